"""Several tokens at once: the loss of heads that predict the tokens further on, in one pass for all that share a head.

loss, each = multi_token_cross_entropy([hidden, *of_modules], head, input_ids, weights=(1.0, 0.3))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .algebra.options import check_ignore_index, whole_from
from .errors import DtypeError, OptionError, ShapeError
from .losses import nll
from .vocab.face import (
    LMHead,
    Options,
    TokenStats,
    add_at,
    compute_dtype,
    divisor_of,
    dtype_of,
    of_integers,
    token_loss,
)

__all__ = ["MultiTokenLoss", "multi_token_cross_entropy"]


class MultiTokenLoss(NamedTuple):
    """What `multi_token_cross_entropy` returns: the weighted sum to differentiate, and its parts to look at."""

    loss: Tensor  # ()
    each: Tensor  # (K,), the mean loss of each depth, without gradient


@torch.compiler.disable(reason="logitless: multi_token_cross_entropy breaks the graph, leave out fullgraph=True")
def multi_token_cross_entropy(
    hiddens: Tensor | Sequence[Tensor],  # (K, ..., T, H), or K of (..., T, H)
    head: LMHead | Sequence[LMHead],
    labels: Tensor,  # (..., T)
    *,
    weights: Sequence[float] | None = None,
    first: int = 1,
    position_ids: Tensor | None = None,  # (..., T)
    ignore_index: int = -100,
    denominator: float | Tensor | None = None,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> MultiTokenLoss:
    """Weighted cross-entropy of K depths, of which depth k predicts the token `first` + k further on, in 3 GEMMs each.

    Dense equivalent:

        each = [
            F.cross_entropy(z[..., : T - first - k, :].flatten(0, -2), labels[..., first + k :].flatten())
            for k, z in enumerate(logits)  # of depth k's hidden states and head
        ]
        loss = sum(weight * x for weight, x in zip(weights, each))

    hiddens: each depth's hidden states, such as those of a model and of its multi-token prediction modules. head: one
    for all depths, or one for each. Depths with the same LMHead are one call: a slice of its matrix is read once for
    all of their tokens, and its gradient is one. labels: (..., T) integer, as transformers' models take them: labels[t]
    is token t itself; they are shifted here, and a depth's last tokens have none. weights: a number for each depth, 1
    unless given. first: 1 where depth 0 predicts the next token, 2 where it is the first module or Medusa head, 0 where
    labels are shifted already. position_ids: of packed documents, restarting at each: no label then is of another
    document, but for those that came shifted already at a document's last token. denominator: divides each depth's sum
    in the place of its number of labels. Returns the sum and the K means, fp32 (fp64 for fp64 inputs); a mean over no
    label is 0 with a live graph. Raises what `token_loss` raises.
    Memory: slices within the budget, the gradients, and a copy of hidden states that come one by one and share a head.
    Gloeckle et al., arXiv 2404.19737; DeepSeek-V3, arXiv 2412.19437; Medusa, arXiv 2401.10774.
    """
    heads, first = _checked(hiddens, head, labels, position_ids), whole_from("first", first, 0)
    check_ignore_index(ignore_index)
    options: Options = {"ignore_index": ignore_index, "memory_budget": memory_budget, "backend": backend}
    like = {"dtype": max((compute_dtype(x) for x in hiddens), key=lambda x: x.itemsize), "device": hiddens[0].device}
    factors = torch.tensor(_factors(weights, len(heads), like["dtype"]), **like)
    targets = torch.stack([_shifted(labels, first + k, ignore_index, position_ids) for k in range(len(heads))])
    counts = (targets != ignore_index).flatten(1).sum(1).clamp(min=1).to(**like)
    divisors = counts if denominator is None else divisor_of(denominator, **like).to(counts).expand_as(counts)
    each, losses = torch.zeros_like(counts), []
    for depths in _that_share(heads):
        hidden, own = _stacked(hiddens, depths), divisors[depths]
        loss, sums = _weighted_sum(hidden, heads[depths[0]], targets[depths], factors[depths] / own, options)
        each[depths] = sums / own
        losses.append(loss)
    return MultiTokenLoss(torch.stack(losses).sum(), each)


def _weighted_sum(
    hidden: Tensor,  # (D, ..., T, H)
    head: LMHead,
    targets: Tensor,  # (D, ..., T)
    factors: Tensor,  # (D,)
    options: Options,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the negative log-probs of some depths, and each depth's own sum, without gradient."""
    factors = factors.to(compute_dtype(hidden))
    sums = torch.zeros_like(factors)
    depths = torch.arange(len(factors), device=factors.device).reshape(-1, *[1] * (targets.ndim - 1))

    def weighted(stats: TokenStats, depth: Tensor) -> Tensor:
        losses = nll(stats.logprob)
        add_at(sums, depth, losses.detach())
        return factors[depth] * losses

    inputs = (depths.expand_as(targets),)
    return token_loss(weighted, hidden, head, targets, inputs=inputs, reduction="sum", **options), sums


def _shifted(labels: Tensor, by: int, ignore_index: int, position_ids: Tensor | None) -> Tensor:
    """The labels `by` tokens further on: ignored past the end, and where they are of another document."""
    by = min(by, labels.shape[-1])
    found = F.pad(labels[..., by:].long(), (0, by), value=ignore_index)
    if position_ids is None:
        return found
    places = position_ids.long()
    same = F.pad(places[..., by:], (0, by), value=-1) == places + by
    return found.masked_fill(~same, ignore_index)


def _stacked(hiddens: Tensor | Sequence[Tensor], depths: list[int]) -> Tensor:
    """The hidden states of some depths; a view where they lie side by side."""
    if isinstance(hiddens, Tensor) and len(depths) == len(hiddens):
        return hiddens
    return hiddens[depths[0]][None] if len(depths) == 1 else torch.stack([hiddens[k] for k in depths])


def _that_share(heads: Sequence[LMHead]) -> list[list[int]]:
    """The depths of each head."""
    found: dict[int, list[int]] = {}
    for depth, head in enumerate(heads):
        found.setdefault(id(head), []).append(depth)
    return list(found.values())


def _checked(
    hiddens: Tensor | Sequence[Tensor],
    head: LMHead | Sequence[LMHead],
    labels: Tensor,
    position_ids: Tensor | None,
) -> list[LMHead]:
    """The head of each depth."""
    k = len(hiddens)
    if k == 0:
        raise ShapeError("hiddens: expected at least one depth, got none")
    heads = list(head) if isinstance(head, Iterable) else [head] * k
    if not all(isinstance(each, LMHead) for each in heads):
        got = next(type(each).__name__ for each in heads if not isinstance(each, LMHead))
        raise DtypeError(f"head: expected an LMHead, or one for each depth, got {got}; use LMHead.of")
    if len(heads) != k:
        raise ShapeError(f"head: expected one LMHead for all depths or {k}, one for each, got {len(heads)}")
    if not of_integers(labels):
        got = dtype_of(labels)
        raise DtypeError(f"labels: expected integer ids, got {got}")
    for depth, hidden in enumerate(hiddens):
        if hidden.shape[:-1] != labels.shape:
            got = f"{tuple(hidden.shape)} beside labels {tuple(labels.shape)}"
            raise ShapeError(f"hiddens: expected labels' shape and one dimension more at depth {depth}, got {got}")
    if labels.ndim == 0:
        raise ShapeError("labels: expected (..., T), the tokens of sequences, got a single number")
    if position_ids is None:
        return heads
    if not of_integers(position_ids):
        raise DtypeError(f"position_ids: expected whole numbers in a tensor, got {dtype_of(position_ids)}")
    if position_ids.shape != labels.shape:
        got = f"{tuple(position_ids.shape)}, labels {tuple(labels.shape)}"
        raise ShapeError(f"position_ids: expected labels' shape, got {got}; expand them")
    return heads


def floats_of(given: Iterable[Any], most: float) -> list[float]:
    """The numbers, of Python's or in tensors of one; none where one of them is no number, or larger than `most`."""
    try:
        numbers = [*given]
        found = [float(x) for x in numbers if not isinstance(x, str)]  # which `float` would read
    except (TypeError, ValueError, OverflowError):  # of what is no number, or too large for a float
        return []
    return found if len(found) == len(numbers) and all(abs(x) <= most for x in found) else []


def _factors(weights: Sequence[float] | None, k: int, dtype: torch.dtype) -> list[float]:
    found = floats_of([1.0] * k if weights is None else weights, torch.finfo(dtype).max)
    if len(found) != k:
        raise OptionError(f"weights: expected a number finite in {dtype} for each depth, {k} in all, got {weights!r}")
    return found
