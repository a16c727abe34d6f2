"""The forward that takes the place of TRL's fused one, and its output."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import OptionError
from ...vocab.face import LMHead
from ..transformers.bad_batches import Watch
from ..transformers.lm_head import captured, observe, through_head
from .contract import HOST, OUTPUT, Settings
from .exact_kl import ExactKL
from .replay import Replay, replayed_scores
from .scores import IGNORED, Wanted, scores

try:
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("trl."):
        raise  # it is not installed, or what it needs is not
    raise HOST.error(f"{OUTPUT} is gone") from error

# TRL's names of per-token fields, and the statistics they are read off
STATISTIC_OF = {
    "log_probs": "logprob",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_prob",
    "mean_logits": "mean_logit",
    "is_top1": "rank",
}


@dataclass
class TokenOutput(FusedCausalLMOutput):
    """TRL's output of a fused head with what `install` was asked to add: fp32, (B, T - 1), 0 where ignored.

    logsumexp, self_certainty: of the temperature-scaled logits, in nats; top_k_ids, top_k_logits: (B, T - 1, k), best
    first; kl: KL(policy ‖ reference) where GRPO's is exact. They carry gradients where the loss is not TRL's own.
    is_top1 counts a tie as right, where TRL counts the first of the equals.
    """

    logsumexp: Tensor | None = None
    self_certainty: Tensor | None = None
    top_k_ids: Tensor | None = None
    top_k_logits: Tensor | None = None
    kl: Tensor | None = None


@dataclass(eq=False)
class Fused:
    """`model(..., labels=labels, fused_lm_head=True)` on one model; every other call goes to `before`."""

    before: Callable[..., Any]
    settings: Settings
    wanted: Wanted
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    exact: ExactKL | None = None  # the policy's, where its KL is exact
    replay: Replay | None = None  # the trainer's, where what was sampled from is replayed
    pair_means: Callable[[LMHead, Tensor], Tensor] | None = None  # in the place of each token's mean logit
    on: bool = False
    watch: Watch = field(default_factory=Watch)

    def method(self, model: Any) -> Any:
        """The model's new forward, with the old one's signature, which `generate` looks at."""

        @functools.wraps(getattr(self.before, "__func__", self.before))
        def forward(own: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
            # of a copy of the model: what was there before is the model's, and would run that
            before = self.before if own is model else functools.partial(type(own).forward, own)
            if fused_lm_head and self.on:
                return self(own, before, *args, **kwargs)
            if fused_lm_head:
                kwargs["fused_lm_head"] = True
            return before(*args, **kwargs)

        return types.MethodType(forward, model)

    def __call__(
        self,
        model: Any,
        before: Callable[..., Any],
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        targets, width = _targets(labels, shift_labels)
        kwargs["use_cache"] = False
        self.watch.before()
        with self.autocast():
            reference = None if self.exact is None else self.exact.reference(model, before, kwargs)
            with captured(model, before, *args, **kwargs) as (hidden, own):
                numbers = self._scores(model, hidden, targets, reference)
        self.watch.after(numbers["logprob"].detach().sum())
        if self.replay is not None:
            self.replay.put(numbers["logprob"][:, :width])
        means = numbers.pop("pair_means", None)
        numbers = {name: x[:, :width] for name, x in numbers.items()}
        if self.exact is not None and reference is not None:
            self.exact.put(numbers["logprob"], numbers["kl"])
        out = _output(model, numbers, targets[:, :width], num_items_in_batch, _aux_loss(model, own, kwargs))
        if means is not None:
            out.mean_logits = means
        return out

    def _scores(
        self, model: Any, hidden: Tensor, targets: Tensor, reference: tuple[Tensor, LMHead] | None
    ) -> dict[str, Tensor]:
        wanted = self.wanted
        if reference is not None:
            wanted = replace(wanted, statistics=(*wanted.statistics, "kl"))

        sampled = None if self.replay is None else self.replay.sampled_from(targets != IGNORED)

        def compute(head: LMHead, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
            observe(model, head, hidden, targets)
            if sampled is not None:
                return replayed_scores(wanted, head, hidden, targets, sampled)
            means = {} if self.pair_means is None else {"pair_means": self.pair_means(head, hidden)}
            return scores(wanted, head, hidden, targets, reference) | means

        exact: AbstractContextManager[Any] = nullcontext()
        if self.settings.cast_lm_head_to_fp32:
            hidden, exact = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
        with exact:
            return through_head(model, compute, hidden, targets)


def _targets(labels: Tensor | None, shift_labels: Tensor | None) -> tuple[Tensor, int]:
    """What each position predicts, (B, T), and how many positions of it are given back."""
    if shift_labels is not None:
        return shift_labels, shift_labels.shape[1]
    if labels is None:
        raise OptionError("fused_lm_head: expected labels or shift_labels, got neither; pass one of them")
    # the last position predicts nothing: ignored, since to cut it off would copy the hidden states
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED), labels.shape[1] - 1


def _aux_loss(model: Any, own: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The load balancing of experts that were asked for: the model's, or TRL's of one that has none (DeepSeek-V2)."""
    found, routed = getattr(own, "aux_loss", None), getattr(own, "router_logits", None)
    config = model.config.get_text_config()
    asked = kwargs.get("output_router_logits", getattr(config, "output_router_logits", False))
    if found is not None or not asked or routed is None:
        return found
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    experts, chosen = config.num_experts, config.num_experts_per_tok
    mask = kwargs.get("attention_mask")
    return load_balancing_loss_func(routed, experts, chosen, mask)  # pyright: ignore[reportReturnType]


def _output(
    model: Any, numbers: dict[str, Tensor], targets: Tensor, num_items_in_batch: Any, aux_loss: Tensor | None
) -> TokenOutput:
    fields: dict[str, Any] = {field: numbers.pop(name, None) for field, name in STATISTIC_OF.items()}
    log_probs = fields["log_probs"]
    mask = targets.to(log_probs.device) != IGNORED
    if (squares := fields["log_sum_sq_probs"]) is not None:
        fields["log_sum_sq_probs"] = squares.detach().masked_fill(~mask, 1).log()
    if (means := fields["mean_logits"]) is not None:
        fields["mean_logits"] = means.detach()
    if (rank := fields["is_top1"]) is not None:
        fields["is_top1"] = rank == 1  # 0 where ignored
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
    if aux_loss is not None:
        loss = loss + getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
    return TokenOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **fields, **numbers)
