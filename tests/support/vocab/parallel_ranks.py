"""What `test_parallel.py` runs on every rank: heads whose rows are split, beside the dense oracle of the whole head."""

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import logitless as ll
from logitless.diagnostics import gradient_share
from logitless.sample import SamplingMask
from logitless.vocab.ranks.collectives import Ranks
from logitless.vocab.reference import dense_token_stats
from tests.support.allocations import largest_allocation
from tests.support.vocab import parallel_errors, parallel_tokens
from tests.support.vocab.comparing import (
    ALONE,
    EVERYTHING,
    FIXED,
    TAIL,
    assert_near,
    assert_near_in_norm,
    gradients,
    operands,
)
from tests.support.vocab.parallel_split import EVEN, UNEVEN, Split, V, check, same_on_all, split
from tests.support.vocab.quantised import stored_blocks
from tests.support.vocab.sharding import Case, run


def every_statistic(group: Any) -> None:
    candidates = torch.randint(V - 3, (7, 4))
    for sizes in (EVEN, UNEVEN):
        one = split(group, sizes, sizes is UNEVEN, reference=True, ranks=(2, 1), scale=0.7, vocab_size=V - 2)
        one.ops.labels[3] = -100
        check(one, EVERYTHING, top_k=8, candidates=candidates, temperature=1.3, jsd_beta=0.3)
        check(one, EVERYTHING, whole_reference=True)
        for budget in (None, 1):
            check(one, EVERYTHING, rows=True, memory_budget=budget)
    capped = split(group, UNEVEN, reference=True, softcap=4.0, ranks=(2,))
    check(capped, (*EVERYTHING, *FIXED), top_k=V, candidates=candidates, temperature=torch.rand(7) + 0.5)
    whole = gradient_share(capped.ops.hidden, capped.ops.head, capped.ops.labels)
    assert_near(gradient_share(capped.ops.hidden, capped.head, capped.ops.labels), whole, 1e-10, "gradient_share")
    check(capped, ("tail_logprob", "rank"), candidates=candidates, memory_budget=1)
    capped.ops.labels = None
    check(capped, TAIL, candidates=candidates)
    check(capped, ("entropy", "kl", "max_logit", "mean_logit"), top_k=3)


def each_price(group: Any) -> None:
    """A frozen head, products of the fold; one-hots alone; bias or adapters alone; small slices of several chunks."""
    names = ("logprob", "entropy", "kl", "reverse_kl", "sum_sq_prob", "self_certainty", "jsd", "acceptance")
    names += ("kl_mixture", "reverse_kl_mixture")
    for want in ((name,) for name in names):
        one = split(group, UNEVEN, reference=True, bias=False, ranks=(2,))
        one.ops = one.ops.training("hidden", "a")
        check(one, want)
        check(one, want, memory_budget=1)
    one = split(group, UNEVEN)
    check(one, ("max_logit", "label_logit", "mean_logit", "rank"), top_k=2)
    for names in (("bias",), ("weight",), ("hidden",), ()):
        one.ops = one.ops.training(*names)
        check(one, ("logprob", "entropy"), memory_budget=1)


def draft_vocabulary(group: Any) -> None:
    """A draft's head split over ranks beside its whole target: as whole on every rank."""
    ids, temperature = torch.randperm(3 * V)[:V], torch.rand(7) + 0.5
    target = ll.LMHead(torch.randn(3 * V, 5, dtype=torch.float64), torch.randn(3 * V, dtype=torch.float64))
    want = ("kl", "reverse_kl_shared", "jsd", "kl_mixture", "reverse_kl_mixture", "acceptance", "total_variation")
    reference = torch.randn(7, 5, dtype=torch.float64), target
    for sizes, budget in ((EVEN, None), (UNEVEN, 1)):
        one = split(group, sizes, ranks=(2,))
        found = []
        for head in (one.head, one.ops.head):
            stats = ll.token_stats(
                *(one.ops.hidden, replace(head, token_ids=ids), one.ops.labels),
                want=want,
                reference=reference,
                temperature=temperature,
                jsd_beta=0.3,
                memory_budget=budget,
            )
            values = {name: getattr(stats, name) for name in want}
            up = {name: torch.arange(1.0, 8.0, dtype=torch.float64) for name in want}
            found.append((values, gradients(values, {"hidden": one.ops.hidden}, up)["hidden"]))
        for name in want:
            assert_near(found[0][0][name], found[1][0][name], 1e-10, name)
        assert_near_in_norm(found[0][1], found[1][1], 1e-10, "d hidden")


def sampling_masks(group: Any) -> None:
    """Statistics over each token's own set, whose entries lie on several ranks; other sets elsewhere are told."""
    sets = [range(V - 2), [5, 21], [0], [3, 4, 22, 11, 19], [20, 2], [1, 0, 9], [22, 21, 20]]
    for sizes in (EVEN, UNEVEN):
        one = split(group, sizes, reference=True, ranks=(2, 1), scale=0.7)
        one.ops.labels = torch.tensor([V - 3, 21, 0, 22, -100, 0, 20])
        mask = SamplingMask.of(sets)
        check(one, (*EVERYTHING, *FIXED), sampling_mask=mask, temperature=1.3, jsd_beta=0.3)
        check(one, EVERYTHING, sampling_mask=mask, whole_reference=True, memory_budget=1)
    capped = split(group, UNEVEN, softcap=4.0, bias=False)
    capped.ops.labels = None
    check(capped, ("entropy", "max_logit", "mean_logit"), sampling_mask=mask)
    other = SamplingMask.of([*sets[:-1], [22, 21, 20 - dist.get_rank(group)]])
    parallel_errors.refused(group, lambda: ll.token_stats(one.ops.hidden, one.head, sampling_mask=other, want=()))


def hard_rows(group: Any) -> None:
    """Logits of -inf, whole shards of them; a peaked row; ties across ranks; no token; none that counts."""
    one = split(group, UNEVEN, lead=(2, 3))
    with torch.no_grad():
        one.ops.bias[:9] = -torch.inf
        one.ops.labels[0, 0] = 12
    one.ops = one.ops.training("hidden", "weight")
    check(one, ("logprob", "entropy", "rank", "max_logit"))
    ours, alone = (ll.token_stats(one.ops.hidden, head, want=(), top_k=V) for head in (one.head, one.ops.head))
    assert torch.equal(ours.top_k_ids, alone.top_k_ids)
    one = split(group, EVEN, spread=0.0, bias=False)
    with torch.no_grad():
        one.ops.hidden.copy_(torch.randint(9, one.ops.hidden.shape))  # whole numbers, of which sums are exact:
        one.ops.weight.copy_(torch.arange(5.0).expand_as(one.ops.weight))  # every logit of a token is the same
    for alike in (one, replace(one, backwards=True)):
        stats = ll.token_stats(one.ops.hidden, alike.head, top_k=9, want=("logsumexp",))
        assert torch.equal(stats.top_k_ids, torch.arange(9).expand(7, 9))
    check(split(group, UNEVEN, spread=60.0), ("logprob", "entropy", "kl")[:2])
    none = split(group, UNEVEN)
    none.ops.labels[:] = -100
    check(none, ALONE)
    check(split(group, UNEVEN, lead=(0,)), ALONE)


def losses(group: Any) -> None:
    """Cross-entropy and a loss of one's own, formed in the forward pass, with a second backward; and per token."""
    one = split(group, UNEVEN, reference=True, ranks=(2,), lead=(3, 4))
    one.ops.labels[0, 1:] = -100
    exact = one.ops.to(torch.float64)
    weights = torch.rand(3, 4, dtype=torch.float64)

    def own(stats: Any, w: Tensor) -> Tensor:
        return w * (stats.kl - stats.logprob.square()) + stats.entropy

    def compared(ours: Tensor, dense: Tensor, times: float = 1.0) -> None:
        same_on_all(ours, group)
        assert_near(ours.detach(), dense.detach(), 1e-10)
        wanted = torch.autograd.grad(dense * times, list(exact.leaves.values()), retain_graph=True)
        for factor in (1.0, times):  # the second backward computes anew
            grads = torch.autograd.grad(ours * factor, list(one.ops.leaves.values()), retain_graph=True)
        found = one.whole(dict(zip(one.ops.leaves, grads, strict=True)))
        for name, grad in zip(exact.leaves, wanted, strict=True):
            assert_near_in_norm(found[name], grad, 1e-9, f"d {name}", floor=1e-12)

    labels, want = one.ops.labels, ("logprob", "entropy", "kl")
    dense = dense_token_stats(exact.hidden, exact.head, labels, want=want, reference=exact.reference)
    keep = labels != -100
    for whole in (True, False):
        ours = ll.token_loss(
            own, one.ops.hidden, one.head, labels, inputs=(weights,), want=want,
            reference=one.ops.reference if whole else one.reference, memory_budget=None if whole else 1,
        )  # fmt: skip
        expected = weights * (dense["kl"] - dense["logprob"].square()) + dense["entropy"]
        compared(ours, expected[keep].mean(), 3.0)
    z = exact.hidden @ exact.weight.T + exact.bias
    z = z + sum(x.scaling * exact.hidden @ x.a.T @ x.b.T for x in exact.adapters)
    expected = torch.nn.functional.cross_entropy(z[keep], labels[keep], label_smoothing=0.1)
    expected = expected + 0.01 * z[keep].logsumexp(-1).square().mean()
    compared(ll.linear_cross_entropy(one.ops.hidden, one.head, labels, label_smoothing=0.1, z_loss=0.01), expected, 2.0)
    each = ll.linear_cross_entropy(one.ops.hidden, one.head, labels, reduction="none")
    compared(each.sum() / 5, -dense["logprob"][keep].sum() / 5)


def two_heads(group: Any) -> None:
    """A loss has its gradients again after a call of a head that is split otherwise, on other ranks than this one."""
    splits = {2: ((3, 20), (23, 0)), 4: ((1, 9, 0, 13), (1, 0, 9, 13), (1, 9, 13, 0))}[dist.get_world_size(group)]
    for (sizes, later), budget in product(zip(splits, (*splits[1:], splits[0]), strict=True), (1, 1 << 12)):
        one, other = (Split(operands(v=V, lead=(40,), bias=False), group, x) for x in (sizes, later))
        loss, _ = (
            ll.linear_cross_entropy(x.ops.hidden, x.head, x.ops.labels, memory_budget=budget) for x in (one, other)
        )
        leaves = one.ops.leaves
        dense = torch.nn.functional.cross_entropy(one.ops.hidden @ one.ops.weight.T, one.ops.labels)
        wanted = dict(zip(leaves, torch.autograd.grad(dense, list(leaves.values())), strict=True))
        for _ in range(2):
            grads = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
            for name, grad in one.whole(dict(zip(leaves, grads, strict=True))).items():
                assert_near_in_norm(grad, wanted[name], 1e-10, f"d {name}", floor=1e-12)


def rounding(group: Any) -> None:
    """fp32 and bf16 operands: as near to the oracle as one process is; gradients of bf16 are rounded once."""
    for dtype in (torch.float32, torch.bfloat16):
        one = split(group, UNEVEN, reference=True, dtype=dtype)
        check(one, EVERYTHING, top_k=5, tolerance=4e-5 if dtype == torch.float32 else 8e-3)
        labels = one.ops.labels
        ours = ll.token_stats(one.ops.hidden, one.head, labels, want=("logprob", "kl"), reference=one.reference)
        alone = ll.token_stats(
            one.ops.hidden, one.ops.head, labels, want=("logprob", "kl"), reference=one.ops.reference
        )
        assert_near(ours.logprob.detach(), alone.logprob.detach().double(), 3e-6)
        assert_near(ours.kl.detach(), alone.kl.detach().double(), 3e-6)
        mine, other = (torch.autograd.grad(x.logprob.sum(), one.ops.hidden)[0] for x in (ours, alone))
        assert_near(mine, other.double(), 1e-5 if dtype == torch.float32 else 8e-3)
    near = split(group, UNEVEN, reference=True, dtype=torch.float32)
    near.ops.ref = near.ops.to(torch.float32).training()
    with torch.no_grad():
        near.ops.ref.weight += 1e-4 * torch.randn_like(near.ops.weight)
    exact = near.ops.to(torch.float64)
    kl = dense_token_stats(exact.hidden, exact.head, None, want=("kl",), reference=exact.reference)["kl"].detach()
    ours, alone = (
        ll.token_stats(near.ops.hidden, head, None, want=("kl",), reference=reference).kl.detach()
        for head, reference in ((near.head, near.reference), (near.ops.head, near.ops.reference))
    )
    assert kl.max() < 1e-6
    off = [float(((x - kl) / kl).abs().max()) for x in (ours, alone)]
    assert off[0] <= 2 * off[1] + 1e-4, off


def traffic(group: Any) -> None:
    """`explain` says to the byte what travels, over sets too; no rank ever holds its part of the (N, V) logits."""
    seen: dict[str, list[int]] = {"all_gather": [], "all_reduce": []}
    call = Ranks._call

    def counted(self: Ranks, collective: Any, *args: Any, **kwargs: Any) -> None:
        seen[collective.__name__].append(args[-1].numel() * args[-1].itemsize)
        call(self, collective, *args, **kwargs)

    size = dist.get_world_size(group)
    ops = operands(lead=(128,), v=2048, ranks=(2,), dtype=torch.float32, reference=True)
    one = Split(ops, group, (2048 // size,) * size)
    labels = one.ops.labels.clone()
    labels[::5] = -100
    sets = [list({0, 7, 2047, int(i % 900), max(0, int(label))}) for i, label in enumerate(labels)]
    beside = {"top_k": 3, "candidates": torch.zeros(128, 2, dtype=torch.int64)}
    over = {"sampling_mask": SamplingMask.of(sets)}
    wanted = (("logprob",), ("logprob", "entropy", "rank", "sum_sq_prob"), ("kl", "reverse_kl", "jsd", "max_logit"))
    calls = ((one.ops.labels, 1 << 18, beside), (labels, 1 << 16, over), (labels, 1 << 10, over))
    for want, (given, budget, others) in product(wanted, calls):
        more: dict[str, Any] = {"want": want, "memory_budget": budget, **others}
        more["reference"] = one.reference if "kl" in want else None
        told = ll.explain(one.ops.hidden, one.head, given, **more).traffic
        with patch.object(Ranks, "_call", counted):
            stats = ll.token_stats(one.ops.hidden, one.head, given, **more)
            torch.autograd.grad(sum(getattr(stats, name).float().sum() for name in want), one.ops.hidden)
        assert told is not None
        assert told.collectives == sum(map(len, seen.values()))
        assert (told.gathered, told.summed) == tuple(sum(sizes) for sizes in seen.values())
        seen = {name: [] for name in seen}

    uneven = Split(ops, group, (2048 - 64 * (size - 1), *[64] * (size - 1))).head
    for _ in range(2):  # `explain` knows the shards of a head that ranks have met on
        told = ll.explain(ops.hidden, uneven, ops.labels, loss=True, memory_budget=1 << 18).traffic
        with patch.object(Ranks, "_call", counted):
            loss = ll.linear_cross_entropy(ops.hidden, uneven, ops.labels, memory_budget=1 << 18)
            torch.autograd.grad(loss, ops.hidden)
        sent, seen = sum(map(len, seen.values())), {name: [] for name in seen}
    assert told is not None
    assert told.collectives == sent

    def step() -> None:
        ll.linear_cross_entropy(one.ops.hidden, one.head, one.ops.labels, memory_budget=1 << 16).backward()

    assert largest_allocation(step) < 4 * 128 * one.sizes[0] // 2


def quantised_head(group: Any) -> None:
    """Each rank has rows of the blocks, of the policy and of a reference that is quantised as well."""
    for sizes, transform in ((UNEVEN, {"softcap": 4.0, "vocab_size": V - 1}), (EVEN, {"scale": 0.7})):
        ops = stored_blocks("Q8_0", V, dtype=torch.float64, ranks=(2,), reference=True, **transform)
        for whole_reference in (False, True):
            one = Split(ops, group, sizes[dist.get_world_size(group)])
            check(one, EVERYTHING, whole_reference, top_k=3, candidates=torch.randint(V - 1, (7, 2)))


CASES: dict[str, Case] = {
    "quantised head": quantised_head,
    "every statistic": every_statistic,
    "each price": each_price,
    "draft vocabulary": draft_vocabulary,
    "sampling masks": sampling_masks,
    "hard rows": hard_rows,
    "losses": losses,
    "two heads": two_heads,
    "rounding": rounding,
    "traffic": traffic,
    **parallel_tokens.CASES,
    **parallel_errors.CASES,
}

if __name__ == "__main__":
    run(CASES, last=parallel_errors.killed_rank)
