"""The compiled backend: eager's formulas to the last digits, compiled once for all sizes, plain where it cannot be."""

import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import logitless as ll
from logitless.errors import BackendError
from logitless.vocab.backends.compiled import kernels, stream
from logitless.vocab.backends.eager.formulas import without_maximum
from logitless.vocab.call import choice, compiled_support, validate
from tests.support import forked
from tests.support.switches import put_back
from tests.support.vocab.comparing import EVERYTHING, assert_near_in_norm, compare, compare_loss, operands
from tests.support.vocab.processors import needs_a_compiler

pytestmark = pytest.mark.compiled
WANT = ("logprob", "entropy")


def stats_of(ops, want=WANT, **options):
    found = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, **options)
    return [getattr(found, name).detach() for name in want]


def problem(n=13, v=257):
    return operands((n,), 8, v, dtype=torch.float32, bias=False).training()


@pytest.fixture
def fresh(monkeypatch):
    """No function is known yet, and every call makes slices."""
    known = {}
    monkeypatch.setattr(stream, "takes", lambda call, kept=False: False)
    monkeypatch.setattr(kernels, "_compiled", known)
    return known


def compiled(known):
    """How many functions this process has compiled or loaded."""
    return sum(x is not None for x in known.values())


@needs_a_compiler
def test_one_function_for_all_sizes_threads_and_gradient_modes(fresh):
    for n, v, budget in ((13, 257, None), (40, 1031, 20_000), (2, 300, 6_000)):  # ragged last slices
        compare(problem(n, v), WANT, backend="compiled", memory_budget=budget)
    with put_back(), torch.inference_mode():
        torch.set_num_threads(torch.get_num_threads() + 1)
        compare(problem(11, 99), WANT, backend="compiled", memory_budget=4_000)
    assert compiled(fresh) == len(fresh) == 1


@needs_a_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_functions_keep_their_digits_near_zero(dtype, fresh):
    """Inductor's own expm1 is a difference of two numbers near 1."""
    x = torch.cat([torch.logspace(-9, 1, 2000, dtype=dtype), -torch.logspace(-9, -0.01, 2000, dtype=dtype)])
    x = torch.stack([x, torch.linspace(-0.9, 80, 4000, dtype=dtype)])
    ends = torch.tensor([[-torch.inf, torch.inf, torch.nan, 0.0]] * 2, dtype=dtype).abs_()

    def both(tensors):
        return {"expm1": torch.expm1(tensors["x"]), "log1p": torch.log1p(tensors["x"])}

    near, far = (kernels.run("both", both, {"x": x}) for x in (x, ends))
    for name, function in (("expm1", torch.expm1), ("log1p", torch.log1p)):
        torch.testing.assert_close(near[name].double(), function(x.double()), rtol=4 * torch.finfo(dtype).eps, atol=0)
        torch.testing.assert_close(far[name], function(ends), equal_nan=True)
    assert compiled(fresh) == 1


@needs_a_compiler
def test_one_token_and_a_last_slice_of_one_entry_are_plain(fresh):
    compare(problem(1, 257), WANT, backend="compiled")
    assert compiled(fresh) == 0


@needs_a_compiler
def test_gradients_and_a_reference(fresh):
    ops = operands((13,), 7, 1031, dtype=torch.float32, reference=True, bias=False).training("hidden", "weight")
    compare(ops, (*WANT, "kl"), backend="compiled", memory_budget=60_000)
    assert compiled(fresh) == 2


@needs_a_compiler
@pytest.mark.parametrize(("n", "v", "functions"), [(40, 1031, 0), (80, 70, 1)])
def test_a_loss_keeps_weights_and_reads_them_by_products_alone(n, v, functions, fresh):
    """Of few tokens in columns, which plain operations read."""
    ops = problem(n, v).training("hidden", "weight", "bias")
    exact = ops.to(torch.float64)
    for x, backend in ((ops, "compiled"), (exact, "eager")):
        loss = ll.linear_cross_entropy(x.hidden, x.head, x.labels, memory_budget=90_000, backend=backend)
        loss.backward()
    for name, leaf in ops.leaves.items():
        assert_near_in_norm(leaf.grad, exact.leaves[name].grad, 4e-6, name)
    assert compiled(fresh) == len(fresh) == functions  # nothing is compiled for backward


@needs_a_compiler
@pytest.mark.parametrize("masked", [False, True])
def test_a_second_look_is_compiled(fresh, masked):
    ops = operands((13,), 7, 1031, dtype=torch.float32, reference=True).training()
    if masked:  # entries that one head has, or neither
        ops.bias[5:9] = ops.ref.bias[8:12] = -torch.inf
        ops.labels.clamp_(min=20)
    compare(ops, ("logprob", "jsd", "acceptance", "reverse_kl"), backend="compiled", memory_budget=60_000)
    assert any("second look" in str(key) for key in fresh)
    assert compiled(fresh) == len(fresh) == 2


def built_plainly(function, tensors):
    """What `kernels.build` gives, of a function that stays as it is."""
    names = list(tensors)
    outputs = list(function({name: x.clone() for name, x in tensors.items()}))
    return lambda *given: list(function(dict(zip(names, given, strict=True))).values()), outputs


@pytest.fixture
def plain(fresh, monkeypatch):
    """A function is kept for its key as a compiled one is, and nothing is compiled."""
    monkeypatch.setattr(kernels, "build", built_plainly)
    monkeypatch.setattr(compiled_support, "_compiler_fails", lambda _: None)


def test_a_function_is_of_one_beta(plain):
    ops = operands((13,), 7, 1031, dtype=torch.float32, reference=True).training("hidden", "weight")
    for beta in (0.5, 0.2):
        compare(ops, ("logprob", "jsd"), backend="compiled", memory_budget=60_000, jsd_beta=beta)


def test_an_infinite_kl_after_finite_ones_has_no_gradient_at_impossible_entries(plain):
    """Those are another function's than of heads whose logits are all finite."""
    for bias in (False, True):
        ops = operands((13,), 7, 1031, dtype=torch.float32, reference=True, bias=bias).training("hidden", "weight")
        if bias:
            ops.ref.bias[3:9] = ops.bias[20:30] = -torch.inf
        given = {"want": ("kl",), "reference": ops.reference, "backend": "compiled", "memory_budget": 60_000}
        ll.token_stats(ops.hidden, ops.head, **given).kl.sum().backward()
    assert not ops.weight.grad[3:9].isfinite().any()
    assert not ops.weight.grad[20:30].any()


@needs_a_compiler
def test_a_number_each_of_the_tokens_may_lie_apart(fresh):
    z, x = torch.randn(40, 300), torch.randn(40, 3)[:, 1]
    found = kernels.run("apart", lambda tensors: {"y": tensors["z"] * tensors["x"][:, None]}, {"z": z, "x": x})
    assert torch.equal(found["y"], z * x[:, None])


@needs_a_compiler
@pytest.mark.parametrize(
    ("want", "more"),
    [
        pytest.param((*WANT, "kl", "sum_sq_prob"), {}, id="one look"),
        pytest.param(("jsd", "reverse_kl", "rank"), {"softcap": 5.0}, id="two looks, softcap", marks=pytest.mark.slow),
    ],
)
def test_columns_are_compiled_in_whole_blocks(want, more, fresh):
    """Some tokens whose logits a gradient needs again, and a last slice of 41 entries, which is read plainly."""
    ops = operands((13,), 7, 2048 + 41, dtype=torch.float32, reference=True, bias=False, **more)
    compare_loss(ops.training("hidden", "weight"), want, backend="compiled", memory_budget=600_000)
    assert {columns for _, columns, *_ in fresh} == {True}
    assert compiled(fresh) == len(fresh) == (3 if "jsd" in want else 2)


@needs_a_compiler
@pytest.mark.parametrize("entries", [kernels.BLOCK, 5 * kernels.BLOCK])
def test_columns_are_added_up_by_blocks(entries, fresh):
    z = torch.randn(entries, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).t()
    z[3, 7], z[4, -1] = torch.nan, torch.inf
    assert kernels.fits(z)
    assert not kernels.fits(z[:, 1:])

    def both(tensors):
        return {"sum": kernels.by_block(torch.sum, tensors["z"]), "most": kernels.by_block(torch.amax, tensors["z"])}

    for x in (z, z.contiguous()):
        found = kernels.run("both", both, {"z": x})
        torch.testing.assert_close(found["sum"], z.sum(1), equal_nan=True)
        torch.testing.assert_close(found["most"], z.amax(1), equal_nan=True)
    assert compiled(fresh) == len(fresh) == 2


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("trainable", [(), ("hidden",), ("hidden", "weight", "bias")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_statistic(trainable, dtype):
    ops = operands((13,), 7, 1031, dtype=dtype, reference=True).training(*trainable)
    for budget in (None, 60_000):
        compare(ops, EVERYTHING, top_k=3, backend="compiled", memory_budget=budget)
        for want in (("logprob",), ("entropy",), ("kl",), ("sum_sq_prob", "logprob")):
            # behind a frozen head KL's products cancel: in fp32 eager is up to 4e-5 off in the gradient, too
            loose = {"tolerance": 4e-5} if want == ("kl",) and dtype == torch.float32 else {}
            compare(ops, want, backend="compiled", memory_budget=budget, **loose)


def test_a_tail_that_the_maximum_would_swallow():
    w = torch.tensor([[1.0, 1e-9, 2e-9], [1.0, 0.5, 0.0]])
    assert without_maximum(w).sum(1).tolist() == pytest.approx([3e-9, 0.5])


@needs_a_compiler
def test_a_sure_tokens_entropy_keeps_its_digits():
    hidden, weight = torch.eye(2), torch.zeros(300, 2)
    weight[5, 0], weight[7, 1] = 24.0, 30.0  # nats above the others, which are equal
    got = ll.token_stats(hidden, ll.LMHead(weight), want=("entropy",), backend="compiled").entropy
    exact = ll.token_stats(hidden.double(), ll.LMHead(weight.double()), want=("entropy",)).entropy
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=0)


@needs_a_compiler
def test_several_threads_compile_once(fresh):
    ops = problem()
    expected, found = stats_of(ops), []

    def work():
        with torch.no_grad():
            found.append(stats_of(ops, backend="compiled"))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert compiled(fresh) == 1
    assert len(found) == 3
    for each in found:
        torch.testing.assert_close(each, expected)


@needs_a_compiler
def test_functions_are_compiled_for_a_cpu_whatever_the_default_device(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    ops = operands((13,), 7, 1031, dtype=torch.float32, reference=True).training()
    want, options = ("logprob",), {"memory_budget": 60_000}
    with torch.device("meta"):
        found = stats_of(ops, want, backend="compiled", **options)
    assert compiled(fresh) == len(fresh) == 1
    for x, right in zip(found, stats_of(ops, want, backend="eager", **options), strict=True):
        torch.testing.assert_close(x, right, rtol=2e-5, atol=2e-5)


@needs_a_compiler
def test_a_forked_worker_uses_what_its_parent_compiled():
    status, written = forked.module("tests.support.vocab.forked_worker")
    assert status == 0, written


def test_a_failed_compilation_is_told_once_and_computed_plainly(fresh, monkeypatch):
    def fails(*_):
        raise RuntimeError("no space left on device\nand more")

    monkeypatch.setattr(kernels, "build", fails)
    monkeypatch.setattr(compiled_support, "_compiler_fails", lambda _: None)
    ops = problem(v=1031)
    with pytest.warns(RuntimeWarning, match=r"plain operations compute it \(RuntimeError: no space left on device\)"):
        compare(ops, WANT, backend="compiled", memory_budget=20_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(ops, WANT, backend="compiled", memory_budget=20_000)


def test_without_a_compiler_the_named_backend_is_refused_and_the_automatic_one_is_eager(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BackendError, match=r"backend 'compiled' cannot run here: .*no-such-compiler is not installed"):
        stats_of(problem(), backend="compiled")
    assert choice.choose(None, "cpu", choice.WORTH_COMPILING) == "eager"
    said = choice.passed_over("eager", "cpu", choice.WORTH_COMPILING)
    assert said.startswith("not compiled: it needs a C++ compiler")


def test_a_broken_compiler_is_refused_with_its_own_words(monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BackendError, match="'false' cannot make a library with OpenMP"):
        choice.choose("compiled", "cpu")


def test_a_compiler_that_cannot_be_tried_is_none(monkeypatch):
    """A full or missing folder of temporary files, and a CXX that is no command, leave a call to plain operations."""

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiled_support.tempfile, "mkdtemp", full)
    compiled_support._compiler_fails.cache_clear()
    try:
        with pytest.raises(BackendError, match=r"does not run: .*No space left on device"):
            choice.choose("compiled", "cpu")
        assert choice.choose(None, "cpu", choice.WORTH_COMPILING) == "eager"
        monkeypatch.setenv("CXX", 'g++ "')
        assert choice.choose(None, "cpu", choice.WORTH_COMPILING) == "eager"
    finally:
        compiled_support._compiler_fails.cache_clear()
    monkeypatch.setenv("CXX", " ")
    assert compiled_support.compiler() == "g++"


@needs_a_compiler
def test_taken_unasked_where_a_call_is_worth_it():
    assert choice.choose(None, "cpu", choice.WORTH_COMPILING) == "compiled"
    assert choice.choose(None, "cpu", choice.WORTH_COMPILING - 1) == "eager"
    assert choice.choose(None, "meta", choice.WORTH_COMPILING) == "eager"
    for want, times in ((("logprob", "entropy"), 16), (("kl",), 16), (("kl", "jsd"), 256)):
        assert choice.choose(None, "cpu", choice.WORTH_COMPILING // times, want) == "compiled"
        assert choice.choose(None, "cpu", choice.WORTH_COMPILING // times - 1, want) == "eager"
    few = ll.explain(torch.zeros(4, 2), ll.LMHead(torch.zeros(9, 2)), torch.zeros(4, dtype=torch.long))
    assert (few.backend, few.passed_over) == ("eager", f"not compiled: fewer than {choice.WORTH_COMPILING:,} logits")


def test_nothing_is_compiled_while_torch_traces(monkeypatch):
    hidden, head = torch.zeros(4, 2), ll.LMHead(torch.zeros(9, 2))
    assert validate.compilable_logits(hidden, head) == 36
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert validate.compilable_logits(hidden, head) == 0


def test_what_torch_keeps_for_wider_vectors_is_not_used_for_others(tmp_path):
    """Its own key of a compiled function does not have what `ATEN_CPU_CAPABILITY` makes of the processor."""
    program = """
import torch
from logitless.vocab.backends.compiled import kernels
x = torch.linspace(-3, 3, 24 * 97).sin().view(24, 97).t()
sums = kernels.run("sums", lambda tensors: {"sum": torch.exp(tensors["x"] - tensors["x"].amax(0)).sum(0)}, {"x": x})
print(*sums["sum"].tolist())
"""
    found = []
    for capability in ("avx512", "avx2"):
        own = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "ATEN_CPU_CAPABILITY": capability}
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=own)
        found.append([float(x) for x in ran.stdout.split()])
    x = torch.linspace(-3, 3, 24 * 97).sin().double().view(24, 97).t()
    right = torch.exp(x - x.amax(0)).sum(0)
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), right.expand(2, -1), rtol=1e-5, atol=0)
