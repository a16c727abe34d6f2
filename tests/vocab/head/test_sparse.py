"""A sparse backward leaves out what it says, never more than its bound, and the gradient moves by no more than that."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import logitless as ll
from logitless.errors import OptionError
from logitless.vocab.call import validate
from logitless.vocab.call.validate import check_sparse, flatten
from logitless.vocab.head.sparse import SparseBackward
from tests.support.allocations import trace_allocations
from tests.support.vocab.comparing import Operands, operands
from tests.support.vocab.measuring import measure

WAYS = ["stats", "loss"]  # slices recomputed in backward, or the gradient formed in the forward pass
each_way = pytest.mark.parametrize("way", WAYS)


def with_sparse(ops: Operands, sparse: SparseBackward | None) -> ll.LMHead:
    return ll.LMHead(ops.weight, ops.bias, **ops.transform, adapters=ops.adapters, sparse=sparse)


def objective(ops: Operands, sparse, way, up, want=("logprob",), **options):
    """Σ up·statistic, up by statistic, (N,) each."""
    args = ops.hidden, with_sparse(ops, sparse), ops.labels
    if way == "stats":
        stats = ll.token_stats(*args, want=want, **options)
        return sum((getattr(stats, name) * up[name]).sum() for name in want)

    def loss_fn(stats, *given):
        return sum(getattr(stats, name) * g for name, g in zip(want, given, strict=True))

    given = tuple(up[name] for name in want)
    return ll.token_loss(loss_fn, *args, want=want, inputs=given, reduction="sum", **options)


def step(ops: Operands, sparse, way, up, want=("logprob",), **options) -> dict[str, torch.Tensor]:
    found = torch.autograd.grad(objective(ops, sparse, way, up, want, **options), list(ops.leaves.values()))
    return dict(zip(ops.leaves, found, strict=True))


def upstream(ops: Operands, want=("logprob",)) -> dict[str, torch.Tensor]:
    return {name: torch.randn(ops.labels.shape, dtype=torch.float64) for name in want}


def logits_as_hidden(n: int, v: int, spread: float) -> Operands:
    """Operands whose hidden states are their logits, so that their gradient is dL/dz."""
    ops = Operands(torch.randn(n, v, dtype=torch.float64) * spread, torch.eye(v, dtype=torch.float64), None, None)
    ops.labels = torch.randint(v, (n,))
    ops.labels[0], ops.labels[-1], ops.labels[n // 2] = 0, v - 1, -100
    return ops.training("hidden", "weight")


@each_way
@pytest.mark.parametrize("bound", [0.0, 1e-3, 0.05, 0.6])
@pytest.mark.parametrize(("spread", "width"), [(0.3, 8), (3.0, 5), (3.0, 1), (8.0, 16), (300.0, 7), (3.0, 1000)])
def test_it_leaves_out_the_least_slices_and_says_which_share(spread, width, bound, way):
    n, v = 29, 57
    ops, sparse = logits_as_hidden(n, v, spread), SparseBackward(bound, width)
    ops.hidden.data[3, 10:] = -1e4  # a token of which most slices weigh nothing at all
    ops.labels[4] = int(ops.hidden[4].argmin())  # a label in a slice that weighs nothing
    up = upstream(ops)
    exact, got = step(ops, None, way, up)["hidden"], step(ops, sparse, way, up)["hidden"]
    counted = ops.labels != -100
    assert got[~counted].eq(0).all()
    exact, got, c = exact[counted], got[counted], -up["logprob"][counted]
    p = ops.hidden.detach()[counted].softmax(1)
    labels = torch.nn.functional.one_hot(ops.labels[counted], v).bool()
    mass = p.masked_fill(labels, 0)
    left = (exact - got) / c[:, None]  # p where it was left out
    torch.testing.assert_close(left[labels], torch.zeros(n - 1).double(), rtol=0, atol=1e-12)
    slices = range(0, v, width)
    masses = torch.stack([mass[:, i : i + width].sum(1) for i in slices], 1)
    missing = torch.stack([left[:, i : i + width].sum(1) for i in slices], 1)
    out = (missing > masses / 2) | (masses < 1e-11)
    torch.testing.assert_close(left, mass * out.repeat_interleave(width, 1)[:, :v], rtol=1e-9, atol=1e-11)
    assert missing.sum(1).max() <= bound + 1e-12
    assert float(sparse.skipped_mass) <= bound * (1 + 1e-9)
    torch.testing.assert_close(sparse.skipped_mass, missing.sum(1).max(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sparse.logit_error, (exact - got).abs().sum(), rtol=1e-9, atol=1e-12)
    # no slice more would have kept to the bound, those apart that nearly all tokens need
    crowded = (~out).sum(0) > 0.9 * (n - 1)
    next_ = torch.where(out | crowded, 2.0, masses).amin(1)
    assert (missing.sum(1) + next_ > bound).all()
    if bound == 0.05 and spread == 3.0 and width < 10:
        assert out.any(1).sum() > n // 2
    full = (~out).sum(0) > 0.9 * n  # as many whether or not the ignored token is one of them
    assert not (out & (masses > 1e-11))[:, full].any()


@each_way
def test_a_slice_that_nearly_all_tokens_need_takes_all(way):
    """Two of forty tokens would leave the first slice out, six the second: of the first nothing is gained by that."""
    ops, sparse = logits_as_hidden(40, 30, 0.1), SparseBackward(0.1, 10)
    ops.labels[:] = 29
    ops.hidden.data[:2, :10] -= 5
    ops.hidden.data[2:8, 10:20] -= 5
    up = upstream(ops)
    out = (step(ops, None, way, up)["hidden"] - step(ops, sparse, way, up)["hidden"]).abs() > 1e-12
    expected = torch.zeros(40, 30, dtype=torch.bool)
    expected[2:8, 10:20] = True
    assert torch.equal(out, expected)
    assert sparse.skipped_share == pytest.approx(6 / 40 / 3)


@each_way
def test_of_a_gpu_it_waits_for_the_counts_alone(way):
    """Which tokens a slice still has is found without asking the device how many these are once more."""
    ops, seen = operands((30,), 6, 90, dtype=torch.float32, spread=6.0), set()

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Seeing():
        step(ops, SparseBackward(0.1, 9), way, upstream(ops))
    assert "nonzero_static" in seen
    assert not seen & {"nonzero", "masked_select"}


@each_way
def test_the_share_is_of_the_products_that_are_left_out(way):
    ops, sparse = logits_as_hidden(40, 60, 4.0), SparseBackward(0.1, 7)
    up = upstream(ops)
    out = step(ops, None, way, up)["hidden"] - step(ops, sparse, way, up)["hidden"]
    counted = ops.labels != -100
    least = (out[counted].abs() > 1e-14).double().mean()  # a label inside a slice that is left out is none of them
    assert least <= sparse.skipped_share <= least + 1 / 60
    assert least > 0.3


@each_way
@pytest.mark.parametrize(
    ("want", "transform"),
    [
        (("logprob",), {"softcap": 15.0, "scale": 1.7}),
        (("logprob", "logsumexp"), {"vocab_size": 90, "scale": 0.6}),
        (("entropy", "logprob"), {}),
        (("entropy",), {"softcap": 20.0}),
        (("logprob", "self_certainty", "sum_sq_prob", "label_logit", "max_logit"), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("budget", [None, 20_000])
def test_the_gradient_moves_by_no_more_than_the_certificate(want, transform, budget, dtype, way):
    ops = operands((31,), 6, 101, dtype=dtype, spread=6.0, ranks=(2,), **transform)
    ops.labels[[2, 7]] = -100
    temperature = torch.rand(31, dtype=torch.float64) + 0.5
    up, options = upstream(ops, want), {"temperature": temperature, "memory_budget": budget}
    exact = step(ops.to(torch.float64), None, way, up, want, **options)
    for bound in (1e-3, 0.1):
        sparse = SparseBackward(bound, 9)
        got = step(ops, sparse, way, up, want, **options)
        moved = {name: got[name].double() - exact[name] for name in exact}
        rounding = 0 if dtype == torch.float64 else 1e-4
        assert float(sparse.skipped_mass) <= bound * (1 + 1e-6)
        error, norms = float(sparse.logit_error), ops.weight.detach().double().norm(dim=1)
        assert moved["bias"].abs().sum() <= error + rounding
        assert moved["weight"].norm() <= error * ops.hidden.double().norm(dim=1).max() + rounding
        assert moved["hidden"].norm(dim=1).sum() <= error * (norms.max() + adapter_norm(ops)) + rounding
    assert sparse.skipped_share > 0.05
    assert max(float(x.norm()) for x in moved.values()) > 10 * rounding  # it did leave something out


def adapter_norm(ops: Operands) -> float:
    """By how much more the hidden states' gradient can move where the product has adapters."""
    return float(
        sum(x.scaling * (x.b.detach().double() @ x.a.detach().double()).norm(dim=1).max() for x in ops.adapters)
    )


@each_way
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_bound_of_nothing_is_the_dense_gradient(dtype, way):
    ops = operands((33,), 8, 203, dtype=dtype, spread=5.0)
    ops.bias.data[100:] -= 900
    up = upstream(ops)
    exact, sparse = step(ops, None, way, up), SparseBackward(0, 13)
    got = step(ops, sparse, way, up)
    assert sparse.skipped_share > 0.4  # probabilities that are 0
    for name, x in got.items():
        near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(x, exact[name], rtol=0, atol=near * float(exact[name].abs().max()))


@each_way
def test_best_entries_and_candidates_keep_their_own_gradient(way):
    ops, sparse = logits_as_hidden(11, 40, 5.0), SparseBackward(0.4, 4)
    ids = torch.randint(40, (11, 3))
    up = torch.randn(11, 5, dtype=torch.float64)

    def loss_fn(stats):
        best = (stats.top_k_logits * up[: stats.logprob.shape[0], :2]).sum(1)
        return best + (stats.candidate_logits * up[: stats.logprob.shape[0], 2:]).sum(1) + 0 * stats.logprob

    def grad(sparse):
        options = {"top_k": 2, "candidates": ids}
        if way == "loss":
            value = ll.token_loss(loss_fn, ops.hidden, with_sparse(ops, sparse), ops.labels, **options)
        else:
            stats = ll.token_stats(ops.hidden, with_sparse(ops, sparse), ops.labels, **options)
            value = loss_fn(stats).sum()
        return torch.autograd.grad(value, ops.hidden)[0]

    exact = grad(None)
    torch.testing.assert_close(grad(sparse), exact, rtol=0, atol=1e-12)
    assert exact.abs().max() > 0.01


@each_way
def test_tokens_without_an_upstream_gradient_leave_out_all(way):
    ops, sparse = operands((64,), 8, 300, spread=1.0), SparseBackward(0, 32)
    up = upstream(ops)
    up["logprob"][16:] = 0
    got, exact = step(ops, sparse, way, up), step(ops, None, way, up)
    for name, x in got.items():
        torch.testing.assert_close(x, exact[name], rtol=0, atol=1e-12)
    assert sparse.skipped_share == 0.75
    assert sparse.skipped_mass == 0
    assert got["hidden"][16:].eq(0).all()


@each_way
def test_a_second_backward_leaves_out_the_same(way):
    ops, sparse = operands((19,), 8, 300, spread=5.0), SparseBackward(0.02, 32)
    value = objective(ops, sparse, way, upstream(ops))
    first = torch.autograd.grad(value, list(ops.leaves.values()), retain_graph=True)
    error = sparse.logit_error
    second = torch.autograd.grad(2 * value, list(ops.leaves.values()))
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(2 * x, y, rtol=0, atol=1e-12)
    torch.testing.assert_close(sparse.logit_error, 2 * error)


@each_way
def test_a_diverged_token_stays_seen(way):
    ops, sparse = operands((9,), 4, 64, spread=5.0), SparseBackward(0.5, 8)
    ops.hidden.data[4, 2] = float("nan")
    assert step(ops, sparse, way, upstream(ops))["hidden"].isnan().any(1).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("trainable", [("hidden", "weight"), ("hidden",), ("weight",)], ids=str)
def test_products_are_really_saved(trainable, reduction):
    """The forward product stays, those of backward shrink to the share that is not skipped."""
    n, h, v = 128, 64, 4096
    ops = operands((n,), h, v, dtype=torch.float32, spread=12.0).training(*trainable)
    sparse = SparseBackward(0.01, 128)

    def run():
        loss = ll.linear_cross_entropy(ops.hidden, with_sparse(ops, sparse), ops.labels, reduction=reduction)
        torch.autograd.grad(loss.sum(), list(ops.leaves.values()))

    found = measure(run).flops / (2 * n * h * v)
    share = float(sparse.skipped_share)
    if reduction == "none" and trainable == ("hidden",):  # one product more in the forward pass, and none after it
        assert found == pytest.approx(2, rel=0.03)
        return
    backward = len(trainable) + (reduction == "none")
    assert share > 0.4
    assert found == pytest.approx(1 + backward * (1 - share), rel=0.03)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_explain_says(dtype, reduction):
    n, h, v = 256, 32, 4096
    ops = operands((n,), h, v, dtype=dtype, spread=8.0, scale=0.5)
    head, dense = (with_sparse(ops, sparse) for sparse in (SparseBackward(0.01, 128), None))
    options = {"memory_budget": 2**20}

    def loss_of(head):
        return ll.linear_cross_entropy(ops.hidden, head, ops.labels, reduction=reduction, **options)

    def run():
        loss = loss_of(head)
        torch.autograd.grad(loss.sum(), list(ops.leaves.values()))

    run()
    said = ll.explain(ops.hidden, head, ops.labels, loss=reduction == "mean", **options)
    if reduction == "none":
        kept = [trace_allocations(lambda h=h: loss_of(h)).kept for h in (head, dense)]
        assert kept[0] - kept[1] == said.saved_bytes + 4 * n == n * v // 128 + 4 * n  # the mass that each leaves out
    predicted = said.buffer_bytes + said.saved_bytes + said.gradient_bytes
    peak = trace_allocations(run).peak
    assert peak <= 1.05 * predicted + n * (12 * h + 256)
    assert predicted < 4 * n * v


def test_a_frozen_head_has_nothing_to_leave_out():
    ops, sparse = operands((9,), 4, 64).training("hidden"), SparseBackward(0.5, 8)
    up = upstream(ops)
    assert torch.equal(step(ops, sparse, "stats", up)["hidden"], step(ops, None, "stats", up)["hidden"])
    assert sparse.skipped_share == 0


def test_explain_and_the_report_are_readable_lines():
    ops, sparse = operands((9,), 4, 64, spread=5.0), SparseBackward(0.5, 8)
    assert "backward leaves out up to 0.5 of each token's mass" in str(
        ll.explain(ops.hidden, with_sparse(ops, sparse), ops.labels)
    )
    step(ops, sparse, "stats", upstream(ops))
    line = str(sparse)
    assert "\n" not in line
    assert all(part in line for part in ("bound 0.5", "left out", "products skipped", "8 entries")), line
    with torch.no_grad():
        assert "left out" not in str(ll.explain(ops.hidden, with_sparse(ops, sparse), ops.labels))


def test_the_head_of_a_layer():
    sparse = SparseBackward(1e-4)
    assert ll.LMHead.of(torch.nn.Linear(4, 9), sparse=sparse).sparse is sparse
    assert ll.LMHead.of(torch.nn.Linear(4, 9)).sparse is None


@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jsd"])
@each_way
def test_what_p_does_not_bound_is_refused(name, way):
    ops = operands((5,), reference=True)
    head = with_sparse(ops, SparseBackward(0.1))
    call = {"want": ("logprob", name), "reference": ops.reference}
    ask = ll.token_stats if way == "stats" else partial(ll.token_loss, lambda s: s.logprob)
    with pytest.raises(OptionError, match=f"^sparse: .* got {name}; .*no sparse$"):
        ask(ops.hidden, head, ops.labels, **call)
    with pytest.raises(OptionError, match=name):
        ll.explain(ops.hidden, head, ops.labels, **call)
    with torch.no_grad():  # values have no backward
        ll.token_stats(ops.hidden, head, ops.labels, **call)


def test_where_it_cannot_run(monkeypatch):
    ops = operands((3,))
    call = flatten(ops.hidden, with_sparse(ops, SparseBackward(0.1)), ops.labels, want=("logprob", "entropy"))
    check_sparse(call)
    with pytest.raises(OptionError, match=r"^sparse: .*'triton'"):
        check_sparse(replace(call, options=replace(call.options, backend="triton")))
    sharded = replace(call.head)
    object.__setattr__(sharded, "shard", object())
    with pytest.raises(OptionError, match=r"^sparse: .*sharded"):
        check_sparse(replace(call, head=sharded))
    monkeypatch.setattr(validate, "capturing", lambda x: True)
    with pytest.raises(OptionError, match=r"^sparse: .*CUDA graph"):
        check_sparse(call)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at its input
def test_a_compiled_call_is_one_graph_break():
    ops, sparse = operands((20,), 8, 300, spread=5.0, bias=False), SparseBackward(0.05, 16)

    def run(hidden):
        loss = ll.linear_cross_entropy(hidden * 1.5, with_sparse(ops, sparse), ops.labels)
        return loss + ll.token_stats(hidden, with_sparse(ops, sparse), ops.labels).logprob.sum()

    leaves = list(ops.leaves.values())
    expected, error = torch.autograd.grad(run(ops.hidden), leaves), sparse.logit_error
    found = torch.autograd.grad(torch.compile(run, backend="aot_eager")(ops.hidden), leaves)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert sparse.logit_error == error > 0


def test_other_refusals():
    ops = operands((5,), reference=True)
    head = with_sparse(ops, SparseBackward(0.1))
    with pytest.raises(OptionError, match="got kl;"):
        ll.token_stats(ops.hidden, head, ops.labels, want=("kl",), reference=ops.reference)
    capped = operands((5,), softcap=3.0)
    given = capped.hidden, with_sparse(capped, SparseBackward(0.1)), capped.labels
    expected = r"sparse: expected no label_smoothing, .* where the head has a softcap, got softcap=3\.0; leave out one"
    with pytest.raises(OptionError, match=expected):
        ll.linear_cross_entropy(*given, label_smoothing=0.1)
    with pytest.raises(OptionError, match=expected):
        ll.token_stats(*given, want=("self_certainty",))
    for wrong in (-0.1, 1.0, float("nan"), "1", False):
        with pytest.raises(OptionError, match="bound must be"):
            SparseBackward(wrong)
    for wrong in (0, 2.5, True):
        with pytest.raises(OptionError, match="width: expected a whole number of at least 1"):
            SparseBackward(0.1, wrong)
    assert repr(SparseBackward(0.1, torch.tensor(8))) == repr(SparseBackward(0.1, 8))
    with pytest.raises(OptionError, match="sparse must be a SparseBackward"):
        ll.LMHead(ops.weight, sparse=0.1)
