"""No path allocates N·V elements, forward or backward: what lives at once is the budget and the gradients."""

import pytest
import torch

import logitless as ll
from tests.support.allocations import trace_allocations
from tests.support.vocab.comparing import EVERYTHING, PAIRED, Operands, operands
from tests.support.vocab.measuring import measure, not_interpreted

pytestmark = not_interpreted
N, H, V = 128, 16, 4096  # whose logits take 2 MiB
BUDGETS = [2**18, 2**20]
TRAINABLE = [("hidden", "weight", "bias"), ("hidden",), ("weight",), ("bias",), ()]
PER_TOKEN = 4 * N * 160  # a few (N, H) buffers and the per-token numbers, 160 words a token


def problem(*trainable: str, v: int = V, dtype: torch.dtype = torch.float32, **options) -> Operands:
    return operands((N,), H, v, dtype=dtype, **options).training(*trainable)


def own_bytes(ops: Operands) -> int:
    """The gradients, in fp32 where they accumulate and in the parameter's dtype where they are handed over."""
    return sum(x.numel() * (4 + (0 if x.dtype == torch.float32 else x.itemsize)) for x in ops.leaves.values())


def assert_lean(step, ops: Operands, budget: int) -> None:
    step()  # whatever is made once and kept
    traced = trace_allocations(step)
    allowed = budget + own_bytes(ops) + PER_TOKEN
    whole = 4 * N * len(ops.weight)  # bytes of the logits
    assert traced.largest <= max(budget, 4 * ops.weight.numel()) < whole
    assert traced.peak <= allowed < whole, f"{traced.peak / 2**20:.2f} of {allowed / 2**20:.2f} MiB"


def backward(outputs, ops: Operands):
    if not ops.leaves:
        return None
    up = [torch.rand_like(x) for x in outputs]
    return torch.autograd.grad(outputs, list(ops.leaves.values()), up)


@pytest.mark.halved
@pytest.mark.parametrize("trainable", TRAINABLE, ids=str)
@pytest.mark.parametrize(
    ("want", "budget"),
    [(("logprob",), 2**18), (("logprob", "entropy"), 2**18), (("logprob", "entropy"), 2**20), (EVERYTHING, 2**20)],
    ids=["one", "two", "two-more", "all"],
)
def test_token_stats(want, trainable, budget, backend):
    paired = bool(set(PAIRED) & set(want))
    ops = problem(*trainable, v=2 * V, reference=paired)  # more entries, beside which the best ones take little

    def step():
        stats = ll.token_stats(
            *(ops.hidden, ops.head, ops.labels),
            want=want,
            reference=ops.reference,
            top_k=8,
            memory_budget=budget,
            backend=backend,
        )
        return backward([getattr(stats, name) for name in want if name != "rank"], ops)

    assert_lean(step, ops, budget)


@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("top_k", [8, 64])
def test_best_entries_are_in_the_budget(top_k, rising, backend):
    """What waits to be sorted and what sorting takes, also where every entry is better than those before."""
    n, budget = 2 * N, 2**18
    hidden, weight, labels = torch.randn(n, H), torch.randn(V, H), torch.randint(V, (n,))
    if rising:
        hidden[:, 0], weight[:, 0] = 1.0, torch.linspace(0, V, V)
    call = hidden, ll.LMHead(weight), labels
    options = {"top_k": top_k, "memory_budget": budget, "backend": backend}

    def step():
        with torch.no_grad():
            return ll.token_stats(*call, **options)

    with torch.no_grad():
        said = ll.explain(*call, **options).buffer_bytes
    step()
    outputs = n * (4 + top_k * (4 + 8))
    assert said <= budget
    assert trace_allocations(step).peak <= said + outputs + 4 * n * 32


@pytest.mark.parametrize("want", [("logprob",), ("jsd",)], ids=str)
def test_a_loss_without_a_gradient_keeps_no_slice(want, backend):
    """As many tokens at a time as stay in caches, of two heads whose whole rows no budget here holds."""
    ops = problem(reference=True).training()
    options = {"want": want, "reference": ops.reference, "memory_budget": 2**16, "backend": backend}

    def step():
        with torch.no_grad():
            return ll.token_loss(lambda s: getattr(s, want[0]), ops.hidden, ops.head, ops.labels, **options)

    step()
    assert trace_allocations(step).peak <= 2**17 + PER_TOKEN


@pytest.mark.parametrize("want", [("logprob",), ("self_certainty",)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_converted_slices_are_there_once(dtype, want):
    """Of a few tokens a slice of the head in fp32 is nearly all that there is: one at a time, of half of the budget."""
    ops = operands((4,), 256, V, dtype=dtype).training()
    options = {"want": want, "memory_budget": 2**20, "backend": "eager"}

    def step():
        with torch.no_grad():
            return ll.token_stats(ops.hidden, ops.head, ops.labels, **options)

    step()
    assert trace_allocations(step).peak <= 1.1 * 2**20


def test_a_losss_converted_slices_are_there_once():
    """Those of its gradient, too, which weights that stay are multiplied by."""
    ops = operands((64,), 256, V, dtype=torch.bfloat16).training("hidden")

    def step():
        loss = ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, memory_budget=2**20, backend="eager")
        return backward([loss], ops)

    step()
    said = ll.explain(ops.hidden, ops.head, ops.labels, loss=True, memory_budget=2**20, backend="eager")
    assert trace_allocations(step).peak <= 1.1 * 2**20 + said.gradient_bytes


@pytest.mark.halved
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trainable", TRAINABLE, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_token_loss(reduction, trainable, budget, backend):
    ops = problem(*trainable, reference=True)

    def step():
        loss = ll.token_loss(
            *(lambda s: s.kl - s.logprob - s.entropy, ops.hidden, ops.head, ops.labels),
            want=("logprob", "entropy", "kl"),
            reference=ops.reference,
            reduction=reduction,
            memory_budget=budget,
            backend=backend,
        )
        return backward([loss], ops)

    assert_lean(step, ops, budget)


@pytest.mark.halved
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("trainable", TRAINABLE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_cross_entropy(dtype, trainable, budget, backend):
    ops = problem(*trainable, dtype=dtype, softcap=20.0)

    def step():
        loss = ll.linear_cross_entropy(
            *(ops.hidden, ops.head, ops.labels), label_smoothing=0.1, memory_budget=budget, backend=backend
        )
        return backward([loss], ops)

    assert_lean(step, ops, budget)


@pytest.mark.parametrize("trainable", TRAINABLE[:-1], ids=str)
def test_what_waits_for_backward(trainable, backend):
    """Between forward and backward: per-token numbers, and for `token_loss` the gradients themselves."""
    ops = problem(*trainable)
    call = (ops.hidden, ops.head, ops.labels)
    options = {"memory_budget": 2**18, "backend": backend}
    stats = trace_allocations(lambda: ll.token_stats(*call, want=("logprob", "entropy"), **options))
    assert stats.kept <= PER_TOKEN
    loss = trace_allocations(lambda: ll.token_loss(lambda s: -s.logprob, *call, **options))
    assert loss.kept <= PER_TOKEN + own_bytes(ops)


def test_the_default_budget_bounds_large_calls(backend):
    """320 MiB of logits, most of which the default budget of 256 MiB would hold: slices stay in caches."""
    ops = operands((2048,), 2, 40_960, dtype=torch.float32).training()
    traced = trace_allocations(lambda: ll.token_stats(ops.hidden, ops.head, ops.labels, backend=backend))
    assert traced.peak <= 2**25  # a tenth of the logits


@pytest.mark.not_on(
    "compiled", reason="a dispatch mode does not see into its loops: the profiler's peaks above hold it"
)
def test_no_operator_allocates_out_of_sight(backend):
    """Torch's profiler, which sees scratch memory inside operators, finds the same peak."""
    ops = problem("hidden", "weight", "bias")

    def step():
        loss = ll.token_loss(
            *(lambda s: -s.logprob, ops.hidden, ops.head, ops.labels), memory_budget=2**18, backend=backend
        )
        return backward([loss], ops)

    measured, traced = measure(step, memory=True), trace_allocations(step)
    assert abs(measured.peak - traced.peak) < 4096
