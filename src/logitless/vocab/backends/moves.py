"""Products of weights and the head's rows, Σ basis_v·W_v, of some slices, moved to the maximum of the next one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...algebra.online_softmax import Accumulation, Totals


@dataclass
class Moves:
    """What brings the products before a slice to the slice's maximum and d0, or all of them to probabilities."""

    grow: Tensor  # e^(m before - m)
    step: Tensor  # m before - m
    grow_ref: Tensor | None = None
    shift: Tensor | None = None  # d0 before - d0

    def apply(self, products: dict[str, Tensor], infinite: bool) -> None:
        """Σ basis·W of the entries so far, relative to the new maxima and d0."""
        if "pD" in products and self.shift is not None:
            products["pD"].addcmul_(products["p"], self.shift[:, None]).mul_(self.grow[:, None])
            if infinite:  # 0·inf = 0
                products["pD"].masked_fill_((self.grow == 0)[:, None], 0.0)
        if "plogp" in products:
            products["plogp"].addcmul_(products["p"], self.step[:, None]).mul_(self.grow[:, None])
        if "p2" in products:
            products["p2"].mul_((self.grow * self.grow)[:, None])
        if "q" in products and self.grow_ref is not None:
            products["q"].mul_(self.grow_ref[:, None])
        if "p" in products:
            products["p"].mul_(self.grow[:, None])


def normalised(products: dict[str, Tensor], state: Accumulation, totals: Totals) -> dict[str, Tensor]:
    """The products with probabilities in the weights' place, whichever rows the totals are of."""
    if products:
        offset = (state.m - totals.m) - totals.log_s  # log p = (z - state.m) + offset
        moves = Moves(torch.exp(offset), offset)
        if "pD" in products:
            moves.shift = totals.log_ratio + (state.shift - totals.shift)
        if "q" in products:
            moves.grow_ref = torch.exp((state.m_ref - totals.m_ref) - totals.log_s_ref)
        moves.apply(products, infinite=False)
    return products
