"""Numbers for people: bytes, GiB (2^30) and GB (10^9) kept apart and always named; counts; a perplexity."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from .errors import OptionError

LARGEST = 2**63 - 1  # what torch and every file format can count
UNITS = {  # name, bytes, whether hundredths are shown; none above what a GPU's memory is given in
    "GiB": (("GiB", 1 << 30, True), ("MiB", 1 << 20, False), ("KiB", 1 << 10, False)),
    "GB": (("GB", 10**9, True), ("MB", 10**6, False), ("kB", 10**3, False)),
}
MATTERS = 200  # a size of less than this part of the largest does not choose a table's unit
_FACTORS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(text: str | int, option: str = "size", least: int = 1) -> int:
    """ "256MiB", "10 GB", "1e9" or a number of bytes -> bytes; OptionError for anything else, or less than `least`."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    try:
        if match is None:
            raise ValueError
        size = float(match[1]) * _FACTORS[match[2].lower()]
    except (KeyError, ValueError):
        raise OptionError(f"{option} must be a size such as 256MiB or 10GB, got {text!r}") from None
    if size > LARGEST:  # infinity too
        raise OptionError(f"{option} must be less than 2^63 bytes, got {text!r}")
    if int(size) < least:
        wanted = "more than 0 bytes" if least == 1 else f"{least} bytes or more"
        raise OptionError(f"{option} must be {wanted}, got {text!r}")
    return int(size)


def plural(count: int, what: str) -> str:
    """ "1 row", "4,096 rows", "2 passes"."""
    ending = "" if count == 1 else "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{ending}"


def format_parameters(count: int) -> str:
    """ "134.5 M parameters", of less than a million all digits."""
    return f"{count / 1e6:.1f} M parameters" if count >= 1e6 else plural(count, "parameter")


def perplexity(nats_per_token: float) -> float:
    """Its exponential, cut off where a double still holds it."""
    return math.exp(min(nats_per_token, 700.0))


def format_perplexity(value: float) -> str:
    """A perplexity of any size: "1,234.56", or "1.235e+09" where it is of more digits than can be read."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.4g}"


def one_unit(counts: Iterable[int], units: str = "GiB") -> Callable[[int], str]:
    """`format_bytes` in one unit, for all cells of a table and the sentences about them.

    The unit is the largest of which the largest of `counts` has one, and the smallest that matters a tenth.
    """
    sizes = [abs(count) for count in counts]
    most = max(sizes, default=0)
    least = min((size for size in sizes if size and MATTERS * size >= most), default=0)
    fitting = (row for row in UNITS[units] if row[1] <= min(most, 10 * least))
    name, unit, hundredths = next(fitting, ("B", 1, False))
    parts = 100 if hundredths or (unit > 1 and least < 10 * unit) else 1

    def shown(count: int) -> str:
        whole, rest = divmod((2 * parts * abs(count) + unit) // (2 * unit), parts)
        sign = "-" if count < 0 else ""
        if count and not whole and not rest:
            return f"{sign}<{'1' if parts == 1 else '0.01'} {name}"
        return f"{sign}{whole:,}{'' if parts == 1 or not count else f'.{rest:02d}'} {name}"

    return shown


def format_bytes(count: float, units: str = "GiB") -> str:
    """ "37.09 GiB", or "39.83 GB" for `units="GB"`; in whole numbers, so that a page computes the same text."""
    whole = abs(int(count))
    sign = "-" if count < 0 else ""
    for name, size, hundredths in UNITS[units]:
        if whole >= size and hundredths:
            shown = (200 * whole + size) // (2 * size)
            return f"{sign}{shown // 100:,}.{shown % 100:02d} {name}"
        if whole >= size:
            return f"{sign}{(2 * whole + size) // (2 * size)} {name}"
    return f"{sign}{whole} B"
