"""The end of an alignment run: numbers and the table, from records alone."""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from logitless.workbench.align.callbacks import MemoryMetrics
from logitless.workbench.align.config import AlignConfig
from logitless.workbench.align.report import numbers, show, steps_of, stretches
from logitless.workbench.align.trainers import dense_bytes

STEPS = 20


def record(step: int) -> dict[str, Any]:
    """Of a run whose loss falls, whose memory was largest midway, and whose second and last step have no margin."""
    return {
        "step": step,
        "loss": 1 - step / 100,
        "rewards/margins": None if step in (2, STEPS) else 0.00035 if step == 1 else step / 10,
        "seconds": 2.0 * step,
        "tokens": 10 * step,
        "peak_memory_bytes": 2**20 * (3 if step == 7 else 2),
        "memory/dense_would_need_bytes": 2**20 * (9 if step == 11 else 8),
    }


BEFORE, AFTER = ({"step": step, "held_out": {"loss": loss}} for step, loss in ((0, 0.75), (STEPS, 0.5)))
RECORDS = [BEFORE, *map(record, range(1, STEPS + 1)), AFTER]


def test_the_numbers_are_of_the_first_and_the_last_stretch():
    found = numbers("dpo", RECORDS)
    assert found["first"] == {"loss": pytest.approx(0.985), "rewards/margins": pytest.approx(0.00035)}
    assert found["last"] == {"loss": pytest.approx(0.805), "rewards/margins": pytest.approx(1.9)}
    assert (found["steps"], found["training_seconds"], found["tokens"]) == (STEPS, 40.0, 200)
    assert (found["held_out_before"], found["held_out_after"]) == ({"loss": 0.75}, {"loss": 0.5})
    assert (found["peak_memory_bytes"], found["dense_would_need_bytes"]) == (3 * 2**20, 9 * 2**20)
    assert numbers("dpo", RECORDS[1:])["held_out_before"] is None  # what is left was measured at the end


@pytest.mark.parametrize("count", [1, 3, 8, 9, 20, 100])
def test_stretches_are_all_steps_in_parts_of_about_one_length(count):
    steps = [record(step) for step in range(1, count + 1)]
    parts = stretches(steps)
    assert [step for part in parts for step in part] == steps
    assert len(parts) == min(8, count)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_the_table_has_the_mean_of_each_stretch(tmp_path):
    told = io.StringIO()
    more = {"method": "dpo", "model": "m", "parameters": 1_500_000, "output_dir": str(tmp_path), "rewards": {"f": 0.5}}
    show({**numbers("dpo", RECORDS), **more}, RECORDS, Console(file=told, width=100))
    lines = [" ".join(line.split()) for line in told.getvalue().splitlines() if line]
    assert lines[:3] == ["dpo on m: 1.5 M parameters, 20 steps", "steps loss margin", "1-2 0.9850 0.00035"]
    assert lines[9:13] == [
        "19-20 0.8050 1.9",
        "held-out rows: loss 0.7500 → 0.5000",
        "rewards: f × 0.5",
        "memory: 3.00 MiB at the peak, the whole process; dense logits of one forward pass with their log-softmax "
        "would be 9.00 MiB more",
    ]
    assert lines[13] == "40 s of training"
    assert len(steps_of(RECORDS)) == STEPS


def test_what_dense_logits_would_need():
    """The completions' of a batch, whose longest the step tells, or both sides' of pairs, logits and log-softmax."""
    sizes = [dense_bytes(AlignConfig(method=name, batch_size=3), 100, 4, 7) for name in ("grpo", "dpo")]
    assert sizes == [2 * 3 * 7 * 100 * 4, 2 * 2 * 3 * 7 * 100 * 4]
    logs: list[dict[str, Any]] = [{"loss": 1.0, "completions/max_length": 5.0}, {"loss": 1.0}, {"eval_loss": 1.0}]
    args: Any = SimpleNamespace(device=torch.device("cpu"))
    nothing: Any = None
    for each in logs:
        MemoryMetrics(lambda longest: 10 * longest, 8).on_log(args, nothing, nothing, logs=each)
    assert [each.get("memory/dense_would_need_bytes") for each in logs] == [50, 80, None]
