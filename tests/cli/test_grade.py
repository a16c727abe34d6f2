"""`logitless align --method ste` from its command line."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForSequenceClassification
from yaml import safe_load

from logitless.cli.align import parse_grade as parse
from logitless.cli.main import main
from logitless.cli.options import method_of
from logitless.workbench.align.config import METHODS
from logitless.workbench.common.options import SMALL_MODEL
from logitless.workbench.grade.config import EMBEDDED, GRADE_METHODS, GradeConfig
from tests.support.workbench.micro import line_corpus, micro_model
from tests.support.workbench.options import assert_files_mean, at_default


def test_every_option_of_the_dataclass_is_one_of_the_command_line(tmp_path):
    given = (
        "--method all --model m --data d --reward-model r --reward-label 0 --prompt-length 9 --completion-length 8 "
        "--batch-size 6 --gradient-accumulation-steps 2 --no-gradient-checkpointing --carry cached --max-steps 7 "
        "--learning-rate 1e-3 --beta 0.2 --tau-start 1.5 --tau-end 0.25 --top-k 5 --baseline-decay 0.5 "
        "--variance-samples 3 --max-grad-norm 2 --evaluation-prompts 4 --lora-rank 4 --memory-budget 1GiB --seed 5 "
        "--seeds 3 --dtype bfloat16 --device cpu --report-to wandb --output-dir o --json j"
    )
    whole = GradeConfig(
        method="all",
        model="m",
        data="d",
        reward_model="r",
        reward_label=0,
        prompt_length=9,
        completion_length=8,
        batch_size=6,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        carry="cached",
        max_steps=7,
        learning_rate=1e-3,
        beta=0.2,
        tau_start=1.5,
        tau_end=0.25,
        top_k=5,
        baseline_decay=0.5,
        variance_samples=3,
        max_grad_norm=2.0,
        evaluation_prompts=4,
        lora_rank=4,
        memory_budget="1GiB",
        seed=5,
        seeds=3,
        dtype="bfloat16",
        device="cpu",
        report_to="wandb",
        output_dir=Path("o"),
        json=Path("j"),
    )
    ruled = GradeConfig(model="m", token_reward="a:b")
    meant = {given: whole, "--method ste --model m --token-reward a:b": ruled}
    assert {words: parse(words.split()) for words in meant} == meant
    assert at_default(*meant.values()) == set()
    for config in meant.values():
        assert_files_mean(parse, config, tmp_path)


def test_whose_options_these_are(tmp_path):
    assert method_of(["--method", "ste"]) == "ste"
    assert method_of(["--beta", "1", "--method=reinforce"]) == "reinforce"
    assert method_of([]) is None
    assert method_of(["--help"]) is None
    assert method_of(["--method"]) is None  # refused where all of the options are read
    (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "config": {"method": "gumbel"}}))
    assert method_of(["--resume", str(tmp_path)]) == "gumbel"
    assert method_of(["--resume", str(tmp_path / "nothing")]) is None
    for name, text in (("a.yaml", "method: ppo\nbeta: 0.2\n"), ("a.toml", 'method = "ppo"\n')):
        (tmp_path / name).write_text(text)
        assert method_of(["--config", str(tmp_path / name)]) == "ppo"
        assert method_of(["--config", str(tmp_path / name), "--method", "ste"]) == "ste"
    (tmp_path / "b.json").write_text(json.dumps({"resume": str(tmp_path)}))
    assert method_of(["--config", str(tmp_path / "b.json")]) == "gumbel"


def test_seeds_are_of_all_methods_alone(capsys):
    assert parse(["--method", "all", "--seeds", "3"]).seeds == 3
    assert main(["align", "--method", "ste", "--seeds", "3"]) == 2
    assert "--seeds is of --method all, got it with --method ste" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--seeds", "3"], ["--method", "rloo", "--tau-end=0.5"], ["--top_k", "many"]])
def test_an_option_of_these_methods_without_one_of_them(given, capsys):
    assert main(["align", *given]) == 2
    option = next(x for x in given if x != "--method" and x.startswith("--")).partition("=")[0]
    error = f"logitless: {option} is of --method ste, gumbel, reinforce, ppo, ste_legacy, gumbel_legacy, all alone: "
    assert capsys.readouterr().err.startswith(error)


def test_an_option_of_the_other_methods_points_to_the_help_of_this_one(capsys):
    assert main(["align", "--method", "ste", "--rewards", "python_lines"]) == 2
    assert "--rewards, python_lines (see logitless align --method ste --help)" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "meant"), [("ppoo", "ppo"), ("gumbel_topk", "gumbel")])
def test_a_method_of_another_name(given, meant, capsys):
    assert main(["align", "--method", given]) == 2
    assert capsys.readouterr().err.endswith(f", got {given}; did you mean {meant}?\n")


def test_the_help_names_every_method(capsys):
    with pytest.raises(SystemExit):
        main(["align", "--help"])
    text = capsys.readouterr().out.partition("--model")[0]
    assert [name for name in (*METHODS, *GRADE_METHODS) if name not in text] == []


def test_a_file_alone_says_the_method(tmp_path, capsys):
    path = tmp_path / "options.yaml"
    path.write_text("method: gumbel\ntau_end: 0\n")
    assert main(["align", "--config", str(path)]) == 2
    assert "--tau-end must be in 1e-24..1e+26, got 0.0" in capsys.readouterr().err


def test_the_command_line_overrides_a_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("beta = 0.3\ntau_end = 0.7\n")
    config = parse(["--method", "gumbel", "--config", str(path), "--beta", "0.2", "--carry", "cached"])
    assert (config.method, config.beta, config.tau_end, config.carry) == ("gumbel", 0.2, 0.7, "cached")


def test_the_small_model_has_sizes_of_its_own(tmp_path):
    small, other = parse(["--method", "all"]), parse(["--method", "all", "--model", "other"])
    assert small.model == SMALL_MODEL
    assert small.completion_length == EMBEDDED["completion_length"]
    assert (other.completion_length, other.batch_size, other.gradient_accumulation_steps) == (64, 1, 16)
    assert parse(["--method", "ste", "--completion-length", "9"]).completion_length == 9
    path = tmp_path / "options.yaml"
    path.write_text("model: other\nbeta: 0.2\n")
    config = parse(["--method", "ste", "--config", str(path)])
    assert (config.model, config.beta, config.completion_length) == ("other", 0.2, 64)


@pytest.mark.parametrize(("model", "steps", "beta"), [([], 32, 0.02), (["--model", "other"], 40, 0.1)])
def test_the_help_says_the_defaults_that_a_run_would_have(model, steps, beta, capsys):
    config = parse(["--method", "all", *model])
    assert (config.max_steps, config.beta) == (steps, beta)
    with pytest.raises(SystemExit):
        main(["align", "--method", "all", *model, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"Optimizer steps. (default: {steps})" in text
    assert f"per continuation. (default: {beta})" in text


def test_the_recipes_of_the_page_are_read(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "grade.md"
    text = page.read_text("utf-8")
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "imdb.yaml"
    path.write_text(yaml)
    config = parse(["--config", str(path), "--output-dir", "runs/imdb"])
    assert (config.method, config.model, config.tau_end, config.max_steps) == ("ste", "Qwen/Qwen3-4B", 0.5, 250)
    assert config == replace(
        GradeConfig(model=config.model),
        **{x: getattr(config, x) for x in safe_load(yaml)},
        config=path,
        output_dir=Path("runs/imdb"),
    )
    commands = [shlex.split(x, comments=True) for x in text.splitlines() if x.startswith("logitless align --method")]
    assert [parse(x[2:]).method for x in commands] == ["ste", "reinforce", "all"]


def test_bad_options_are_one_line(capsys):
    assert main(["align", "--method", "ste", "--tau-end", "0"]) == 2
    assert main(["align", "--method", "ste", "--rewards", "x"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "--tau-end must be in 1e-24..1e+26, got 0.0" in first
    assert "--rewards" in second


def test_help_needs_no_torch():
    code = (
        "import sys\nfrom logitless.cli.main import main\n"
        "try:\n    main(['align', '--method', 'ste', '--help'])\n"
        "except SystemExit:\n    sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False, text=True)
    assert done.returncode == 0
    assert "--tau-start" in done.stdout


def test_a_run_and_its_summary(micro, tmp_path, capsys):
    model, reward, place = tmp_path / "model", tmp_path / "reward", tmp_path / "run"
    micro_model(initializer_range=0.2).save_pretrained(model)
    for path in micro.model.parent.glob("tok*.json"):
        (model / path.name).write_bytes(path.read_bytes())
    shutil.copytree(model, reward, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.manual_seed(3)
    config = micro_model().config
    config.num_labels, config.pad_token_id = 2, 0
    Qwen3ForSequenceClassification(config).save_pretrained(reward)
    given = ["--model", model, "--reward-model", reward, "--data", line_corpus(tmp_path / "data"), "--device", "cpu"]
    given += ["--prompt-length", 12, "--completion-length", 4, "--gradient-accumulation-steps", 2, "--max-steps", 2]
    given += ["--evaluation-prompts", 4, "--top-k", 50, "--output-dir", place, "--json", "-", "--method", "ste"]
    assert main(["align", *map(str, given)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((place / "summary.json").read_text())
    made = json.loads((place / "completions.json").read_text())
    assert [len(made[when]) for when in ("before", "after")] == [3, 3]
    assert all(0 <= x["reward"] <= 1 for when in made.values() for x in when)
    for shown in ("before, reward ", "after, reward ", "validation reward", "test reward", "nats per continuation"):
        assert shown in err
    for shown in ("soft tokens cover", "for a batch's gradient", "at the peak"):
        assert shown in err
