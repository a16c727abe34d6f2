"""Runs in processes of their own that are killed: in the middle of writing a file, or at any moment."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from logitless.workbench.align.run import run as align
from logitless.workbench.common.files import read_lines
from logitless.workbench.common.lock import acquire
from logitless.workbench.common.written import RUN_FILE
from logitless.workbench.evaluation.config import EvalConfig
from logitless.workbench.evaluation.run import run as evaluate
from logitless.workbench.grade.run import run as compare
from logitless.workbench.runs.rundir import stored
from logitless.workbench.scoring import block, documents, parts
from logitless.workbench.scoring.config import ScoreConfig
from logitless.workbench.scoring.run import run
from logitless.workbench.sft import run as sft
from tests.support.forked import FORKED, begin

TIMES = {"seconds", "tokens_per_second", "peak_memory_bytes", "step_time", "memory/peak_bytes", "held_out"}
RUNS = {"train": sft.run, "align": align, "compare": compare, "score": run, "eval": evaluate}


def killed(after: int | str, config: ScoreConfig | EvalConfig) -> int:
    """The exit status of a run that ends after so many parts, or in the "merge"; "never": at its end."""
    return _ended(_run, after, config)[0]


def killed_after(seconds: float, command: str, config: Any) -> int:
    """The exit status of a command's run that is killed so long after it has begun, if it does not end before."""
    return _ended(_begin, command, config, after=seconds)[0]


def undisturbed(command: str, config: Any) -> float:
    """The seconds of a command's run, from the moment on from which `killed_after` counts."""
    status, seconds = _ended(_begin, command, config)
    assert status == 0
    return seconds


@contextmanager
def locked_by_another(place: Path) -> Iterator[int]:
    """The id of a process that has the lock of a directory while this lasts; it ends by a kill."""
    held = FORKED.Event()
    process = begin(_hold, held, place)
    assert held.wait(60)
    yield process.pid or 0
    process.kill()
    process.join()


def goes_on(place: Path, config: Any) -> Any:
    """The options that go on with what a run of `train` or `align` has left, if anything."""
    if not (place / RUN_FILE).exists():
        return config
    return replace(stored(place, type(config)()), resume=place)


def curve(place: Path) -> list[dict[str, Any]]:
    """What a run recorded that does not depend on when and where it ran; held-out rows in full."""
    records = [
        {name: value for name, value in record.items() if name not in TIMES}
        | {name: _untimed(value) for name, value in record.items() if name == "held_out"}
        for record in read_lines(place / "metrics.jsonl")
    ]
    assert records
    return records


def _untimed(found: dict[str, Any]) -> dict[str, Any]:
    timed = ("runtime", "samples_per_second", "steps_per_second")
    return {name: value for name, value in found.items() if name not in timed}


def _ended(work: Any, *arguments: Any, after: float | None = None) -> tuple[int, float]:
    begun = FORKED.Event()
    process = begin(work, begun, *arguments)
    begun.wait(120)
    start = time.perf_counter()
    process.join(120 if after is None else after)
    seconds = time.perf_counter() - start
    process.kill()
    process.join()
    return process.exitcode or 0, seconds


def _hold(held: Any, place: Path) -> None:
    assert acquire(place)
    held.set()
    time.sleep(60)


def _begin(begun: Any, command: str, config: Any) -> None:
    torch.set_num_threads(1)
    documents.PIECE = block.PIECE = 400
    sft.measure = lambda config, tokens: {m: {"not_measured": "test"} for m in ("logitless", "dense")}
    begun.set()
    RUNS[command](config, Console(quiet=True))


def _run(begun: Any, after: int | str, config: ScoreConfig | EvalConfig) -> None:
    begun.set()
    torch.set_num_threads(1)
    documents.PIECE = block.PIECE = 400
    write_whole, written = parts.write_whole, 0

    def write_then_die(path, write):
        nonlocal written
        merging = path == config.place

        def half(temporary):
            write(temporary)
            if after == ("merge" if merging else written):
                temporary.write_bytes(temporary.read_bytes()[:-100])
                os.kill(os.getpid(), signal.SIGKILL)

        write_whole(path, half)
        written += not merging

    parts.write_whole = write_then_die
    if isinstance(config, EvalConfig):
        evaluate(config)
    else:
        run(config)
