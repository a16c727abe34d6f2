"""What `explain` says a call costs is what the call is measured to cost."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import logitless as ll
from logitless.vocab.backends import logits
from logitless.vocab.call import choice
from tests.support.allocations import trace_allocations
from tests.support.switches import put_back
from tests.support.vocab.comparing import PAIRED, operands
from tests.support.vocab.measuring import measure, not_interpreted

pytestmark = pytest.mark.usefixtures("in_slices")
N, H, V = 64, 32, 2048
TRAINABLE = [("hidden", "weight", "bias"), ("hidden",), ("weight",), ()]


def problem(trainable, want, dtype=torch.float32):
    ops = operands((N,), H, V, dtype=dtype, reference=bool(set(PAIRED) & set(want))).training(*trainable)
    if ops.ref is not None:  # as wide as the policy, so that its product costs the same
        ops.ref.hidden, ops.ref.weight = torch.randn(N, H).to(dtype), torch.randn(V, H).to(dtype)
    return ops


def backward(outputs, ops):
    if ops.leaves:
        torch.autograd.grad(sum(x.sum() for x in outputs), list(ops.leaves.values()))


WANTED = [("logprob",), ("logprob", "entropy"), ("logprob", "entropy", "kl"), ("jsd",), ("max_logit", "label_logit")]


def forward_and_backward(ops, call, options, loss):
    """Of the wanted statistics, or of a loss that adds them up."""
    want = options["want"]
    if loss:
        backward([ll.token_loss(lambda s: sum(getattr(s, n) for n in want), *call, **options)], ops)
    else:
        stats = ll.token_stats(*call, **options)
        backward([getattr(stats, name) for name in want], ops)


@pytest.mark.halved
@not_interpreted
@pytest.mark.parametrize(
    ("budget", "dtype"), [(None, torch.float32), (400_000, torch.float32), (400_000, torch.bfloat16)]
)
@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("trainable", TRAINABLE, ids=str)
@pytest.mark.parametrize("want", WANTED, ids=str)
def test_flop_and_bytes(want, trainable, loss, budget, dtype, backend):
    ops = problem(trainable, want, dtype)
    call = (ops.hidden, ops.head, ops.labels)
    options = {"want": want, "reference": ops.reference, "memory_budget": budget, "backend": backend}
    said = ll.explain(*call, loss=loss, **options)

    step = partial(forward_and_backward, ops, call, options, loss)
    flops = measure(step).flops
    assert abs(flops - said.flop) <= 0.03 * said.flop
    assert said.price.gemms == pytest.approx(said.flop / (2 * N * H * V), rel=0.03)
    assert said.backend == backend
    if budget is not None:
        assert said.buffer_bytes <= budget
    predicted = said.buffer_bytes + said.saved_bytes + said.gradient_bytes
    per_token = N * (12 * H + 256)  # hidden states and their gradient in fp32, and a few numbers
    assert trace_allocations(step).peak <= 1.05 * predicted + per_token


@not_interpreted
@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("trainable", [("hidden", "weight"), ("hidden",), ()], ids=str)
@pytest.mark.parametrize("want", [("logprob", "kl"), ("jsd",), ("logprob",)], ids=str)
def test_flop_beside_a_wider_reference(want, trainable, loss, backend):
    """Its products are as wide as its own hidden states, and are not made where no statistic reads them."""
    ops = operands((N,), H, V).training(*trainable)
    reference = torch.randn(N, 4 * H), ll.LMHead(torch.randn(V, 4 * H))
    call, options = (ops.hidden, ops.head, ops.labels), {"want": want, "reference": reference, "backend": backend}

    step = partial(forward_and_backward, ops, call, options, loss)
    assert measure(step).flops == pytest.approx(ll.explain(*call, loss=loss, **options).flop, rel=0.03)


def test_it_computes_nothing(backend):
    ops = operands((4096,), 64, 100_000, dtype=torch.float32)
    measured = measure(lambda: ll.explain(ops.hidden, ops.head, ops.labels, backend=backend))
    assert measured.flops == 0


def test_one_readable_line(backend):
    ops = problem(("hidden", "weight"), ("logprob",))
    line = str(ll.explain(ops.hidden, ops.head, ops.labels, backend=backend))
    assert "\n" not in line
    for word in ("4 GEMMs", backend, "MiB", "slices"):
        assert word in line


def test_it_refuses_what_the_call_refuses(backend):
    ops = operands()
    with pytest.raises(ll.errors.OptionError, match="entropi"):
        ll.explain(ops.hidden, ops.head, ops.labels, want=("entropi",), backend=backend)


def test_threads_that_add_up_in_sums_of_their_own():
    """Two threads more have two gradients of a chunk's hidden states more."""
    ops = operands((256,), 64, 8192, dtype=torch.float32, bias=False).training("hidden", "weight")
    call, options = (ops.hidden, ops.head, ops.labels), {"want": ("logprob", "entropy"), "memory_budget": 16 << 20}

    def step():
        stats = ll.token_stats(*call, backend="eager", **options)
        backward([stats.logprob, stats.entropy], ops)

    said, taken = [], []
    with put_back():
        for number in (2, 4):
            torch.set_num_threads(number)
            said.append(ll.explain(*call, backend="eager", **options).gradient_bytes)
            taken.append(trace_allocations(step).peak)
    assert said[1] - said[0] == 2 * 256 * 64 * 4
    assert taken[1] - taken[0] == pytest.approx(said[1] - said[0], rel=0.02)


@not_interpreted
@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ("hidden", "weight")], ids=str)
def test_what_forming_a_gradient_takes_beside_it(trained, loss):
    """Few entries, so that slices are small beside a chunk's hidden states: each tensor of their size shows."""
    ops = operands((256,), 1024, 128, dtype=torch.float32, bias=False).training(*trained)
    call, options = (ops.hidden, ops.head), {"want": ("logsumexp",), "backend": "eager"}  # no label's rows
    with put_back():
        torch.set_num_threads(1)
        said = ll.explain(*call, loss=loss, **options)
        step = partial(forward_and_backward, ops, call, options, loss)
        step()
        taken = trace_allocations(step).peak
    own = ("hidden" in trained) * said.slices.tokens * 1024 * 4  # a chunk's part of the gradient
    predicted = said.gradient_bytes + said.saved_bytes + own
    assert predicted <= taken <= predicted + said.buffer_bytes + 256 * 64


@pytest.mark.parametrize(
    ("device", "dtype", "tiles", "method"),
    [
        ("meta", torch.bfloat16, False, "basis"),  # whose operands are sized for as widened, too
        ("cpu", torch.bfloat16, True, "recompute"),
        ("cpu", torch.bfloat16, False, "basis"),
        ("cpu", torch.float32, True, "basis"),
    ],
    ids=str,
)
@not_interpreted
def test_what_rounds_a_reverse_kls_weights_recomputes(device, dtype, tiles, method, monkeypatch):
    """A GPU multiplies operands of 16 bits as they are, and so do a CPU's tiles; another CPU widens them."""
    monkeypatch.setattr(logits, "has_bf16_tiles", lambda device_type: tiles and device_type == "cpu")
    hidden, weight = (torch.empty(n, 16, dtype=dtype, device=device) for n in (8, 99))
    head = ll.LMHead(weight)
    said = ll.explain(hidden.requires_grad_(), head, want=("reverse_kl",), reference=(hidden.detach(), head))
    assert said.price.method == method


def test_why_a_backend_that_nobody_named(monkeypatch):
    """Where eager alone serves the call, and where the caller asked for it."""
    ops = operands((N,), H, V, dtype=torch.float32)
    monkeypatch.setattr(choice, "CANDIDATES", choice.CANDIDATES | {"compiled": choice.Candidate(lambda device: None)})
    call, want = (ops.hidden, ops.head, ops.labels), ("kl",)
    said = ll.explain(*call, want=want, reference=torch.randn(N, V))
    assert said.passed_over == "not compiled: eager alone serves the call"
    assert ll.explain(*call, backend="eager").passed_over == "not compiled: named"


def test_one_token_is_no_tokens():
    ops = operands((1,), H, V)
    with torch.no_grad():
        line = str(ll.explain(ops.hidden, ops.head, ops.labels))
    assert line.startswith("1 GEMM (")
    assert "slices of 1 token x" in line


def test_logits_that_no_memory_holds_are_no_slices():
    ops = operands((N,), H, V)
    said = ll.explain(ops.hidden, ops.head, ops.labels)
    line = str(replace(said, slices=replace(said.slices, tokens=40, in_products=True)))
    assert "chunks of 40 tokens, whose logits no memory holds" in line
    assert "MiB of buffers" in line
    assert "slices" not in line
