"""verl's training and scoring without logits: its FSDP engine's per-token numbers from hidden states.

    actor_rollout_ref.model.external_lib=logitless.integrations.verl  # of main_ppo; model.external_lib of sft_trainer

Works with verl 0.9.1, whose workers import this before they choose an engine; it registers one for this hardware, which
verl prefers to its own.
"""

# ruff: noqa: E402 - the seam is looked at before what it names is imported
# pyright: reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from ..vocab.face import LMHead, token_stats
from .seam import Seam
from .transformers.lm_head import capturing_hidden, causal_lm, replaced, through_head

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
        "verl.utils.device:get_vendor": (),
    },
)  # fmt: skip
HOST.require()

from verl.utils import tensordict_utils
from verl.utils.device import get_device_name, get_vendor
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size, slice_input_tensor
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngineWithLMHead

HERE = {"device": get_device_name(), "vendor": get_vendor()}
OTHERS = ["automodel", "fsdp_turbo", "megatron", "torchtitan", "veomni"]
# What verl asks of a batch, and gets back by another name: the statistic.
ASKED = {
    "calculate_entropy": ("entropy", "entropy"),
    "calculate_sum_pi_squared": ("sum_pi_squared", "sum_sq_prob"),
}
TEACHER = ("teacher_ids", "student_logprobs", "student_best")


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


class StreamedEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine, fsdp and fsdp2, whose log-probs, entropies and sums of squared probabilities need no logits.

    Dense equivalent: `FSDPEngineWithLMHead`, with a temperature for each sample and a teacher's best entries.

    `model.fused_kernel_options.memory_budget`: bytes of slices, 256 MiB unless given. Raises ConfigError for verl's own
    fused kernels and for an output head that is not known.
    Memory: slices within the budget, the gradients of hidden states and head.
    """

    def _build_module(self) -> Any:
        if self.model_config.use_fused_kernels:
            raise ConfigError(f"external_lib={__name__}: expected use_fused_kernels=False; leave one of the two out")
        module = super()._build_module()
        LMHead.of(module)
        return module

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        inner = causal_lm(self.module)
        dense = inner.forward

        def forward(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
            with capturing_hidden(inner) as seen:
                dense(*args, **kwargs)
            hidden, tensors = self._tokens(seen.hidden(), micro_batch)
            return through_head(inner, self._numbers, hidden, *tensors)

        with replaced(inner, "forward", forward):
            return super().forward_step(micro_batch, loss_function, forward_only)

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        model_inputs, self.output_args = super().prepare_model_inputs(micro_batch)
        return model_inputs, self.output_args

    def _tokens(self, hidden: Tensor, micro_batch: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """This rank's tokens (N, H) without padding between them, and their labels, temperatures, teacher's ids."""
        labels, lengths = self._taken("input_ids_rmpad_rolled"), micro_batch["input_ids"].offsets().diff()
        if "temperature_rmpad" in self.output_args:
            hidden, temperature = hidden.squeeze(0), self._taken("temperature_rmpad")
        else:
            hidden = hidden[torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]]
            temperature = torch.repeat_interleave(self._taken("temperature"), lengths)
        teacher = None
        if asks(micro_batch, "distillation_use_topk"):
            teacher = micro_batch["teacher_ids"].values()
            if get_ulysses_sequence_parallel_world_size() > 1:
                teacher = slice_input_tensor(teacher, dim=0)
        self.want = {key: found for key, found in ASKED.items() if asks(micro_batch, key)}
        if asks(micro_batch, "distillation_only"):
            labels = None
        return hidden, (labels, temperature.clamp(min=1e-8), teacher)

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
        teacher: Tensor | None,  # (N, K)
    ) -> dict[str, Tensor]:
        """verl's numbers of each token by verl's names, computed within the head's own call."""
        wanted = dict(self.want.values()) | ({} if labels is None else {"log_probs": "logprob"})
        more = {} if teacher is None else {"candidates": teacher, "top_k": teacher.shape[-1]}
        stats = token_stats(
            hidden,
            head,
            labels,
            want=(*wanted.values(), *(["logsumexp"] if more else [])),
            temperature=temperature,
            memory_budget=(self.model_config.fused_kernel_options or {}).get("memory_budget"),
            **more,
        )
        found = {name: getattr(stats, statistic) for name, statistic in wanted.items()}
        if teacher is not None:
            logprobs = stats.candidate_logits - stats.logsumexp[:, None]
            found |= dict(zip(TEACHER, (teacher, logprobs, stats.top_k_ids), strict=True))
        return found

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        found = dict(output)
        if asks(micro_batch, "distillation_use_topk"):
            entries = self.model_config.hf_config.get_text_config().vocab_size
            ids, logprobs, best = (found.pop(name)[None] for name in TEACHER)
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


def asks(micro_batch: Any, key: str) -> bool:
    return bool(tensordict_utils.get_non_tensor_data(data=micro_batch, key=key, default=False))


EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], **HERE)(StreamedEngine)
EngineRegistry.register(model_type="language_model", backend=OTHERS, **HERE)(OtherEngine)
