"""A reference that is rows of logits which exist already: a cached teacher, read by slices."""

import numpy as np
import pytest
import torch

import logitless as ll
from logitless.errors import DtypeError, OptionError, ShapeError
from logitless.vocab.reference import dense_logits, dense_token_stats
from tests.support.allocations import largest_allocation, peak_new_bytes
from tests.support.vocab.comparing import EVERYTHING, assert_near, assert_near_in_norm, operands

BUDGETS = [None, 3000]  # the second cuts tokens and vocabulary


def rows_of(ops):
    """The reference's logits."""
    return dense_logits(*ops.reference).detach().to(ops.hidden.dtype)


def log_probs(ops):
    return rows_of(ops).log_softmax(-1)


def reader(ops):
    """A function that reads a cache of probabilities."""
    cache = rows_of(ops).softmax(-1).flatten(0, -2)
    return lambda tokens, entries: cache[tokens, entries].log()


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("lead", [(11,), (2, 5)])
@pytest.mark.parametrize("given", [rows_of, log_probs, reader])
def test_every_statistic_and_its_gradient(given, lead, labels, budget):
    ops = operands(lead, 7, 31, reference=True, vocab_size=29, scale=0.7)
    ops.labels.view(-1)[3] = -100
    want = EVERYTHING if labels else ("kl", "reverse_kl", "jsd", "entropy")
    options = {"want": want, "jsd_beta": 0.3, "temperature": torch.rand(lead, dtype=torch.float64) + 0.5}
    args = ops.hidden, ops.head, ops.labels if labels else None
    exact = dense_token_stats(*args, reference=ops.reference, **options)
    got = ll.token_stats(*args, reference=given(ops), memory_budget=budget, **options)
    for name, x in exact.items():
        assert_near(getattr(got, name).detach().double(), x.detach().double(), 1e-10, name)
    up = {name: torch.randn_like(x) for name, x in exact.items() if x.is_floating_point()}
    leaves = list(ops.leaves.values())
    wanted = torch.autograd.grad([exact[n] for n in up], leaves, list(up.values()))
    found = torch.autograd.grad([getattr(got, n) for n in up], leaves, list(up.values()))
    for a, b in zip(found, wanted, strict=True):
        assert_near_in_norm(a, b, 1e-10)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(
    ("trainable", "loss", "backward"),
    [((), False, 0), (("hidden",), False, 0), (("hidden", "weight"), False, 1), (("hidden", "weight"), True, 0)],
)
def test_rows_are_read_once_and_again_only_for_products_that_are_made_again(trainable, loss, backward, labels, budget):
    ops = operands((9,), 7, 31, dtype=torch.float32, reference=True).training(*trainable)
    rows, entries = rows_of(ops), []

    def reader(tokens, some):
        entries.append(len(tokens) * (some.stop - some.start))
        return rows[tokens, some]

    want = ("reverse_kl", "logprob", "rank") if labels else ("reverse_kl",)
    args = ops.hidden, ops.head, ops.labels if labels else None
    options = {"want": want, "reference": reader, "memory_budget": budget}
    if loss:
        found = ll.token_loss(lambda s: s.reverse_kl, *args, **options)
    else:
        found = ll.token_stats(*args, **options).reverse_kl.sum()
    assert sum(entries) == rows.numel()
    if trainable:
        found.backward()
    assert sum(entries) == (1 + backward) * rows.numel()


@pytest.mark.parametrize("trainable", [("hidden", "weight", "bias"), ("hidden",), ()], ids=str)
def test_distillation_at_three_products(trainable):
    ops = operands((9,), 7, 31, dtype=torch.float32, reference=True, ranks=(2,)).training(*trainable)
    teacher = rows_of(ops)
    args = ops.hidden, ops.head
    loss = ll.token_loss(
        lambda s: ll.losses.forward_kl(s.reverse_kl), *args, want=("reverse_kl",), reference=teacher, memory_budget=3000
    )
    exact = ops.to(torch.float64)
    z = dense_logits(exact.hidden, exact.head)
    dense = torch.nn.functional.kl_div(
        z.log_softmax(-1), teacher.double().log_softmax(-1), reduction="batchmean", log_target=True
    )
    assert_near(loss.detach().double(), dense.detach(), 2e-6)
    price = ll.explain(*args, want=("reverse_kl",), reference=teacher, loss=True).price
    assert price.gemms == 1 + len({"hidden", "weight"} & set(trainable))
    if trainable:
        found = torch.autograd.grad(loss, list(ops.leaves.values()))
        for a, b in zip(found, torch.autograd.grad(dense, list(exact.leaves.values())), strict=True):
            assert_near_in_norm(a, b, 2e-6)


def test_entries_that_the_teacher_never_gives():
    ops = operands((9,), 7, 31, reference=True)
    teacher = log_probs(ops)
    teacher[:, ::3] = -torch.inf
    stats = ll.token_stats(ops.hidden, ops.head, want=("reverse_kl", "kl"), reference=teacher)
    q = teacher.softmax(-1)
    logp = dense_logits(ops.hidden, ops.head).log_softmax(-1)
    exact = torch.where(q > 0, q * (q.log() - logp), 0.0).sum(-1)
    assert_near(stats.reverse_kl.detach(), exact.detach(), 1e-10)
    assert stats.kl.isposinf().all()
    found, wanted = (torch.autograd.grad(x.sum(), ops.weight)[0] for x in (stats.reverse_kl, exact))
    assert_near_in_norm(found, wanted, 1e-10)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_cache_on_disk_is_read_by_slices(ignored, tmp_path):
    """Half precision, mapped from a file: nothing of its size is made."""
    n, v = 512, 4096
    hidden, head = torch.randn(n, 8, requires_grad=True), ll.LMHead(torch.randn(v, 8, requires_grad=True))
    labels = torch.randint(v, (n,))
    labels[: n // 4 * ignored] = -100
    np.lib.format.open_memmap(tmp_path / "t.npy", "w+", np.float16, (n, v))[:] = np.random.default_rng(0).normal(
        size=(n, v)
    )
    cache = torch.from_numpy(np.load(tmp_path / "t.npy", mmap_mode="c"))

    def call():
        more = {"want": ("reverse_kl",), "reference": cache, "memory_budget": 1 << 19}
        return ll.token_loss(lambda s: s.reverse_kl, hidden, head, labels, **more)

    logp, logq = (x.double().log_softmax(-1) for x in (hidden @ head.weight.t(), cache))
    exact = torch.nn.functional.kl_div(logp, logq, reduction="none", log_target=True).sum(-1)[labels != -100].mean()
    loss = call()
    assert_near(loss.detach().double(), exact.detach(), 1e-5)
    loss.backward()
    assert largest_allocation(lambda: call().backward()) < n * v // 4


def shifted(x):
    """The same numbers as a view of one token more in each sequence, as `logits[:, :-1]` is."""
    return torch.cat([x, x[:, :1]], 1)[:, :-1]


@pytest.mark.parametrize("given", [shifted, lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0)])
@pytest.mark.parametrize("ignored", [False, True])
def test_rows_that_do_not_lie_one_after_another_are_not_copied(given, ignored):
    lead, v = (2, 256), 4096
    hidden, head = torch.randn(*lead, 8, requires_grad=True), ll.LMHead(torch.randn(v, 8, requires_grad=True))
    labels, rows = torch.randint(v, lead), torch.randn(*lead, v)
    labels[0, : 100 * ignored] = -100

    def call(reference):
        more = {"want": ("reverse_kl",), "reference": reference, "memory_budget": 1 << 19}
        return ll.token_loss(lambda s: s.reverse_kl, hidden, head, labels, **more)

    teacher = given(rows)
    assert not teacher.is_contiguous()
    loss, usual = call(teacher), call(rows)
    assert torch.equal(loss, usual)
    found, wanted = (torch.autograd.grad(x, [hidden, head.weight]) for x in (loss, usual))
    assert all(map(torch.equal, found, wanted))
    assert largest_allocation(lambda: call(teacher).backward()) < labels.numel() * v // 4


def test_labels_are_looked_for_within_the_budget():
    hidden, head, budget = torch.randn(1024, 8), ll.LMHead(torch.randn(4096, 8)), 1 << 20
    labels, teacher = torch.randint(4096, (1024,)), torch.randn(1024, 4096)

    def call():
        return ll.token_stats(hidden, head, labels, want=("kl",), reference=teacher, memory_budget=budget)

    call()
    assert peak_new_bytes(call) <= budget + 4 * 160 * labels.numel()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at its input
@pytest.mark.parametrize("given", [lambda x: x, shifted])
def test_under_compile(given):
    ops = operands((3, 3), 7, 31, dtype=torch.float32, reference=True)
    teacher = given(rows_of(ops))

    def f(hidden):
        return ll.token_stats(hidden, ops.head, want=("kl",), reference=teacher).kl * 2.0

    compiled, eager = torch.compile(f, backend="aot_eager")(ops.hidden), f(ops.hidden)
    assert_near(compiled.detach().double(), eager.detach().double(), 1e-6)


def test_what_is_no_reference():
    ops = operands((9,), 7, 31, reference=True)
    rows = rows_of(ops)
    for wrong, error, said in (
        (rows[:, :5], ShapeError, r"expected rows of logits or log-probs, \(9, 31\), got \(9, 5\)"),
        (rows.long(), DtypeError, "expected floating logits or log-probs, got torch.int64"),
        (lambda tokens, entries: rows[tokens, :2], ShapeError, r"a tensor \(tokens, entries\) = .* got \(\d+, 2\)"),
        (3, OptionError, r"expected \(hidden, head\), rows of logits or what reads them, got int"),
    ):
        with pytest.raises(error, match=said) as caught:
            ll.token_stats(ops.hidden, ops.head, want=("kl",), reference=wrong, memory_budget=3000)
        assert "\n" not in str(caught.value)
    with pytest.raises(OptionError, match="rows of logits are for backend 'eager', got 'triton'; leave backend out"):
        ll.token_stats(ops.hidden, ops.head, want=("kl",), reference=rows, backend="triton")
