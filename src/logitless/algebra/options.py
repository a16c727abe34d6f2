"""What the options of the pass may be, whatever the arrays are."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable, Set
from numbers import Integral, Real
from operator import index
from typing import Any, TypeGuard

from ..errors import OptionError
from .stats import STATISTICS

MOST_FLOAT = (2 - 2**-23) * 2.0**127  # of float32
# What a call gives without `want`, and the option that asks for it.
BY_REQUEST = {
    "top_k": "top_k=k",
    "top_k_ids": "top_k=k",
    "top_k_logits": "top_k=k",
    "candidates": "candidates=ids",
    "candidate_logits": "candidates=ids",
}


def whole(x: object) -> int | None:
    """A whole number of any kind, NumPy's or an array's, as one of Python's; None for all else, booleans among it."""
    if type(x) is int:  # of torch.compile's, too, whose symbolic numbers stay symbolic
        return x
    if isinstance(x, bool) or str(getattr(x, "dtype", "")) == "torch.bool":
        return None
    try:
        return index(x)  # pyright: ignore[reportArgumentType]
    except (TypeError, RuntimeError):  # of no number, and of a tensor that holds none, on meta
        return None


def whole_within(name: str, x: object, least: int, most: int, said: str = "the vocabulary") -> int:
    """The whole number, or an OptionError where it is none of least..most; `said`: what the highest is."""
    number = whole(x)
    if number is None or not least <= number <= most:
        raise OptionError(f"{name}: expected a whole number in {least}..{most} ({said}), got {x!r}")
    return number


def whole_from(name: str, x: object, least: int) -> int:
    """The whole number, or an OptionError where it is none, or less than `least`."""
    number = whole(x)
    if number is None or number < least:
        raise OptionError(f"{name}: expected a whole number of at least {least}, got {x!r}")
    return number


def check_want(want: str | tuple[str, ...], labels: bool, reference: bool, candidates: bool = False) -> tuple[str, ...]:
    """The statistics' names, each once; `labels`, `reference` and `candidates` say whether the call has them."""
    if isinstance(want, str):
        want = (want,)
    alone = getattr(want, "shape", None) == ()  # an array of one number, over which nothing iterates
    if alone or not isinstance(want, Iterable):
        raise OptionError(f"want: expected names of statistics in a tuple, got {want!r}")
    want = tuple(sorted(want, key=str) if isinstance(want, Set) else want)  # a set's order is each process' own
    for name in want:
        if name not in STATISTICS:
            near = difflib.get_close_matches(str(name), STATISTICS, 2)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            hint = f"; pass {BY_REQUEST[name]}" if name in BY_REQUEST else hint
            raise OptionError(f"want: expected names among {', '.join(STATISTICS)}, got {name!r}{hint}")
        if STATISTICS[name].needs_label and not labels:
            raise OptionError(f"want: {name!r} needs labels, got None; pass labels, or leave {name!r} out of want")
        if STATISTICS[name].needs_reference and not reference:
            raise OptionError(f"want: {name} compares with a reference; pass reference=(hidden, head)")
        if STATISTICS[name].needs_candidates and not candidates:
            raise OptionError(f"want: {name} is of everything but the candidates; pass candidates=ids")
    return tuple(dict.fromkeys(want))


def check_numbers(rows: int, top_k: int, jsd_beta: float, memory_budget: float | None) -> None:
    """Raise OptionError for a top_k, jsd_beta or memory_budget that means nothing; `rows`: the vocabulary's size."""
    whole_within("top_k", top_k, 0, rows)
    if not isinstance(jsd_beta, Real) or not 0 < jsd_beta < 1:
        got = f"{jsd_beta!r}; at the ends use kl or reverse_kl"
        raise OptionError(f"jsd_beta: expected 0 < beta < 1, a number of Python's, got {got}")
    check_bytes("memory_budget", memory_budget)


def check_bytes(name: str, size: float | None) -> None:
    """Raise OptionError for a size that is no positive number of bytes; None leaves it to who asks."""
    number = is_number(size) and not isinstance(size, bool)
    if size is not None and not (number and 1 <= size < math.inf):
        raise OptionError(f"{name}: expected a positive number of bytes or None, got {size!r}")


def check_ignore_index(ignore_index: int, bits: int = 64) -> None:
    """Raise OptionError for an ignore_index that no label can be."""
    most, number = 2 ** (bits - 1), isinstance(ignore_index, Integral) and not isinstance(ignore_index, bool)
    if not number or not -most <= ignore_index < most:
        raise OptionError(f"ignore_index: expected an integer of {bits} bits, got {ignore_index!r}")


def is_number(x: object) -> TypeGuard[float]:
    """Whether x is one: no array, nor a whole number that no float holds, which is less than infinity all the same."""
    return not (isinstance(x, int) and abs(x) > sys.float_info.max) and isinstance(x, Real)


def is_in_float32(x: object) -> TypeGuard[float]:
    """Whether x is a number that is finite in float32, too."""
    return is_number(x) and abs(float(x)) <= MOST_FLOAT


def _holds_number(x: object) -> bool:
    """Whether x is one, or an array that holds one: not a word of NumPy's, nor a tensor on meta."""
    if isinstance(x, Real):  # which torch.compile's own numbers are, that can be asked nothing else
        return is_number(x)
    if isinstance(x, str) or getattr(getattr(x, "dtype", None), "kind", "f") not in "biuf":
        return False
    return hasattr(x, "__float__") and not getattr(x, "is_meta", False) and math.prod(getattr(x, "shape", ())) == 1


def _python(x: Any) -> Any:
    """The number that x is or holds; as Python's where it is not, as NumPy's narrow ones have other ends."""
    return x if isinstance(x, int | float) or not hasattr(x, "item") else x.item()


def _shown(x: object) -> str:
    """What errors say that they got: of an array that holds several numbers its shape."""
    shape = getattr(x, "shape", ())
    return f"shape {tuple(shape)}" if math.prod(shape) != 1 else repr(x)


def check_reduction(reduction: str) -> None:
    """Raise OptionError for a reduction that does not exist."""
    if not isinstance(reduction, str) or reduction not in ("mean", "sum", "none"):
        raise OptionError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")


def check_cross_entropy(label_smoothing: float, z_loss: float) -> None:
    """Raise OptionError for a weight of cross-entropy's extra terms that means nothing."""
    if not _holds_number(label_smoothing) or not 0 <= label_smoothing <= 1:
        raise OptionError(f"label_smoothing: expected a number in 0..1, got {_shown(label_smoothing)}")
    if not _holds_number(z_loss) or not 0 <= _python(z_loss) <= MOST_FLOAT:
        raise OptionError(f"z_loss: expected a weight of 0 or more, finite in float32, got {_shown(z_loss)}")
