"""What `test_parallel.py` runs on every rank: heads whose rows are split, beside the dense oracle of the whole head."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import logitless as ll
from logitless import relax
from logitless.errors import OptionError
from logitless.vocab.reference import dense_token_stats
from logitless.vocab.shard import VocabShard
from tests.vocab import parallel_errors
from tests.vocab.comparing import (
    ALONE,
    EVERYTHING,
    INTEGERS,
    Operands,
    assert_near,
    assert_near_in_norm,
    cotangents_like,
    gradients,
    named_results,
    operands,
)
from tests.vocab.sharding import Case, run

V = 23
EVEN = {2: (12, 11), 4: (6, 6, 6, 5)}
UNEVEN = {2: (3, 20), 4: (1, 9, 0, 13)}


@dataclass
class Split:
    """Operands whose head is split: this rank's rows as slices of the whole leaves."""

    ops: Operands
    group: Any
    sizes: tuple[int, ...]

    @property
    def shard(self) -> VocabShard:
        offset = sum(self.sizes[: dist.get_rank(self.group)])
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


def check(split: Split, want: tuple[str, ...], whole_reference: bool = False, **options: Any) -> None:
    """As `comparing.compare`, of a head that is split."""
    ours_only = {name: options.pop(name) for name in ("memory_budget",) if name in options}
    tolerance = options.pop("tolerance", 1e-10)
    ops, exact = split.ops, split.ops.to(torch.float64)
    expected = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want, reference=exact.reference, **options)
    reference = ops.reference if whole_reference else split.reference
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


def split(group: Any, sizes: dict[int, tuple[int, ...]] = EVEN, **options: Any) -> Split:
    return Split(operands(v=V, **options), group, sizes[dist.get_world_size(group)])


def every_statistic(group: Any) -> None:
    candidates = torch.randint(V - 3, (7, 4))
    for sizes in (EVEN, UNEVEN):
        one = split(group, sizes, reference=True, ranks=(2, 1), scale=0.7, vocab_size=V - 2)
        one.ops.labels[3] = -100
        check(one, EVERYTHING, top_k=8, candidates=candidates, temperature=1.3, jsd_beta=0.3)
        check(one, EVERYTHING, whole_reference=True)
    capped = split(group, UNEVEN, reference=True, softcap=4.0, ranks=(2,))
    check(capped, EVERYTHING, top_k=V, candidates=candidates, temperature=torch.rand(7) + 0.5)
    capped.ops.labels = None
    check(capped, ("entropy", "kl", "max_logit", "mean_logit"), top_k=3)


def each_price(group: Any) -> None:
    """A frozen head, products of the fold; one-hots alone; bias or adapters alone; small slices of several chunks."""
    for want in (("logprob",), ("entropy",), ("kl",), ("reverse_kl",), ("sum_sq_prob",), ("self_certainty",), ("jsd",)):
        one = split(group, UNEVEN, reference=True, bias=False, ranks=(2,))
        one.ops = one.ops.training("hidden", "a")
        check(one, want)
        check(one, want, memory_budget=1)
    one = split(group, UNEVEN)
    check(one, ("max_logit", "label_logit", "mean_logit", "rank"), top_k=2)
    for names in (("bias",), ("weight",), ("hidden",), ()):
        one.ops = one.ops.training(*names)
        check(one, ("logprob", "entropy"), memory_budget=1)


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
    stats = ll.token_stats(one.ops.hidden, one.head, top_k=9, want=("logsumexp",))
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


def soft_tokens(group: Any) -> None:
    """The k best with noise: the one-process soft tokens, their gradients, and seeds that a generator gives alike."""
    for sizes, transform in ((UNEVEN, {"softcap": 4.0, "vocab_size": V - 1}), (EVEN, {})):
        one = split(group, sizes, ranks=(2,), scale=0.8, **transform)
        noise = relax.Noise(torch.arange(7), torch.arange(7) * 5)
        table = torch.randn(V, 6, dtype=torch.float64)
        results = []
        for head in (one.head, one.ops.head):
            soft = relax.gumbel_topk(one.ops.hidden, head, 0.7, k=9, hard=True, noise=noise)
            results.append((soft, relax.soft_embedding(soft, table)))
        (ours, row), (alone, other) = results
        same_on_all(row, group)
        assert torch.equal(ours.ids, alone.ids)
        assert torch.equal(ours.token, alone.token)
        assert_near(ours.outside, alone.outside, 1e-10)
        up = torch.randn(row.shape, dtype=torch.float64)
        found, wanted = (gradients({"row": x}, one.ops.leaves, {"row": up}) for x in (row, other))
        for name, grad in one.whole(found).items():
            assert_near_in_norm(grad, wanted[name], 1e-10, f"d {name}", floor=1e-12)
    torch.manual_seed(dist.get_rank())
    drawn = relax.gumbel_topk(one.ops.hidden, one.head, 1.0, k=4)
    same_on_all(drawn.weights, group)
    parallel_errors.refused(
        group, lambda: relax.gumbel_topk(one.ops.hidden, one.head, 1.0, k=0, embeddings=(table,)),
        "the k best entries of a head that is sharded", kind=OptionError,
    )  # fmt: skip


def sampled_tokens(group: Any) -> None:
    """The record of one process, under every kind of rule, and the same tokens for any number of ranks."""
    rules = (
        {}, {"temperature": 0}, {"top_k": 5, "temperature": 0.6}, {"top_p": 0.7}, {"top_p": 0.999, "temperature": 3.0},
        {"min_p": 0.05}, {"top_k": 9, "top_p": 0.8, "min_p": 0.01, "temperature": torch.rand(7) + 0.3},
    )  # fmt: skip
    for sizes, transform in ((UNEVEN, {"softcap": 9.0, "vocab_size": V - 2}), (EVEN, {"bias": False})):
        one = split(group, sizes, ranks=(2,), scale=0.8, **transform)
        if one.ops.bias is not None:
            one.ops.bias.data[4:8] = -torch.inf
        noise = relax.Noise(torch.arange(7), torch.arange(7) * 5)
        for rule in rules:
            for keep, budget in ((3, None), (0, 1)) if rule in rules[3:5] else ((2, None),):
                ours, alone = (
                    ll.sample_tokens(one.ops.hidden, head, keep=keep, noise=noise, memory_budget=budget, **rule)
                    for head in (one.head, one.ops.head)
                )
                for name, x in ours.to_dict().items():
                    expected = getattr(alone, name)
                    if name != "vocab_size":
                        same_on_all(getattr(ours, name), group)
                    x = torch.tensor(x, dtype=torch.float64)
                    assert_near(x, torch.as_tensor(expected).double().reshape(x.shape), 1e-9, f"{name} {rule}")
    torch.manual_seed(dist.get_rank())
    same_on_all(ll.sample_tokens(one.ops.hidden, one.head).token, group)


def dropout(group: Any) -> None:
    """Ranks drop the same elements, whatever their own generators hold."""
    one = split(group, UNEVEN, ranks=(2,))
    one.ops.adapters = tuple(replace(x, dropout=0.5) for x in one.ops.adapters)
    torch.manual_seed(dist.get_rank())
    loss = ll.linear_cross_entropy(one.ops.hidden, one.head, one.ops.labels)
    same_on_all(loss, group)
    for x in torch.autograd.grad(loss, (one.ops.hidden, one.ops.adapters[0].a)):
        same_on_all(x, group)
    again = ll.linear_cross_entropy(one.ops.hidden, one.head, one.ops.labels)
    assert loss != again


def shards_of_sequences(group: Any) -> None:
    """Context parallelism: each rank has a part of every sequence, and its share of one loss."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    ops = operands(lead=(2, 8), v=V)
    ops.labels[0, :3], ops.labels[1, 5] = -100, -100  # unlike numbers of tokens that count
    dense = torch.nn.functional.cross_entropy(
        (ops.hidden @ ops.weight.T + ops.bias).flatten(0, 1), ops.labels.flatten()
    )
    wanted = torch.autograd.grad(dense, [ops.hidden, ops.weight])
    hidden, labels = (x.chunk(size, 1)[rank] for x in (ops.hidden, ops.labels))
    total = ll.count_tokens(labels, DeviceMesh.from_group(group, "cpu"))
    assert int(total) == 12
    cross = ll.linear_cross_entropy(hidden, ops.head, labels, denominator=total)
    own = ll.token_loss(lambda s: -s.logprob, hidden, ops.head, labels, reduction="sum") / total
    for share in (cross, own):
        grads = torch.autograd.grad(share, [ops.hidden, ops.weight])
        for x, expected in zip((share.detach().clone(), *grads), (dense.detach(), *wanted), strict=True):
            dist.all_reduce(x, group=group)
            assert_near(x, expected, 1e-10)
    assert int(ll.count_tokens(torch.full((3,), -100), group)) == 1
    assert int(ll.count_tokens(labels)) == int((labels != -100).sum())


def dtensors(group: Any) -> None:
    """A weight that says itself which rows are here, one of them padding; its gradient is a DTensor too."""
    mesh = DeviceMesh.from_group(group, "cpu")
    ops = operands(v=V)
    weight = distribute_tensor(ops.weight.detach(), mesh, [Shard(0)]).requires_grad_()
    bias = distribute_tensor(ops.bias.detach(), mesh, [Shard(0)]).requires_grad_()
    head = ll.LMHead(weight, bias, vocab_size=V - 1)
    labels = ops.labels.clamp(max=V - 2)
    loss = ll.linear_cross_entropy(ops.hidden, head, labels)
    loss.backward()
    z = ops.hidden @ ops.weight[: V - 1].T + ops.bias[: V - 1]
    expected = torch.nn.functional.cross_entropy(z, labels)
    wanted = torch.autograd.grad(expected, [ops.hidden, ops.weight, ops.bias])
    assert isinstance(weight.grad, DTensor)
    assert_near(loss.detach(), expected.detach(), 1e-10)
    for got, grad in zip((ops.hidden.grad, weight.grad.full_tensor(), bias.grad.full_tensor()), wanted, strict=True):
        assert_near(got, grad, 1e-10)


CASES: dict[str, Case] = {
    "every statistic": every_statistic,
    "each price": each_price,
    "hard rows": hard_rows,
    "losses": losses,
    "rounding": rounding,
    "soft tokens": soft_tokens,
    "sampled tokens": sampled_tokens,
    "dropout": dropout,
    "dtensors": dtensors,
    "shards of sequences": shards_of_sequences,
    **parallel_errors.CASES,
}

if __name__ == "__main__":
    run(CASES, last=parallel_errors.killed_rank)
