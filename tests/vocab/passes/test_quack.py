"""`backend="quack"` against dense float64, through a stand-in for QuACK, which needs CUTLASS and a GPU."""

import ast
import inspect
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import logitless as ll
from logitless.algebra.costs import INT32, quack_slices
from logitless.errors import GradientError
from logitless.vocab.call.choice import CANDIDATES
from tests.support.vocab import quack_stand_in
from tests.support.vocab.comparing import assert_near, assert_near_in_norm

H, V = 24, 384
ROUNDED = 2 * 2.0**-8  # exponentials, what multiplies them, their product and the gradient: each in bf16
FUNCTION = "scaled_exp_linear_cross_entropy_fwd"


@pytest.fixture(autouse=True)
def calls(monkeypatch) -> list[dict]:
    """The stand-in in QuACK's place, on this machine's processor; what each call of it was given, by name."""
    seen = []
    own = getattr(quack_stand_in, FUNCTION)

    def recorded(*args, **kwargs):
        seen.append(inspect.signature(own).bind(*args, **kwargs).arguments)
        return own(*args, **kwargs)

    module = ModuleType("quack.linear_cross_entropy")
    setattr(module, FUNCTION, recorded)
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(CANDIDATES, "quack", replace(CANDIDATES["quack"], why_not=lambda device: None))
    return seen


class Problem:
    """Hidden states and head in bf16, of which some are trained, and the same numbers in float64."""

    def __init__(self, n, trained=("hidden", "weight"), ignored=(), v=V, ignore_index=-100):
        self.hidden = torch.randn(n, H).bfloat16()
        self.weight = torch.randn(v, H).bfloat16()
        self.labels = torch.randint(v, (n,))
        self.labels[self.labels == ignore_index] += 1
        self.ignored, self.ignore_index = list(ignored), ignore_index
        self.labels[self.ignored] = ignore_index
        self.exact = {"hidden": self.hidden.double(), "weight": self.weight.double()}
        self.hidden[self.ignored] = torch.nan
        self.leaves = {name: getattr(self, name).requires_grad_() for name in trained}

    def loss(self, **options):
        options = {"backend": "quack", "ignore_index": self.ignore_index, **options}
        return ll.linear_cross_entropy(self.hidden, ll.LMHead(self.weight), self.labels, **options)

    def dense(self, reduction="mean", denominator=None):
        """Torch's own on whole logits; 0 over no token."""
        for name in self.leaves:
            self.exact[name].requires_grad_()
        z = self.exact["hidden"] @ self.exact["weight"].t()
        each = F.cross_entropy(z, self.labels, reduction="sum", ignore_index=self.ignore_index)
        if reduction == "sum":
            return each
        return each / (max(1, len(self.labels) - len(self.ignored)) if denominator is None else denominator)

    def check(self, **options):
        got = self.loss(**options)
        wanted = self.dense(options.get("reduction", "mean"), options.get("denominator"))
        assert got.dtype == torch.float32
        assert_near(got.detach(), wanted.detach(), 2e-5, "loss")
        if not self.leaves:
            assert not got.requires_grad
            return
        up = torch.randn(()).sign() * 2.0 ** torch.randint(-3, 4, ())  # a power of two rounds nowhere
        found = torch.autograd.grad(got, list(self.leaves.values()), up)
        expected = torch.autograd.grad(wanted, [self.exact[name] for name in self.leaves], up.double())
        for (name, leaf), grad, want in zip(self.leaves.items(), found, expected, strict=True):
            assert grad.dtype == leaf.dtype
            assert_near_in_norm(grad, want, ROUNDED, f"d {name}")
            assert (grad - want).norm() <= ROUNDED / 2 * want.norm()
            # the factor between the two, which many tokens know better than each of them
            assert abs((grad * want).sum() / want.square().sum() - 1) < ROUNDED * len(self.labels) ** -0.5


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"denominator": 37}, {"denominator": torch.tensor(9.0)}])
@pytest.mark.parametrize("ignored", [(), (0, 3, 4, 149)], ids=["all", "some ignored"])
def test_reductions(options, ignored):
    Problem(150, ignored=ignored).check(**options)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 255, 300, 600])
def test_ragged_token_counts(n, calls):
    Problem(n).check(memory_budget=150_000)
    (given,) = calls
    assert given["chunk_size"] == 128


@pytest.mark.parametrize("trained", [("hidden",), ("weight",), ()], ids=str)
def test_only_the_gradients_that_are_needed(trained, calls):
    Problem(150, trained, ignored=(7,)).check()
    (given,) = calls
    assert (given["need_dx"], given["need_dw"]) == ("hidden" in trained, "weight" in trained)


def test_without_grad_mode(calls):
    problem = Problem(150)
    with torch.no_grad():
        got = problem.loss()
    assert not got.requires_grad
    assert (calls[0]["need_dx"], calls[0]["need_dw"]) == (False, False)
    assert_near(got, problem.dense().detach(), 2e-5, "loss")


@pytest.mark.parametrize("v", [128, 256, 640])
def test_vocabularies_of_other_tiles(v):
    Problem(40, v=v).check()


def test_an_ignore_index_that_is_an_entry(calls):
    Problem(50, ignored=(0, 1), ignore_index=3).check()
    assert calls[0]["x"].shape == (48, H)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"denominator": 4}])
def test_no_token_that_counts(options, calls):
    problem = Problem(5, ignored=range(5))
    got = problem.loss(**options)
    assert got == 0
    for grad in torch.autograd.grad(got, list(problem.leaves.values())):
        assert torch.equal(grad, torch.zeros_like(grad))
    assert calls == []


def test_leading_dimensions_and_gaps():
    problem = Problem(12)
    wide = torch.randn(2, 6, 2 * H).bfloat16()
    wide[..., :H] = problem.hidden.detach().view(2, 6, H)
    wide.requires_grad_()
    got = ll.linear_cross_entropy(wide[..., :H], ll.LMHead(problem.weight), problem.labels.view(2, 6), backend="quack")
    (found,) = torch.autograd.grad(got, wide)
    (expected,) = torch.autograd.grad(problem.loss(), problem.hidden)
    assert torch.equal(found[..., :H].reshape(12, H), expected)


def test_a_second_backward_gives_the_same_bits():
    problem = Problem(150, ignored=(2,))
    loss, leaves = problem.loss(), list(problem.leaves.values())
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(map(torch.equal, first, second))


def test_the_heads_gradient_in_fp32():
    problem = Problem(150)
    problem.weight.grad_dtype = torch.float32
    problem.loss().backward()
    problem.dense().backward()
    assert problem.weight.grad.dtype == torch.float32
    assert not torch.equal(problem.weight.grad, problem.weight.grad.bfloat16().float())
    assert_near_in_norm(problem.weight.grad, problem.exact["weight"].grad, ROUNDED, "d weight")


def test_a_second_derivative_is_refused():
    problem = Problem(5)
    with pytest.raises(GradientError, match="first-order"):
        torch.autograd.grad(problem.loss(), problem.hidden, create_graph=True)


def test_under_autocast():
    problem = Problem(30)
    hidden = problem.hidden.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        got = ll.linear_cross_entropy(hidden, ll.LMHead(problem.weight), problem.labels, backend="quack")
    expected = problem.loss()
    assert torch.equal(got, expected)
    (found,) = torch.autograd.grad(got, hidden)
    assert found.dtype == torch.float32
    assert torch.equal(found.bfloat16(), torch.autograd.grad(expected, problem.hidden)[0])


@pytest.mark.compiled
def test_it_breaks_a_compiled_graph_once():
    problem = Problem(20)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="backend 'compiled' or 'quack'"):
        torch.compile(problem.loss, backend="aot_eager", fullgraph=True)()
    expected = torch.autograd.grad(problem.loss(), list(problem.leaves.values()))
    found = torch.autograd.grad(torch.compile(problem.loss, backend="aot_eager")(), list(problem.leaves.values()))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("trained", "gemms"), [(("hidden", "weight"), 3), (("hidden",), 2), ((), 1)], ids=str)
def test_explain_says_the_chunks_that_it_gets(trained, gemms, calls):
    problem = Problem(700, trained)
    options = {"memory_budget": 300_000, "backend": "quack"}
    said = ll.explain(problem.hidden, ll.LMHead(problem.weight), problem.labels, loss=True, **options)
    problem.loss(memory_budget=300_000)
    assert (said.backend, said.price.gemms) == ("quack", gemms)
    assert said.slices.tokens == calls[0]["chunk_size"] == 256
    assert said.buffer_bytes == said.slices.nbytes <= 300_000
    assert "backend quack" in str(said)


@pytest.mark.parametrize("budget", [1, 2**20, 2**28, 2**30, 2**36])
@pytest.mark.parametrize("n", [1, 128, 4097, 131_072])
@pytest.mark.parametrize("v", [384, 128_256, 262_144])
def test_chunks_keep_to_the_budget(v, n, budget):
    got = quack_slices(n, v, 4096, budget=budget)
    assert got.tokens % 128 == 0
    assert got.tokens < n + 128
    assert got.tokens * v < INT32
    assert got.tokens == 128 or got.nbytes <= budget


def test_the_stand_in_takes_what_quack_takes():
    """Of the QuACK that is installed, read and not imported: that wants CUTLASS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "quack")
        spec = find_spec("quack")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("quack is not installed: make test-quack")
    text = Path(spec.submodule_search_locations[0], "linear_cross_entropy.py").read_text()
    (own,) = (x for x in ast.parse(text).body if isinstance(x, ast.FunctionDef) and x.name == FUNCTION)
    (stand_in,) = ast.parse(inspect.getsource(getattr(quack_stand_in, FUNCTION))).body

    def takes(function):
        arguments = function.args
        return [
            [x.arg for x in arguments.args],
            [x.arg for x in arguments.kwonlyargs],
            [ast.unparse(x) for x in arguments.defaults],
            [ast.unparse(x) for x in arguments.kw_defaults],
        ]

    assert takes(stand_in) == takes(own)
