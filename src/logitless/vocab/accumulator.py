"""The gradients of a whole problem while its chunks add to them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .backends.chunk import Grads
from .dispatch import load
from .problem import DIFFERENTIATED, Needs, Problem
from .ranks import Ranks


class Accumulator:
    """The gradients of a whole problem: per entry in the compute dtype, per token written chunk by chunk."""

    def __init__(self, problem: Problem, needs: Needs) -> None:
        i = problem.inputs
        self.problem, self.compute = problem, problem.compute
        # fp16 would underflow before the loss scale arrives; ranks add their parts before these are rounded
        keeps = i.hidden.dtype == torch.float16 or problem.shard is not None
        narrow = self.compute if keeps else i.hidden.dtype
        pairs = zip(i[:DIFFERENTIATED], needs.flags, strict=True)
        hidden, weight, bias, low, up = (x if wanted else None for x, wanted in pairs)
        wide = self.compute
        self.total = Grads(_zeros(hidden, narrow), None, _zeros(bias, wide), _zeros(low, wide), _zeros(up, wide))
        if weight is not None:  # large: its first part is written over nothing, not added to zeros
            self.total.weight = torch.empty_like(weight, dtype=wide)
            self.total.blank.append(self.total.weight)

    def chunk(self, n_tokens: int) -> Grads:
        def zeros(x: Tensor | None) -> Tensor | None:
            return None if x is None else torch.zeros(n_tokens, x.shape[1], dtype=self.compute, device=x.device)

        return replace(self.total, hidden=zeros(self.total.hidden), low=zeros(self.total.low))

    def put(self, rows: slice, grads: Grads) -> None:
        for whole, part in ((self.total.hidden, grads.hidden), (self.total.low, grads.low)):
            if whole is not None and part is not None:
                self.problem.put(whole, rows, part)

    def scale_(self, factor: Tensor) -> None:
        """Multiply by a scalar, in place."""
        self.total.clear()
        for x in self.total.all:
            if x is not None:
                load(self.problem.spec.backend).scale_(x, factor)

    def result(self) -> tuple[Tensor | None, ...]:
        """(dhidden, dweight, dbias, dlow, dup) as autograd takes them, those of tokens added up over ranks; once."""
        self.total.clear()
        ranks = Ranks.of(self.problem.shard)
        if ranks is not None:
            for x in (self.total.hidden, self.total.low):
                if x is not None:
                    ranks.add_(x)
        pairs = zip(self.total.all, self.problem.inputs[:DIFFERENTIATED], strict=True)
        return tuple(None if x is None or i is None else x.to(_gradient_dtype(i, x.dtype)) for x, i in pairs)


def _zeros(like: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if like is None else torch.zeros_like(like, dtype=dtype)


def _gradient_dtype(x: Tensor, summed: torch.dtype) -> torch.dtype:
    """The dtype of a tensor's gradient: its own, unless its `grad_dtype` says another, or any (None)."""
    return (getattr(x, "grad_dtype", x.dtype) or summed) if x.is_leaf else x.dtype
