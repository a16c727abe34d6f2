"""Heads whose vocabulary is split over two and four ranks: one launch, a test for each case."""

import math
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from logitless.algebra.costs import traffic_of
from logitless.errors import DeviceError, RankError
from logitless.vocab.head.lm_head import place
from logitless.vocab.head.shard import Layout, VocabShard
from logitless.vocab.passes.gradient import scatter_one_hots
from logitless.vocab.ranks.agreement import FACTS, _by_rank, _check_alike, _mark, layout_of
from logitless.vocab.ranks.collectives import Ranks
from tests.support.vocab.parallel_ranks import CASES
from tests.support.vocab.sharding import assert_ok, launch


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch("tests.support.vocab.parallel_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("case", CASES)
def test_split_over_ranks(found, case, size):
    assert_ok(found, case, size)


def test_a_rank_that_is_killed(found):
    assert [found[str(rank)]["last"] for rank in range(4)] == ["ok", "ok", "ok", "never ended"]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_on_a_part_of_the_vocabulary(tmp_path):
    found = launch("tests.support.vocab.parallel_triton", tmp_path, TRITON_INTERPRET="1")
    assert {found[rank]["kernels 2"] for rank in "01"} == {"ok"}


def test_entries_of_other_ranks_burden_no_single_row():
    """They add nothing, and go to all rows in turn: a kernel adds up serially what goes to the same row."""
    held, seen = 8, []
    head = SimpleNamespace(local_rows=held)
    factor = SimpleNamespace(scatter=lambda ids, c, tokens, entries, of: seen.append((ids, c)))
    policy = SimpleNamespace(head=head, place=lambda ids: place(ids, 100, held), factors=[factor])
    labels = torch.tensor([[3], [104], [500], [107], *[[i] for i in range(28)], *[[1000]] * 32])
    grads = SimpleNamespace(pairs=[(None, None)], bias=torch.zeros(held))
    scatter_one_hots(SimpleNamespace(policy=policy), labels, torch.ones(64, 1), grads)
    ((ids, c),) = seen
    assert ids[[1, 3]].flatten().tolist() == [4, 7]
    assert c.flatten().nonzero().flatten().tolist() == [1, 3]
    assert grads.bias.tolist() == [0, 0, 0, 0, 1, 0, 0, 1]
    assert ids.flatten().bincount(minlength=held).max() <= 64 // held + 2


def test_a_group_without_a_backend_for_the_tensors(monkeypatch):
    """No rank is dead: NCCL alone serves no CPU, which torch says as it says that."""

    def gather(*args, group):
        raise RuntimeError("No backend type associated with device type cpu")

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    for name in ("get_world_size", "get_rank"):
        monkeypatch.setattr(torch.distributed, name, lambda group: 1)
    with pytest.raises(DeviceError, match=r"a backend for, got cpu .*move them, or start the group"):
        Ranks("nccl").gather(torch.ones(2))


def test_numbers_that_are_compared_may_lie_on_another_device():
    """A loss's denominator on the CPU beside a head on a GPU, as calls without ranks take it."""
    assert _mark([torch.arange(3), torch.tensor(3.0)], torch.device("meta")).is_meta


@pytest.mark.parametrize(
    ("total", "rows", "offsets", "held"),
    [(23, 23, (0, 6, 12, 18), (6, 6, 6, 5)), (23, 14, (0, 6, 12, 18), (6, 6, 2, 0)), (2, 2, (0, 1), (1, 1))],
)
def test_rows_are_even_until_ranks_have_met(monkeypatch, total, rows, offsets, held):
    """As torch.chunk divides them: what `explain` goes by before the first call."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    shard = VocabShard(SimpleNamespace(group_name="ranks"), 0, total)
    assert layout_of(shard, rows) == Layout(offsets, held)


def test_round_numbers_are_told_apart():
    """Whose bits, weighed and added up, would all overflow to 0."""
    marks = {_mark([torch.full((7,), x)], torch.device("cpu")).item() for x in (0.0, 2.0, -2.0)}
    assert len(marks) == 3


def test_sums_may_differ_by_rounding():
    """By 2 % of the largest norm: what ranks computed alike, whose sums cancel, and not what they did not."""
    alike = [[0.0, 1.0, 100.0], [1.9, -0.9, 90.0], [0.5, 0.0, 99.0]]
    _check_alike("hidden states", "", alike)
    for other in ([-0.2, 0.0, 99.0], [0.5, -1.1, 99.0]):
        with pytest.raises(RankError, match=r"expected the same hidden states .*, got sums .* on rank 3; send it$"):
            _check_alike("hidden states", "send it", [*alike, other])
    _check_alike("hidden states", "", [*alike, [math.nan] * 3])  # diverged, which has an error of its own
    _check_alike("hidden states", "", [*alike, [5.0, 5.0, math.inf]])


def test_what_many_ranks_have_is_cut():
    assert _by_rank([7, 7, 7, 7, 6]) == "7 on ranks 0, 1, 2, 3, 6 on rank 4"
    assert _by_rank([7] * 7 + [6]) == "7 on ranks 0, 1, 2, 3, ..., 6 on rank 7"
    assert _by_rank([1, 2, 3, 4]) == "1 on rank 0, 2 on rank 1, 3 on rank 2, 4 on rank 3"
    assert _by_rank([1, 2, 3, 4, 5]) == "1 on rank 0, 2 on rank 1, 3 on rank 2, 4 on rank 3, ..."


def test_what_leaves_a_rank():
    """Gathered bytes go to each of the others, of the rings that add up twice all but one part leaves each rank."""
    told = traffic_of(("logprob", "entropy"), 100, chunks=2, widths=(64, 8))
    assert (told.collectives, told.gathered, told.summed) == (1 + 2 + 2, 8 * FACTS + 100 * 4 * 4, 100 * 72 * 4)
    assert told.sent(4) == 3 * told.gathered + 2 * 3 * told.summed // 4
    assert told.sent(1) == 0
