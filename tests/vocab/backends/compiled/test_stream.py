"""Values whose logits no memory holds, added up in registers: held to float64, and to the slices that they replace."""

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import logitless as ll
from logitless.vocab.backends.compiled import backward, library, panels, stream
from logitless.vocab.passes import price
from tests.support.allocations import trace_allocations
from tests.support.switches import put_back
from tests.support.vocab.comparing import assert_near, assert_near_in_norm, compare, compare_loss, operands
from tests.support.vocab.processors import needs_library

pytestmark = [needs_library, pytest.mark.usefixtures("streamed")]
PROCESSOR = torch.backends.cpu.get_cpu_capability()
WANT = (
    *("logprob", "logsumexp", "label_logit", "entropy", "self_certainty", "mean_logit"),
    *("max_logit", "rank", "sum_sq_prob"),
)
KL = ("kl", "reverse_kl")


def problem(n=13, h=8, v=257, bias=False, **more):
    return operands((n,), h, v, dtype=torch.float32, bias=bias, **more).training()


def values(ops, want=WANT, **options):
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, backend="compiled", **options)
    return {name: getattr(stats, name) for name in want}


SIZES = [
    (1, 1, 1),
    (5, 3, 12),
    (13, 8, 257),
    (33, 65, 1031),
    (70, 517, 96),
    (100, 129, 97),
    (40, 1030, 2500),
    (40, 12, 20_000),
]  # the last has parts of several blocks


@pytest.mark.parametrize(("n", "h", "v"), SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_size_is_the_oracle(n, h, v, threads, streamed):
    with put_back():
        torch.set_num_threads(threads)
        compare(problem(n, h, v), WANT, backend="compiled", top_k=min(v, 7))
        compare(problem(n, h, v, reference=True), WANT + KL, backend="compiled", top_k=min(v, 3))
    assert streamed == [n, n]


TRANSFORMS = [{}, {"bias": True}, {"softcap": 3.0}, {"ranks": (2, 25)}, {"bias": True, "softcap": 30.0, "ranks": (4,)}]


@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.linspace(0.3, 3.0, 50)], ids=["1", "0.7", "tensor"])
@pytest.mark.parametrize("reference", [False, True], ids=["alone", "beside a reference"])
@pytest.mark.parametrize("more", TRANSFORMS, ids=str)
def test_every_head_is_the_oracle(more, reference, temperature, streamed):
    ops = problem(50, 37, 1031, reference=reference, scale=0.8, vocab_size=1020, **more)
    ops.labels[[3, 40]] = -100
    want = WANT + KL * reference
    compare(ops, want, backend="compiled", temperature=temperature, top_k=5)
    assert streamed == [48]


def with_impossible(ops, *parts):
    """The operands with entries that are impossible: a bias of -inf."""
    for one, some in zip((ops, ops.ref), parts, strict=False):
        one.bias[some] = -torch.inf
    return ops


IMPOSSIBLE = {
    "the reference's": (slice(0, 0), slice(3, 9)),
    "both's": (slice(3, 9), slice(3, 9)),
    "the policy's": (slice(3, 9), slice(0, 0)),
    "overlapping": (slice(3, 9), slice(7, 1000)),
}


@pytest.mark.parametrize(("own", "others"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_entries(own, others, streamed):
    """Infinite KLs where one head alone has an entry, at labels and elsewhere."""
    ops = with_impossible(problem(33, 9, 1031, bias=True, reference=True), own, others)
    ops.labels[:4] = torch.tensor([4, 8, 1030, 500])
    want = ("logprob", "logsumexp", "entropy", "self_certainty", "mean_logit", "rank", "sum_sq_prob", *KL)
    exact = ops.to(torch.float64)
    expected = ll.token_stats(
        exact.hidden, exact.head, ops.labels, want=want, reference=exact.reference, backend="eager"
    )
    got = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, backend="compiled")
    for name in want:
        assert_near(getattr(got, name), getattr(expected, name).double(), 2e-5, name)
    assert streamed == [33]


@pytest.mark.parametrize("apart", [0.0, 1e-3, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("far", [0.0, 3.0, 200.0, -5e3])
def test_a_kl_has_the_digits_that_slices_have(apart, far, streamed):
    """Of heads that are nearly the same one, or far from each other, whose logits differ by a large number, too."""
    ops = problem(34, 16, 12_000, bias=True, reference=True)  # parts of several blocks
    ops.ref.hidden = ops.hidden + 0.0
    ops.ref.weight = ops.weight + apart * torch.randn_like(ops.weight)
    ops.ref.bias = ops.bias + far
    exact = ops.to(torch.float64)

    def kls(of, backend):
        found = ll.token_stats(of.hidden, of.head, of.labels, want=KL, reference=of.reference, backend=backend)
        return {name: getattr(found, name).double() for name in KL}

    expected, sliced, got = kls(exact, "eager"), kls(ops, "eager"), kls(ops, "compiled")
    for name, right in expected.items():
        rounded = (sliced[name] - right).abs()
        floor = 2e-6 * right.abs() + 1e-9 * (1 + abs(far))
        assert ((got[name] - right).abs() <= 2 * rounded.max() + floor).all(), name
    assert streamed == [34]


def test_entries_that_neither_head_has_leave_a_small_kl_its_digits(streamed):
    """Their difference is no number, and weighs nothing."""
    ops = problem(34, 16, 1031, bias=True, reference=True)
    ops.ref.hidden, ops.ref.weight = ops.hidden, ops.weight + 1e-4 * torch.randn_like(ops.weight)
    ops.ref.bias = ops.bias.clone()
    ops = with_impossible(ops, slice(3, 300), slice(3, 300))
    ops.labels.fill_(1000)
    exact = ops.to(torch.float64)
    expected, got = (
        ll.token_stats(of.hidden, of.head, of.labels, want=KL, reference=of.reference, backend=backend)
        for of, backend in ((exact, "eager"), (ops, "compiled"))
    )
    for name in KL:
        right = getattr(expected, name)
        assert right.max() < 1e-6
        torch.testing.assert_close(getattr(got, name).double(), right, rtol=1e-2, atol=1e-10)
    assert streamed == [34]


FIRST = {  # (z, z') of entries of the first block; b and d0: see algebra/online_softmax.py
    "as all others": [],
    "d0 far below": [(-59.0, 3.0)],
    "d0 far above, b infinite": [(-40.0, -240.0), (-120.0, -170.0)],
    "a maximum far below, b infinite": [(-70.0, -129.0), (-130.0, -71.0)],
    "b without digits": [(-40.0, -500.0), (-57.0, 1.5)],
    "d0 above, b large": [(-3.0, -23.0), (-30.0, -1.0)],
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_a_small_kl_keeps_its_digits_whatever_the_first_block_is(first, streamed):
    """Of logits that no product rounds, nearly the same in all other blocks: alone, these have a KL of 5e-11."""
    z = -torch.rand(5, 12_000)
    z_ref = z + 1e-5 * torch.randn_like(z)
    if first:
        z[:, :96], z_ref[:, :96] = -200.0, -500.0  # which weigh nothing
        z[:, : len(first)], z_ref[:, : len(first)] = torch.tensor(first).t()
    hidden = torch.eye(5)
    head, ref = (ll.LMHead(x.t().contiguous()) for x in (z, z_ref))
    found = ll.token_stats(hidden, head, want=KL, reference=(hidden, ref), backend="compiled")
    p, q = (x.double().log_softmax(1) for x in (z, z_ref))
    for name, a, b in (("kl", p, q), ("reverse_kl", q, p)):
        expected, got = (a.exp() * (a - b)).sum(1), getattr(found, name).double()
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=2e-11, msg=lambda m, name=name: f"{name}: {m}")
    assert streamed == [5]


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("k", [1, 20, 300, 700])
def test_of_equal_entries_the_first_are_the_best(k, threads, streamed):
    ops = problem(37, 6, 700)
    ops.hidden = torch.randint(-2, 3, ops.hidden.shape).float()
    ops.weight = torch.randint(-1, 2, ops.weight.shape).float()
    ops.hidden[0] = 0.0  # -0 and 0
    z = ops.hidden @ ops.weight.t()
    logits, ids = z.sort(dim=1, descending=True, stable=True)
    with put_back():
        torch.set_num_threads(threads)
        found = ll.token_stats(ops.hidden, ops.head, top_k=k, want=("logsumexp",), backend="compiled")
    assert torch.equal(found.top_k_ids, ids[:, :k])
    assert torch.equal(found.top_k_logits, logits[:, :k])
    assert streamed == [37]


def test_the_best_entries_of_a_long_vocabulary(streamed):
    """Entries that get better to the end fill the room over and over; so do those that get worse, once."""
    ops = problem(34, 2, 20_000)
    ops.weight = torch.stack([torch.linspace(0, 9, 20_000), torch.randn(20_000)], 1)
    ops.hidden[:, 0] = torch.linspace(-1, 1, 34)
    z = ops.hidden @ ops.weight.t()
    found = ll.token_stats(ops.hidden, ops.head, top_k=33, want=("logsumexp",), backend="compiled")
    torch.testing.assert_close(found.top_k_logits, z.topk(33).values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z.gather(1, found.top_k_ids), found.top_k_logits, rtol=1e-6, atol=1e-6)
    assert streamed == [34]


@pytest.mark.parametrize("more", [{"scale": 0.3}, {"vocab_size": 250}], ids=str)
@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.3, 3.0, 13)], ids=["number", "tensor"])
def test_scale_temperature_and_padding(more, temperature, streamed):
    compare(problem(**more), WANT, backend="compiled", temperature=temperature)
    assert streamed == [13]


@pytest.mark.parametrize(("budget", "chunks"), [(600_000, 1), (170_000, 2), (9_000, 0)])
def test_a_budget_makes_chunks_and_a_small_one_makes_slices(budget, chunks, streamed):
    with put_back():
        torch.set_num_threads(1)  # each has rows of the weight, whose number depends on the processor
        budget += 400 * (library.library().entries() - 96)
        ops = problem(150, 33, 1031)
        ops.labels[[2, 149]] = -100
        compare(ops, WANT, backend="compiled", memory_budget=budget)
        assert (len(streamed), sum(streamed)) == (chunks, 148 if chunks else 0)
        told = ll.explain(ops.hidden, ops.head, ops.labels, want=WANT, backend="compiled", memory_budget=budget)
        assert told.buffer_bytes <= budget


@pytest.mark.parametrize("threads", [1, 3])
def test_the_best_entries_are_among_what_is_told(threads, held):
    ops = problem(200, 16, 3000)
    given = {"want": ("logprob",), "top_k": 200, "backend": "compiled"}
    with put_back():
        torch.set_num_threads(threads)
        ll.token_stats(ops.hidden, ops.head, ops.labels, **given)
        assert held() <= ll.explain(ops.hidden, ops.head, ops.labels, **given).buffer_bytes


def test_operands_that_do_not_lie_in_one_piece(streamed):
    ops = problem(40, 24, 1031)
    hidden, labels = ops.hidden.t().contiguous().t(), torch.stack([ops.labels] * 2, 1)[:, 0]
    apart = dataclasses.replace(ops, hidden=hidden, labels=labels)
    assert not any(x.is_contiguous() for x in (hidden, labels))
    expected = values(ops)
    for name, x in values(apart).items():
        assert torch.equal(x, expected[name]), name
    assert streamed == [40, 40]


def test_a_thread_without_memory_is_said():
    with pytest.raises(MemoryError, match="no memory for a thread's rows"):
        library.run(lambda call, threads: 1, library.Streamed())


def test_without_labels(streamed):
    ops = dataclasses.replace(problem(), labels=None)
    compare(ops, ("logsumexp", "entropy"), backend="compiled")
    assert streamed == [13]


@pytest.mark.parametrize("hidden", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_rows_are_widened_where_no_pairs_are_multiplied(hidden, streamed, monkeypatch):
    monkeypatch.setattr(library.library(), "multiplies_pairs", lambda: 0)
    ops = problem(20, 40, 1031)
    narrow = dataclasses.replace(ops, weight=ops.weight.bfloat16(), hidden=ops.hidden.to(hidden))
    wide = dataclasses.replace(ops, weight=narrow.weight.float(), hidden=narrow.hidden.float())
    found, expected = values(narrow), values(wide)
    for name, x in found.items():
        assert torch.equal(x, expected[name]), name
    assert streamed == [20, 20]


def test_the_same_bits_for_any_number_of_threads_and_any_batch(streamed):
    ops = problem(70, 40, 12_000)
    with put_back():
        torch.set_num_threads(1)
        alone = values(ops)
        for threads in (2, 5, 19):
            torch.set_num_threads(threads)
            for name, x in values(ops).items():
                assert torch.equal(x, alone[name]), (threads, name)
        some = dataclasses.replace(ops, hidden=ops.hidden[9:12], labels=ops.labels[9:12])
        for name, x in values(some, ("logsumexp", "entropy")).items():
            assert torch.equal(x, alone[name][9:12]), name


@pytest.mark.parametrize("sure", [20.0, 80.0, 1e4, 1e6])
def test_extreme_logits_are_as_near_to_float64_as_slices_have_them(sure, streamed):
    """Labels far above all others, or far below; many of equal logits."""
    ops = problem(6, 8, 700)
    ops.weight[:, 0] = 0.0
    ops.weight[[0, 300, 699], 0] = 1.0
    ops.hidden[:, 0] = sure
    ops.hidden[5] = 0.0
    ops.labels = torch.tensor([0, 300, 699, 5, 6, 698])
    want = ("logprob", "logsumexp", "entropy")
    exact = ops.to(torch.float64)
    expected = ll.token_stats(exact.hidden, exact.head, ops.labels, want=want, backend="eager")
    sliced = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, backend="eager")
    for name, x in values(ops, want).items():
        right = getattr(expected, name)
        rounded = (getattr(sliced, name).double() - right).abs()
        assert ((x.double() - right).abs() <= 2 * rounded + 2e-6 * (1 + right.abs())).all(), name
    assert streamed == [6]


@pytest.mark.parametrize("sure", [10.0, 30.0, 80.0])
def test_a_sure_token_keeps_the_digits_of_what_the_others_weigh(sure, streamed):
    ops = problem(6, 8, 700)
    ops.weight[:, 0] = 0.0
    ops.weight[0, 0] = 1.0
    ops.hidden[:, 0] = sure
    ops.labels[:] = 0
    exact = ops.to(torch.float64)
    expected = ll.token_stats(exact.hidden, exact.head, ops.labels, backend="eager").logprob
    assert (expected > -0.1).any()
    torch.testing.assert_close(values(ops, ("logprob",))["logprob"].double(), expected, rtol=1e-4, atol=1e-37)
    assert streamed == [6]


def test_nan_and_infinity_are_seen_and_stay_with_their_token(streamed):
    ops = problem(20, 8, 300)
    clean = values(ops)
    ops.hidden[3, 2], ops.hidden[17, 0] = torch.nan, torch.inf
    for name, x in values(ops).items():
        others = torch.tensor([i not in (3, 17) for i in range(20)])
        assert torch.equal(x[others], clean[name][others]), name
        if name in ("logprob", "logsumexp", "entropy"):
            assert x[[3, 17]].isnan().all(), name


@pytest.mark.parametrize("entry", [0, 50, 95, 299])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf], ids=["NaN", "what inf - inf is", "inf"])
def test_an_entry_that_is_nan_or_infinite_is_seen_in_every_token(bad, entry, streamed):
    """By the maximum, too, whichever entries come after it in a block, and as the best entry."""
    ops = problem(20, 8, 300, bias=True)
    ops.bias[entry] = bad
    ops.labels.fill_(7)
    sliced, found = (
        ll.token_stats(ops.hidden, ops.head, ops.labels, want=WANT, top_k=3, backend=backend)
        for backend in ("eager", "compiled")
    )
    for name in (*WANT, "top_k_logits", "top_k_ids"):
        x, right = getattr(found, name), getattr(sliced, name)
        torch.testing.assert_close(x, right, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
    assert streamed == [20]


def test_no_slice_of_logits_exists(streamed):
    ops = problem(200, 16, 30_000)
    seen = trace_allocations(lambda: values(ops, ("logprob", "entropy")))
    assert streamed == []  # a watched call makes slices, which are seen
    told = ll.explain(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="compiled")
    assert told.slices.in_products
    assert "whose logits no memory holds" in str(told)
    assert told.buffer_bytes < 200 * 30_000 * 4 / 50 < seen.peak


@pytest.mark.parametrize("also", ["float64", "flop", "transposed"])
def test_what_it_does_not_do_is_done_by_slices(also, streamed):
    ops = problem()
    if also == "float64":
        ops = ops.to(torch.float64)
    elif also == "transposed":
        ops.weight = ops.weight.t().contiguous().t()
    if also == "flop":
        with FlopCounterMode(display=False) as counted:
            values(ops)
        assert counted.get_total_flops() >= 2 * 13 * 8 * 257
    else:
        compare(ops, ("logprob", "entropy"), backend="compiled")
    assert streamed == []


LOSSES = {
    "a log-prob's": ("logprob",),
    "with entropy": ("logprob", "entropy", "self_certainty"),
    "with KLs": ("logprob", "entropy", *KL),
    "of a second look": ("logprob", "jsd", "acceptance"),
}


@pytest.mark.halved
@pytest.mark.parametrize("more", TRANSFORMS, ids=str)
@pytest.mark.parametrize("want", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize(("n", "budget"), [(50, None), (400, 2_500_000)], ids=["one chunk", "some chunks"])
def test_the_gradient_of_a_loss_is_the_oracles(n, budget, want, more, streamed):
    """Its logits stay for the products of backward."""
    reference = bool({"kl", "jsd"} & set(want))
    if budget is not None and "jsd" in want:
        budget *= 2  # for tensors of both heads' slices
    ops = operands((n,), 37, 1031, dtype=torch.float32, reference=reference, **({"bias": False} | more))
    with put_back():
        torch.set_num_threads(3 if budget is None else 1)  # each has rows of the weight
        compare_loss(ops, want, backend="compiled", memory_budget=budget)
        compare_loss(ops.training("hidden", "weight"), want, backend="compiled", memory_budget=budget)
        told = ll.explain(
            *(ops.hidden, ops.head, ops.labels),
            want=want,
            reference=ops.reference,
            backend="compiled",
            memory_budget=budget,
            loss=True,
        )
    assert set(streamed) == {n} if budget is None else streamed and n not in streamed and sum(streamed) % n == 0
    assert "no memory holds" not in str(told)
    assert told.buffer_bytes <= (budget or 1 << 28)


def test_the_gradient_of_a_cross_entropy_is_the_oracles(streamed):
    ops = problem(64, 20, 3000, bias=True).training("hidden", "weight", "bias")
    ops.labels[5] = -100
    exact, options = ops.to(torch.float64), {"label_smoothing": 0.1, "z_loss": 1e-3}
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="compiled", **options)
    expected = ll.linear_cross_entropy(exact.hidden, exact.head, exact.labels, backend="eager", **options)
    torch.testing.assert_close(loss.double(), expected)
    loss.backward()
    expected.backward()
    for name, leaf in ops.leaves.items():
        assert_near_in_norm(leaf.grad, exact.leaves[name].grad, 2e-6, name)
    assert streamed == [63]


def test_impossible_entries_have_no_gradient(streamed):
    ops = with_impossible(problem(40, 9, 1031, bias=True, reference=True), slice(3, 9), slice(3, 9))
    ops.labels.clamp_(min=9)
    compare_loss(ops.training("hidden", "weight", "bias"), ("logprob", "entropy", *KL), backend="compiled")
    assert set(streamed) == {40}


def test_an_infinite_kl_that_a_loss_leaves_out_has_no_gradient(streamed):
    """Logits stay with MASK for -inf: what 0 times their differences is, is 0."""
    ops = with_impossible(problem(40, 9, 1031, bias=True, reference=True), slice(0, 0), slice(3, 9))
    ops = ops.training("hidden", "weight", "bias")
    exact = ops.to(torch.float64)

    def loss_fn(stats):
        return stats.kl.where(stats.kl.isfinite(), 0.0) - stats.logprob

    given = {"want": ("kl", "logprob"), "reference": ops.reference, "backend": "compiled"}
    ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, **given).backward()
    torch.nn.functional.cross_entropy(exact.hidden @ exact.weight.t() + exact.bias, exact.labels).backward()
    for name, leaf in ops.leaves.items():
        assert_near_in_norm(leaf.grad, exact.leaves[name].grad, 2e-6, name)
    assert streamed == [40]


@pytest.mark.parametrize("want", [("logprob",), ("logprob", "entropy")], ids=["weights", "gradients"])
@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("a",), ("b", "weight")])
def test_each_gradient_alone_is_the_oracles(trained, want, streamed):
    ops = problem(60, 37, 1031, bias=True, ranks=(3,), vocab_size=1021).training(*trained)
    for budget in (None, 900_000):  # more than one chunk adds to the head's
        compare_loss(ops, want, backend="compiled", memory_budget=budget)
    assert streamed[0] == 60
    assert len(streamed) > 2 - (trained == ("hidden",))  # which of weights is a frozen head's, and keeps no logits


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("n", [32, 35, 140])
def test_backward_of_every_size_is_the_oracle(n, size, streamed):
    """Of more tokens than one chain of sums takes, of panels and blocks that are not whole."""
    ops = problem(n, size, 300).training("hidden", "weight")
    for want in (("logprob",), ("logprob", "entropy")):
        compare_loss(ops, want, backend="compiled")
    assert set(streamed) == {n}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_widened_rows_have_gradients_of_fp32_products(dtype, streamed, monkeypatch):
    """Each rounded once, to the dtype of what it is the gradient of."""
    monkeypatch.setattr(library.library(), "multiplies_pairs", lambda: 0)
    ops = problem(50, 24, 1031)
    hidden, weight = ops.hidden.to(dtype).requires_grad_(), ops.weight.bfloat16().requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), ops.labels).backward()
    ll.linear_cross_entropy(hidden, ll.LMHead(weight), ops.labels, backend="compiled").backward()
    for x, right in zip((hidden, weight), exact, strict=True):
        half_a_digit = {torch.float32: 2e-6, torch.bfloat16: 1.001 * 2**-8}[x.dtype]
        torch.testing.assert_close(x.grad.double(), right.grad, rtol=half_a_digit, atol=1e-7)
    assert streamed == [50]


@pytest.mark.parametrize("want", [("logprob",), ("logprob", "entropy")], ids=["weights", "gradients"])
def test_a_losss_gradients_have_the_same_bits_for_any_number_of_threads(want, streamed):
    ops, found = problem(300, 40, 9000).training("hidden", "weight"), []
    with put_back():
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            loss = ll.token_loss(
                lambda stats: sum(getattr(stats, name) for name in want),
                *(ops.hidden, ops.head, ops.labels),
                want=want,
                backend="compiled",
            )
            found.append(torch.autograd.grad(loss, [ops.hidden, ops.weight]))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
    assert streamed == [300] * 3


@pytest.mark.parametrize("budget", [2_500_000, 10_000_000, None])
def test_a_loss_holds_what_is_told(budget, streamed, held):
    ops = problem(200, 48, 5000, bias=True).training("hidden", "weight", "bias")
    ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="compiled", memory_budget=budget).backward()
    told = ll.explain(ops.hidden, ops.head, ops.labels, loss=True, backend="compiled", memory_budget=budget)
    assert len(streamed) > 0
    assert held() <= told.buffer_bytes <= (budget or 1 << 28)


def test_a_loss_keeps_to_its_budget(streamed):
    ops = problem(200, 16, 30_000).training("hidden", "weight")
    told = ll.explain(ops.hidden, ops.head, ops.labels, loss=True, backend="compiled", memory_budget=10_000_000)
    assert told.slices.in_products
    assert told.buffer_bytes <= 10_000_000
    assert told.slices.tokens * 30_000 * 4 < 10_000_000


FROZEN = {
    "a log-prob's": (("logprob",), ("logprob", "rank", "self_certainty")),
    "of p": (("logprob", "logsumexp"), ("logsumexp", "mean_logit", "max_logit")),
    "an entropy's": (("logprob", "entropy"), ("entropy", "self_certainty", "rank")),
    "of squares": (("sum_sq_prob",), ("logprob", "sum_sq_prob", "max_logit")),
    "a KL's": (("logprob", "kl"), ("kl", "self_certainty")),
    "a reverse KL's": (("logprob", "reverse_kl"), ("reverse_kl", "mean_logit")),
}


def frozen_head(want, n, h, v, **more):
    """A problem whose tokens alone are trained, with a reference where a statistic needs one."""
    return problem(n, h, v, reference=any("kl" in name for name in want), **more).training("hidden", "a")


@pytest.mark.halved
@pytest.mark.parametrize("temperature", [1.0, torch.linspace(0.3, 3.0, 70)], ids=["1", "tensor"])
@pytest.mark.parametrize("more", TRANSFORMS, ids=str)
@pytest.mark.parametrize("wants", FROZEN.values(), ids=FROZEN)
def test_the_gradient_through_a_frozen_head_is_the_oracles(wants, more, temperature, streamed):
    """Its products with the weights add up beside the sums."""
    for want, v in zip(wants, (1031, 9000), strict=True):  # parts of several blocks
        ops = frozen_head(want, 70, 37, v, scale=0.8, vocab_size=v - 11, **more)
        ops.labels[[3, 40]] = -100
        compare(ops, want, backend="compiled", temperature=temperature)
    assert streamed[0] == 68


@pytest.mark.halved
@pytest.mark.parametrize("more", TRANSFORMS, ids=str)
@pytest.mark.parametrize("wants", FROZEN.values(), ids=FROZEN)
def test_a_loss_through_a_frozen_head_is_the_oracles(wants, more, streamed):
    for want in wants:
        ops = frozen_head(want, 70, 37, 1031, vocab_size=1020, **more)
        for trained in (("hidden", "a"), ("hidden",)):
            compare_loss(ops.training(*trained), want, backend="compiled")
    assert set(streamed) == {70}


@pytest.mark.parametrize(("n", "h", "v"), SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_size_of_a_frozen_head_is_the_oracle(n, h, v, threads, streamed):
    with put_back():
        torch.set_num_threads(threads)
        compare(problem(n, h, v).training("hidden"), ("logprob", "entropy", "rank"), backend="compiled")
        compare(problem(n, h, v, reference=True).training("hidden"), ("logprob", "kl"), backend="compiled")
        compare_loss(problem(n, h, v).training("hidden"), ("logprob", "self_certainty"), backend="compiled")
    assert streamed == [n, n, n]


@pytest.mark.parametrize("budget", [None, 1_400_000, 900_000])
def test_a_loss_of_a_frozen_head_keeps_no_logits(budget, streamed, held):
    ops = problem(200, 16, 30_000, bias=True).training("hidden")
    ops.labels[5] = -100
    exact, given = ops.to(torch.float64), {"backend": "compiled", "memory_budget": budget}
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, **given, **options)
        expected = ll.linear_cross_entropy(exact.hidden, exact.head, exact.labels, backend="eager", **options)
        torch.testing.assert_close(loss.double(), expected)
        (got,), (right,) = torch.autograd.grad(loss, [ops.hidden]), torch.autograd.grad(expected, [exact.hidden])
        assert_near_in_norm(got, right, 2e-6, str(options))
    assert sum(streamed) == 2 * 199
    told = ll.explain(ops.hidden, ops.head, ops.labels, loss=True, **given)
    assert told.price.gemms == 2
    assert "no memory holds" in str(told)
    assert held() <= told.buffer_bytes <= min(budget or 1 << 28, 200 * 30_000 * 4 / 10)


@pytest.mark.parametrize("budget", [None, 1_400_000, 900_000])
def test_a_graph_of_a_frozen_heads_kl_keeps_no_logits(budget, streamed, held):
    ops = frozen_head(("kl",), 200, 16, 30_000)
    given = {"want": ("logprob", "kl"), "reference": ops.reference, "backend": "compiled", "memory_budget": budget}
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, **given)
    (stats.logprob + stats.kl).sum().backward()
    assert sum(streamed) == 200
    told = ll.explain(ops.hidden, ops.head, ops.labels, **given)
    assert told.price.gemms == 4
    assert "no memory holds" in str(told)
    assert held() <= told.buffer_bytes <= min(budget or 1 << 28, 200 * 30_000 * 4 / 10)


SECOND = ("entropy", "sum_sq_prob", "kl", "reverse_kl")  # statistics, each with a basis of its own beside p


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("sure", [20.0, 1e4])
def test_a_frozen_heads_products_follow_a_rising_maximum(sure, second, streamed):
    """Logits that rise from block to block, so that what was added up before has to be moved each time."""
    ops = frozen_head((second,), 40, 8, 20_000)
    for one in (ops, ops.ref)[: 1 + ("kl" in second)]:
        one.weight[:, 0] = torch.linspace(-sure, sure, 20_000)
        one.weight[:, 1:] = torch.randn_like(one.weight[:, 1:])
        one.hidden.data[:, 0] = torch.where(torch.arange(40) % 2 == 0, 1.0, -1.0)
    exact = ops.to(torch.float64)
    up = torch.randn(40, 2)

    def gradient(of, backend):
        given = {"want": ("logprob", second), "reference": of.reference, "backend": backend}
        found = ll.token_stats(of.hidden, of.head, of.labels, **given)
        sum_of = (torch.stack([found.logprob, getattr(found, second)], -1) * up).sum()
        return torch.autograd.grad(sum_of, [of.hidden])[0].double()

    expected, sliced, got = gradient(exact, "eager"), gradient(ops, "eager"), gradient(ops, "compiled")
    floor = 2e-6 * expected.abs().max()
    assert (got - expected).abs().max() <= 2 * (sliced - expected).abs().max() + floor
    assert streamed == [40]


def gradient_of_kls(of, backend, finite):
    """Through a frozen head, of a KL and a reverse KL; finite: of those that are."""
    given = {"reference": of.reference, "backend": backend}
    for name in KL:
        found = getattr(ll.token_stats(of.hidden, of.head, of.labels, want=(name,), **given), name)
        yield torch.autograd.grad(found[found.isfinite()].sum() if finite else found.sum(), [of.hidden])[0].double()


@pytest.mark.parametrize("finite", [True, False], ids=["finite", "all"])
@pytest.mark.parametrize(("own", "others"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_frozen_heads_gradient_beside_impossible_entries(own, others, finite, streamed):
    """Those of an infinite KL are none; nothing of them is in others."""
    ops = with_impossible(problem(33, 9, 1031, bias=True, reference=True), own, others).training("hidden")
    kinds = gradient_of_kls(ops.to(torch.float64), "eager", finite), gradient_of_kls(ops, "compiled", finite)
    for right, got in zip(*kinds, strict=True):
        torch.testing.assert_close(got, right, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert streamed == [33, 33]


@pytest.mark.parametrize("low", [1000, 5000], ids=["in a part of the vocabulary", "between parts"])
def test_an_infinite_difference_is_forgotten_with_its_weight(low, streamed):
    """A reference's impossible entries that come first, and weigh nothing beside a maximum that comes later."""
    ops = problem(33, 9, 20_000, bias=True, reference=True).training("hidden")
    ops.bias[:low] -= 1000.0
    ops = with_impossible(ops, slice(0, 0), slice(0, low // 2))
    kinds = gradient_of_kls(ops.to(torch.float64), "eager", False), gradient_of_kls(ops, "compiled", False)
    for right, got in zip(*kinds, strict=True):
        assert right.isfinite().all()
        assert_near_in_norm(got, right, 2e-5)
    assert streamed == [33, 33]


@pytest.mark.parametrize("second", SECOND)
def test_a_frozen_heads_gradient_has_the_same_bits_for_any_number_of_threads(second, streamed):
    ops, found = frozen_head((second,), 300, 40, 20_000), []
    given = {"want": ("logprob", second), "reference": ops.reference, "backend": "compiled"}
    with put_back():
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            stats = ll.token_stats(ops.hidden, ops.head, ops.labels, **given)
            (gradient,) = torch.autograd.grad((stats.logprob + getattr(stats, second)).sum(), [ops.hidden])
            found.append(gradient)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert streamed == [300] * 3


@pytest.mark.halved
@pytest.mark.parametrize("more", TRANSFORMS, ids=str)
@pytest.mark.parametrize("want", [x for x in LOSSES.values() if "jsd" not in x], ids=str)
@pytest.mark.parametrize(("n", "budget"), [(50, None), (400, 2_500_000)], ids=["one chunk", "some chunks"])
def test_the_gradient_of_statistics_is_the_oracles(n, budget, want, more, streamed):
    """Whose logits are made again in backward, and stay until its products are made."""
    ops = operands((n,), 37, 1031, dtype=torch.float32, reference="kl" in want, **({"bias": False} | more))
    ops.labels[3] = -100
    for trained in (("hidden", "weight", "bias", "a", "b"), ("hidden", "weight")):
        streamed.clear()
        compare(ops.training(*trained), want, backend="compiled", memory_budget=budget, top_k=3)
        assert sum(streamed) == 2 * (n - 1)
        assert (n - 1 in streamed) is (budget is None)


def test_a_graph_of_a_second_look_makes_slices(streamed):
    compare(problem(40, reference=True).training("hidden", "weight"), ("logprob", "jsd"), backend="compiled")
    assert streamed == []


def test_without_a_library_slices_are_made(monkeypatch, streamed):
    monkeypatch.setattr(library, "_loaded", lambda command: (_ for _ in ()).throw(OSError("no room")))
    library._library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="could not compile a product.*no room"):
            compare(problem(), ("logprob", "entropy"), backend="compiled")
        compare(problem(), ("logprob", "entropy"), backend="compiled")  # said once
    finally:
        library._library.cache_clear()
    assert streamed == []


def test_another_process_loads_what_this_one_compiled(tmp_path, monkeypatch):
    """Or compiles anew what a machine that went down left of it."""
    place, own = library.library().place, tmp_path / "logitless"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    own.mkdir()
    first = Path(shutil.copy(place, own)).stat()
    program = "from logitless.vocab.backends.compiled.library import library; print(library().parts())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (found.stdout.strip(), found.stderr) == ("32", "")
    (made,) = own.iterdir()
    assert (made.name, made.stat().st_mtime_ns) == (place.name, first.st_mtime_ns)

    made.write_bytes(b"")
    library._library.cache_clear()
    try:
        assert library.library().parts() == 32
    finally:
        library._library.cache_clear()
    (again,) = own.iterdir()
    assert (again.name, again.stat().st_size) == (place.name, first.st_size)


def gradients(ops):
    """Of a frozen head and of a trained one."""
    ops = ops.training("hidden", "weight")
    frozen = ll.token_stats(
        ops.hidden, ll.LMHead(ops.weight.detach()), ops.labels, want=("logprob", "entropy"), backend="compiled"
    )
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="compiled")
    of_tokens = torch.autograd.grad((frozen.logprob + frozen.entropy).sum(), [ops.hidden])
    return *of_tokens, *torch.autograd.grad(loss, [ops.hidden, ops.weight])


def test_both_kinds_of_vectors_give_the_same_bits(tmp_path, monkeypatch, streamed):
    """AVX2's, on a processor that has AVX512's, too."""
    ops = problem(50, 40, 1031)
    found = {}
    for kind in ("AVX2", PROCESSOR):
        made = library._library("g++", kind, ())
        for module in (stream, panels, backward):
            monkeypatch.setattr(module, "library", lambda made=made: made)
        found[kind] = values(ops), gradients(ops)
    (narrow, narrow_gradients), (wide, wide_gradients) = found["AVX2"], found[PROCESSOR]
    for name, x in narrow.items():
        assert torch.equal(x, wide[name]), name
    for x, y in zip(narrow_gradients, wide_gradients, strict=True):  # whose vocabulary is in other parts
        assert_near_in_norm(x, y.double(), 2e-6)


ALL = "hidden", "weight"
KINDS = {
    "values": ({}, ("logprob", "entropy"), False, (), True),
    "KL": ({"reference": True}, ("logprob", "kl"), False, (), True),
    "a cross-entropy": ({}, ("logprob", "mean_logit"), True, ALL, True),
    "an entropy's gradient": ({}, ("logprob", "entropy"), True, ALL, False),  # Inductor's function
    "a second look": ({"reference": True}, ("jsd",), False, (), False),
    "a graph": ({}, ("logprob",), False, ALL, True),  # whose backward makes logits again
    "a graph of entropy": ({}, ("logprob", "entropy"), False, ALL, False),
    "a graph of a frozen head": ({}, ("logprob", "entropy"), False, ("hidden",), True),
    "a frozen head's KL": ({"reference": True}, ("kl",), False, ("hidden",), True),
    "a loss of a frozen head": ({}, ("logprob", "mean_logit"), True, ("hidden",), True),
}


@pytest.mark.parametrize(("tokens", "whole"), [(228, 224), (688, 688), (256, 256), (33, 32), (20, 20)])
def test_a_chunk_leaves_few_lanes_empty(tokens, whole):
    assert stream._whole_panels(tokens, 32) == whole


def test_chunks_are_whole_panels_unless_one_has_all_tokens():
    hidden, weight = torch.randn(500, 8, requires_grad=True), torch.randn(1031, 8, requires_grad=True)
    head, labels, lanes, sizes = ll.LMHead(weight), torch.zeros(500, dtype=torch.long), library.library().lanes(), set()
    for budget in (*range(500_000, 6_000_000, 100_000), 1 << 28):
        told = ll.explain(hidden, head, labels, loss=True, memory_budget=budget, backend="compiled").slices
        if told.in_products:
            assert told.tokens == 500 or told.tokens < lanes or 16 * (-told.tokens % lanes) <= told.tokens
            sizes.add(told.tokens)
    assert 500 in sizes
    assert len(sizes) > 5


@pytest.mark.parametrize(("more", "want", "loss", "trained", "taken"), KINDS.values(), ids=KINDS)
def test_taken_unasked_for_fewer_logits_than_what_inductor_compiles(
    more, want, loss, trained, taken, streamed, monkeypatch
):
    ops = problem(40, 8, 1031, **more).training(*trained)
    given = {"want": want, "reference": ops.reference}

    def told(**options):
        return ll.explain(ops.hidden, ops.head, ops.labels, loss=loss, **given, **options).backend

    assert told() == "eager"
    monkeypatch.setattr(price, "WORTH_REGISTERS", 40 * 1031)
    assert told() == ("compiled" if taken else "eager")
    assert told(backend="eager") == "eager"
    monkeypatch.setattr(price, "WORTH_REGISTERS", 40 * 1031 + 1)
    assert told() == "eager"
    monkeypatch.setattr(price, "WORTH_REGISTERS", 1)
    if loss:
        ll.token_loss(lambda stats: -stats.logprob, ops.hidden, ops.head, ops.labels, **given).backward()
    else:
        ll.token_stats(ops.hidden, ops.head, ops.labels, **given)
    assert streamed == [40] * taken


@pytest.mark.parametrize("kind", [kind for kind, (*_, loss, _, taken) in KINDS.items() if taken and not loss])
def test_taken_unasked_inside_a_callers_graph(kind, streamed, monkeypatch):
    """By the operator that the graph has of the call, with the bits that it has outside of one."""
    monkeypatch.setattr(price, "WORTH_REGISTERS", 1)
    more, want, _, trained, _ = KINDS[kind]
    ops = problem(40, 8, 1031, **more).training(*trained)

    def run(hidden, **options):
        found = ll.token_stats(hidden, ops.head, ops.labels, want=want, reference=ops.reference, **options)
        return sum((1 + i) * getattr(found, name).square().sum() for i, name in enumerate(want))

    check_in_a_graph(run, ops, streamed)


@pytest.mark.parametrize("trained", [ALL, ("hidden",), ()], ids=["all", "frozen", "nothing"])
def test_a_loss_is_taken_unasked_inside_a_callers_graph(trained, streamed, monkeypatch):
    monkeypatch.setattr(price, "WORTH_REGISTERS", 1)
    ops = problem(40, 8, 1031).training(*trained)

    def run(hidden, **options):
        return ll.linear_cross_entropy(hidden, ops.head, ops.labels, z_loss=0.1, **options)

    check_in_a_graph(run, ops, streamed)


def check_in_a_graph(run, ops, streamed):
    leaves = list(ops.leaves.values())

    def made(function, **options):
        streamed.clear()
        found = function(ops.hidden, **options)
        gradients = torch.autograd.grad(found, leaves) if leaves else ()
        return [x.detach() for x in (found, *gradients)], list(streamed)

    expected, chunks = made(run)
    assert chunks
    torch._dynamo.reset()  # it compiles a function for so many kinds of arguments alone
    found, within = made(torch.compile(run, fullgraph=True, backend="aot_eager"))
    assert within == chunks
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
    _, within = made(torch.compile(run, fullgraph=True, backend="aot_eager"), backend="eager")
    assert not within
