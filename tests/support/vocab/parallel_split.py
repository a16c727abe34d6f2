"""A head whose rows are split over the ranks of a group, beside the dense oracle of the whole head."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import logitless as ll
from logitless.vocab.head.shard import VocabShard
from logitless.vocab.reference import dense_logits, dense_token_stats
from tests.support.vocab.comparing import (
    INTEGERS,
    Operands,
    assert_near,
    assert_near_in_norm,
    cotangents_like,
    gradients,
    named_results,
    operands,
)

V = 23
EVEN = {2: (12, 11), 4: (6, 6, 6, 5)}
UNEVEN = {2: (3, 20), 4: (1, 9, 0, 13)}


@dataclass
class Split:
    """Operands whose head is split: this rank's rows as slices of the whole leaves."""

    ops: Operands
    group: Any
    sizes: tuple[int, ...]
    backwards: bool = False  # the first rank holds the last rows

    @property
    def shard(self) -> VocabShard:
        rank = dist.get_rank(self.group)
        offset = sum(self.sizes[rank + 1 :] if self.backwards else self.sizes[:rank])
        return VocabShard(self.group, offset, sum(self.sizes))

    def part(self, ops: Operands) -> ll.LMHead:
        here, shard = self.sizes[dist.get_rank(self.group)], self.shard
        rows = slice(shard.offset, shard.offset + here)
        adapters = tuple(replace(x, b=x.b[rows]) for x in ops.adapters)
        bias = None if ops.bias is None else ops.bias[rows]
        return ll.LMHead(ops.weight[rows], bias, **ops.transform, adapters=adapters, shard=shard)

    @property
    def head(self) -> ll.LMHead:
        return self.part(self.ops)

    @property
    def reference(self) -> tuple[Tensor, ll.LMHead] | None:
        return None if self.ops.ref is None else (self.ops.ref.hidden, self.part(self.ops.ref))

    def whole(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of what is split, with those of the other ranks' rows."""
        for name, x in grads.items():
            same_on_all(x, self.group) if name[0] in "ha" else dist.all_reduce(x, group=self.group)
        return grads


def same_on_all(x: Tensor, group: Any) -> None:
    """The same bits on every rank."""
    mine = x.detach().contiguous().flatten().view(torch.uint8)
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(each, mine, group=group)
    assert all(torch.equal(mine, other) for other in each)


def check(
    split: Split, want: tuple[str, ...], whole_reference: bool = False, rows: bool = False, **options: Any
) -> None:
    """As `comparing.compare`, of a head that is split; rows: the reference is given as its logits."""
    ours_only = {name: options.pop(name) for name in ("memory_budget", "backend") if name in options}
    tolerance = options.pop("tolerance", 1e-10)
    ops, exact = split.ops, split.ops.to(torch.float64)
    expected = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want, reference=exact.reference, **options)
    reference = ops.reference if whole_reference else split.reference
    if rows:
        reference = dense_logits(*ops.reference).detach()
    stats = ll.token_stats(ops.hidden, split.head, ops.labels, want=want, reference=reference, **options, **ours_only)
    got = named_results(stats, want, options)
    for name, value in got.items():
        same_on_all(value, split.group)
        if name in INTEGERS:
            assert torch.equal(value, expected[name]), name
        else:
            assert_near(value.detach(), expected[name].detach(), tolerance, name)
    up = cotangents_like(expected)
    if ops.leaves and up:
        wanted = gradients(expected, exact.leaves, up)
        for name, grad in split.whole(gradients(got, ops.leaves, up)).items():
            assert_near_in_norm(grad, wanted[name], 2 * tolerance, f"d {name}", floor=tolerance / 10)


def split(group: Any, sizes: dict[int, tuple[int, ...]] = EVEN, backwards: bool = False, **options: Any) -> Split:
    return Split(operands(v=V, **options), group, sizes[dist.get_world_size(group)], backwards)
