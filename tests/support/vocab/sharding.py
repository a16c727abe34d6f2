"""Several real processes for tests of sharded heads, forked from one that has imported their cases."""

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support import forked

RANKS = 4
Case = Callable[[Any], None]


def launch(module: str, folder: Path, **more: str) -> dict[str, dict[str, str]]:
    """Run `module`, which calls `run`, with `more` in its environment; returns what became of each case, by rank."""
    status, written = forked.module(module, folder, **more)
    assert status == 0, written[-4000:]
    ranks = {str(rank): folder / f"{rank}.json" for rank in range(RANKS)}
    return {rank: json.loads(place.read_text()) for rank, place in ranks.items()}


def assert_ok(found: dict[str, dict[str, str]], case: str, size: int) -> None:
    """A case ended well on each of the first `size` ranks."""
    for rank in range(size):
        ended = found[str(rank)].get(f"{case} {size}", "never started")
        assert ended == "ok", f"rank {rank}: {ended}"


def run(cases: dict[str, Case], last: Case | None = None) -> None:
    """Every case on all ranks and then on the first two alone, and `last` once, with the world's group."""
    folder, *some = sys.argv[1:]
    cases = {name: case for name, case in cases.items() if not some or name in some}
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, Path(folder), cases, last)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


def _rank(rank: int, folder: Path, cases: dict[str, Case], last: Case | None) -> None:
    found: dict[str, str] = {}
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(minutes=5)
        )
        pair = dist.new_group([0, 1], timeout=timedelta(minutes=5))
        for name, case in cases.items():
            for group in (dist.group.WORLD, pair) if rank < 2 else (dist.group.WORLD,):
                key = f"{name} {dist.get_world_size(group)}"
                torch.manual_seed(0)
                found[key] = "never ended"
                case(group)
                found[key] = "ok"
        if last is not None:
            found["last"] = "never ended"
            (folder / f"{rank}.json").write_text(json.dumps(found))  # this rank may not come back
            last(dist.group.WORLD)
            found["last"] = "ok"
    except BaseException:
        found[list(found)[-1] if found else "start"] = traceback.format_exc()
    finally:
        (folder / f"{rank}.json").write_text(json.dumps(found))
        os._exit(0)  # nothing of torch's own ending, which waits for ranks that are gone
