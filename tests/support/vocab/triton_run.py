"""The Triton backend's tests without pytest: on a GPU as they are, on a CPU under Triton's interpreter.

    python -m tests.support.vocab.triton_run [--device cuda] [NAME ...]

A name is as pytest has it, `test_draws.py::test_drawn[top-k]`, or a part of one. On a CPU set TRITON_INTERPRET=1.
"""

import argparse
import json
import sys
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from tests.support.allocations import poison
from tests.support.plain import cases_of
from tests.support.vocab.triton_seen import Options

FOLDER = Path(__file__).parents[2] / "vocab/backends/triton/on_device"
Cases = dict[str, Callable[..., None]]  # each takes the device


def collected(folder: Path) -> Cases:
    """Each case in the folder's files by its name; a file that cannot be imported is one case, which fails."""
    found: Cases = {}
    for path in sorted(folder.glob("test_*.py")):
        spec = spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # reported as this file's result: the other files' cases run
            found[path.name] = partial(raises, error)
            continue
        tests = {name: x for name, x in vars(module).items() if name.startswith("test_")}
        for name, test in tests.items():
            for case in cases_of(test):
                label = f"[{case.label}]" if case.label else ""
                found[f"{path.name}::{name}{label}"] = partial(test, **case.arguments)
    return found


def raises(error: Exception, device: str) -> None:
    """The case of a file that cannot be imported."""
    raise error


def outcome(case: Callable[..., None], device: str) -> tuple[str, str]:
    """'ok', 'skipped', 'FAILED' or 'BROKE', which is after it no kernel runs in this process; and why."""
    torch.manual_seed(0)
    try:
        case(device=device)
        wait_for(device)
    except unittest.SkipTest as reason:
        return "skipped", str(reason)
    except Exception:  # reported as this case's result
        why = traceback.format_exc()
        try:
            wait_for(device)
        except RuntimeError:
            return "BROKE", why
        return "FAILED", why
    return "ok", ""


def wait_for(device: str) -> None:
    """Until what a case has launched has run; raises where that has gone wrong."""
    if device == "cuda":
        torch.cuda.synchronize()


def run_cases(cases: Cases, device: str, seconds: float, report: Path | None = None) -> tuple[int, int]:
    """How many began within the seconds, and failed; each is in the report before it begins, for it may not end."""
    ended = failed = 0
    start = time.perf_counter()
    note(report, names=list(cases))
    for name, case in cases.items():
        begin = time.perf_counter()
        if begin - start > seconds:
            break
        note(report, begun=name)
        how, why = outcome(case, device)
        took = time.perf_counter() - begin
        error = why[-2000:] if how in ("FAILED", "BROKE") else ""
        note(report, ended=name, seconds=round(took, 2), error=error, skipped=why if how == "skipped" else "")
        ended, failed = ended + 1, failed + bool(error)
        print(f"{how:7} {took:6.2f} s  {name}", flush=True)
        if why:
            print(why, flush=True)
        if how == "BROKE":  # every later case would fail for it, right or not
            break
    return ended, failed


def note(report: Path | None, **line: Any) -> None:
    """One write, as several processes may share the report."""
    if report is not None:
        with report.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.vocab.triton_run", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all cases unless given")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after these")
    parser.add_argument("--share", default="0/1", help="every k-th case, as in 1/4")
    parser.add_argument("--report", type=Path, help="JSON lines: the names, each case as it begins and as it ends")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, of -inf - -inf in interpreted kernels
    poison()
    first, step = map(int, options.share.split("/"))
    cases, seen = collected(options.folder), Options()
    chosen = [name for name in cases if not options.names or any(part in name for part in options.names)][first::step]
    with seen.watch() if options.report is not None and options.device == "cpu" else nullcontext():
        ended, failed = run_cases({x: cases[x] for x in chosen}, options.device, options.seconds, options.report)
    note(options.report, kernels=sorted(seen.seen), one_sided=seen.one_sided())
    print(f"{failed} failed, {len(chosen) - ended} not run of {len(chosen)} on {options.device}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
