"""The k best entries of each row so far, slice by slice; of equal entries the lowest ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

GROUP = 128


def keep_best(values: Tensor, ids: Tensor, z: Tensor, start: int) -> None:
    """Merge a slice z (C, S) of the ids from `start` on into values and ids (C, k), best first; slices come in order.

    Only the rows whose slice beats their k-th are sorted.
    """
    k = values.shape[1]
    seen, full = min(k, start), min(k, start + z.shape[1])
    rows = slice(None) if seen < k else (z.amax(1) > values[:, -1]).nonzero().squeeze(1)
    if isinstance(rows, Tensor) and rows.numel() == 0:
        return
    new, where = _best(z[rows], min(k, z.shape[1]))
    merged, order = torch.cat([values[rows, :seen], new], 1).sort(dim=1, descending=True, stable=True)
    values[rows, :full] = merged[:, :full]
    ids[rows, :full] = torch.cat([ids[rows, :seen], where + start], 1).gather(1, order[:, :full])


def _best(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, columns) of each row's k best; topk alone leaves open which of equal ones, and their order."""
    near, columns = _near(z, k + 1)
    values, where = near.topk(min(k + 1, z.shape[1]), dim=1)
    cut = values[:, k - 1]
    tied = (values[:, -1] == cut) & (cut > -math.inf)  # with one that is left out
    where = where[:, :k] if columns is None else columns.gather(1, where[:, :k])
    where, order = where.sort(1)
    values, order = values[:, :k].gather(1, order).sort(dim=1, descending=True, stable=True)
    where = where.gather(1, order)
    rows = (tied if k < z.shape[1] else tied[:0]).nonzero().squeeze(1)
    if rows.numel():
        where[rows] = z[rows].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return values, where


def _near(z: Tensor, k: int) -> tuple[Tensor, Tensor | None]:
    """(some entries, their columns), the k best of each row among them, but for equal ones; (z, None) where z is small.

    Those are in the k groups of neighbours with the highest maxima: one pass at the price of a maximum, where topk's
    own costs more the more it keeps.
    """
    whole = z.shape[1] // GROUP
    if whole < 4 * k:
        return z, None
    groups = z[:, : whole * GROUP].unflatten(1, (whole, GROUP)).amax(2).topk(k, dim=1).indices * GROUP
    inside = torch.arange(GROUP, device=z.device)
    rest = torch.arange(whole * GROUP, z.shape[1], device=z.device).expand(z.shape[0], -1)
    columns = torch.cat([(groups[:, :, None] + inside).flatten(1), rest], 1)
    return z.gather(1, columns), columns
