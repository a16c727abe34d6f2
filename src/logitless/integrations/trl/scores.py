"""Scores of the next tokens, at the lowest price that the trainer's loss allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import GradientError
from ...vocab.face import LMHead, Options, SamplingMask, TokenStats, token_loss, token_stats

IGNORED = -100


@dataclass(frozen=True)
class Wanted:
    """Which statistics a trainer reads, and what its loss does with them."""

    statistics: tuple[str, ...]
    temperature: float = 1.0
    top_k: int = 0
    memory_budget: int | None = None
    only_logprob: bool = False  # the log-prob alone gets a gradient; the rest are metrics
    equal_weights: bool = False  # and every token's log-prob the same one

    def options(self) -> Options:
        return {
            "want": self.statistics,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "memory_budget": self.memory_budget,
            "ignore_index": IGNORED,
        }


def scores(
    wanted: Wanted,
    head: LMHead,
    hidden: Tensor,  # (B, T, H)
    targets: Tensor,  # (B, T)
    reference: tuple[Tensor, LMHead] | None = None,
    sampling_mask: SamplingMask | None = None,
) -> dict[str, Tensor]:
    """The wanted statistics of every target, (B, T) each, 0 where it is ignored; those that need it with a graph.

    Dense equivalent:

        vars(token_stats(hidden, head, targets, want=wanted.statistics, reference=reference,
                         sampling_mask=sampling_mask))

    Price in GEMMs: 1 without gradients; 2 where the head is frozen and only log-probs get a gradient; 3 where the
    head is trained and all log-probs get the same one; else what `token_stats` costs, 4 (6 with a reference); 0
    over a sampling mask.
    Raises what `token_stats` raises. Memory: the pass's, and one (B·T, H) buffer where the head is frozen.
    """
    valid = targets != IGNORED
    one_pass = reference is None and sampling_mask is None
    short = torch.is_grad_enabled() and wanted.only_logprob and one_pass and bool(valid.any())
    trained = any(x.requires_grad for x in _parameters(head))
    if short and not trained and hidden.requires_grad:
        return _by_rows(wanted, head, hidden, targets, valid)
    if short and trained and wanted.equal_weights:
        return _as_one_sum(wanted, head, hidden, targets, valid)
    options: Options = {**wanted.options(), "reference": reference, "sampling_mask": sampling_mask}
    return dict(vars(token_stats(hidden, head, targets, **options)))


def _parameters(head: LMHead) -> list[Tensor]:
    factors = [x for adapter in head.adapters for x in (adapter.a, adapter.b)]
    weight = [] if head.weight_tensor is None else [head.weight_tensor]
    return [*weight, *factors, *([] if head.bias is None else [head.bias])]


class Collected:
    """The sum of one statistic as a loss; the values of all statistics are collected on the side."""

    def __init__(self, name: str = "logprob") -> None:
        self.name = name
        self.parts: list[dict[str, Tensor]] = []

    def __call__(self, stats: TokenStats) -> Tensor:
        self.parts.append({name: x.detach() for name, x in vars(stats).items()})
        return getattr(stats, self.name)

    def spread(self, valid: Tensor) -> dict[str, Tensor]:
        """What was collected, in the places of the valid tokens."""
        out = {}
        for name in self.parts[0]:
            flat = torch.cat([part[name] for part in self.parts])
            fill = -1 if name == "top_k_ids" else 0
            out[name] = flat.new_full((*valid.shape, *flat.shape[1:]), fill)
            out[name][valid] = flat
        return out


def _as_one_sum(wanted: Wanted, head: LMHead, hidden: Tensor, targets: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """3 GEMMs: the gradient of the log-probs' sum is formed in the forward pass."""
    collected = Collected()
    total = token_loss(collected, hidden, head, targets, reduction="sum", **wanted.options())
    out = collected.spread(valid)
    return {**out, "logprob": _Known.apply(total, out["logprob"], valid, _of_the_sum)}  # pyright: ignore[reportReturnType]


def _by_rows(wanted: Wanted, head: LMHead, hidden: Tensor, targets: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """2 GEMMs: with a frozen head a token's gradient is its own row, times whatever weight it turns out to have."""
    collected = Collected()
    leaf = hidden.detach().requires_grad_()
    total = token_loss(collected, leaf, head, targets, reduction="sum", **wanted.options())
    (rows,) = torch.autograd.grad(total, leaf)
    out = collected.spread(valid)
    return {**out, "logprob": _Known.apply(hidden, out["logprob"], rows, _of_rows)}  # pyright: ignore[reportReturnType]


class _Known(torch.autograd.Function):
    """Log-probs whose gradient with respect to `source` is `gradient(saved, grad)`."""

    @staticmethod
    def forward(
        ctx: Any, source: Tensor, logprob: Tensor, saved: Tensor, gradient: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(saved)
        ctx.gradient = gradient
        return logprob.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.gradient(*ctx.saved_tensors, grad), None, None, None


def _of_the_sum(valid: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the log-probs' sum, for losses that weigh them all alike."""
    low, high = torch.aminmax(grad[valid])
    if low < high:
        raise GradientError(
            "log_probs: expected a loss that weighs every token alike, as SFT's nll does, got weights from "
            f"{low.item():.3g} to {high.item():.3g}; override compute_loss in a subclass before install"
        )
    return high


def _of_rows(rows: Tensor, grad: Tensor) -> Tensor:
    """The gradient of hidden states, of which each token has its row."""
    return (rows * grad[..., None]).to(rows.dtype)
