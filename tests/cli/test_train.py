"""`logitless train` from its command line: options, the summary, and one line for bad input."""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import save_file

from logitless.cli.main import main
from logitless.cli.train import parse
from logitless.workbench.runs.ending import how_to_go_on
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.summary import show
from tests.support.workbench.micro import micro_model
from tests.support.workbench.options import assert_files_mean, at_default
from tests.support.workbench.units import assert_one_unit


def arguments(micro, place: Path, *more: object) -> list[str]:
    fixed = ["train", "--model", micro.model, "--data", micro.data, "--context-length", 32, "--max-steps", 4]
    return [str(x) for x in (*fixed, "--learning-rate", 1e-2, "--device", "cpu", "--output-dir", place, *more)]


def test_every_option_of_the_dataclass_is_one_of_the_command_line(tmp_path):
    given = (
        "--model small --data d --context-length 64 --batch-size 3 --gradient-accumulation-steps 2 "
        "--gradient-checkpointing --max-steps 9 --learning-rate 1e-3 --lora-rank 4 --loss dense --memory-budget 1GiB "
        "--attention nsa --mlp-tiles 2 --offload-activations --rope-scaling yarn:2 --sharding fsdp2 --rank-timeout 60 "
        "--tensor-parallel 1 --context-parallel 1 "
        "--seed 5 --dtype bfloat16 --device cpu --output-dir o --json j"
    )
    whole = TrainConfig(
        model="small",
        data="d",
        context_length=64,
        batch_size=3,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        max_steps=9,
        learning_rate=1e-3,
        lora_rank=4,
        attention="nsa",
        mlp_tiles=2,
        offload_activations=True,
        rope_scaling="yarn:2",
        sharding="fsdp2",
        rank_timeout=60,
        loss="dense",
        memory_budget="1GiB",
        seed=5,
        dtype="bfloat16",
        device="cpu",
        output_dir=Path("o"),
        json=Path("j"),
    )
    taught = (
        "--teacher t --distill-tail tail-aware --distill-tail-weight 3 --distill-top-k 5 --distill-weight 0.5 "
        "--distill-temperature 2 --teacher-ids i --report-to wandb"
    )
    student = TrainConfig(
        teacher="t",
        distill_tail="tail-aware",
        distill_tail_weight=3.0,
        distill_top_k=5,
        distill_weight=0.5,
        distill_temperature=2.0,
        teacher_ids="i",
        report_to="wandb",
    )
    others = {
        "--teacher t --distill-loss reverse": TrainConfig(teacher="t", distill_loss="reverse"),
        "--tensor-parallel 2 --context-parallel 2": TrainConfig(tensor_parallel=2, context_parallel=2),
        "--loss-on all": TrainConfig(loss_on="all"),
        "--loss-threshold 1GB": TrainConfig(loss_threshold="1GB"),
        "--mixed-precision bf16": TrainConfig(mixed_precision="bf16"),
    }
    meant = {given: whole, taught: student, **others}
    assert {words: parse(words.split()) for words in meant} == meant
    assert at_default(*meant.values()) == set()
    for config in meant.values():
        assert_files_mean(parse, config, tmp_path)


def test_the_command_line_overrides_a_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("max_steps = 7\nbatch_size = 3\n")
    config = parse(["--config", str(path), "--max-steps", "8"])
    assert (config.max_steps, config.batch_size, config.context_length) == (8, 3, TrainConfig().context_length)


@pytest.mark.usefixtures("unmeasured")
def test_a_run_and_its_summary(micro, tmp_path, capsys):
    place = tmp_path / "run"
    assert main(arguments(micro, place, "--json", tmp_path / "summary.json")) == 0
    out, err = capsys.readouterr()
    for shown in ("training loss", "held-out loss", "tokens/s", "peak memory", "one step, dense", "loss.png"):
        assert shown in out
    assert "step     1/4" in err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["schema"] == 1
    assert summary["loss"] == {
        "asked": "auto",
        "method": "dense",
        "logits_bytes": TrainConfig().batch_size * 32 * 259 * 4,
        "memory_budget_bytes": 2**28,
        "threshold_bytes": 2**28,
    }


@pytest.mark.usefixtures("unmeasured")
def test_names_with_line_breaks_stay_on_their_lines(micro, tmp_path, monkeypatch, capsys):
    """The run is called after its model: in the title, and in the last line, which says where everything lies."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(micro.model.parent, "[bold]two\nlines")
    given = ["--data", str(micro.data), "--context-length", "32", "--max-steps", "1", "--device", "cpu"]
    assert main(["train", "--model", "[bold]two\nlines/config.json", *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("[bold]two\\nlines/config.json: 23,872 parameters, 1 step") for line in lines)
    assert lines[-1].startswith("in runs/[bold]two\\nlines: ")


def test_memory_has_one_unit(capsys):
    """Of the process and of what is beside it, however much smaller that is."""
    loss = {
        "asked": "auto",
        "method": "dense",
        "logits_bytes": 9 << 20,
        "memory_budget_bytes": 1 << 30,
        "threshold_bytes": 1 << 30,
    }
    steps = {name: {"peak_bytes": peak << 20, "loss": 4.5} for name, peak in (("logitless", 45), ("dense", 900))}
    names = ("first_loss", "last_loss", "held_out_loss_before", "held_out_loss_after", "tokens_per_second")
    given = {"model": "m", "parameters": 9, "steps": 1, "training_seconds": 1.0, "tensor_parallel": 1, "loss": loss}
    console = Console(width=160)
    show({**dict.fromkeys(names, 1.0), **given, "peak_memory_bytes": 3 << 30, "step_memory": steps}, Path(), console)
    out = capsys.readouterr().out
    assert_one_unit(out, "loss method", "peak memory")
    assert_one_unit(out, "peak memory", "the dense loss takes 20.0 ×")


@pytest.mark.usefixtures("unmeasured")
def test_json_on_standard_output_stands_alone(micro, tmp_path, capsys):
    assert main(arguments(micro, tmp_path / "run", "--memory-budget", "16KiB", "--json", "-")) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["loss"]["method"] == "logitless"  # auto, above the budget


@pytest.mark.usefixtures("unmeasured")
def test_a_threshold_beside_the_budget(micro, tmp_path, capsys):
    sizes = ["--memory-budget", "16KiB", "--loss-threshold", "10GB", "--json", "-"]
    assert main(arguments(micro, tmp_path / "run", *sizes)) == 0
    found = json.loads(capsys.readouterr().out)["loss"]
    assert (found["method"], found["memory_budget_bytes"], found["threshold_bytes"]) == ("dense", 2**14, 10**10)
    for words, size, *more in (
        ("where --loss auto changes", "10GB", "--loss", "logitless"),
        ("must be a size such as", "ten"),
        ("--loss-threshold must be 1000 bytes or more, got '10'", "10"),  # of GB, as it were
    ):
        assert main(arguments(micro, tmp_path / "bad", "--loss-threshold", size, *more)) == 2
        assert words in capsys.readouterr().err


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def bad_model(name: str, text: str):
    return lambda micro, tmp: ["--model", write(tmp / "model" / name, text)]


def mismatched_weights(micro, tmp: Path) -> list[object]:
    """A directory whose weights have another width than its configuration says."""
    import torch

    place = tmp / "model"
    place.mkdir()
    for path in micro.model.parent.iterdir():
        (place / path.name).write_bytes(path.read_bytes())
    save_file({"model.norm.weight": torch.ones(31)}, place / "model.safetensors", metadata={"format": "pt"})
    return ["--model", place]


BAD = {
    "unknown preset": (lambda m, t: ["--model", "tinny"], "unknown model 'tinny': did you mean tiny"),
    "no such directory": (lambda m, t: ["--model", t / "none"], "unknown model"),
    "config without a type": (bad_model("config.json", "{}"), "expected a transformers configuration"),
    "config that is not JSON": (bad_model("config.json", "{"), "not a readable JSON file"),
    "config of an unknown type": (bad_model("config.json", '{"model_type": "zzz"}'), "zzz"),
    "config with code": (
        bad_model("config.json", '{"model_type": "qwen3", "auto_map": {"AutoModelForCausalLM": "x.Y"}}'),
        "never run",
    ),
    "config with a small vocabulary": (
        bad_model("config.json", '{"model_type": "qwen3", "vocab_size": 100}'),
        "the tokenizer has 131,072 entries, the model's vocabulary only 100",
    ),
    "weights of another shape": (mismatched_weights, "asks for a model.norm.weight of (32,), its weights have (31,)"),
    "no such data": (lambda m, t: ["--data", t / "none"], "no such file"),
    "empty data": (lambda m, t: ["--data", write(t / "data" / "a.txt", "")], "no text in it"),
    "binary data": (lambda m, t: ["--data", write(t / "data" / "a.txt", "a\0b")], "not UTF-8 text, or with NUL"),
    "short data": (lambda m, t: ["--data", write(t / "data" / "a.txt", "short")], "6 tokens, two sequences"),
    "long context": (lambda m, t: ["--context-length", 128], "positions up to 64"),
    "no budget": (lambda m, t: ["--memory-budget", "much"], "--memory-budget must be a size"),
    "no such config": (lambda m, t: ["--config", t / "none.yaml"], "cannot read --config"),
    "no run to resume": (lambda m, t: ["--resume", t], "no run in this directory"),
    "output in a file": (lambda m, t: ["--output-dir", write(t / "data" / "file", "")], "--output-dir"),
}


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_line(micro, tmp_path, capsys, what):
    change, message = BAD[what]
    status = main(arguments(micro, tmp_path / "run", *change(micro, tmp_path)))
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("...")]
    assert status == 2
    assert len(lines) == 1
    assert lines[0].startswith("logitless: ")
    assert message in lines[0]


def test_a_failed_start_does_not_occupy_its_directory(micro, tmp_path, unmeasured):
    place = tmp_path / "run"
    assert main(arguments(micro, place, "--data", write(tmp_path / "d" / "a.txt", "short"))) == 2
    assert main(arguments(micro, place)) == 0


def test_a_model_that_is_refused_leaves_its_directory_to_other_options(micro, tmp_path, unmeasured, capsys):
    model, place = Path(shutil.copytree(micro.model.parent, tmp_path / "model")), tmp_path / "run"
    micro_model().half().save_pretrained(model)
    given = arguments(micro, place, "--model", model)
    assert main(given) == 2
    assert "its weights are of float16, in which a run diverges: give --dtype float32" in capsys.readouterr().err
    assert not place.exists()
    assert main([*given, "--dtype", "float32"]) == 0


def test_a_resumed_run_needs_no_data_that_it_has_read(micro, tmp_path, unmeasured, capsys):
    place, data = tmp_path / "a run", Path(shutil.copytree(micro.data, tmp_path / "data"))
    assert main(arguments(micro, place, "--data", data)) == 0
    shutil.rmtree(data)
    assert main(["train", "--resume", str(place), "--max-steps", "5"]) == 0
    (place / "tokens.npz").unlink()
    capsys.readouterr()
    assert main(["train", "--resume", str(place), "--max-steps", "6"]) == 2
    assert capsys.readouterr().err == f"logitless: --data {data}: no such file or directory\n"
    assert how_to_go_on(place, "train") == f"logitless train --resume '{place}' goes on from step 5"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--max-steps", "many"], "logitless: --max-steps: expected a whole number, got 'many'"),
        (["--learning-rate", "low"], "logitless: --learning-rate: expected a number, got 'low'"),  # may be left out
        (["--los", "dense"], "--los, dense; did you mean --loss?"),
        (["--MODEL", "tiny"], "--MODEL, tiny; did you mean --model?"),
        (["--output", "here"], "--output, here; did you mean --output-dir?"),
        (["--loss", "fast"], "'--loss'. Expected one of ('auto', 'dense', 'logitless')"),
        (["--data"], "Missing value for argument '--data'"),
        (["everything"], "Unrecognized options: everything"),
    ],
)
def test_options_that_cannot_be_read(given, expected, capsys):
    assert main(["train", *given]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert expected in error
    assert error.endswith("(see logitless train --help)\n")


@pytest.mark.parametrize(
    "given", [["--data", ""], ["--output-dir="], ["--output_dir", ""], ["--teacher", ""]], ids=" ".join
)
def test_an_option_without_a_value_is_no_other_one(given, capsys):
    """As a shell's variable is that nobody set: a path was the current folder, and data the standard library."""
    assert main(["train", "--rope-scaling", "", *given]) == 2
    option = given[0].partition("=")[0]
    assert capsys.readouterr().err == f"logitless: {option} is empty: give a value, or leave it out\n"
