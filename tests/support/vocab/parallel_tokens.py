"""Tokens, adapters, DTensors and shards of sequences on several ranks."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import logitless as ll
from logitless import relax, retrieval
from logitless.errors import ConfigError, OptionError
from tests.support.vocab import parallel_errors
from tests.support.vocab.comparing import assert_near, assert_near_in_norm, gradients, operands
from tests.support.vocab.parallel_split import EVEN, UNEVEN, Split, V, same_on_all, split


def soft_tokens(group: Any) -> None:
    """The k best with noise: the one-process soft tokens, their gradients, and seeds that a generator gives alike."""
    for sizes, transform in ((UNEVEN, {"softcap": 4.0, "vocab_size": V - 1}), (EVEN, {})):
        one = split(group, sizes, sizes is UNEVEN, ranks=(2,), scale=0.8, **transform)
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


def mean_embedding(group: Any) -> None:
    """Σ p·E, entropy, argmax and draw of one process, with the gradients of what is whole and of each rank's rows."""
    for sizes, transform, tied in ((UNEVEN, {"softcap": 4.0, "vocab_size": V - 2}, False), (EVEN, {}, True)):
        one = split(group, sizes, sizes is UNEVEN, ranks=(2,), scale=0.8, **transform)
        noise = relax.Noise(torch.arange(7), torch.arange(7) * 5)
        table = torch.randn(V, 6, dtype=torch.float64).requires_grad_()
        shard = one.shard
        rows = table[shard.offset : shard.offset + one.head.weight.shape[0]]
        pairs = ((one.head, None if tied else rows), (one.ops.head, None if tied else table))
        for budget in (None, 3_000):
            options = {"temperature": 0.7, "noise": noise, "memory_budget": budget}
            ours, alone = (relax.expected_embedding(one.ops.hidden, head, own, **options) for head, own in pairs)
            same_on_all(ours.embedding, group)
            assert torch.equal(ours.argmax, alone.argmax)
            assert torch.equal(ours.token, alone.token)
            leaves = one.ops.leaves | ({} if tied else {"table": table})
            up = {"embedding": torch.randn_like(alone.embedding), "entropy": torch.randn_like(alone.entropy)}
            for name in up:
                assert_near(getattr(ours, name).detach(), getattr(alone, name).detach(), 1e-10, name)
            found, wanted = (gradients({name: getattr(x, name) for name in up}, leaves, up) for x in (ours, alone))
            for name, grad in one.whole(found).items():
                assert_near_in_norm(grad, wanted[name], 1e-10, f"d {name}", floor=1e-12)
    drawn = relax.expected_embedding(one.ops.hidden, one.head, generator=torch.Generator().manual_seed(dist.get_rank()))
    same_on_all(drawn.token, group)
    alike = split(group, UNEVEN, True, bias=False)
    nothing = torch.zeros_like(alike.ops.hidden)  # of which all logits are equal: the lowest id is the argmax
    assert (relax.expected_embedding(nothing, alike.head).argmax == 0).all()


def documents(group: Any) -> None:
    """Maxima over documents' tokens: values, places and gradients of one process, whole or what is kept of them."""
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    for sizes, transform in ((UNEVEN, {"softcap": 4.0, "vocab_size": V - 2}), (EVEN, {"bias": False})):
        one = split(group, sizes, sizes is UNEVEN, lead=(4, 4), ranks=(2,), scale=0.8, **transform)
        for more in ({}, {"memory_budget": 1}, {"top_k": 5}, {"above": 0.1}, {"above": 0.1, "top_k": 3}):
            ours, alone = (retrieval.max_pool_logits(one.ops.hidden, x, mask, **more) for x in (one.head, one.ops.head))
            same_on_all(ours.values, group)
            assert_near(ours.values.detach(), alone.values.detach(), 1e-10)
            assert torch.equal(ours.tokens, alone.tokens)
            up = {"values": torch.randn(alone.values.shape, dtype=torch.float64).masked_fill(alone.values.isinf(), 0.0)}
            found, wanted = (gradients({"values": x.values}, one.ops.leaves, up) for x in (ours, alone))
            for name, grad in one.whole(found).items():
                assert_near_in_norm(grad, wanted[name], 1e-10, f"d {name}", floor=1e-12)
    mask[0, dist.get_rank(group)] = 0
    parallel_errors.refused(group, lambda: retrieval.max_pool_logits(one.ops.hidden, one.head, mask))
    many = partial(retrieval.max_pool_logits, one.ops.hidden, one.head, top_k=V + 1)
    parallel_errors.refused(group, many, "top_k: expected", kind=OptionError)


def sampled_tokens(group: Any) -> None:
    """The record of one process, under every kind of rule, and the same tokens for any number of ranks."""
    rules = (
        {}, {"temperature": 0}, {"top_p": 0.999, "temperature": 3.0},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.01, "temperature": torch.rand(7) + 0.3},
    )  # fmt: skip
    wide = 131  # more entries than are retained, so that noise lifts some of the others, and rows are read whole
    uneven, even = ((3, 128), (66, 65)) if dist.get_world_size(group) == 2 else ((1, 60, 0, 70), (33, 33, 33, 32))
    for sizes, transform in ((uneven, {"softcap": 9.0, "vocab_size": wide - 2}), (even, {"bias": False})):
        ops = operands(v=wide, spread=1.0, ranks=(2,), scale=0.8, **transform)
        one = Split(ops, group, sizes, backwards=sizes is uneven)
        if one.ops.bias is not None:
            one.ops.bias.data[4:8] = -torch.inf
        noise = relax.Noise(torch.arange(7), torch.arange(7) * 5)
        for rule in rules if sizes is uneven else rules[:1]:
            for keep, budget in ((3, None), (0, 1)) if rule is rules[2] else ((2, None),):
                ours, alone = (
                    ll.sample_tokens(one.ops.hidden, head, keep=keep, noise=noise, memory_budget=budget, **rule)
                    for head in (one.head, one.ops.head)
                )
                for name, x in ours.to_dict().items():
                    expected = getattr(alone, name)
                    if isinstance(expected, Tensor):
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
    if size == 4:  # two groups of two, of which this rank's is one
        pairs = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "cp"))
        assert int(ll.count_tokens(torch.full((1 + rank,), 7), pairs, dim="cp")) == (3, 7)[rank // 2]
        assert int(ll.count_tokens(torch.full((1 + rank,), 7), pairs, dim="dp")) == (4, 6)[rank % 2]
    assert int(ll.count_tokens(labels)) == int((labels != -100).sum())


def losses_of_sequences(group: Any) -> None:
    """One loss for each response, whether its rows stay or are too many, and one of these has no token that counts."""
    for sizes, budget in ((EVEN, None), (UNEVEN, 1), (UNEVEN, 4_000)):
        one = split(group, sizes, lead=(4, 3), reference=True, ranks=(2,), scale=0.8, vocab_size=V - 1)
        one.ops.labels[0, 1:] = one.ops.labels[2] = -100
        advantages = torch.randn(4, dtype=torch.float64)

        def loss_fn(stats: Any, advantages: Tensor) -> Tensor:
            return advantages * (stats.logprob + stats.kl).sum(1).square() - stats.entropy.prod(1)

        results = []
        for head, reference in ((one.head, one.reference), (one.ops.head, one.ops.reference)):
            loss = ll.token_loss(
                *(loss_fn, one.ops.hidden, head, one.ops.labels),
                inputs=(advantages,),
                per="sequence",
                want=("logprob", "entropy", "kl"),
                reference=reference,
                memory_budget=budget,
            )
            results.append(loss)
        same_on_all(results[0], group)
        assert_near(results[0], results[1], 1e-10)
        up = {"loss": torch.tensor(0.7, dtype=torch.float64)}
        found, wanted = (gradients({"loss": x}, one.ops.leaves, up) for x in results)
        for name, grad in one.whole(found).items():
            assert_near_in_norm(grad, wanted[name], 1e-10, f"d {name}", floor=1e-12)


def dtensors(group: Any) -> None:
    """A weight that says itself which rows are here, one of them padding; its gradient is a DTensor too."""
    mesh = DeviceMesh.from_group(group, "cpu")
    ops = operands(v=V)
    weight = distribute_tensor(ops.weight.detach(), mesh, [Shard(0)]).requires_grad_()
    bias = distribute_tensor(ops.bias.detach(), mesh, [Shard(0)]).requires_grad_()
    with torch.no_grad():  # in which a plain head's leaves stay those that get gradients
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


def dtensor_adapters(group: Any) -> None:
    """b sharded as the weight is, or already this rank's rows, as PEFT makes it of a split head; a whole."""
    mesh = DeviceMesh.from_group(group, "cpu")
    ops = operands(v=V, ranks=(2, 1))
    weight = distribute_tensor(ops.weight.detach(), mesh, [Shard(0)])
    adapters, leaves = [], []
    for x, plain in zip(ops.adapters, (False, True), strict=True):
        b = distribute_tensor(x.b.detach(), mesh, [Shard(0)])
        a = x.a.detach().clone() if plain else distribute_tensor(x.a.detach(), mesh, [Replicate()])
        pair = [y.requires_grad_() for y in (a, b.to_local().detach().clone() if plain else b)]
        adapters.append(ll.LowRank(*pair, x.scaling))
        leaves += pair
    loss = ll.linear_cross_entropy(ops.hidden, ll.LMHead(weight, adapters=tuple(adapters)), ops.labels)
    loss.backward()
    z = ops.hidden @ (ops.weight + sum(x.scaling * x.b @ x.a for x in ops.adapters)).T
    expected = torch.nn.functional.cross_entropy(z, ops.labels)
    assert_near(loss.detach(), expected.detach(), 1e-10)
    dense = [y for x in ops.adapters for y in (x.a, x.b)]
    wanted = torch.autograd.grad(expected, [ops.hidden, *dense])
    rows = weight.to_local().shape[0]
    start = min(V, dist.get_rank(group) * -(-V // dist.get_world_size(group)))
    for i, (got, grad) in enumerate(zip([ops.hidden, *leaves], wanted, strict=True)):
        found = got.grad.full_tensor() if isinstance(got.grad, DTensor) else got.grad
        assert_near(found, grad[start : start + rows] if i == 4 else grad, 1e-10)
    turned = ll.LowRank(distribute_tensor(ops.adapters[0].a.detach(), mesh, [Shard(1)]), ops.adapters[0].b.detach())
    for one, message in ((weight, "a is sharded as"), (ops.weight.detach(), "LowRank: a is sharded")):
        refuse = partial(ll.LMHead, one, adapters=(turned,))
        parallel_errors.refused(group, refuse, message, kind=ConfigError)


def compiled(group: Any) -> None:
    """One graph, with the collectives inside of its operators; a DTensor's rows are found while it is traced."""
    if group is dist.group.WORLD:
        return  # two ranks are enough for what takes seconds
    one = split(group, UNEVEN)
    mesh = DeviceMesh.from_group(group, "cpu")
    weight = distribute_tensor(one.ops.weight.detach(), mesh, [Shard(0)]).requires_grad_()
    head = one.head

    def plain(hidden: Tensor) -> Tensor:
        stats = ll.token_stats(hidden, head, one.ops.labels, want=("entropy", "logprob"))
        return stats.entropy.sum() + ll.linear_cross_entropy(hidden, head, one.ops.labels)

    def dtensor(hidden: Tensor) -> Tensor:
        return ll.linear_cross_entropy(hidden, ll.LMHead(weight), one.ops.labels)

    for loss in (plain, dtensor):
        results = []
        for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
            out = call(one.ops.hidden)
            results.append((out.detach(), *torch.autograd.grad(out, one.ops.hidden)))
        for eager, graph in zip(*results, strict=True):
            assert_near(graph, eager, 1e-12)
            same_on_all(graph, group)


class Scored(nn.Module):
    """A head with its loss inside, where FSDP2's hooks have gathered what data-parallel ranks hold of it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return ll.linear_cross_entropy(hidden, ll.LMHead(self.weight), labels)


def two_dimensions(group: Any) -> None:
    """FSDP2 over one dimension of a mesh, the vocabulary over the other."""
    if group is not dist.group.WORLD:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ops = operands(lead=(2, 6), v=V, bias=False)
    model = Scored(distribute_tensor(ops.weight.detach(), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"])
    mine = mesh.get_local_rank("dp")  # unlike tokens for unlike data-parallel ranks
    hidden = ops.hidden.detach()[mine].requires_grad_()
    loss = model(hidden, ops.labels[mine])
    loss.backward()
    z = ops.hidden @ ops.weight.T
    dense = torch.nn.functional.cross_entropy(z[mine], ops.labels[mine])
    both = torch.nn.functional.cross_entropy(z.flatten(0, 1), ops.labels.flatten())
    assert_near(loss.detach(), dense.detach(), 1e-10)
    assert_near(hidden.grad, torch.autograd.grad(dense, ops.hidden, retain_graph=True)[0][mine], 1e-10)
    assert_near(model.weight.grad.full_tensor(), torch.autograd.grad(both, ops.weight)[0], 1e-10)


CASES = {
    "two dimensions": two_dimensions,
    "compiled": compiled,
    "soft tokens": soft_tokens,
    "mean embedding": mean_embedding,
    "sampled tokens": sampled_tokens,
    "documents": documents,
    "dropout": dropout,
    "dtensors": dtensors,
    "dtensor adapters": dtensor_adapters,
    "shards of sequences": shards_of_sequences,
    "losses of sequences": losses_of_sequences,
}
