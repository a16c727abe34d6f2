"""`--report-to`: what each tracker's own files hold after a run; `make test-trackers` brings the trackers."""

import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from logitless.workbench.runs.files import read_lines
from tests.support.workbench.processes import finished, flags

SENT = ("self_certainty/mean", "memory/peak_bytes", "memory/dense_would_need_bytes", "reward", "kl", "loss")
BLOCK, WHOLE, FIRST, LAST = 2**15, 1, 2, 4
pytestmark = pytest.mark.slow


def tensorboard(place: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "tensorboard")).Reload()
    return {name: [event.value for event in events.Scalars(f"train/{name}")] for name in SENT}


def trackio(place: Path) -> dict[str, list[float]]:
    (path,) = (place / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    rows = [row for row in rows if "train/loss" in row]
    return {name: [row[f"train/{name}"] for row in rows] for name in SENT}


def wandb(place: Path) -> dict[str, list[float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = place.glob("wandb/offline-run-*/*.wandb")
    found = [Record.FromString(data).history.item for data in records_of(path.read_bytes())]
    rows = [{".".join(item.nested_key) or item.key: item.value_json for item in items} for items in found]
    rows = [row for row in rows if "train/loss" in row]
    return {name: [json.loads(row[f"train/{name}"]) for row in rows] for name in SENT}


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format behind a header of 7 bytes: blocks of 32 KiB, records in fragments."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts = (b"" if kind in (WHOLE, FIRST) else parts) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            yield parts


@pytest.mark.parametrize("read", [tensorboard, trackio, wandb], ids=lambda read: read.__name__)
def test_the_metrics_arrive(start, tmp_path, read: Callable[[Path], dict[str, list[float]]]):
    name = read.__name__
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make test-trackers")
    files = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "tensorboard"), "TRACKIO_DIR": str(tmp_path / "trackio")}
    offline = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    options = flags(replace(start, max_steps=3, report_to=name))
    finished("logitless.cli", "align", *options, "--output-dir", tmp_path / "run", **files, **offline)
    records = [record for record in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in record]
    found = read(tmp_path)
    assert len(records) == 3
    for key in SENT:
        assert found[key] == pytest.approx([record[key] for record in records], rel=1e-6), key
