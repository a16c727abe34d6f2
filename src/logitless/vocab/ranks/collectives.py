"""Ranks that share a head's vocabulary: their collectives.

Every rank gets the same bits: parts are gathered and then merged in the order of the ranks, not as they arrive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import DeviceError, DtypeError, RankError
from ..dtypes import dtype_of, of_integers
from ..head.shard import VocabShard, process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """The collectives of a process group. A rank that does not answer in the group's timeout is a RankError."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.size = torch.distributed.get_world_size(group)
        self.rank = torch.distributed.get_rank(group)

    @classmethod
    def of(cls, shard: VocabShard | None) -> Ranks | None:
        return None if shard is None else cls(shard.process_group)

    def gather(self, x: Tensor) -> Tensor:  # (R, ...)
        """`x` of every rank, all of one shape."""
        out = x.new_empty((self.size, *x.shape))
        self._call(torch.distributed.all_gather, list(out.unbind(0)), x.contiguous())
        return out

    def gather_all(self, parts: list[Tensor]) -> list[Tensor]:  # (R, C, ...) each
        """Several tensors (C, ...) of every rank in one collective, to the bit, whatever their dtypes."""
        sizes = [math.prod(x.shape[1:]) * x.itemsize // 4 for x in parts]
        flat = [  # a clone's strides are canonical, of a single token too
            x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.int32).view(x.shape[0], n)
            for x, n in zip(parts, sizes, strict=True)
        ]
        words = self.gather(torch.cat(flat, 1)).split(sizes, 2)
        pairs = zip(words, parts, strict=True)
        return [w.reshape(-1).view(x.dtype).view(self.size, *x.shape) for w, x in pairs]

    def total(self, parts: list[Tensor]) -> list[Tensor]:  # (C, ...) each
        """The sums over all ranks, added up in their order."""
        return [in_order(each.unbind(0)) for each in self.gather_all(parts)]

    def add_(self, x: Tensor) -> None:
        """The sum over all ranks in place, for large tensors: every rank's bytes travel twice, however many ranks."""
        self._call(torch.distributed.all_reduce, x)

    def first_(self, x: Tensor) -> None:
        """The first rank's numbers on all."""
        self._call(torch.distributed.broadcast, x, group_src=0)

    def _call(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            collective(*args, group=self.group, **kwargs)
        except RuntimeError as error:
            if "No backend type" in str(error):
                raise DeviceError(
                    f"head: expected tensors on a device that its group has a backend for, got {args[-1].device} "
                    f"({reason_of(error)}); move them, or start the group with backend='cpu:gloo,cuda:nccl'"
                ) from error
            raise RankError(
                f"head: expected an answer from all {self.size} ranks of its group, rank {self.rank} got none from at "
                f"least one ({reason_of(error)}); find the first error among the ranks' logs and restart them all"
            ) from error


def reason_of(error: Exception) -> str:
    """What a collective's error says in its first sentence, without the place in torch's source."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", line).partition(". ")[0][:160]


def first_on_all(x: Tensor, shard: VocabShard | None) -> Tensor:
    """The first rank's numbers on all ranks, in place, where there are several: random numbers must be the same."""
    ranks = Ranks.of(shard)
    if ranks is not None:
        ranks.first_(x)
    return x


def summed(x: Tensor, shard: VocabShard) -> Tensor:
    """The sum over ranks, (C, ...); all go on with it alike, so that its gradient is each one's own."""
    return _Summed.apply(x, shard)  # pyright: ignore[reportReturnType]


def spread(x: Tensor, shard: VocabShard) -> Tensor:
    """`x`, which all ranks hold alike, for each to use in its own way: its gradient is the sum over ranks."""
    return _Spread.apply(x, shard)  # pyright: ignore[reportReturnType]


def best_of_all(token: Tensor, value: Tensor, shard: VocabShard) -> Tensor:
    """Of each rank's token (C,) that with the highest value, of equals the lowest."""
    tokens, values = Ranks(shard.process_group).gather_all([token, value])
    return torch.where(values == values.amax(0), tokens, tokens.max()).amin(0)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VocabShard) -> Tensor:
        return Ranks(shard.process_group).total([x])[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return g, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        g = g.clone(memory_format=torch.contiguous_format)
        Ranks(ctx.shard.process_group).add_(g)
        return g, None


def in_order(parts: Iterable[Tensor]) -> Tensor:
    """The sum from first to last."""
    first, *rest = parts
    total = first.clone()
    for x in rest:
        total += x
    return total


def count_tokens(
    labels: Tensor,  # (...)
    group: ProcessGroup | DeviceMesh | None = None,
    *,
    dim: str | None = None,
    ignore_index: int = -100,
) -> Tensor:  # () int64
    """How many labels of all ranks of a group count: what a loss over sequence or batch shards is divided by.

    Dense equivalent:

        (torch.cat(all ranks' labels) != ignore_index).sum().clamp(min=1)

    With context parallelism each rank has a part of every sequence, with data parallelism some of the sequences, and
    mostly unlike numbers of tokens that count; a mean of means weighs them wrong. Each rank's share of the loss is

        linear_cross_entropy(hidden, head, labels, denominator=count_tokens(labels, group))
        token_loss(loss_fn, hidden, head, labels, reduction="sum") / count_tokens(labels, group)

    and the shares add up to the loss of the whole batch. An engine that averages gradients over D ranks (DDP, FSDP2)
    wants the shares times D. labels: shifted before they are sharded; group: a process group, or a mesh with `dim` as
    `VocabShard` takes them; None counts these labels alone. At least 1, so that a mean over no token is 0. One
    collective of a number. Raises DtypeError, ConfigError, RankError.
    """
    if not of_integers(labels):
        got = dtype_of(labels)
        raise DtypeError(f"labels: expected integer ids, got {got}")
    total = (labels.long() != ignore_index).sum()  # in which no ignore_index wraps around
    if group is not None:
        Ranks(process_group("count_tokens", group, dim)).add_(total)
    return total.clamp(min=1)
