"""One case three ways: our op, dense float64 and, where it is installed, the peer's own function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

Operands = dict[str, Any]
Outcome = dict[str, Tensor]
Function = Callable[..., Tensor | Outcome]

# What our results may be off, of the largest entry: the rounding of a result in this dtype, not the peer's tolerance.
BUDGET = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
LARGEST_RTOL = 0.5  # a peer's tolerance above it could not fail
SCALE = 2e-4  # what results may be off by a common factor, beside what rounding leaves of one
SCALE_OF_PEERS = 5e-4
WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Within:
    """A peer's tolerance, as its tests have it."""

    atol: float
    rtol: float


def cheapest(cases: Sequence[Any], cost: Callable[[Any], float], fast: int = 1) -> list[Any]:
    """The cases as parameters: the cheapest stay in the fast suite, the others are slow."""
    quick = sorted(range(len(cases)), key=lambda i: cost(cases[i]))[:fast]
    return [pytest.param(case, marks=() if i in quick else (pytest.mark.slow,)) for i, case in enumerate(cases)]


def fit(tokens: int, width: int, vocab: int) -> tuple[int, int, int]:
    """A peer's shape as a CPU does it thousands of times: its whole vocabulary, narrower and with fewer tokens."""
    width = min(width, max(16, 2**18 // vocab))
    return max(4, min(tokens, 2**22 // (width * vocab))), width, vocab


def fit_batch(batch: int, length: int, width: int, vocab: int) -> tuple[int, int, int, int]:
    """The same of whole responses: the shape as it is, or two short ones."""
    tokens, width, vocab = fit(batch * length, width, vocab)
    return (batch, length, width, vocab) if tokens == batch * length else (2, max(6, tokens // 2), width, vocab)


def name_of(case: Any) -> str:
    """A case's name: what its fields are where they are not the default."""
    shown = {x.name: getattr(case, x.name) for x in fields(case) if getattr(case, x.name) != x.default}
    shown.pop("within", None)
    return "-".join(f"{name}={value}" if isinstance(value, bool | str) else str(value) for name, value in shown.items())


class Case:
    """What the cases share, dataclasses of sizes and options: a name, and their tensors' random numbers."""

    def __str__(self) -> str:
        return name_of(self)


def normals(generator: torch.Generator, dtype: torch.dtype) -> Callable[..., Tensor]:
    """normal(*shape, by=1.0): normal numbers with this deviation, rounded to the dtype."""

    def normal(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * by).to(dtype)

    return normal


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def outcome(
    function: Function, operands: Operands, trained: Sequence[str], dtype: torch.dtype | None = None
) -> Outcome:
    """What `function` returns, by name, and the gradient of Σ cotangent·result of each operand in `trained`.

    The cotangents are random and the same for every function. dtype: floating operands are made this first.
    """
    given: Operands = {}
    for name, x in operands.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.detach().to(dtype or x.dtype).clone().requires_grad_(name in trained)
        given[name] = x
    results = function(**given)
    named = results if isinstance(results, dict) else {"loss": results}
    found = {name: x.detach() for name, x in named.items()}
    outputs = [x for x in named.values() if x.requires_grad]
    leaves = [name for name in trained if given.get(name) is not None]
    if outputs and leaves:
        generator = seeded(7)
        up = [torch.randn(x.shape, dtype=torch.float64, generator=generator).to(x.dtype) for x in outputs]
        grads = torch.autograd.grad(outputs, [given[name] for name in leaves], up)
        found |= {f"d {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def assert_held(ours: Outcome, exact: Outcome, within: Within, budget: float | None = None) -> None:
    """Our results are exact within the peer's tolerance and, of the largest entry, within our own budget."""
    assert ours.keys() == exact.keys()
    for name, value in exact.items():
        got = ours[name].double()
        assert got.shape == value.shape, f"{name}: {tuple(got.shape)} for {tuple(value.shape)}"
        torch.testing.assert_close(got, value, atol=within.atol, rtol=within.rtol, msg=lambda m, n=name: f"{n}: {m}")
        largest = float(value.abs().max()) if value.numel() else 0.0
        kind = torch.finfo(ours[name].dtype)
        allowed = (budget or BUDGET[ours[name].dtype]) * max(largest, 1e-6) + kind.smallest_normal * kind.eps
        off = float((got - value).abs().max()) if value.numel() else 0.0
        assert off <= allowed, f"{name}: {off:.3g} off, where {allowed:.3g} is allowed"
        assert_in_scale(got, value, SCALE, kind.eps, name)


def assert_in_scale(got: Tensor, value: Tensor, most: float, eps: float, name: str) -> None:
    """The factor between them is 1: a wrong scale of a narrow dtype's results hides in the rounding of each row, and
    not in the mean over many."""
    got, value = (x.double().reshape(-1, x.shape[-1] if x.ndim > 1 else 1) for x in (got, value))
    value = value.masked_fill(value.abs() < torch.finfo(torch.float32).tiny, 0.0)  # as float32 has it
    weights = value.square().sum(1)
    if not weights.any():
        return
    factor = float((got * value).sum() / weights.sum())
    rows = float(weights.sum().square() / weights.square().sum())  # how many the mean is of, if they were alike
    allowed = most + 1.5 * eps / rows**0.5
    assert abs(factor - 1) <= allowed, f"{name}: {factor:.6f} times what is exact, {allowed:.2g} is allowed"


def assert_same(ours: Outcome, theirs: Outcome, within: Within) -> None:
    """Our results are the peer's within the tolerance of its tests; of wide operands, of one scale too."""
    wide = [x.dtype in WIDE for name, x in theirs.items() if name.startswith("d ")]
    for name, value in theirs.items():
        torch.testing.assert_close(
            *(ours[name].double(), value.double()),
            atol=within.atol,
            rtol=min(within.rtol, LARGEST_RTOL),
            msg=lambda m, n=name: f"{n}: {m}",
        )
        if wide and all(wide):  # narrow operands are rounded inside as well, each peer in its own way
            assert_in_scale(ours[name], value, SCALE_OF_PEERS, torch.finfo(value.dtype).eps, name)


def assert_same_or_nearer(ours: Outcome, theirs: Outcome, exact: Outcome, within: Within) -> None:
    """The same within the tolerance; where not, float64 says that ours is the nearer."""
    for name, value in theirs.items():
        try:
            assert_same({name: ours[name]}, {name: value}, within)
        except AssertionError:
            off = [float((x.double() - exact[name]).abs().max()) for x in (ours[name], value)]
            assert off[0] < off[1], f"{name}: ours is {off[0]:.3g} off, the peer's {off[1]:.3g}"


def ignored_rows_poisoned(hidden: Tensor, ignored: Tensor) -> Tensor:
    """NaN in the rows of ignored tokens, which no result or gradient may show."""
    return torch.where(ignored[..., None], torch.nan, hidden)
