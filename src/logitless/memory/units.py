"""Bytes for people: GiB (2^30) and GB (10^9) kept apart, always named."""

from __future__ import annotations

UNITS = {
    "GiB": (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)),
    "GB": (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)),
}


def human(nbytes: int, units: str = "GiB") -> str:
    """ "37.09 GiB", or "39.83 GB" for `units="GB"`."""
    sign = "-" if nbytes < 0 else ""
    for name, size in UNITS[units]:
        if abs(nbytes) >= size:
            value = abs(nbytes) / size
            return f"{sign}{value:,.2f} {name}" if name[0] in "TG" else f"{sign}{value:.0f} {name}"
    return f"{nbytes} B"
