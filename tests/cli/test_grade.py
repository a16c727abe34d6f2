"""`logitless align --method ste` from its command line."""

import json
import shutil
import subprocess
import sys

import torch
from transformers import Qwen3ForSequenceClassification

from logitless.cli.grade import asked_for, parse
from logitless.cli.main import main
from tests.train.micro import line_corpus, micro_model


def test_whose_options_these_are(tmp_path):
    assert asked_for(["--method", "ste"])
    assert asked_for(["--beta", "1", "--method=reinforce"])
    assert not asked_for(["--method", "grpo"])
    assert not asked_for([])
    for method, ours in (("gumbel", True), ("grpo", False)):
        (tmp_path / "run.json").write_text(json.dumps({"schema": 1, "config": {"method": method}}, indent=2))
        assert asked_for(["--resume", str(tmp_path)]) == ours
    assert not asked_for(["--resume", str(tmp_path / "nothing")])


def test_the_command_line_overrides_a_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("beta = 0.3\ntau_end = 0.7\n")
    config = parse(["--method", "gumbel", "--config", str(path), "--beta", "0.2", "--carry", "cached"])
    assert (config.method, config.beta, config.tau_end, config.carry) == ("gumbel", 0.2, 0.7, "cached")


def test_bad_options_are_one_line(capsys):
    assert main(["align", "--method", "ste", "--tau-end", "0"]) == 2
    assert main(["align", "--method", "ste", "--rewards", "x"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "--tau-end must be positive, got 0.0" in first
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
    for shown in ("validation reward", "test reward", "nats per continuation", "soft tokens cover", "at the peak"):
        assert shown in err
