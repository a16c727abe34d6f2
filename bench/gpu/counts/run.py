"""Counts every call and writes a result file: `python -m bench.gpu.counts.run [--calls loss,values] [--out FILE]`."""

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from bench.gpu.counts.calls import CALLS
from bench.gpu.counts.count import Seen, counted
from bench.gpu.counts.machine import COUNTED_ROWS, MOVED, TILES, Machine, with_measured
from bench.gpu.counts.show import kernels_table, times_table
from bench.harness import environment, write_line

OUT = Path("bench/results/gpu_counts.jsonl")
MEASURED = Path("bench/results/gpu.jsonl")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.counts.run", description=__doc__)
    parser.add_argument("--calls", default=",".join(CALLS), help="comma-separated, of: %(default)s")
    parser.add_argument("--capabilities", default="90,80,100", help="compiled for; times are of the first")
    parser.add_argument("--out", type=Path, help="written anew; nothing is written without it")
    options = parser.parse_args(arguments)
    names = options.calls.split(",")
    if unknown := [name for name in names if name not in CALLS]:
        parser.error(f"unknown call {unknown[0]!r}; choose from {', '.join(CALLS)}")
    machine = with_measured(Machine(), MEASURED)
    capabilities = [int(x) for x in options.capabilities.split(",")]
    records = []
    for capability in capabilities:
        seen, counts = Seen(), []
        for name in names:
            counts.append(counted(CALLS[name], machine, seen, capability))
            print(f"sm_{capability} {name}: {len(seen.kernels)} kernels compiled", flush=True)
        records += counts if capability == capabilities[0] else []
        records += seen.records(capability)
    assumed = {"moved": MOVED, "counted_rows": COUNTED_ROWS, "tiles": TILES}
    found = [environment(), {"kind": "gpu-machine", **asdict(machine), **assumed}, *records]
    print(times_table(found), kernels_table(found), sep="\n\n")
    if options.out is not None:
        part = options.out.with_name(f"{options.out.name}.part")
        part.unlink(missing_ok=True)
        for record in found:
            write_line(part, record)
        os.replace(part, options.out)
        print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
