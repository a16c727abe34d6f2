"""What a run says at its end."""

from pathlib import Path

import pytest
from rich.console import Console

from logitless.workbench.sft.summary import _loss_method, _rows, numbers, show

MIB = 1 << 20


def test_the_numbers_of_records():
    records = [
        {"step": 0, "held_out_loss": 6.0},
        *(
            {"step": i, "loss": 5.0 - i, "tokens": 100 * i, "seconds": 2.0 * i}
            | {"tokens_per_second": (10.0, 50.0, 20.0)[i - 1], "peak_memory_bytes": (3, 5, 4)[i - 1]}
            for i in (1, 2, 3)
        ),
        {"step": 3, "held_out_loss": 1.5},
    ]
    expected = {
        "first_loss": 4.0,
        "last_loss": 2.0,
        "held_out_loss_before": 6.0,
        "held_out_loss_after": 1.5,
        "steps": 3,
        "tokens": 300,
        "training_seconds": 6.0,
        "tokens_per_second": 20.0,
        "peak_memory_bytes": 5,
    }
    assert numbers(records) == expected
    assert numbers(records[1:]) == expected | {"held_out_loss_before": None}  # nobody looked before the first step


SUMMARY = {
    "model": "m", "parameters": 134_500_000, "steps": 3, "first_loss": 4.0, "last_loss": 2.0, "tensor_parallel": 1,
    "held_out_loss_before": 6.0, "held_out_loss_after": 1.5, "tokens_per_second": 1234.4, "training_seconds": 6.4,
    "peak_memory_bytes": 900 * MIB,
    "loss": {
        "asked": "dense", "method": "dense", "logits_bytes": 48 * MIB, "threshold_bytes": 48 * MIB,
        "memory_budget_bytes": 48 * MIB,
    },
}  # fmt: skip


def test_the_table_of_a_run(capsys):
    measured = {name: {"peak_bytes": n * MIB, "loss": 4.123456} for name, n in (("logitless", 40), ("dense", 100))}
    assert _rows({**SUMMARY, "step_memory": measured}) == [
        ("training loss", "4.000 → 2.000 nats per token"),
        ("held-out loss", "6.000 → 1.500 (perplexity 4.48)"),
        ("speed", "1,234 tokens/s, 6 s of training"),
        ("loss method", "dense: logits of 48 MiB fit the budget of 48 MiB"),
        ("peak memory", "900 MiB, the whole process"),
        ("one step, logitless", "+40 MiB at the peak, loss 4.12346"),
        ("one step, dense", "+100 MiB at the peak, loss 4.12346"),
        ("", "the dense loss takes 2.5 × the memory for the same step"),
    ]
    one = {**measured, "dense": {"not_measured": "does not fit"}}
    rows = dict(_rows({**SUMMARY, "held_out_loss_before": None, "tensor_parallel": 2, "step_memory": one}))
    assert rows["held-out loss"].startswith("? → 1.500")
    assert rows["one step, dense"] == "not measured: does not fit"
    assert "" not in rows
    assert rows["loss method"] == "dense: the head is split over 2 ranks"
    rows = dict(_rows({**SUMMARY, "held_out_loss_after": 500.0, "step_memory": measured}))
    assert rows["held-out loss"] == "6.000 → 500.000 (perplexity 1.404e+217)"
    show({**SUMMARY, "step_memory": measured}, Path(), Console(width=160))
    assert "m: 134.5 M parameters, 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({}, "r: forward KL over the whole vocabulary"),
        ({"stored": "topk"}, "r: forward KL over its best entries, the others as one"),
        ({"tail": "decoupled"}, "r: forward KL over its best entries, the others decoupled"),
        (
            {"tail": "tail-aware", "temperature": 2.0, "weight": 0.25},
            "r: forward KL over its best entries, the others weighted by their mean at temperature 2, 0.25 of the loss "
            "beside the text's own",
        ),
    ],
)
def test_what_was_learned_of_a_teacher(of, said):
    usual = {"record": "r", "loss": "forward", "stored": "hidden", "tail": "bucket", "temperature": 1.0, "weight": 1.0}
    assert dict(_rows({**SUMMARY, "teacher": usual | of}))["teacher"] == said


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
