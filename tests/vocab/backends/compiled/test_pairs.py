"""bf16 operands that are multiplied two numbers at a time, or by tiles: exact products, added up in fp32."""

import dataclasses
import subprocess
import warnings

import pytest
import torch

import logitless as ll
from logitless.vocab.backends.compiled import backward, library, stream
from logitless.vocab.reference import dense_token_stats
from tests.support import forked
from tests.support.switches import put_back
from tests.support.vocab.comparing import Operands, assert_near, operands
from tests.support.vocab.processors import multiply_by, needs_library, needs_pairs

pytestmark = [needs_library, needs_pairs]
WANT = ("logprob", "logsumexp", "entropy", "self_certainty", "mean_logit", "max_logit", "rank", "sum_sq_prob")
KL = ("kl", "reverse_kl")


@pytest.fixture(params=["pairs", "tiles"], autouse=True)
def multiplied(request, streamed, monkeypatch):
    """What the library multiplies by."""
    multiply_by(request.param, monkeypatch)
    return request.param


@pytest.fixture(autouse=True)
def pairs(multiplied, monkeypatch):
    """What was multiplied in pairs: "values", "tokens" and "entries" by backward, "weights" beside the sums."""
    found, run = [], library.run

    def watched(function, call):
        if isinstance(call, library.Streamed):
            found.append("values" if call.head.factors[0].pairs else "fp32")
            found.extend(["weights"] * bool(call.products.pairs))
        elif isinstance(call, library.OfEntries):
            found.append("entries" if call.tokens.factors[0].pairs else "fp32")
        else:
            found.append("tokens" if call.products.pairs else "fp32")
        return run(function, call)

    for module in (stream, backward):
        monkeypatch.setattr(module, "run", watched)
    return found


def problem(n, h, v, bias=False, **more):
    return operands((n,), h, v, dtype=torch.bfloat16, bias=bias, **more).training()


def assert_values(ops, want=WANT, **options):
    exact = ops.to(torch.float64)
    right = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want, reference=exact.reference, **options)
    found = ll.token_stats(
        ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, backend="compiled", **options
    )
    for name in want:
        assert_near(getattr(found, name), right[name].double(), 2e-5, name)


SIZES = [(1, 1, 1), (5, 3, 12), (13, 8, 257), (33, 65, 1031), (70, 517, 96), (40, 2062, 2500), (100, 16, 20_000)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("n", "h", "v"), SIZES, ids=str)
def test_every_size_is_the_oracle(n, h, v, threads, pairs):
    with put_back():
        torch.set_num_threads(threads)
        assert_values(problem(n, h, v))
        assert_values(problem(n, h, v, reference=True), WANT + KL)
    assert pairs == ["values"] * 2


TRANSFORMS = [{}, {"bias": True}, {"softcap": 3.0}, {"ranks": (2, 25)}, {"bias": True, "softcap": 30.0, "ranks": (4,)}]
EACH = torch.linspace(0.3, 3.0, 50)  # a temperature of its own for each token


@pytest.mark.parametrize("temperature", [1.0, 0.7, EACH], ids=["1", "0.7", "tensor"])
@pytest.mark.parametrize("more", TRANSFORMS, ids=str)
def test_every_head_is_the_oracle(more, temperature, pairs):
    assert_values(problem(50, 37, 1031, scale=0.8, vocab_size=1020, **more), temperature=temperature)
    assert_values(problem(50, 37, 1031, scale=0.8, reference=True, **more), WANT + KL, temperature=temperature)
    assert pairs == ["values"] * 2


def test_rows_that_lie_apart_are_read_no_further_than_they_go(pairs):
    """Beside what is NaN, on either side of a pair."""
    ops = problem(20, 31, 500)
    wide = torch.full((500, 40), torch.nan, dtype=torch.bfloat16)
    wide[:, 3:34] = ops.weight
    assert_values(dataclasses.replace(ops, weight=wide[:, 3:34]))
    assert pairs == ["values"]


def test_operands_are_read_no_further_than_memory_goes(multiplied):
    status, written = forked.module("tests.support.vocab.guarded", multiplied)
    assert status == 0, written
    assert written.endswith("nothing else was read\n")  # after what torch may warn of


def test_nan_and_infinity_stay_with_their_token():
    ops = problem(20, 8, 300)
    clean = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="compiled")
    ops.hidden[3, 2], ops.hidden[17, 0] = torch.nan, torch.inf
    found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="compiled")
    others = [i for i in range(20) if i not in (3, 17)]
    assert found.logprob[[3, 17]].isnan().all()
    assert torch.equal(found.logprob[others], clean.logprob[others])
    assert torch.equal(found.entropy[others], clean.entropy[others])


@pytest.mark.parametrize("sure", [20.0, 1e4])
def test_extreme_logits_are_as_near_to_float64_as_wide_operands_have_them(sure, pairs, monkeypatch):
    ops = problem(40, 24, 3000)
    ops.hidden[::2] *= sure
    exact = ops.to(torch.float64)
    right = dense_token_stats(exact.hidden, exact.head, ops.labels, want=("logprob", "entropy"))
    errors = []
    for multiplied in (1, 0):
        monkeypatch.setattr(library.library(), "multiplies_pairs", lambda multiplied=multiplied: multiplied)
        found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="compiled")
        for name, most in (("logprob", 1 + right["logprob"].abs()), ("entropy", 1 + right["entropy"])):
            errors.append(float(((getattr(found, name).double() - right[name]).abs() / most).max()))
    assert pairs == ["values", "fp32"]
    assert errors[0] <= 1.5 * errors[2] + 2e-6
    assert errors[1] <= 1.5 * errors[3] + 2e-6


def dense_loss(ops, kind):
    """What plain torch makes of it, in the operands' dtype."""
    z = torch.nn.functional.linear(ops.hidden, ops.weight, ops.bias) * ops.transform.get("scale", 1.0)
    if cap := ops.transform.get("softcap"):
        z = cap * torch.tanh(z / cap)
    logp = (z if z.dtype == torch.float64 else z.float()).log_softmax(1)
    nll = -logp.gather(1, ops.labels[:, None])[:, 0]
    return (nll if kind == "cross-entropy" else nll - (logp.exp() * logp).sum(1).sin()).mean()


def loss(ops, kind, **options):
    if kind == "cross-entropy":
        return ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="compiled", **options)
    want = ("logprob", "entropy")
    return ll.token_loss(
        lambda stats: stats.entropy.sin() - stats.logprob,
        *(ops.hidden, ops.head, ops.labels),
        want=want,
        backend="compiled",
        **options,
    )


MULTIPLIED = {  # one basis of weights, or the gradient of the logits themselves
    ("cross-entropy", "frozen"): {"values", "weights"},
    ("cross-entropy", "trained"): {"values", "entries", "tokens"},
    ("entropy", "frozen"): {"values", "tokens"},
    ("entropy", "trained"): {"values", "entries", "tokens"},
}


@pytest.mark.halved
@pytest.mark.parametrize("more", [{}, {"bias": True}, {"softcap": 3.0, "scale": 0.8}], ids=str)
@pytest.mark.parametrize("budget", [None, 2_500_000], ids=["one chunk", "some chunks"])
@pytest.mark.parametrize(("kind", "head"), MULTIPLIED)
def test_gradients_are_no_worse_than_plain_bf16s(kind, head, budget, more, pairs, streamed):
    ops = problem(300, 65, 2051, **more).training("hidden", *(["weight"] if head == "trained" else []))
    exact, plain = ops.to(torch.float64), ops.to(torch.bfloat16)
    found, right = loss(ops, kind, memory_budget=budget), dense_loss(exact, kind)
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-6)
    found.backward(), right.backward(), dense_loss(plain, kind).backward()
    assert set(pairs) == MULTIPLIED[kind, head]
    assert (len(streamed) > 1) == (budget is not None and (kind, head) != ("cross-entropy", "frozen"))
    for name, leaf in ops.leaves.items():
        of = exact.leaves[name].grad
        allowed = (plain.leaves[name].grad.double() - of).norm()
        assert (leaf.grad.double() - of).norm() <= allowed, name


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rise", [12.0, -12.0, 0.0])
@pytest.mark.parametrize(("n", "h", "v"), [(20, 31, 5000), (600, 300, 1741), (1100, 16, 900)], ids=str)
def test_products_that_wait_are_relative_to_each_maximum(n, h, v, rise, threads, pairs):
    """Those of several blocks of entries are added up at once, of which each, one or none has a higher logit."""
    ops = problem(n, h, v, bias=True).training("hidden")
    with torch.no_grad():
        ops.bias.copy_(torch.linspace(0, rise, v))
        ops.hidden[::7] = 0  # tokens that are alike
    exact, plain = ops.to(torch.float64), ops.to(torch.bfloat16)
    with put_back():
        torch.set_num_threads(threads)
        loss(ops, "cross-entropy").backward()
    for x in (exact, plain):
        dense_loss(x, "cross-entropy").backward()
    assert pairs == ["values", "weights"]
    error = (ops.hidden.grad.double() - exact.hidden.grad).norm(dim=1)
    allowed = (plain.hidden.grad.double() - exact.hidden.grad).norm(dim=1)
    assert (error <= 1.5 * allowed + 1e-3 * exact.hidden.grad.norm(dim=1)).all()


@pytest.mark.parametrize("trained", [("a",), ("hidden", "b", "weight")], ids=str)
def test_an_adapters_products_stay_fp32(trained, pairs):
    """Its tokens are no bf16 numbers, and its weights would be rounded once more."""
    ops = problem(50, 37, 1031, ranks=(4,)).training(*trained)
    exact = ops.to(torch.float64)
    ll.linear_cross_entropy(ops.hidden, ops.head, ops.labels, backend="compiled").backward()
    expected = dense_token_stats(exact.hidden, exact.head, ops.labels, want=("logprob",))["logprob"]
    (-expected.mean()).backward()
    assert "fp32" in pairs
    assert "tokens" not in pairs
    for name, leaf in ops.leaves.items():
        right = exact.leaves[name].grad
        assert (leaf.grad.double() - right).norm() <= 4e-3 * right.norm(), name


def test_a_reference_near_by_leaves_reverse_kls_gradient_its_digits(multiplied, pairs):
    """At KL 1e-4 p - q is a hundredth of p: weights rounded to bf16 would lose a tenth of it."""
    ops = problem(64, 96, 4096).training("hidden")
    near = (ops.weight.float() * (1 + 0.005 * torch.randn(ops.weight.shape))).bfloat16()
    ops.ref = Operands(ops.hidden.detach(), near, None, None)
    exact = ops.to(torch.float64)
    own = ll.token_stats(ops.hidden, ops.head, want=("reverse_kl",), reference=ops.reference, backend="compiled")
    own.reverse_kl.mean().backward()
    right = dense_token_stats(exact.hidden, exact.head, None, want=("reverse_kl",), reference=exact.reference)
    right["reverse_kl"].mean().backward()
    assert pairs == {"pairs": ["values"], "tiles": ["values", "values", "tokens"]}[multiplied]  # logits made again
    assert (ops.hidden.grad.double() - exact.hidden.grad).norm() < 3e-3 * exact.hidden.grad.norm()


@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_the_same_bits_for_any_number_of_threads(head, pairs):
    ops, found = problem(300, 41, 9000).training("hidden", *(["weight"] if head == "trained" else [])), []
    with put_back():
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(torch.autograd.grad(loss(ops, "cross-entropy"), list(ops.leaves.values())))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
    assert set(pairs) == MULTIPLIED["cross-entropy", head]


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_other_operands_keep_their_digits(dtypes, pairs):
    ops = operands((40,), 24, 1031, dtype=torch.float32, bias=False)
    hidden = ops.hidden.to(dtypes[0]).requires_grad_()
    ll.linear_cross_entropy(hidden, ll.LMHead(ops.weight.to(dtypes[1])), ops.labels, backend="compiled").backward()
    assert set(pairs) == {"fp32"}


@pytest.mark.parametrize("kind", ["cross-entropy", "entropy"])
@pytest.mark.parametrize("head", ["frozen", "trained"])
def test_a_loss_holds_what_is_told(kind, head, held):
    ops = problem(200, 48, 5000).training("hidden", *(["weight"] if head == "trained" else []))
    loss(ops, kind, memory_budget=2_500_000).backward()
    want = ("logprob", "entropy") if kind == "entropy" else ("logprob",)
    told = ll.explain(
        *(ops.hidden, ops.head, ops.labels), want=want, loss=True, backend="compiled", memory_budget=2_500_000
    )
    assert held() <= told.buffer_bytes <= 2_500_000


@pytest.mark.parametrize(("n", "h", "more"), [(1, 1, {}), (40, 700, {"ranks": (3,), "bias": True})], ids=str)
def test_values_hold_what_is_told(n, h, more, held):
    """And rows of pairs are told as half of their numbers."""
    ops = problem(n, h, 1031, reference=True, **more)
    ll.token_stats(ops.hidden, ops.head, ops.labels, want=KL, reference=ops.reference, backend="compiled")
    told = ll.explain(ops.hidden, ops.head, ops.labels, want=KL, reference=ops.reference, backend="compiled")
    assert (
        held() <= told.buffer_bytes < held() + 4 * torch.get_num_threads() * library.library().entries() * 2 * (h + 100)
    )


def test_a_compiler_that_knows_no_pairs_makes_the_rest(monkeypatch, multiplied, pairs):
    loaded = library._loaded

    def old(command):
        if library.PAIRS[0] in command:
            raise subprocess.CalledProcessError(1, command, stderr="error: unrecognized command-line option")
        return loaded(command)

    monkeypatch.setattr(library, "_loaded", old)
    library._library.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_values(problem(13, 8, 257))
    finally:
        library._library.cache_clear()
    assert pairs == {"pairs": ["fp32"], "tiles": []}[multiplied]  # which are torch's then
