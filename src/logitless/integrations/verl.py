"""verl's training and scoring without logits: its FSDP engine's per-token numbers from hidden states.

    actor_rollout_ref.model.external_lib=logitless.integrations.verl  # of main_ppo; model.external_lib of sft_trainer

Works with verl 0.9.1, whose workers import this before they choose an engine; it registers one for this hardware, which
verl prefers to its own.
"""

# ruff: noqa: E402 - the seam is looked at before what it names is imported
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from ..vocab.face import LMHead, token_stats
from .seam import Seam
from .transformers.lm_head import captured, causal_lm, replaced, through_head

ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
HOST = Seam(
    "verl",
    ">=0.9.1,<0.9.2",
    {
        f"{ENGINE}._build_module": ("self",),
        f"{ENGINE}.prepare_model_inputs": ("self", "micro_batch"),
        f"{ENGINE}.prepare_model_outputs": (
            "self", "output", "output_args", "micro_batch", "logits_processor_func",
        ),
        f"{ENGINE}.forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
        f"{ENGINE}._gather_and_unpad_packed": ("self", "tensor", "pad_size"),
        "verl.workers.engine:BaseEngine": (),
        "verl.workers.engine:EngineRegistry.register": ("model_type", "backend", "device", "vendor"),
        "verl.trainer.distillation.fsdp.losses:compute_forward_kl_topk": (
            "student_logits", "teacher_topk_log_probs", "teacher_topk_ids", "config", "data_format",
        ),
        "verl.utils.ulysses:slice_input_tensor": ("x", "dim", "padding", "group"),
        "verl.utils.device:get_device_id": (),
        "verl.utils.device:get_vendor": (),
        "verl.trainer.ppo.core_algos:agg_loss": (),
        "verl.utils.metric:AggregationType": (),
        "verl.utils.metric:Metric": ("aggregation", "value"),
        "verl.workers.config:HFModelConfig": (),
        "verl.workers.utils.losses:sft_loss": ("config", "model_output", "data", "dp_group"),
        "verl.workers.utils.padding:no_padding_2_padding": ("tensor", "data"),
    },
)  # fmt: skip
HOST.require()

from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.utils.metric import AggregationType, Metric
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor
from verl.workers.config import HFModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead
from verl.workers.utils.losses import sft_loss
from verl.workers.utils.padding import no_padding_2_padding

# What verl looks an engine up by.
HERE = {
    "device": os.getenv("VERL_ENGINE_DEVICE") or get_device_name(),
    "vendor": os.getenv("VERL_ENGINE_VENDOR") or get_vendor(),
}
OTHERS = ["automodel", "fsdp_turbo", "megatron", "torchtitan", "veomni"]
# What verl asks of a batch, and gets back by another name: the statistic.
ASKED = {
    "calculate_entropy": ("entropy", "entropy"),
    "calculate_sum_pi_squared": ("sum_pi_squared", "sum_sq_prob"),
}
BEST = ("teacher_ids", "student_logprobs", "student_best")  # of a teacher that sends its best entries alone
# By name, the statistic of a student whose reference is its teacher: KL(teacher‖student), KL(student‖teacher).
DIVERGENCES = {"forward": "reverse_kl", "reverse": "kl", "jsd": "jsd"}
# Of fused_kernel_options: ours, and verl's own.
OPTIONS = ("memory_budget", "teacher", "distill_loss", "distill_weight", "impl_backend")


class StudentLogProbs:
    """A student's log-probs at its teacher's ids and its own best ids, in the place of its logits (1, N, V).

    What verl's distillation asks of logits is answered; anything else is a ConfigError.
    """

    def __init__(self, ids: Tensor, logprobs: Tensor, best: Tensor, entries: int) -> None:
        self.ids, self.logprobs, self.best = ids, logprobs, best  # (1, N, K)
        self.shape = torch.Size((*ids.shape[:2], entries))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self, kwargs = args[0], kwargs or {}
        if func is F.log_softmax and kwargs.get("dim") == -1:
            return self
        if func is torch.topk and kwargs.get("k") == self.best.shape[-1]:
            return SimpleNamespace(indices=self.best)
        if func is torch.gather and torch.equal(kwargs["index"], self.ids):
            return self.logprobs
        raise HOST.error(f"its distillation asks {func.__name__} of logits, expected log_softmax, topk and gather")

    def __getattr__(self, name: str) -> Any:
        raise HOST.error(f"its distillation asks {name} of logits; leave distillation_loss.use_chunked_topk out")


class HiddenEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine, fsdp and fsdp2, that computes `_numbers` from hidden states in the place of logits."""

    def _build_module(self) -> Any:
        module = super()._build_module()
        LMHead.of(module)
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        model_inputs, self.output_args = super().prepare_model_inputs(micro_batch)
        return model_inputs, self.output_args

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        micro_batch = micro_batch.to(get_device_id())  # verl's own does so too, for itself alone
        inner = causal_lm(self.module)
        dense = inner.forward

        def forward(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            with captured(inner, dense, *args, **kwargs) as (hidden, _):
                hidden = self._unpadded(hidden, micro_batch["input_ids"].offsets().diff())
                return through_head(inner, self._numbers, hidden, *self._tokens(micro_batch))

        with replaced(inner, "forward", forward):
            return super().forward_step(micro_batch, loss_function, forward_only)

    def _unpadded(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """This rank's hidden states (N, H), without padding between them."""
        if "temperature_rmpad" in self.output_args:
            return hidden.squeeze(0)
        return hidden[torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]]

    def _tokens(self, micro_batch: Any) -> tuple[Tensor | None, ...]:
        """What `_numbers` takes beside them: a row for each of these tokens."""
        return ()

    def _numbers(self, head: LMHead, hidden: Tensor, *tokens: Tensor | None) -> dict[str, Tensor]:
        raise NotImplementedError


class TeacherEngine(HiddenEngine):
    """A frozen model as verl holds its reference policy, that gives its hidden states.

    Memory: its body sharded and offloaded as verl's engines that only run forward, its output head whole on each rank.
    """

    head: LMHead | None = None

    @classmethod
    def beside(cls, student: FSDPEngineWithLMHead, path: str) -> TeacherEngine:
        """Made as `student` was. Raises ConfigError for a teacher of another vocabulary."""
        own = student.model_config
        attention = {name: x for name, x in own.override_config.items() if name == "attn_implementation"}
        model_config = HFModelConfig(
            path=path,
            trust_remote_code=own.trust_remote_code,
            use_shm=own.use_shm,
            use_remove_padding=own.use_remove_padding,
            override_config=attention,
        )
        if model_config.tokenizer.get_vocab() != own.tokenizer.get_vocab():
            raise ConfigError(f"fused_kernel_options.teacher={path}: expected a teacher with the student's tokenizer")
        entries, least = (x.hf_config.get_text_config().vocab_size for x in (model_config, own))
        if entries < least:
            raise ConfigError(
                f"fused_kernel_options.teacher={path}: expected a vocabulary of at least the student's {least} "
                f"entries, got {entries}; take a teacher whose weight has no fewer rows"
            )
        engine_config = replace(student.engine_config, forward_only=True)
        made = cls(model_config, engine_config, student.optimizer_config, student.checkpoint_config)
        made.initialize()
        return made

    def reference(self, micro_batch: Any) -> tuple[Tensor, LMHead]:
        """Its hidden states (N, H) of a student's micro-batch, and its head."""
        with torch.no_grad(), self.eval_mode():
            _, output = self.forward_step(micro_batch, None, forward_only=True)
        assert self.head is not None
        return output["model_output"]["hidden"], self.head

    def _numbers(self, head: LMHead, hidden: Tensor, *tokens: Tensor | None) -> dict[str, Tensor]:
        if self.head is None:  # a copy, as what is gathered here is gone when a student's backward asks for it
            bias = None if head.bias is None else head.bias.detach().clone()
            self.head = replace(head, weight=head.weight.detach().clone(), bias=bias)  # pyright: ignore
        return {"hidden": hidden}

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        return dict(output)


class StreamedEngine(HiddenEngine):
    """verl's FSDP engine, fsdp and fsdp2, whose log-probs, entropies and sums of squared probabilities need no logits.

    Dense equivalent: `FSDPEngineWithLMHead`, with a temperature for each sample and a teacher's best entries.

    `model.fused_kernel_options.memory_budget`: bytes of slices, 256 MiB unless given, up to 1 GiB on a GPU; `teacher`,
    `distill_loss` and `distill_weight`: a model to learn from, over the whole vocabulary. Raises ConfigError for verl's
    own fused kernels, for an output head that is not known and for such an option without a meaning.
    Memory: slices within the budget, the gradients of hidden states and head.
    """

    teacher: TeacherEngine | None = None
    reference: tuple[Tensor, LMHead] | None = None

    def _build_module(self) -> Any:
        if self.model_config.use_fused_kernels:
            raise ConfigError(f"external_lib={__name__}: expected use_fused_kernels=False; leave one of the two out")
        return super()._build_module()

    def initialize(self) -> None:
        options = self.model_config.fused_kernel_options or {}
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise ConfigError(f"fused_kernel_options: expected {', '.join(OPTIONS)}, got {', '.join(unknown)}")
        self.memory_budget = options.get("memory_budget")
        self.distill_loss = options.get("distill_loss", "forward")
        self.distill_weight = options.get("distill_weight", 1)
        if self.distill_loss not in DIVERGENCES:
            known = ", ".join(DIVERGENCES)
            raise ConfigError(f"fused_kernel_options.distill_loss: expected one of {known}, got {self.distill_loss}")
        if not 0 < self.distill_weight <= 1:
            raise ConfigError(
                f"fused_kernel_options.distill_weight: expected above 0, at most 1, got {self.distill_weight}"
            )
        super().initialize()
        if "teacher" in options and not self.engine_config.forward_only:
            self.teacher = TeacherEngine.beside(self, options["teacher"])

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        self.reference = None
        if self.teacher is not None and loss_function is not None:
            if asks(micro_batch, "distillation_use_topk"):
                raise ConfigError(
                    "fused_kernel_options.teacher: expected no distillation.enabled; leave one of the two out"
                )
            self.reference = self.teacher.reference(micro_batch)
            loss_function = taught(loss_function, self.distill_weight)
        return super().forward_step(micro_batch, loss_function, forward_only)

    def _tokens(self, micro_batch: Any) -> tuple[Tensor | None, ...]:
        """Labels, temperatures, and the best entries of verl's teacher."""
        labels, lengths = self._taken("input_ids_rmpad_rolled"), micro_batch["input_ids"].offsets().diff()
        if "temperature_rmpad" in self.output_args:
            temperature = self._taken("temperature_rmpad")
        else:
            temperature = torch.repeat_interleave(self._taken("temperature"), lengths)
        best = None
        if asks(micro_batch, "distillation_use_topk"):
            best = micro_batch["teacher_ids"].values()
            if get_ulysses_sequence_parallel_world_size() > 1:
                best = slice_input_tensor(best, dim=0)
        self.want = {key: found for key, found in ASKED.items() if asks(micro_batch, key)}
        if asks(micro_batch, "distillation_only"):
            labels = None
        return labels, temperature.clamp(min=1e-8), best

    def _taken(self, name: str) -> Tensor:
        if name not in self.output_args:
            raise HOST.error(f"prepare_model_inputs gives no {name}")
        return self.output_args[name]

    def _numbers(
        self,
        head: LMHead,
        hidden: Tensor,  # (N, H)
        labels: Tensor | None,  # (N)
        temperature: Tensor,  # (N)
        best: Tensor | None,  # (N, K)
    ) -> dict[str, Tensor]:
        """verl's numbers of each token by verl's names, computed within the head's own call."""
        wanted = dict(self.want.values()) | ({} if labels is None else {"log_probs": "logprob"})
        more: dict[str, Any] = {} if best is None else {"candidates": best, "top_k": best.shape[-1]}
        if self.reference is not None:
            wanted["distillation_losses"] = DIVERGENCES[self.distill_loss]
            more["reference"] = within(self.reference, head)
        stats = token_stats(
            hidden,
            head,
            labels,
            want=(*wanted.values(), *([] if best is None else ["logsumexp"])),
            temperature=temperature,
            memory_budget=self.memory_budget,
            **more,
        )
        found = {name: getattr(stats, statistic) for name, statistic in wanted.items()}
        if best is not None:
            logprobs = stats.candidate_logits - stats.logsumexp[:, None]
            found |= dict(zip(BEST, (best, logprobs, stats.top_k_ids), strict=True))
        return found

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        found = dict(output)
        if asks(micro_batch, "distillation_use_topk"):
            entries = self.model_config.hf_config.get_text_config().vocab_size
            ids, logprobs, best = (found.pop(name)[None] for name in BEST)
            student = StudentLogProbs(ids, logprobs, best, entries)
            answered = logits_processor_func(student_logits=student, data=micro_batch)
            found |= {name: x.squeeze(0) for name, x in answered.items()}
        offsets, pad = micro_batch["input_ids"].offsets(), output_args.get("pad_size", 0)
        return {
            name: torch.nested.nested_tensor_from_jagged(self._gather_and_unpad_packed(x, pad), offsets)
            for name, x in found.items()
        }


class OtherEngine(BaseEngine):
    """What verl finds where its configuration asks for an engine that this does not serve."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"external_lib={__name__}: expected strategy fsdp or fsdp2, got another of verl's "
            f"({', '.join(OTHERS)}); leave external_lib out"
        )


def within(reference: tuple[Tensor, LMHead], head: LMHead) -> tuple[Tensor, LMHead]:
    """A teacher over a student's entries: what it has more are rows that pad its weight, as the tokenizer is one."""
    hidden, teacher = reference
    return hidden, replace(teacher, vocab_size=min(teacher.rows, head.rows))


def taught(own: Callable[..., Any], weight: float) -> Callable[..., Any]:
    """verl's loss `own` and the mean divergence from a teacher, whose share of their sum is `weight`."""

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
        found, metrics = own(model_output=model_output, data=data, dp_group=dp_group)
        each = model_output["distillation_losses"]
        if "responses" in data:
            mask = data["response_mask"]
            learned = agg_loss(
                loss_mat=no_padding_2_padding(each, data),
                loss_mask=mask.to_padded_tensor(0) if mask.is_nested else mask,
                loss_agg_mode="token-mean",
                dp_size=data["dp_size"],
                batch_num_tokens=data["batch_num_tokens"],
            )
            metrics["distillation/loss"] = Metric(value=learned, aggregation=AggregationType.SUM)
        else:  # fine-tuning: a mean log-prob with its sign turned
            learned, _ = sft_loss(None, {"log_probs": -each}, data)
        return (learned if weight == 1 else weight * learned + (1 - weight) * found), metrics

    return loss


def asks(micro_batch: Any, key: str) -> bool:
    return bool(tensordict_utils.get_non_tensor_data(data=micro_batch, key=key, default=False))


EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], **HERE)(StreamedEngine)
EngineRegistry.register(model_type="language_model", backend=OTHERS, **HERE)(OtherEngine)
