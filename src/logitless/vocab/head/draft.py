"""A draft vocabulary: a head over some entries of its target's vocabulary, beside the target's own rows of these."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...errors import OptionError
from .lm_head import LMHead
from .quantised import QuantisedWeight, Weight


@dataclass(frozen=True, eq=False)
class SelectedRows:
    """Some rows of another weight in the order of ids, read slice by slice: a `Format` whose one part is the ids."""

    weight: Weight
    name = "selected rows"

    def decoded(self, parts: tuple[Tensor, ...], rows: slice | Tensor) -> Tensor:
        ids = parts[0][rows]
        return self.weight.index_select(0, ids) if isinstance(self.weight, Tensor) else self.weight.rows_at(ids)


def selected(head: LMHead, ids: Tensor) -> LMHead:
    """The head over some of its entries, a constant: its weight is not copied, bias and adapters' b are small."""
    shape = torch.Size((ids.shape[0], head.hidden_size))
    return LMHead(
        QuantisedWeight((ids,), SelectedRows(head.weight.detach()), shape, head.weight.dtype),
        None if head.bias is None else head.bias.detach()[ids],
        scale=head.scale,
        softcap=head.softcap,
        adapters=tuple(replace(x, b=x.b.detach()[ids]) for x in head.adapters),
    )


def split(target: LMHead, ids: Tensor) -> tuple[LMHead, LMHead | None]:
    """The target over a draft's entries, and over all others, None where there are none. Raises OptionError."""
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < target.rows):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise OptionError(
            f"LMHead: token_ids must be in 0..{target.rows - 1}, the reference's vocabulary, got {wrong}; give the "
            "draft's ids in its target's vocabulary"
        )
    left = torch.ones(target.rows, dtype=torch.bool, device=ids.device)
    left[ids] = False
    others = left.nonzero().squeeze(1)
    if others.shape[0] != target.rows - ids.shape[0]:
        raise OptionError(
            f"LMHead: token_ids must name every entry once, got {ids.shape[0]} ids of {target.rows - others.shape[0]} "
            "entries; leave out the repeated rows"
        )
    return selected(target, ids), selected(target, others) if others.shape[0] else None
