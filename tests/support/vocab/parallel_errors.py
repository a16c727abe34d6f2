"""Bad input on ranks that share a vocabulary: the same error on every rank, no hang, and the next call works."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import logitless as ll
from logitless import relax
from logitless.errors import (
    ConfigError,
    DtypeError,
    LabelError,
    LogitlessError,
    NotFiniteError,
    OptionError,
    RankError,
    ShapeError,
)
from logitless.vocab.ranks.agreement import GIVEN

V, H, N = 11, 4, 6
UNLIKE = f"the same values of {GIVEN}"
BOUND = 60.0  # seconds, on a loaded machine; a collective that nobody ends would take the group's five minutes


def mine(group: Any, sizes: tuple[int, ...] | None = None, offset: int | None = None, total: int = V) -> ll.LMHead:
    """This rank's part of a head."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = sizes or (*[2] * (size - 1), V - 2 * (size - 1))
    start = sum(sizes[:rank]) if offset is None else offset
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(1))
    rows = weight[:1].expand(sizes[rank], H) if offset is not None else weight[start : start + sizes[rank]]
    return ll.LMHead(rows.clone().requires_grad_(), shard=ll.VocabShard(group, start, total))


def call(head: ll.LMHead, n: int = N, seed: int = 0, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, H, generator=generator)
    return ll.linear_cross_entropy(hidden, head, torch.arange(n), **options)


def refused(group: Any, attempt: Callable[[], Any], *fragments: str, kind: type = RankError) -> None:
    """`attempt` raises on this and every other rank, with one message, soon; then a right call works."""
    start = time.monotonic()
    with pytest.raises(LogitlessError) as caught:
        attempt()
    message = str(caught.value)
    assert time.monotonic() - start < BOUND
    assert type(caught.value) is kind, message
    assert "\n" not in message
    assert all(fragment in message for fragment in fragments), message
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, message, group=group)
    assert set(messages) == {message}
    assert call(mine(group)).isfinite()


def unlike_calls(group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    last = rank == size - 1
    refused(group, lambda: call(mine(group), n=N - last), "number of tokens", f"{N - 1} on rank {size - 1}", "gather")
    refused(group, lambda: call(mine(group), seed=int(last)), "the same hidden states", "FSDP2")
    rows = torch.arange(1.0, 1 + N * H).view(N, H)
    for other in (rows.flip(0), torch.cat([rows[:-1], -rows[-1:]])):  # of one sum; alike but for the last token
        refused(group, lambda: ll.token_stats(other if last else rows, mine(group), want=()), "the same hidden states")  # noqa: B023
    hidden, labels = torch.ones(N, H), torch.arange(N)
    refused(group, lambda: ll.token_stats(hidden, mine(group), labels.roll(int(last))), "the same labels")
    ignored = labels.masked_fill(labels < last, -100)
    refused(group, lambda: ll.token_stats(hidden, mine(group), ignored), "number of tokens that count")
    refused(group, lambda: call(mine(group), z_loss=0.1 * last), "the same options", "the same call on every rank")
    for options in (
        {"z_loss": 0.1 + last},
        {"label_smoothing": 0.1 + 0.1 * last},
        {"reduction": ("sum", "mean")[last]},
    ):
        refused(group, lambda: call(mine(group), **options), "the same options")  # noqa: B023
    each = {"reduction": "none", "label_smoothing": 0.1 + 0.1 * last}
    refused(group, lambda: call(mine(group), **each), "the same options")
    for kind in ("sum", "none"):
        one = partial(ll.token_loss, lambda stats: -stats.logprob, hidden, reduction=kind if last else "mean")
        refused(group, lambda: one(mine(group), labels), "the same options")  # noqa: B023
    told = "temperature=1.0 on rank", f"temperature=2.0 on rank {size - 1}"
    refused(group, lambda: call(mine(group), temperature=1.0 + last), "the same options", *told)
    refused(group, lambda: call(mine(group), denominator=3 + last), UNLIKE)
    for options in ({"temperature": torch.full((N,), 1.0 + last)}, {"candidates": torch.full((N, 2), int(last))}):
        refused(group, lambda: ll.token_stats(hidden, mine(group), labels, **options), UNLIKE)  # noqa: B023
    frozen = mine(group)
    frozen.weight.requires_grad_(not last)
    refused(group, lambda: call(frozen), "the same options", "weight=(torch.float32, (4,), False) on rank")
    frozen.weight.requires_grad_()

    def without_graph() -> None:
        with torch.set_grad_enabled(not last):
            call(frozen)

    refused(group, without_graph, "the same options", "weight=(torch.float32, (4,), False) on rank")
    draft, target = replace(mine(group), token_ids=torch.arange(V).roll(int(last))), ll.LMHead(torch.ones(2 * V, H))
    refused(group, lambda: ll.token_stats(hidden, draft, want=("kl",), reference=(hidden, target)), UNLIKE)

    adapter = ll.LowRank(torch.ones(2, H) * (1 + last), torch.ones(len(mine(group).weight), 2))
    one, scaled = replace(mine(group), adapters=(adapter,)), replace(adapter, a=torch.ones(2, H), scaling=1.0 + last)
    refused(group, lambda: call(one), "the same adapters' a", "sums 8 on rank", "only b is split")
    refused(group, lambda: call(replace(one, adapters=(scaled,))), "scaling and dropout of adapters=[(1.0, 0.0)] on")
    beside = {"want": ("kl",), "reference": (hidden * (1 + last), mine(group))}
    refused(group, lambda: ll.token_stats(hidden, mine(group), **beside), "the same hidden states of the reference")
    for each, message in ((adapter, "the same adapters' a"), (scaled, "scaling and dropout of adapters=[(1.0, 0.0)]")):
        beside = {"want": ("kl",), "reference": (hidden, replace(mine(group), adapters=(each,)))}
        refused(group, lambda: ll.token_stats(hidden, mine(group), **beside), message)  # noqa: B023

    def budgeted() -> None:
        with patch("logitless.vocab.call.call.default_budget", lambda device: 1 << (20 + last)):
            call(mine(group))

    refused(group, budgeted, "the same options", "memory_budget=1048576 on rank")

    def on_a_smaller_gpu() -> None:
        with patch("logitless.vocab.call.call.processors", lambda device: 132 - last):
            call(mine(group))

    refused(group, on_a_smaller_gpu, "the same options", f"processors=131 on rank {size - 1}")

    def released(name: str, version: str) -> None:
        with patch(f"{name}.__version__", version):
            call(mine(group))

    ours, torchs = ("0.0.7", "2.13.0") if last else ("0.0.6", "2.12.1+cpu")
    refused(group, lambda: released("logitless", ours), "version of logitless", f"0.0.7 on rank {size - 1}", "install")
    refused(group, lambda: released("torch", torchs), "version of torch", "2.12.1 on rank", "2.13.0 on rank")


def unlike_samples(group: Any) -> None:
    """Ranks that would draw by other rules wait for each other in other collectives, or draw other tokens."""
    last, hidden = dist.get_rank(group) == dist.get_world_size(group) - 1, torch.ones(N, H)
    seeds, positions = torch.arange(N), torch.arange(N)

    def draw(*message: str, **options: Any) -> None:
        refused(group, lambda: ll.sample_tokens(hidden, mine(group), **options), *message)

    for name, value in {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "order": "vllm"}.items():
        draw("the same options", **({name: value} if last else {}))
    draw("the same options", keep=2 + last)
    draw("the same options", noise=relax.Noise(seeds, positions) if last else None)
    draw(UNLIKE, temperature=1.0 + last)
    draw(UNLIKE, temperature=torch.linspace(0.5, 0.9, N) + 0.05 * last)
    draw(UNLIKE, noise=relax.Noise(seeds + last, positions))
    draw(UNLIKE, noise=relax.Noise(seeds, positions.roll(int(last))))


def unlike_graphs(group: Any) -> None:
    """What operators of a compiled graph are told beside the call."""
    if group is dist.group.WORLD:
        return  # two ranks are enough for what takes seconds
    last = dist.get_rank(group)
    hidden, labels, head = torch.ones(N, H), torch.arange(N), mine(group)
    adapted = replace(head, adapters=(ll.LowRank(torch.ones(2, H) * (1 + last), torch.ones(len(head.weight), 2)),))

    def graph(head: ll.LMHead, **options: Any) -> None:
        call = torch.compile(lambda h: ll.linear_cross_entropy(h, head, labels, **options), backend="aot_eager")
        call(hidden)

    for options, message in (
        ({"z_loss": 0.1 + last}, "the same options"),
        ({"reduction": ("sum", "mean")[last]}, "the same options"),
        ({"reduction": "none", "label_smoothing": 0.1 + 0.1 * last}, "the same options"),
        ({"denominator": torch.tensor(3.0 + last)}, UNLIKE),
        ({"weight": torch.ones(V) + last, "reduction": "sum"}, UNLIKE),
    ):
        refused(group, lambda: graph(head, **options), message)  # noqa: B023
    refused(group, lambda: graph(adapted), "the same adapters' a")


def unlike_soft_tokens(group: Any) -> None:
    """Ranks that would mix other tokens, or by other noise."""
    last, hidden, head = dist.get_rank(group) == dist.get_world_size(group) - 1, torch.ones(N, H), mine(group)
    noise = relax.Noise(torch.arange(N), torch.arange(N))
    other = relax.Noise(torch.arange(N) + last, torch.arange(N))
    half = ll.LMHead(head.weight[:1], shard=head.shard)
    table = torch.ones(len(head.weight), 3).requires_grad_(last)
    soft = partial(relax.gumbel_topk, hidden, head, k=3)
    for message, attempt in (
        ("number of tokens", lambda: relax.expected_embedding(hidden[: N - last], head)),
        ("the same hidden states", lambda: relax.expected_embedding(hidden * (1 + last), head)),
        ("none that holds rows", lambda: relax.expected_embedding(hidden, half)),
        ("temperature=1.0 embedding=None", lambda: relax.expected_embedding(hidden, head, temperature=1.0 + last)),
        ("embedding=(torch.float32, 3, False)", lambda: relax.expected_embedding(hidden, head, table)),
        ("draws=False", lambda: relax.expected_embedding(hidden, head, noise=noise if last else None)),
        (UNLIKE, lambda: relax.expected_embedding(hidden, head, noise=other)),
        ("gumbel_topk tau=1.0", lambda: soft(tau=1.0 + last, noise=noise)),
        ("hard=True", lambda: soft(tau=1.0, noise=noise, hard=not last)),
        ("hard=False noise=False", lambda: soft(tau=1.0, noise=noise if last else None)),
        (UNLIKE, lambda: soft(tau=1.0, noise=other)),
    ):
        refused(group, attempt, message)


def unlike_shards(group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    last, each = rank == size - 1, V // size
    refused(group, lambda: call(mine(group, (each,) * size, each * rank)), f"none that holds rows {each * size} to 10")
    refused(
        group, lambda: call(mine(group, (4,) * size, min(2 * rank, 4))), "on one rank", "rows 2 to 3 on ranks 0 and 1"
    )
    refused(group, lambda: call(mine(group, total=V + last)), "number of rows in all (total)", f"12 on rank {size - 1}")
    small = mine(group)
    small = ll.LMHead(small.weight, shard=small.shard, vocab_size=V - last)
    refused(group, lambda: call(small), "the same vocabulary", "set vocab_size alike")
    label, hidden = torch.full((N,), V), torch.ones(N, H)
    refused(group, lambda: ll.token_stats(hidden, mine(group), label), "labels: expected ids in 0..10", kind=LabelError)


def bad_shards(group: Any) -> None:
    """What one rank alone can see."""
    shard, local = ll.VocabShard, mine(group).weight
    if group is dist.group.WORLD:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
        refused(group, lambda: shard(mesh, 0, V, dim="cp"), "dimension 'cp'", "'dp', 'tp'", kind=ConfigError)
        refused(group, lambda: shard(mesh, 0, V), "dim, one of the mesh's 2 dimensions", kind=ConfigError)
        assert shard(mesh, 0, V, dim="tp").name == mesh.get_group("tp").group_name
        weight = distribute_tensor(torch.randn(V, H), mesh, [Replicate(), Shard(0)])
        refused(group, lambda: ll.LMHead(weight), "expected Shard(0) over one", "install", kind=ConfigError)
        flat = DeviceMesh("cpu", torch.arange(4))
        wide = distribute_tensor(torch.randn(V, H), flat, [Shard(1)])
        refused(group, lambda: ll.LMHead(wide), "sharded as (Shard(dim=1),)", kind=ConfigError)
        tall = distribute_tensor(torch.randn(V, H), flat, [Shard(0)])
        kept, labels = distribute_tensor(torch.randn(N, H), flat, [Replicate()]), torch.arange(N)
        message = "hidden is a DTensor with (Replicate(),), expected a plain tensor; pass hidden.full_tensor()"
        refused(group, lambda: ll.token_stats(kept, mine(group), labels), message, kind=ConfigError)
        beside = {"want": ("kl",), "reference": (kept, mine(group))}
        attempt = partial(ll.token_stats, torch.randn(N, H), mine(group), **beside)
        refused(group, attempt, "reference[0] is a DTensor with (Replicate(),)", kind=ConfigError)
        split = distribute_tensor(labels, flat, [Shard(0)])
        attempt = partial(ll.linear_cross_entropy, torch.randn(N, H), mine(group), split)
        refused(group, attempt, "labels is a DTensor", "labels.to_local()", kind=ConfigError)
        refused(group, lambda: ll.LMHead(tall, torch.ones(V)), "bias must be a DTensor", kind=ConfigError)
    refused(group, lambda: shard(None, 0, V), "a process group that this rank is in", kind=ConfigError)
    refused(group, lambda: shard(group, 0, V, dim="tp"), "dimension 'tp'", "no named dimension", kind=ConfigError)
    refused(group, lambda: shard(group, -1, V), "offset: expected a whole number of at least 0", kind=OptionError)
    assert shard(group, torch.tensor(0), V).offset is shard(group, 0, V).offset
    refused(group, lambda: ll.LMHead(local[:1], shard=shard(group, V, V)), "from row 11 on", kind=ShapeError)
    whole = ll.LMHead(torch.randn(V, H))
    hidden = torch.ones(N, H)
    for head, ref in ((whole, mine(group)), (mine(group), ll.LMHead(local[:0], shard=shard(group, 1, V)))):
        error = caught(lambda: ll.token_stats(hidden, head, want=("kl",), reference=(hidden, ref)))  # noqa: B023
        assert type(error) is ConfigError
        assert "reference: expected its rows sharded as the head's" in str(error)


def one_rank_alone(group: Any) -> None:
    """An argument that one rank refuses: the others do not wait for it, and say where to look."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    last, where = rank == size - 1, f"(rank {size - 1} of the {size} that share the head)"
    hidden, labels, head = torch.ones(N, H), torch.arange(N), mine(group)
    dropped = replace(head, adapters=(ll.LowRank(torch.ones(2, H), torch.ones(len(head.weight), 2), dropout=0.5),))

    def wrong(attempt: Callable[[], Any], message: str, kind: type) -> None:
        refused(group, attempt, message, where, kind=kind)

    short = labels[: N - last]
    for one in (head, dropped):
        wrong(lambda: ll.token_stats(hidden, one, short), "labels: expected shape (6,)", ShapeError)  # noqa: B023
        wrong(lambda: ll.linear_cross_entropy(hidden, one, short), "labels: expected shape (6,)", ShapeError)  # noqa: B023
        wrong(lambda: ll.sample_tokens(hidden, one, keep=V + last), "keep: expected a whole number", OptionError)  # noqa: B023
        wrong(lambda: relax.gumbel_topk(hidden, one, 1.0, k=V + last), "k: expected a whole number", OptionError)  # noqa: B023
    wrong(lambda: ll.token_stats(hidden[:, : H - last], head, labels), "hidden: expected (..., 4)", ShapeError)
    wrong(lambda: call(head, reduction=["mean", "wrong"][last]), "reduction", OptionError)
    wrong(lambda: call(head, **({"weights": 1} if last else {})), "unknown option 'weights'", OptionError)
    endless = "é" * 2000  # more words than a rank sends
    wrong(lambda: call(head, **({endless: 1} if last else {})), "unknown option 'éé", OptionError)
    wrong(lambda: call(head, denominator=1.0 - last), "denominator: expected a positive number", OptionError)
    given = [torch.ones(N), torch.ones(N + 1)][last]
    own = lambda stats, w: -w * stats.logprob  # noqa: E731
    wrong(lambda: ll.token_loss(own, hidden, head, labels, inputs=(given,)), "inputs: expected leading", ShapeError)
    wrong(lambda: ll.sample_tokens(hidden, head, top_p=1.0 + last), "top_p", OptionError)
    wrong(lambda: ll.sample_tokens(hidden, head, temperature=0.0 - last), "temperature", OptionError)
    nan = hidden.clone().fill_(torch.nan if last else 1.0)
    kl = partial(relax.online_kl, hidden, head, (hidden, head))
    wrong(lambda: kl(lengths=(3, 3 + last)), "lengths: expected both models", OptionError)
    wrong(lambda: kl(alive=[True] * N if last else None), "alive: expected a tensor, got list", DtypeError)
    listed, soft = [1.0] if last else hidden, relax.expected_embedding
    wrong(lambda: soft(listed, head), "hidden: expected a floating-point tensor", DtypeError)
    wrong(lambda: relax.online_kl(listed, head, (hidden, head)), "hidden: expected a floating-point", DtypeError)
    wrong(lambda: soft(hidden, head, temperature=1.0 - 2 * last), "temperature: expected a number", OptionError)
    wrong(lambda: relax.gumbel_topk(nan, head, 1.0, k=2), "hidden: expected finite numbers", NotFiniteError)
    refused(group, lambda: ll.token_stats(hidden, head, labels.float()), "labels: expected integer", kind=DtypeError)
    both = [lambda: call(head, reduction="wrong"), lambda: ll.token_stats(hidden, head, short[:1])][last]
    refused(group, both, "reduction", "(rank 0 of", kind=OptionError)


def caught(attempt: Callable[[], Any]) -> Exception:
    with pytest.raises(LogitlessError) as raised:
        attempt()
    return raised.value


def silent_rank(group: Any) -> None:
    """A rank that never comes: the others fail when the group's own timeout has passed."""
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=3)) if group is dist.group.WORLD else None
    if impatient is not None and dist.get_rank() == 0:
        start = time.monotonic()
        error = caught(lambda: call(mine(impatient)))
        assert type(error) is RankError
        assert "rank 0 got none from at least one" in str(error)
        assert 2 < time.monotonic() - start < BOUND
    dist.barrier(group)


def killed_rank(group: Any) -> None:
    """A rank dies between two steps: the others' next call fails, long before the timeout of five minutes."""
    head = mine(group)
    call(head).backward()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = caught(lambda: [call(head).backward() for _ in range(2)])
    assert type(error) is RankError
    assert "from all 4 ranks of its group" in str(error)
    assert "\n" not in str(error)
    assert time.monotonic() - start < BOUND


CASES = {
    "unlike calls": unlike_calls,
    "unlike graphs": unlike_graphs,
    "unlike samples": unlike_samples,
    "unlike soft tokens": unlike_soft_tokens,
    "unlike shards": unlike_shards,
    "bad shards": bad_shards,
    "one rank alone": one_rank_alone,
    "silent rank": silent_rank,
}
