"""What a GPU has taken, from `bench/results/gpu.jsonl` and its profile, and what it is asked for by count."""

import math
from typing import Any

from bench.gpu.counts import show
from bench.gpu.rows import IN_A_GRAPH
from bench.gpu.run import by_row, worst_errors
from bench.harness import read_lines
from docs.tables.shared import RESULTS, grid

Record = dict[str, Any]
PROFILE = RESULTS / "gpu_profile.jsonl"
NOT_HERE = (
    "logitless, weights",
    "logitless, eager",
)  # the first what `logitless` is here already, the other no way


def measured(records: list[Record]) -> str:
    """Each row of the benchmark: medians in milliseconds, and the ratio to bare products that took turns with them."""
    rows = [_row(row) for row in by_row([r for r in records if r["kind"] == "gpu-result"])]
    head = ["work", "shape", "bare", "logitless", "ratio", "in turn", "goal", "MB", "errors"]
    return f"{grid(head, rows)}\n\n{_machine(records)}"


def _row(row: dict[str, Record]) -> list[str]:
    first, ours = next(iter(row.values())), row["ours"]
    bare = min(r.get("median_s", math.inf) for r in row.values() if r["method_kind"] == "floor")
    start = [first["title"], _shape(first), _ms(bare)]
    if ours["status"] != "ok":
        return [*start, "not timed", "", "", "", "", ""]
    goal = "–" if ours["time_limit"] is None else f"{ours['time_limit']:.2f} ×"
    graph = " in a graph" if ours["method"] == IN_A_GRAPH else ""
    ratio, turn = f"{ours['median_s'] / bare:.2f} ×", f"{ours['to_bare']:.2f} ×"
    return [
        *start,
        f"**{_ms(ours['median_s'])}**{graph}",
        ratio,
        turn,
        goal,
        f"{ours['peak_mb']:,.0f}",
        worst_errors(ours),
    ]


def others(records: list[Record]) -> str:
    """What ran beside it, and other settings of its own: milliseconds, megabytes above inputs, errors."""
    rows = []
    for row in by_row([r for r in records if r["kind"] == "gpu-result"]):
        first, ours = next(iter(row.values())), row.pop("ours")
        for name, r in row.items():
            if (
                r["status"] == "ok"
                and r["method_kind"] != "floor"
                and r["method"] not in (ours["method"], *NOT_HERE)
            ):
                work = f"{first['title']}, {_shape(first)}"
                rows.append(
                    [work, name, _ms(r["median_s"]), f"{r['peak_mb']:,.0f}", worst_errors(r)]
                )
    return grid(["work", "method", "ms", "MB", "errors"], rows)


def _shape(record: Record) -> str:
    return " x ".join(f"{x:,}" for x in record["shape"])


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _machine(records: list[Record]) -> str:
    about, device = records[0], next(r for r in records if r["kind"] == "gpu-device")
    versions = ", ".join(
        f"{name} {about['versions'][name]}" for name in ("torch", "triton", "liger-kernel")
    )
    driver = about["driver_clocks_power"].partition(",")[0]
    return (
        f"{about['gpu']}, driver {driver}, CUDA {about['cuda']}, {versions}, {about['date'][:10]}. A copy moves "
        f"{device['bandwidth'] / 1e12:.2f} TB/s, bf16 products take {device['rate'] / 1e12:.0f} TFLOP/s, those of the "
        f"library's own kernel {device['rate_own'] / 1e12:.0f}, while the processors run at "
        f"{device['clock'] / 1e9:.2f} GHz."
    )


def counts(records: list[Record]) -> str:
    """Predicted times against goals, what they are made of, and the kernels' machine code."""
    return "\n\n".join(
        [
            "## Predicted times",
            show.times_table(records),
            show.machine_line(records),
            "## Beside what was measured",
            beside(records),
            "## What they are made of",
            show.parts_table(records),
            "## Launches and waits",
            show.launches_table(records),
            "## Products",
            show.products_table(records),
            "## Bytes",
            show.bytes_table(records),
            "## Kernels",
            show.kernels_table(records),
        ]
    )


def beside(records: list[Record]) -> str:
    """Each call that was profiled: predicted, measured, and its kernels alone, the longest of them named."""
    predicted = {r["call"]: r["seconds"]["all"] for r in show.counts_of(records)}
    found = [r for r in read_lines(PROFILE) if r.get("status") == "ok" and r["call"] in predicted]
    rows = [
        [
            f"`{r['call']}`",
            _ms(predicted[r["call"]]),
            _ms(r["seconds"]),
            _ms(r["busy"]),
            "; ".join(f"{_short(k['name'])} {_ms(k['seconds'])}" for k in r["kernels"][:4]),
        ]
        for r in sorted(found, key=lambda r: list(predicted).index(r["call"]))
    ]
    return grid(["call", "predicted, ms", "measured", "its kernels", "of these the longest"], rows)


def _short(name: str) -> str:
    """A kernel's name without its template: `nvjet` and `cutlass` are the matrix library's products."""
    name = name.removeprefix("void ").partition("<")[0].rpartition("::")[2]
    return (
        "product" if name.startswith(("nvjet", "cutlass", "Kernel2", "sm90_xmma")) else f"`{name}`"
    )
