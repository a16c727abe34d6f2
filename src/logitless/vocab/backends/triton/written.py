"""Kernels written from the algebra's own formulas: a function of per-token numbers becomes one launch.

The functions of `algebra/` name their operations through an array namespace. Given symbols in the arrays' place they
say what is to be computed; that is written down once as straight-line code and compiled by Triton. A formula so stays
defined in one place, and some forty launches of a few microseconds are one.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ....algebra.online_softmax import Accumulation, Totals, finish
from ....algebra.stats import label_coefficient
from .device import on
from .maths import expm1, log1p, logaddexp, signed

ROWS = 128  # tokens of a program


class Symbol:
    """A per-token number of the kernel that is being written."""

    def __init__(self, program: Program, name: str) -> None:
        self.program, self.name = program, name

    def __neg__(self) -> Symbol:
        return self.program.line("-{}", self)

    def __and__(self, other: Any) -> Symbol:
        return self.program.line("{} & {}", self, other)


def _binary(sign: str, swapped: bool = False) -> Callable[[Symbol, Any], Symbol]:
    def method(self: Symbol, other: Any) -> Symbol:
        return self.program.line(f"{{}} {sign} {{}}", *((other, self) if swapped else (self, other)))

    return method


for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*"), ("truediv", "/")):
    setattr(Symbol, f"__{_name}__", _binary(_sign))
    setattr(Symbol, f"__r{_name}__", _binary(_sign, swapped=True))
for _name, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "==")):
    setattr(Symbol, f"__{_name}__", _binary(_sign))


class Program:
    """Straight-line code, and the array namespace whose calls write it; what is said twice is computed once.

    NaN goes through everything, as it does in torch: a model that has diverged must be seen.
    """

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}  # expression -> name

    def line(self, form: str, *args: Any) -> Symbol:
        text = form.format(*(x.name if isinstance(x, Symbol) else _literal(x) for x in args))
        return Symbol(self, self.lines.setdefault(text, f"v{len(self.lines)}"))

    def __getattr__(self, name: str) -> Callable[..., Symbol]:
        if name not in FORMS:
            raise AttributeError(f"Program: no form for {name!r}; add it to FORMS")
        return lambda *args: self.line(FORMS[name], *args)

    def clip(self, x: Symbol, least: float, most: None) -> Symbol:
        return self.line("tl.where({1} < {0}, {0}, {1})", least, x)


def _literal(x: float) -> str:
    return repr(float(x)) if math.isfinite(x) else f"float('{x}')"


FORMS = {
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "sqrt": "tl.sqrt({})",
    "log1p": "log1p({})",
    "expm1": "expm1({})",
    "logaddexp": "logaddexp({}, {})",
    "abs": "tl.abs({})",
    "maximum": "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "where": "tl.where({}, {}, {})",
    "zeros_like": "tl.zeros_like({})",
    "ones_like": "tl.zeros_like({}) + 1.0",
    "isinf": "tl.abs({}) == float('inf')",
    "sign": "signed({})",
}


class Written:
    """A function of symbols as a kernel: (n,) tensors in, the rows of one (outputs, n) tensor out."""

    def __init__(self, title: str, names: Sequence[str], function: Callable[..., dict[str, Any]]) -> None:
        program = Program()
        inputs = {name: Symbol(program, f"x{i}") for i, name in enumerate(names)}
        results = function(program, inputs)
        given = {symbol.name: name for name, symbol in inputs.items()}
        self.names = tuple(names)
        self.same = {name: given[x.name] for name, x in results.items() if x.name in given}  # an input, as it is
        self.made = tuple(name for name in results if name not in self.same)
        self.source = _source(title, len(names), program.lines, [results[name].name for name in self.made])
        self.kernel = _compiled(title, self.source)

    def __call__(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The results by name."""
        like = inputs[self.names[0]]
        n, out = like.shape[0], like.new_empty(len(self.made), like.shape[0])
        if n and self.made:
            numbers = [inputs[name].to(like.dtype).contiguous() for name in self.names]
            with on(like.device):
                self.kernel[(triton.cdiv(n, ROWS),)](*numbers, out, n)
        made = dict(zip(self.made, out.unbind(0), strict=True))
        return made | {name: inputs[given] for name, given in self.same.items()}


def _source(title: str, n_inputs: int, lines: dict[str, str], results: list[str]) -> str:
    xs = [f"x{i}" for i in range(n_inputs)]
    body = [f"rows = tl.program_id(0).to(tl.int64) * {ROWS} + tl.arange(0, {ROWS})", "live = rows < n"]
    body += [f"{x} = tl.load({x} + rows, mask=live, other=0.0)" for x in xs]
    body += [f"{name} = {text}" for text, name in lines.items()]
    body += [f"tl.store(out + {i} * n.to(tl.int64) + rows, {x}, mask=live)" for i, x in enumerate(results)]
    return "\n    ".join([f"def {title}({', '.join([*xs, 'out', 'n'])}):", *body]) + "\n"


def _compiled(title: str, source: str) -> Any:
    """Triton's function of this source, which it asks Python's line cache for."""
    file = f"<{__name__}.{title}.{abs(hash(source)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope: dict[str, Any] = {
        "tl": tl, "expm1": expm1, "log1p": log1p, "logaddexp": logaddexp, "signed": signed, "__name__": __name__,
    }  # fmt: skip
    exec(compile(source, file, "exec"), scope)
    names = scope[title].__code__.co_varnames[: scope[title].__code__.co_argcount]
    kernel: Any = triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=[x for x in names if x != "n"])
    return kernel(scope[title])


@cache
def finisher(fields: tuple[str, ...], label: bool, reference: bool) -> Written:
    """`algebra.online_softmax.finish` of an accumulation with these fields."""

    def totals(xp: Program, x: dict[str, Symbol]) -> dict[str, Any]:
        state = Accumulation(**{name: x[name] for name in fields})
        return dict(finish(state, (x["label"], x.get("label_ref")) if label else None, xp).items())

    return Written("finish", (*fields, *(["label"] * label), *(["label_ref"] * (label and reference))), totals)


def finished(state: Accumulation, label: tuple[Tensor, Tensor | None] | None) -> Totals:
    """`finish(state, label, torch)` in one launch."""
    inputs = dict(state.items())
    fields, reference = tuple(inputs), state.shift is not None
    if label is not None:
        inputs |= {name: x for name, x in zip(("label", "label_ref"), label, strict=True) if x is not None}
    found = finisher(fields, label is not None, reference)(inputs)
    if "rank" in found:
        found["rank"] = found["rank"].long()
    return Totals(**found)


@cache
def label_coefficient_kernel(coefficients: tuple[str, ...], totals: tuple[str, ...], beta: float) -> Written:
    """`algebra.stats.label_coefficient` of these coefficients and totals."""

    def coefficient(xp: Program, x: dict[str, Symbol]) -> dict[str, Any]:
        given = Totals(**{name: x[f"t_{name}"] for name in totals})
        return {"coefficient": label_coefficient({name: x[name] for name in coefficients}, given, beta, xp)}

    return Written("label_coefficient", (*(f"t_{name}" for name in totals), *coefficients), coefficient)


def label_coefficients(coefficient: dict[str, Tensor], totals: Totals, beta: float) -> Tensor:
    """`label_coefficient(coefficient, totals, beta, torch)` in one launch."""
    read = ("m", "log_s", "logprob", "label_logit", "label_ref", "shift", "log_ratio", "m_ref", "log_s_ref")
    numbers = {name: x for name, x in totals.items() if name in read}
    inputs = {f"t_{name}": x for name, x in numbers.items()} | coefficient
    return label_coefficient_kernel(tuple(sorted(coefficient)), tuple(numbers), beta)(inputs)["coefficient"]
