"""The k best entries of each row so far, slice by slice; of equal entries the lowest ids."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....algebra.costs import waiting_entries

GROUP = 128
BLOCK = 64  # neighbours whose maximum is compared with the k-th best so far
PARTS = 4  # of a slice's rows that are sorted whole, one after the other


class TopK:
    """The k best entries so far of each row; slices come in order.

    Most slices hold a few entries that beat a row's k-th best, if any. Those wait beside the k best until there is no
    room left: then all are sorted. Finding them costs a slice one maximum by blocks, not a top-k.
    """

    def __init__(self, like: Tensor, k: int) -> None:
        """like: (C,)"""
        self.values = like.new_full((like.shape[0], k), -math.inf)
        self.ids = torch.full_like(self.values, -1, dtype=torch.int64)
        self.room = waiting_entries(k)
        self.waiting = like.new_full((like.shape[0], self.room), -math.inf)
        self.waiting_ids = torch.full_like(self.waiting, -1, dtype=torch.int64)
        self.count = torch.zeros_like(self.ids[:, 0])

    def add(self, z: Tensor, start: int) -> None:
        """Take in a slice z (C, S) of the ids from `start` on."""
        whole = z.shape[1] // BLOCK * BLOCK
        if start < self.values.shape[1] or not whole:
            self._sort(z, start)
            return
        self._filter(z[:, :whole].unflatten(1, (-1, BLOCK)), start)
        if whole < z.shape[1]:
            self._filter(z[:, None, whole:], start + whole)

    def _filter(self, blocks: Tensor, start: int) -> None:
        """Let the entries of blocks (C, S / B, B) that beat their row's k-th best wait."""
        least = self.values[:, -1]
        row, block = (blocks.amax(2) > least[:, None]).nonzero(as_tuple=True)
        if blocks.is_contiguous():  # whole rows of a matrix: several times as fast
            near = blocks.flatten(0, 1).index_select(0, row * blocks.shape[1] + block)
        else:
            near = blocks[row, block]
        better = near > least[row, None]
        most = self.room * least.shape[0]
        if near.numel() > most and int(better.count_nonzero()) > most:  # more than can wait: they are not even listed
            self._sort(blocks.flatten(1), start)
            return
        hit, column = better.nonzero(as_tuple=True)
        row = row[hit]  # ascending, and ids ascend within a row
        new = torch.bincount(row, minlength=least.shape[0])
        if int((self.count + new).max()) > self.room:
            self.flush()
            if int(new.max()) > self.room:
                self._sort(blocks.flatten(1), start)
                return
        slot = torch.arange(row.shape[0], device=row.device) - (new.cumsum(0) - new - self.count)[row]
        self.waiting[row, slot] = near[hit, column]
        self.waiting_ids[row, slot] = start + block[hit] * blocks.shape[2] + column
        self.count += new

    def _sort(self, z: Tensor, start: int) -> None:
        self.flush()
        keep_topk(self.values, self.ids, z, start)

    def flush(self) -> tuple[Tensor, Tensor]:
        """(values, ids) (C, k), best first, with nothing waiting."""
        most = int(self.count.max()) if self.count.numel() else 0
        if most:
            k = self.values.shape[1]
            found = torch.cat([self.values, self.waiting[:, :most]], 1)
            values, order = found.sort(dim=1, descending=True, stable=True)
            self.ids = torch.cat([self.ids, self.waiting_ids[:, :most]], 1).gather(1, order[:, :k])
            self.values = values[:, :k].contiguous()
            self.waiting[:, :most] = -math.inf
            self.count.zero_()
        return self.values, self.ids


def keep_topk(values: Tensor, ids: Tensor, z: Tensor, start: int) -> None:
    """Merge a slice z (C, S) of the ids from `start` on into values and ids (C, k), best first; slices come in order.

    Only the rows whose slice beats their k-th are sorted.
    """
    k = values.shape[1]
    seen, full = min(k, start), min(k, start + z.shape[1])
    rows = slice(None) if seen < k else (z.amax(1) > values[:, -1]).nonzero().squeeze(1)
    if isinstance(rows, Tensor) and rows.numel() == 0:
        return
    new, where = _topk(z[rows], min(k, z.shape[1]))
    merged, order = torch.cat([values[rows, :seen], new], 1).sort(dim=1, descending=True, stable=True)
    values[rows, :full] = merged[:, :full]
    ids[rows, :full] = torch.cat([ids[rows, :seen], where + start], 1).gather(1, order[:, :full])


def _topk(z: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values, columns) of each row's k best; topk alone leaves open which of equal ones, and their order."""
    near, columns = _near(z, k + 1)
    values, where = near.topk(min(k + 1, z.shape[1]), dim=1)
    cut = values[:, k - 1]
    tied = values[:, -1] == cut  # with one that is left out
    where = where[:, :k] if columns is None else columns.gather(1, where[:, :k])
    where, order = where.sort(1)
    values, order = values[:, :k].gather(1, order).sort(dim=1, descending=True, stable=True)
    where = where.gather(1, order)
    rows = (tied if k < z.shape[1] else tied[:0]).nonzero().squeeze(1)
    for some in rows.chunk(PARTS):
        where[some] = z[some].sort(dim=1, descending=True, stable=True).indices[:, :k]
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
