"""How time and memory grow with each size: bench/results/scaling.jsonl as a page."""

import math
from typing import Any

from bench.cases import CASES
from docs.tables.shared import grid

Record = dict[str, Any]
NAMES = {"vocab": "entries", "tokens": "tokens", "hidden": "width", "threads": "threads"}
FULL = 24e9  # bytes of a machine


def scaling(records: list[Record]) -> str:
    """A table for each piece of work, and from which size on a method does not fit."""
    rows = [r for r in records if r["kind"] == "scaling"]
    parts = []
    for case in dict.fromkeys(r["case"] for r in rows):
        some = [r for r in rows if r["case"] == case]
        names = [name for name in some[0]["methods"] if name != "bare"]
        head = ["varied", "N, H, V", "threads", "bare", *names]
        title = CASES[case].title
        parts.append(
            f"**{title[0].upper()}{title[1:]}**\n\n{grid(head, [_row(r, names) for r in some])}"
        )
        parts.append(f"{_growth(some, names)} {_limits(some, names)}")
    env = records[0]
    busy = max(r["others"] for r in rows)
    kept = f"used again ({env['allocator']})" if env.get("allocator") else "given back"
    parts.append(
        f"`bare`: seconds of the fastest bare products. The others: times that, and the peak above the inputs. Least "
        f"of {env['rounds']} rounds; freed memory is {kept}. "
        f"{env['cpu']}, torch {env['versions']['torch']}, {env['date'][:10]}; other processes took up to {busy:.0%} "
        "of the machine."
    )
    return "\n\n".join(parts)


def _row(r: Record, names: list[str]) -> list[str]:
    bare, of = r["methods"]["bare"]["seconds"], r["methods"]
    cells = [f"{of[n]['seconds'] / bare:.2f} × / {of[n]['peak_mb']:,.0f} MB" for n in names]
    sizes = ", ".join(f"{size:,}" for size in r["shape"])
    return [NAMES[r["sweep"]], sizes, str(r["threads"]), f"{_seconds(bare)}", *cells]


def _seconds(x: float) -> str:
    return f"{x:.2f} s" if x >= 0.1 else f"{1e3 * x:.2f} ms"


def _growth(rows: list[Record], names: list[str]) -> str:
    """How time grows over the last three sizes of each sweep."""
    lines = []
    for sweep in ("vocab", "tokens", "hidden"):
        ends = [r for r in rows if r["sweep"] == sweep][-3::2]
        size = math.log(math.prod(ends[1]["shape"]) / math.prod(ends[0]["shape"]))
        powers = ", ".join(
            f"{n} {math.log(ends[1]['methods'][n]['seconds'] / ends[0]['methods'][n]['seconds']) / size:.1f}"
            for n in ("bare", *names)
        )
        lines.append(f"{NAMES[sweep]}: {powers}")
    return f"Time grows over the last three sizes with the power ({'; '.join(lines)})."


def _limits(rows: list[Record], names: list[str]) -> str:
    """The size of each sweep at which inputs and peak fill a machine, as both grow over its last two sizes."""
    lines = []
    for at, sweep in enumerate(("tokens", "hidden", "vocab")):
        last = [r for r in rows if r["sweep"] == sweep][-2:]
        fixed = ", ".join(
            f"{k}={n:,}"
            for i, (k, n) in enumerate(zip("NHV", last[1]["shape"], strict=True))
            if i != at
        )
        sizes = ", ".join(f"{name} {_size_that_fills(last, name, at):,}" for name in names)
        lines.append(f"{NAMES[sweep]} at {fixed}: {sizes}")
    return f"Inputs and peak together fill 24 GB from here on: {'; '.join(lines)}."


def _size_that_fills(last: list[Record], name: str, at: int) -> int:
    """To two digits."""
    before, after = (_held(r, name) for r in last)
    (low, high) = (r["shape"][at] for r in last)
    size = high + (FULL - after) * (high - low) / (after - before)
    digits = 10 ** max(0, int(math.log10(size)) - 1)
    return round(size / digits) * digits


def _held(r: Record, name: str) -> float:
    """Bytes of hidden states, weight, and what a step allocates beside them."""
    tokens, hidden, vocab = r["shape"]
    return 4 * hidden * (tokens + vocab) + 1e6 * r["methods"][name]["peak_mb"]
