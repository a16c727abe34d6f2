"""`logitless align` from its command line."""

import json
import shutil
from pathlib import Path

import pytest

from logitless.cli.align import parse
from logitless.cli.main import main
from logitless.errors import OptionError
from logitless.workbench.align.config import AlignConfig
from tests.support.workbench.micro import line_corpus, micro_model
from tests.support.workbench.options import assert_files_mean, at_default
from tests.support.workbench.units import assert_one_unit


def test_every_option_of_the_dataclass_is_one_of_the_command_line(tmp_path):
    given = (
        "--method grpo --model m --data d --prompt-length 9 --completion-length 8 --batch-size 6 "
        "--generations-per-prompt 3 --gradient-accumulation-steps 2 --gradient-checkpointing --max-steps 7 "
        "--learning-rate 1e-3 --beta 0.2 --exact-kl --temperature 0.5 --rewards a:b --self-certainty-weight 1 "
        "--repetition-guard 0.5 --lora-rank 4 --memory-budget 1GiB --seed 5 --dtype bfloat16 --device cpu "
        "--report-to wandb --output-dir o --json j"
    )
    whole = AlignConfig(
        method="grpo",
        model="m",
        data="d",
        prompt_length=9,
        completion_length=8,
        batch_size=6,
        generations_per_prompt=3,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=7,
        learning_rate=1e-3,
        beta=0.2,
        exact_kl=True,
        temperature=0.5,
        rewards="a:b",
        self_certainty_weight=1.0,
        repetition_guard=0.5,
        lora_rank=4,
        memory_budget="1GiB",
        seed=5,
        dtype="bfloat16",
        device="cpu",
        report_to="wandb",
        output_dir=Path("o"),
        json=Path("j"),
    )
    cut = AlignConfig(top_p=0.9, min_p=0.1, order="vllm", self_certainty_weight=0.9)
    assert parse(given.split()) == whole
    apart = "--top-p 0.9 --min-p 0.1 --order vllm --self-certainty-weight 0.9"  # not with --exact-kl, nor of grpo
    assert parse(apart.split()) == cut
    assert at_default(whole, cut) == set()
    for config in (whole, cut):
        assert_files_mean(parse, config, tmp_path)


def test_the_command_line_overrides_a_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text('method = "dpo"\nbeta = 0.3\nbatch_size = 3\n')
    config = parse(["--config", str(path), "--beta", "0.2"])
    assert (config.method, config.beta, config.batch_size) == ("dpo", 0.2, 3)


def test_bad_options_are_one_line(capsys):
    assert main(["align", "--method", "none"]) == 2
    assert main(["align", "--batch-size", "3"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "--method must be one of intuitor, grpo, rloo, dpo, ste, gumbel, reinforce, ppo, ste_legacy," in lines[0]
    assert "expected a multiple of --generations-per-prompt 4" in lines[1]
    with pytest.raises(OptionError, match="batch-siz"):
        parse(["--batch-siz", "3"])


@pytest.mark.parametrize("method", ["3", "true", "[grpo]", "{grpo: 1}", "2026-01-01", "''"])
def test_a_method_of_a_file_may_be_anything(method, tmp_path, capsys):
    (tmp_path / "options.yaml").write_text(f"method: {method}\n")
    assert main(["align", "--config", str(tmp_path / "options.yaml")]) == 2
    assert "--method must be one of intuitor, grpo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "prepared"),
    [
        (["--completion-length", 12], "rows.jsonl"),
        (
            [
                *("--method", "ste", "--completion-length", 5, "--token-reward", "bench.real.rules:without_e"),
                *("--evaluation-prompts", 4, "--variance-samples", 0, "--gradient-accumulation-steps", 1),
            ],
            "prompts.jsonl",
        ),
    ],
    ids=["intuitor", "ste"],
)
def test_a_resumed_run_needs_no_data_that_it_has_read(micro, tmp_path, capsys, options, prepared):
    model, data, place = tmp_path / "model", line_corpus(tmp_path / "data", 20), tmp_path / "run"
    micro_model().save_pretrained(model)
    for path in micro.model.parent.glob("tok*.json"):
        shutil.copy(path, model)
    given = ["--model", model, "--data", data, "--prompt-length", 12, "--batch-size", 4, "--device", "cpu", *options]
    assert main(["align", *map(str, given), "--max-steps", "2", "--output-dir", str(place)]) == 0
    shutil.rmtree(data)
    again = ["align", "--resume", str(place), "--trust-config", "--max-steps"]
    assert main([*again, "3"]) == 0
    (place / prepared).unlink()
    capsys.readouterr()
    assert main([*again, "4"]) == 2
    assert capsys.readouterr().err == f"logitless: --data {data}: no such file or directory\n"


def test_a_run_and_its_summary(micro, tmp_path, capsys):
    model, place = tmp_path / "model", tmp_path / "run"
    micro_model().save_pretrained(model)
    for path in micro.model.parent.glob("tok*.json"):
        (model / path.name).write_bytes(path.read_bytes())
    given = ["--model", model, "--data", line_corpus(tmp_path / "data", 20), "--prompt-length", 24, "--device", "cpu"]
    given += ["--completion-length", 12, "--batch-size", 4, "--max-steps", 2, "--output-dir", place, "--json", "-"]
    assert main(["align", *map(str, given)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((place / "summary.json").read_text())
    for shown in (
        "self-certainty",
        "KL",
        "repetition",
        "held-out rows: reward",
        "rewards: self_certainty × 1",
        "align.png",
    ):
        assert shown in err
    assert "-0.0000" not in err  # the KL of a policy to itself, to rounding
    assert_one_unit(err, "memory: ", " s of training")
