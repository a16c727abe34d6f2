"""A plot and a Markdown table from a result file: `python -m bench.plot FILE [--png OUT.png] [--full]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cases import CASES
from bench.harness import read_lines
from bench.peers import shown
from bench.ratios import add_ratios, fastest_floor

Record = dict[str, Any]
COLOURS = {"ours": "#1f6feb", "floor": "#b6bec9", "peer": "#e0a458"}
CLIP = 4.0  # times the fastest bare GEMMs: bars beyond it are cut, their numbers stay


def by_case(records: list[Record]) -> dict[str, list[Record]]:
    """The results of each case, with their ratios: what these divide by is said here, not by a file's own columns."""
    results = [r for r in records if r["kind"] == "result"]
    cases = {name: found for name in CASES if (found := [r for r in results if r["case"] == name])}
    for found in cases.values():
        add_ratios(found)
    return cases


def _best_peer(records: list[Record]) -> Record | None:
    peers = [r for r in records if r["method_kind"] == "peer" and r["method"] != "torch" and r["status"] == "ok"]
    return min(peers, key=lambda r: r["least_s"], default=None)


def _cell(record: Record | None) -> str:
    if record is None:
        return "–"
    if record["status"] != "ok":
        return record["status"]
    return f"{record['to_bare']:.2f} × / {record['peak_mb']:,.0f} MB"


def summary_table(records: list[Record]) -> str:
    """One row a case, in the README: times the fastest bare GEMMs / peak memory above the inputs; dense is torch's.

    logitless: by the backend that a call takes unasked; beside it with the larger budget, where that was measured.
    """
    lines = [
        "| work | fastest bare GEMMs | logitless | with 1 GiB | dense | fastest other |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in by_case(records).items():
        of = {r["method"]: r for r in found}
        best, bare = _best_peer(found), fastest_floor(found)
        floor = "–" if bare is None else f"{bare['least_s']:.2f} s"
        other = f"{shown(best['method'])}: {_cell(best)}" if best else "–"
        ours = _cell(of.get("logitless, compiled"))
        roomy = _cell(of.get("logitless, compiled, 1 GiB"))
        cells = CASES[name].title, floor, f"**{ours}**", roomy, _cell(of.get("torch")), other
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def full_table(records: list[Record]) -> str:
    """Every method of every case, with spreads, errors and targets."""
    lines = []
    for name, found in by_case(records).items():
        case = CASES[name]
        memory = f"{found[0]['gradient_mb'] + case.memory_limit:.0f} MB"
        limits = f"{case.time_limit:.2f} × the fastest bare GEMMs, {memory}"
        limits += f", {case.dense_limit:.2f} × dense" if case.dense_limit else ""
        busy = max((share for r in found for share in r.get("others", ())), default=0.0)
        lines += [
            f"**{case.title}** (to reach: {limits}; other processes took up to {busy:.0%} of the machine)\n",
            "| method | least s (most) | × fastest bare (of a round) | × dense | peak MB | kept MB | error |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_full_row(record) for record in sorted(found, key=lambda r: r.get("least_s", 1e9))]
        lines.append("")
    return "\n".join(lines)


def _full_row(r: Record) -> str:
    if r["status"] != "ok":
        return f"| {shown(r['method'])} | {r['status']}: {r['reason']} | | | | | |"
    most = "one round" if len(r["seconds"]) == 1 else f"{r['most_s']:.3f}"
    times = f"{r['least_s']:.3f} ({most})"
    bare = f"{r['to_bare']:.3f} ({r['to_bare_spread'][0]:.3f}-{r['to_bare_spread'][1]:.3f})"
    dense = f"{r['to_torch']:.3f}" if "to_torch" in r else "–"
    error = f"{max(r['errors'].values()):.0e}" if "errors" in r else "–"
    return f"| {shown(r['method'])} | {times} | {bare} | {dense} | {r['peak_mb']:.0f} | {r['kept_mb']:.0f} | {error} |"


def caption(records: list[Record]) -> str:
    env, shape = records[0], next(r["shape"] for r in records if r["kind"] == "result")
    return (
        f"{env['cpu']}, {env['threads']} threads, torch {env['versions']['torch']}, fp32, "
        f"N={shape[0]:,} H={shape[1]:,} V={shape[2]:,}, {env['date'][:10]}"
    )


def draw(records: list[Record], path: Path) -> None:
    """A row of two panels a case: time over the fastest bare GEMMs', and peak memory above the inputs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = {
        name: [r for r in found if r["status"] == "ok" and r["method_kind"] != "floor"]
        for name, found in by_case(records).items()
    }
    heights = [len(found) + 1.6 for found in cases.values()]
    figure, axes = plt.subplots(
        len(cases),
        2,
        figsize=(10, 0.24 * sum(heights) + 0.7),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for (name, found), (time_axis, memory_axis) in zip(cases.items(), axes, strict=True):
        found.sort(key=lambda r: r["to_bare"], reverse=True)
        colours = [COLOURS[r["method_kind"]] for r in found]
        labels = [shown(r["method"]) for r in found]
        ratios = [r["to_bare"] for r in found]
        bars = time_axis.barh(labels, [min(x, CLIP) for x in ratios], color=colours, height=0.72)
        time_axis.axvline(1.0, color=plt.rcParams["text.color"], linewidth=1, linestyle=(0, (4, 3)))
        numbers = time_axis.bar_label(bars, [f"{x:.2f} ×" for x in ratios], padding=4, fontsize=8)
        for number in numbers:
            number.set_bbox({"facecolor": plt.rcParams["axes.facecolor"], "edgecolor": "none", "pad": 0.8})
        time_axis.set_xlim(0, CLIP * 1.12)
        time_axis.set_title(CASES[name].title, loc="left", fontsize=9.5, fontweight="bold")
        peaks = [max(r["peak_mb"], 1.0) for r in found]
        bars = memory_axis.barh(labels, peaks, color=colours, height=0.72)
        memory_axis.bar_label(bars, [f"{x:,.0f} MB" for x in peaks], padding=3, fontsize=8)
        memory_axis.set_xscale("log")
        memory_axis.set_xlim(4, 40_000)
        memory_axis.set_yticklabels([])
        for axis in (time_axis, memory_axis):
            axis.tick_params(labelsize=8, length=0)
            axis.spines[["top", "right", "left"]].set_visible(False)
            axis.spines["bottom"].set_color(plt.rcParams["grid.color"])
    axes[-1][0].set_xlabel("time, × the fastest bare GEMMs (dashed)", fontsize=8.5)
    axes[-1][1].set_xlabel("peak memory above the inputs, MB", fontsize=8.5)
    figure.suptitle(caption(records), fontsize=8.5)
    figure.savefig(path, dpi=160)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--png", type=Path, help="draw the plot there")
    parser.add_argument("--full", action="store_true", help="every method instead of one row a case")
    options = parser.parse_args(arguments)
    if not options.file.is_file():
        parser.error(f"{options.file}: no such file")
    records = read_lines(options.file)
    print(full_table(records) if options.full else summary_table(records))
    print(f"\n{caption(records)}")
    if options.png:
        draw(records, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
