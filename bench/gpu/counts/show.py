"""Tables of a result file of counts, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
SHOWN = 2  # calls that are named beside a kernel
LONGEST = 4  # products that are named of a call


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def counts_of(records: list[Record]) -> list[Record]:
    return [r for r in records if r["kind"] == "gpu-count"]


def times_table(records: list[Record]) -> str:
    """Each call's predicted time beside its floor's and its goal; bold is what misses it."""
    rows = []
    for r in counts_of(records):
        seconds, bare, graph = r["seconds"]["all"], r["bare_seconds"], r["graph"]
        rows.append(
            [
                r["title"],
                f"`{r['call']}`",
                " x ".join(f"{x:,}" for x in r["shape"]),
                "–" if bare is None else f"{_ms(bare)} {r['bare'].removeprefix('bare GEMMs, ')}",
                f"**{_ms(seconds)}**" if r["rival"] is not None and seconds >= r["rival"] else _ms(seconds),
                _ratio(seconds, bare, None if r["replayed"] else r["goal"]),
                "–" if graph is None else _ms(graph["seconds"]),
                "–" if graph is None else _ratio(graph["seconds"], bare, r["goal"]),
                _goal(r),
            ]
        )
    head = ["work", "call", "shape", "floor", "predicted", "ratio", "in a graph", "ratio", "goal"]
    return grid(head, rows)


def _goal(r: Record) -> str:
    if r["goal"] is None:
        return "–"
    faster = "" if r["rival"] is None else f", faster than QuACK's {_ms(r['rival'])}"
    return f"{r['goal']:.2f} ×{' in a graph' if r['replayed'] else ''}{faster}"


def _ratio(seconds: float, bare: float | None, goal: float | None) -> str:
    if bare is None:
        return "–"
    text = f"{seconds / bare:.2f} ×"
    return f"**{text}**" if goal is not None and seconds / bare > goal else text


def parts_table(records: list[Record]) -> str:
    """What a call's predicted time is made of; small is whatever takes no longer than its launch."""
    kinds = ("products", "kernels", "operators", "small", "waits")
    rows = [[f"`{r['call']}`", *(_ms(r["seconds"][kind]) for kind in kinds)] for r in counts_of(records)]
    return grid(["call", *kinds], rows)


def launches_table(records: list[Record]) -> str:
    """What the host does for a call: launches, waits, kernels to compile, and those that only a CUDA graph needs."""
    rows = [
        [
            f"`{r['call']}`",
            str(r["launches"]),
            str(len(r["waits"])),
            str(r["waits_before_products"]),
            str(r["specialisations"]),
            "–" if r["graph"] is None else str(r["graph"]["launches"]),
            _first(r),
            f"{r['converted_mb']:,.0f} MB",
        ]
        for r in counts_of(records)
    ]
    head = ["call", "launches", "waits", "before a product", "kernels", "in a graph", "first in a graph", "converted"]
    return grid(head, rows)


def _first(r: Record) -> str:
    if r["first_in_capture"] is None:
        return "–"
    rows = r["first_with_rows"] or {}
    more = "".join(f", {len(names)} of {name} rows" for name, names in rows.items() if names)
    return f"{len(r['first_in_capture'])}{more}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def products_table(records: list[Record]) -> str:
    """The products of each call, those that take longest: tiles, waves and how full these are."""
    rows = []
    for r in counts_of(records):
        for p in sorted(r["products"], key=lambda p: -p["many"] * p["seconds"])[:LONGEST]:
            shape = " x ".join(f"{x:,}" for x in p["shape"])
            rows.append(
                [
                    f"`{r['call']}`",
                    f"{p['many']} x ({shape})" + (", added" if p["adds"] else ""),
                    f"{p['tiles']:,}",
                    f"{p['waves']:,}",
                    f"{100 * p['full']:.0f} %",
                    _ms(p["many"] * p["seconds"]),
                ]
            )
    return grid(["call", "product", "tiles", "waves", "full", "predicted"], rows)


def bytes_table(records: list[Record]) -> str:
    """Bytes that each call moves: from and to memory by who moves them, and by products through the cache."""
    kinds = ("products", "kernels", "operators", "through the cache")
    rows = [[f"`{r['call']}`", *(f"{r['bytes'][k] / 1e9:,.2f} GB" for k in kinds)] for r in counts_of(records)]
    return grid(["call", *kinds], rows)


def kernels_table(records: list[Record]) -> str:
    """Every kernel, for each device that it was compiled for."""
    found = [r for r in records if r["kind"] == "gpu-kernel"]
    first = found[0]["capability"]
    rows = [_kernel_row(r, found) for r in found if r["capability"] == first]
    head = [
        "kernel", "switches", "calls", "warps", "registers", "spills", "programs a processor", "instructions an entry",
        "of these at half rate", "barriers a block", "loads", "stores",
    ]  # fmt: skip
    return grid(head, rows)


def _kernel_row(r: Record, every: list[Record]) -> list[str]:
    alike = [x for x in every if x["kernel"] == r["kernel"] and x["switches"] == r["switches"]]
    shared = sorted(alike, key=lambda x: len(set(x["calls"]) & set(r["calls"])))
    by_device = {x["capability"]: x for x in shared if set(x["calls"]) & set(r["calls"])}  # the last, with the most
    devices = [by_device.get(capability, {}) for capability in dict.fromkeys(x["capability"] for x in every)]
    loop = r["loop"]
    return [
        f"`{r['kernel']}`",
        " ".join(f"{name}={x}" if x is not True else name for name, x in r["switches"].items()),
        ", ".join(r["calls"][:SHOWN]) + (f" and {len(r['calls']) - SHOWN} more" if len(r["calls"]) > SHOWN else ""),
        str(r["warps"]),
        " / ".join(str(x.get("registers", "–")) for x in devices),
        " / ".join(str(x.get("spills", "–")) for x in devices),
        str(r["per_processor"]),
        *(("–",) * 3 if loop is None else _loop_cells(r, loop)),
        _widths(r["loads"]),
        _widths(r["stores"]),
    ]


def _loop_cells(r: Record, loop: Record) -> tuple[str, str, str]:
    return f"{r['instructions']:.1f}", f"{loop['half_rate'] / r['entries']:.1f}", str(loop["barriers"])


def _widths(found: dict[str, int]) -> str:
    return ", ".join(f"{bits}: {many}" for bits, many in found.items()) or "–"


def machine_line(records: list[Record]) -> str:
    """The constants of the predictions, and who counted."""
    m = next(r for r in records if r["kind"] == "gpu-machine")
    versions = records[0]["versions"]
    own = "Of these all but the two shares are measured." if m["measured"] else "None of these is measured here."
    least, *_, most = sorted(share for *_, share in m["tiles"] if share < 1)
    assumed = (
        f"Assumed besides: smaller tiles of a product at {100 * least:.0f} to {100 * most:.0f} % of its rate, "
        f"{m['barrier']:g} cycles a barrier and {m['read']:g} a read of memory for which a program waits, "
        f"{1e6 * m['ends']:.2g} µs for one that ends at once, {100 * m['moved']:.0f} % of rows whose sums a slice "
        f"rescales, {100 * m['counted_rows']:.0f} % whose token's rank a draw has to count."
    )
    return (
        f"Predicted for one {m['name']}: {m['processors']} processors at {m['clock'] / 1e9:g} GHz, products at "
        f"{m['rate'] / 1e12:.0f} TFLOP/s in whole waves ({m['rate_tf32'] / 1e12:.0f} in TF32, "
        f"{m['rate_own'] / 1e12:.0f} in a kernel of Triton's) with {100 * m['shown']:.0f} % of what they write or add "
        f"to not hidden, memory at {m['bandwidth'] / 1e12:.3g} TB/s, {100 * m['issued']:.0f} % of the instructions "
        f"that a processor could issue, {1e6 * m['launch']:.2g} µs a launch at least "
        f"({1e6 * m['launch_in_graph']:.2g} in a CUDA graph), {1e6 * m['wait']:.2g} µs for each time the host waits. "
        f"{own} {assumed} "
        f"Compiled with Triton {versions['triton']}, torch {versions['torch']}, {records[0]['date'][:10]}."
    )
