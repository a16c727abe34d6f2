"""Sizes in bytes: "256MiB" <-> 268435456."""

from __future__ import annotations

import re

from ..errors import OptionError

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(text: str | int, option: str = "size") -> int:
    """ "256MiB", "10 GB", "1e9" or a number of bytes -> bytes; OptionError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    try:
        if match is None:
            raise ValueError
        count = int(float(match[1]) * _UNITS[match[2].lower()])
    except (KeyError, ValueError):
        raise OptionError(f"{option} must be a size such as 256MiB or 10GB, got {text!r}") from None
    if count <= 0:
        raise OptionError(f"{option} must be more than 0 bytes, got {text!r}")
    return count


def format_bytes(count: float) -> str:
    """Bytes for people: 1.50 GiB, 64 MiB, 512 KiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            digits = 2 if unit in ("GiB", "TiB") else 0
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} B"
