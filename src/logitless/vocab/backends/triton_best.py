"""The k best entries of each row, kept by the fold's kernel as sortable whole numbers; wide ones by torch's top-k."""

from __future__ import annotations

import torch
from torch import Tensor

from .best import keep_best
from .chunk import Tile

LANES = 64  # entries that the kernel keeps
BLOCK = 1 << 22  # keys at a time where it does not
LOWEST = -(2**63) + 1


class Best:
    """The best entries so far of n rows; k = 0 keeps none."""

    def __init__(self, k: int, n: int, parts: int, dtype: torch.dtype, device: torch.device) -> None:
        self.k, self.double = k, dtype == torch.float64
        self.in_kernel = k if k <= LANES and not self.double else 0
        self.reads_logits = k > self.in_kernel
        self.lanes = 1 << max(0, self.in_kernel - 1).bit_length()
        self.keys = torch.empty(n if self.in_kernel else 1, parts, self.lanes, dtype=torch.int64, device=device)
        if self.reads_logits and self.double:
            self.values = torch.full((n, k), -torch.inf, dtype=dtype, device=device)
            self.ids = torch.full((n, k), -1, dtype=torch.int64, device=device)
        elif self.reads_logits:
            self.keys = torch.full((n, k), LOWEST, dtype=torch.int64, device=device)

    def add(self, tile: Tile) -> None:
        """Take in a slice of final logits, where the kernel did not."""
        if not self.reads_logits:
            return
        if self.double:  # a key holds no more than a logit of 32 bits and its id; this path waits for the device
            keep_best(self.values, self.ids, tile.z, tile.v.start)
            return
        for column in range(0, tile.z.shape[1], max(1, BLOCK // tile.z.shape[0])):
            new = keys_of(tile.z[:, column : column + max(1, BLOCK // tile.z.shape[0])], tile.v.start + column)
            self.keys = torch.cat([self.keys, new], 1).topk(self.k, sorted=True).values

    def result(self) -> tuple[Tensor, Tensor]:
        """(logits, ids), (n, k), best first, the lowest ids first among equal logits."""
        if self.reads_logits and self.double:
            return self.values, self.ids
        keys = self.keys
        if self.in_kernel:
            lanes = keys[..., : self.k].flatten(1)  # the others hold the largest number
            keys = lanes.topk(self.k, sorted=True).values
        ordered = (keys >> 32).to(torch.int32)
        bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
        return bits.view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def keys_of(z: Tensor, start: int) -> Tensor:
    """`triton_kernels.keys_of` in torch."""
    bits = (z + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(start, start + z.shape[1], device=z.device)
    return (ordered << 32) | (0xFFFFFFFF - ids)
