"""How far a policy has gone from its reference, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DtypeError, OptionError, ShapeError
from ..vocab.face import LMHead, check_hidden, on_all, token_stats


def online_kl(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    reference: tuple[Tensor, LMHead],  # (..., H') and its head
    *,
    total: Tensor | None = None,  # (...)
    alive: Tensor | None = None,  # (...) bool
    lengths: tuple[int, int] | None = None,
    memory_budget: int | None = None,
) -> Tensor:  # (...)
    """The sum over steps of the exact KL(policy‖reference): `total` (nothing at the first step) plus this step's.

    Dense equivalent:

        logp, logq = (F.linear(h, head.weight).log_softmax(-1) for h, head in ((hidden, head), reference))
        total = total + alive * (logp.exp() * (logp - logq.detach())).sum(-1)

    hidden and the reference's hidden must predict the *same* next token: both are the last state after the same tokens
    were read. `lengths`, the numbers of tokens that the two models have read, is checked where given: a reference that
    is one token ahead, as in a widely copied implementation, gives several nats for a policy that equals it, where
    this is exactly 0. alive: sequences that are not finished; the others are not computed and add 0.
    Differentiable with respect to hidden and head, not the reference; fp32, never negative. Raises what `token_stats`
    raises, OptionError and ShapeError. Memory: slices within the budget, O(N) per step (a frozen head: two (N, H)).
    """
    on_all(head, lambda: _check(check_hidden(hidden, head), total, alive, lengths))
    labels = None if alive is None else torch.where(alive, 0, -100)  # a label's value does not enter the KL
    stats = token_stats(hidden, head, labels, want=("kl",), reference=reference, memory_budget=memory_budget)
    return stats.kl if total is None else total + stats.kl


def _check(lead: tuple[int, ...], total: Tensor | None, alive: Tensor | None, lengths: tuple[int, int] | None) -> None:
    if lengths is not None and lengths[0] != lengths[1]:
        raise OptionError(
            f"lengths: expected both models after the same number of tokens, got policy {lengths[0]} and reference "
            f"{lengths[1]}; compare the states that predict the same next token"
        )
    for name, x in (("total", total), ("alive", alive)):
        if x is not None and not isinstance(x, Tensor):
            raise DtypeError(f"{name}: expected a tensor, got {type(x).__name__}")
        if x is not None and tuple(x.shape) != lead:
            raise ShapeError(f"{name}: expected shape {lead}, hidden's leading dimensions, got {tuple(x.shape)}")
    if alive is not None and alive.dtype != torch.bool:
        raise DtypeError(f"alive: expected a bool tensor, got {alive.dtype}; pass alive.bool()")
