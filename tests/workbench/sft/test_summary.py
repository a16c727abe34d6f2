"""What a run says at its end."""

from pathlib import Path

import pytest
from rich.console import Console

from logitless.workbench.sft.summary import _loss_method, show

MIB = 1 << 20


@pytest.mark.parametrize(
    ("asked", "threshold", "said"),
    [
        ("logitless", 256, "logitless: logits of 48 MiB fit the budget of 256 MiB"),
        ("auto", 256, "auto → dense: logits of 48 MiB fit the budget of 256 MiB"),
        ("auto", 16, "auto → logitless: logits of 48 MiB exceed the threshold of 16 MiB"),
        ("auto", 1024, "auto → dense: logits of 48 MiB fit the threshold of 1,024 MiB"),
    ],
)
def test_a_loss_is_held_against_what_decided(asked, threshold, said):
    method = "dense" if asked == "auto" and threshold > 48 else "logitless"
    loss = {"asked": asked, "method": method, "logits_bytes": 48 * MIB, "memory_budget_bytes": 256 * MIB}
    assert _loss_method({**loss, "threshold_bytes": threshold * MIB}, 1) == said


def test_the_path_of_a_teachers_record_is_no_markup(capsys):
    names = ("first_loss", "last_loss", "held_out_loss_before", "held_out_loss_after", "tokens_per_second")
    given = {"model": "m", "parameters": 9, "steps": 1, "training_seconds": 1.0, "peak_memory_bytes": 3 << 30}
    teacher = {"record": "runs/[bold]/said", "stored": "hidden", "tail": "bucket", "temperature": 1, "weight": 1}
    show({**dict.fromkeys(names, 1.0), **given, "teacher": {**teacher, "loss": "forward"}}, Path(), Console(width=160))
    assert "runs/[bold]/said: forward KL" in capsys.readouterr().out
