"""What adapters cost: products of their rank beside the frozen head's two, and never a merged (V, H) or an (N, V)."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import logitless as ll
from logitless.algebra.costs import gemm_flop
from logitless.errors import GradientError
from logitless.vocab.head.low_rank import LowRank
from tests.support.allocations import trace_allocations
from tests.support.vocab.comparing import EVERYTHING, Operands, assert_near_in_norm, operands
from tests.support.vocab.measuring import measure, not_interpreted

pytestmark = pytest.mark.usefixtures("in_slices")
N, H, V, R = 96, 48, 8192, 6
LORA, ALL = ("hidden", "a", "b"), ("hidden", "weight", "bias", "a", "b")
BUDGETS = [None, 300_000]  # whole logits are 3 MB


def problem(*trainable: str, dtype=torch.float32, **options) -> Operands:
    return operands((N,), H, V, dtype=dtype, ranks=(R - 2, 2), **options).training(*trainable)


def step_of(ops: Operands, want, loss, budget, backend):
    call, options = (ops.hidden, ops.head, ops.labels), {"memory_budget": budget, "backend": backend}

    def step():
        if loss:
            out = [ll.token_loss(lambda s: sum(getattr(s, n) for n in want), *call, want=want, **options)]
        else:
            stats = ll.token_stats(*call, want=want, **options)
            out = [getattr(stats, name) for name in want]
        if ops.leaves:
            torch.autograd.grad(sum(x.sum() for x in out), list(ops.leaves.values()))

    return step


@pytest.mark.slow_on("triton")
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("want", "loss", "trainable", "wide", "thin"),
    [
        (("logprob", "entropy"), True, LORA, 2, 3),  # thin: logits, d low and d up
        (("logprob", "entropy"), True, ALL, 3, 3),
        (("logprob", "entropy"), True, ("a", "b"), 1, 3),
        (("logprob", "entropy"), True, ("hidden",), 2, 2),
        (("logprob",), False, ("hidden", "a"), 2, 2),  # u-vectors of hidden and low
        (("logprob", "entropy"), False, ("hidden",), 3, 3),
        (("logprob", "entropy"), False, LORA, 3, 4),
        (("logprob", "entropy"), False, ALL, 4, 4),
        (("logprob", "entropy"), False, (), 1, 1),
        (("label_logit",), False, LORA, 1, 1),
    ],
    ids=str,
)
def test_prices(want, loss, trainable, wide, thin, budget, backend):
    """Products counted as they run, and as `explain` says them."""
    ops = problem(*trainable)
    expected = wide * gemm_flop(N, H, V) + thin * gemm_flop(N, R, V)
    got = measure(step_of(ops, want, loss, budget, backend)).flops
    assert got == pytest.approx(expected, rel=0.02)
    call = (ops.hidden, ops.head, ops.labels)
    said = ll.explain(*call, loss=loss, want=want, memory_budget=budget, backend=backend)
    assert said.flop == expected
    assert (said.price.gemms, said.rank) == (wide, R)


@pytest.mark.parametrize("loss", [False, True])
def test_adapters_of_the_reference(loss, backend):
    ops = problem(*LORA, reference=True)
    call, options = (ops.hidden, ops.head, ops.labels), {"want": ("kl",), "reference": ops.reference}
    said = ll.explain(*call, loss=loss, **options, backend=backend)
    looks = 1 if loss else 2
    wide = (said.price.gemms - looks) * gemm_flop(N, H, V) + looks * gemm_flop(N, ops.ref.hidden.shape[1], V)
    assert said.flop == wide + (2 * looks + 2) * gemm_flop(N, R, V)


def test_explain_says_so_and_draws_no_mask(backend):
    ops = problem(*LORA)
    head = ll.LMHead(ops.weight, adapters=(LowRank(ops.adapters[0].a, ops.adapters[0].b, 1.0, 0.5),))
    state = torch.get_rng_state()
    measured = measure(lambda: ll.explain(ops.hidden, head, ops.labels, backend=backend))
    assert measured.flops == 0
    assert torch.equal(state, torch.get_rng_state())
    line = str(ll.explain(ops.hidden, head, ops.labels, loss=True, backend=backend))
    assert "2 GEMMs (in-forward) and products of rank 4" in line
    assert "rank" not in str(ll.explain(ops.hidden, ll.LMHead(ops.weight), ops.labels, backend=backend))


@pytest.mark.halved
@not_interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("trainable", [LORA, ("a", "b"), ("hidden",), ()], ids=str)
@pytest.mark.parametrize("want", [("logprob",), ("logprob", "entropy", "self_certainty")], ids=len)
def test_memory_holds_neither_the_logits_nor_a_merged_head(want, trainable, loss, dtype, backend):
    """Slices, the gradients and what explain says: a (V, H) of bf16 is 0.8 MB, (N, V) 3 MB."""
    budget = 600_000
    ops = problem(*trainable, dtype=dtype, bias=False)
    step = step_of(ops, want, loss, budget, backend)
    step()
    traced = trace_allocations(step)
    said = ll.explain(ops.hidden, ops.head, ops.labels, loss=loss, want=want, memory_budget=budget, backend=backend)
    factors = 3 * 4 * V * R  # both b side by side, and their gradients
    per_token = 4 * N * (4 * H + 160)
    assert traced.largest <= budget < 2 * V * H
    said_bytes = said.buffer_bytes + said.saved_bytes + said.gradient_bytes
    assert traced.peak <= said_bytes + factors + per_token < 4 * N * V


@not_interpreted
def test_hidden_states_wait_for_backward_as_they_are(backend):
    """Between forward and backward: the rank's numbers per token, and no widened copy of the hidden states."""
    ops = operands((4096,), 64, 50, dtype=torch.bfloat16, ranks=(2,), bias=False).training(*LORA)
    kept = trace_allocations(lambda: ll.token_stats(ops.hidden, ops.head, ops.labels, backend=backend)).kept
    assert kept < 4096 * 4 * 24 < 4096 * 64 * 2


class Adapted(nn.Module):
    """A body, a frozen head and its adapter."""

    def __init__(self, what: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.what, self.dropout = what, dropout
        torch.manual_seed(1)
        self.body, self.lm_head = nn.Linear(H, H), nn.Linear(H, 61).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, H) / 7), nn.Parameter(torch.randn(61, 2))

    def forward(self, x, labels):
        adapter = LowRank(self.a, self.b, 0.5, self.dropout if self.training else 0.0)
        hidden = torch.tanh(self.body(x))
        head = ll.LMHead(self.lm_head.weight, self.lm_head.bias, adapters=(adapter,))
        if self.what == "cross_entropy":
            return ll.linear_cross_entropy(hidden, head, labels, label_smoothing=0.1)
        if self.what == "token_loss":
            return ll.token_loss(lambda s: -s.logprob - s.entropy, hidden, head, labels, want=("logprob", "entropy"))
        stats = ll.token_stats(hidden, head, labels, want=("logprob", "entropy"), top_k=2)
        return (stats.logprob * 2 - stats.entropy).mean() + stats.top_k_logits.sum()


def batch():
    torch.manual_seed(2)
    labels = torch.randint(61, (13,))
    labels[1] = -100
    return torch.randn(13, H), labels


def trained(module):
    return [p for p in module.parameters() if p.requires_grad]


def assert_same(got, expected, tolerance=1e-6):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.halved
@pytest.mark.compiled
@pytest.mark.parametrize("what", ["cross_entropy", "token_stats"])
@pytest.mark.parametrize("frozen", [("lm_head",), ("lm_head", "b"), ()], ids=str)
def test_compiles_without_a_graph_break(what, frozen):
    torch._dynamo.reset()
    module = Adapted(what).requires_grad_(True)
    for name in frozen:
        getattr(module, name).requires_grad_(False)
    loss, expected = torch.compile(module, fullgraph=True, backend="aot_eager")(*batch()), module(*batch())
    torch.testing.assert_close(loss, expected)
    assert_same(torch.autograd.grad(loss, trained(module)), torch.autograd.grad(expected, trained(module)))
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, fullgraph=True, backend="aot_eager")(*batch()), expected)


@pytest.mark.compiled
@pytest.mark.parametrize("what", ["cross_entropy", "token_stats"])
def test_compiles_with_dropout(what):
    torch._dynamo.reset()
    module = Adapted(what, dropout=0.5)
    compiled, (x, labels) = torch.compile(module, fullgraph=True, backend="aot_eager"), batch()
    loss = compiled(x, labels)
    grads = torch.autograd.grad(loss, trained(module))
    assert all(g.isfinite().all() for g in grads)
    assert not torch.allclose(compiled(x, labels), loss)
    torch.testing.assert_close(compiled.eval()(x, labels), module.eval()(x, labels))


@pytest.mark.parametrize("what", ["cross_entropy", "token_stats", "token_loss"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_masks_again(what, reentrant):
    module, (x, labels) = Adapted(what, dropout=0.5), batch()
    x.requires_grad_()
    results = []
    for run in (lambda: checkpoint(module, x, labels, use_reentrant=reentrant), lambda: module(x, labels)):
        torch.manual_seed(3)
        module.zero_grad()
        x.grad = None
        run().backward()
        results.append([x.grad, *(p.grad for p in trained(module))])
    assert_same(*results)


@pytest.mark.parametrize("what", ["cross_entropy", "token_stats", "token_loss"])
def test_autocast_rounds_the_head_and_not_the_adapter(what):
    module, (x, labels) = Adapted(what), batch()
    module.body = nn.Identity()
    leaves = [x.requires_grad_(), *trained(module)]
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(x, labels)
        found = torch.autograd.grad(loss, leaves)  # backward too may run under autocast
    assert {loss.dtype, *(g.dtype for g in found)} == {torch.float32}
    rounded = Adapted(what).double()
    rounded.body = nn.Identity()
    rounded.lm_head.weight.data = module.lm_head.weight.bfloat16().double()
    y = torch.atanh(torch.tanh(x).bfloat16().double()).detach().requires_grad_()
    expected = rounded(y, labels)
    torch.testing.assert_close(loss.double(), expected, rtol=5e-7, atol=5e-7)
    for grad, want in zip(found, torch.autograd.grad(expected, [y, *trained(rounded)]), strict=True):
        assert_near_in_norm(grad, want, 2**-7)


@pytest.mark.slow_on("triton")
def test_second_derivatives_are_refused(backend):
    ops = problem(*LORA)
    loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend=backend)
    with pytest.raises(GradientError, match="create_graph"):
        torch.autograd.grad(loss, ops.adapters[0].a, create_graph=True)


@pytest.mark.slow_on("triton")
def test_every_statistic_is_the_same_in_any_slices(backend):
    ops = problem(reference=True)
    call, options = (ops.hidden, ops.head, ops.labels), {"want": EVERYTHING, "reference": ops.reference}
    whole, cut = (ll.token_stats(*call, **options, memory_budget=b, backend=backend) for b in (None, 100_000))
    for name in EVERYTHING:
        torch.testing.assert_close(getattr(cut, name), getattr(whole, name), rtol=1e-4, atol=1e-4)
