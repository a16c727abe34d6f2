"""The k best entries of each row, by the accumulating kernel, or of whole rows afterwards; wide ones by top-k."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ....algebra.online_softmax import MASK
from ..chunk import Tile
from . import topk_kernels
from .topk_kernels import LOWEST_KEY

kernels: Any = topk_kernels
LANES = 64  # entries that a kernel keeps
GROUP = 64  # neighbours whose highest says whether they are looked at
BLOCK = 1 << 22  # keys at a time where no kernel does


class TopK:
    """The best entries so far of n rows; k = 0 keeps none.

    A kernel that streams slices keeps them as it goes. Of rows that stay, `width` entries in one slice, it leaves the
    highest of each group only: the k best lie in the k best groups, equal ones by id.
    """

    def __init__(self, k: int, n: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k, self.n, self.device, self.double = k, n, device, dtype == torch.float64
        narrow = k <= LANES and not self.double
        self.group = GROUP if narrow and k > 1 and width else 0
        self.in_kernel = k if narrow and not self.group else 0
        self.reads_logits = k > LANES or (k > 0 and self.double)
        self.lanes = 1 << max(0, k - 1).bit_length() if narrow else 1
        if self.group:
            self.keys = torch.empty(n, triton.cdiv(width, GROUP), dtype=torch.int32, device=device)
        elif self.reads_logits and self.double:
            self.values = torch.full((n, k), -torch.inf, dtype=dtype, device=device)
            self.ids = torch.full((n, k), -1, dtype=torch.int64, device=device)
        elif self.reads_logits:
            self.keys = torch.full((n, k), LOWEST_KEY, dtype=torch.int64, device=device)

    def begin(self, parts: int) -> None:
        """Room for what a kernel finds in so many parts of every slice."""
        if not self.group and (self.double or not self.reads_logits):
            rows = self.n if self.in_kernel else 1
            self.keys = torch.empty(rows, parts, self.lanes, dtype=torch.int64, device=self.device)

    def add(self, tile: Tile) -> None:
        """Take in a slice of final logits, where the kernel did not."""
        if self.group:
            self.tile = tile.z
        if not self.reads_logits:
            return
        if self.double:  # a key holds no more than a logit of 32 bits and its id
            self._sort(tile)
            return
        for column in range(0, tile.z.shape[1], max(1, BLOCK // tile.z.shape[0])):
            new = keys_of(tile.z[:, column : column + max(1, BLOCK // tile.z.shape[0])], tile.v.start + column)
            self.keys = torch.cat([self.keys, new], 1).topk(self.k, sorted=True).values

    def _sort(self, tile: Tile) -> None:
        ids = torch.arange(tile.v.start, tile.v.stop, device=tile.z.device).expand(tile.z.shape)
        found = torch.cat([self.values, tile.z], 1).sort(dim=1, descending=True, stable=True)
        self.values = found.values[:, : self.k]
        self.ids = torch.cat([self.ids, ids], 1).gather(1, found.indices[:, : self.k])

    def result(self) -> tuple[Tensor, Tensor]:
        """(logits, ids), (n, k), best first, the lowest ids first among equal logits."""
        if self.group:
            return self._of_groups()
        if self.reads_logits and self.double:
            return self.values.masked_fill(self.values <= MASK, -torch.inf), self.ids
        keys = self.keys
        if self.in_kernel:
            lanes = keys[..., : self.k].flatten(1)  # the others hold the largest number
            keys = lanes.amax(1, keepdim=True) if self.k == 1 else lanes.topk(self.k, sorted=True).values
        logits = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
        ids = torch.empty_like(keys)
        if keys.numel():
            kernels.decode[(triton.cdiv(keys.numel(), 1024),)](keys.contiguous(), logits, ids, keys.numel(), BLOCK=1024)
        return logits, ids

    def _of_groups(self) -> tuple[Tensor, Tensor]:
        z, (n, groups) = self.tile, self.keys.shape
        logits = torch.empty(n, self.k, dtype=torch.float32, device=z.device)
        ids = torch.empty(n, self.k, dtype=torch.int64, device=z.device)
        room = torch.empty(n, 4 * self.lanes, dtype=torch.int32, device=z.device)
        if n:
            kernels.best_of_groups[(n,)](
                z,
                z.stride(0),
                z.shape[1],
                self.keys,
                groups,
                min(self.k, groups),
                self.k,
                room,
                logits,
                ids,
                GROUPS=triton.next_power_of_2(max(groups, self.lanes, 16)),
                GROUP=GROUP,
                LANES=self.lanes,
                num_warps=8,
            )
        return logits, ids


def keys_of(z: Tensor, start: int) -> Tensor:
    """`maths.keys_of` in torch."""
    bits = (z + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(start, start + z.shape[1], device=z.device)
    return (ordered << 32) | (0xFFFFFFFF - ids)
