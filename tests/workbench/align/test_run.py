"""Whole alignment runs: what they write, that they resume, and that they end in one line."""

import json
import math
import os
import shutil
import signal
import sys
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from logitless.cli.main import main
from logitless.errors import ConfigError, DataError, OptionError
from logitless.models.nsa.layers import attach
from logitless.models.nsa.options import NSAOptions
from logitless.workbench.align import run as align
from logitless.workbench.align.config import METHODS, AlignConfig
from logitless.workbench.align.run import run
from logitless.workbench.align.trainers import trainer_of
from logitless.workbench.common.files import read_lines
from logitless.workbench.common.written import WRITTEN
from logitless.workbench.runs import callbacks
from logitless.workbench.runs.checkpoints import RUN_FILE, last_checkpoint
from logitless.workbench.runs.ending import Interrupted
from logitless.workbench.runs.rundir import stored
from logitless.workbench.sft import run as sft
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sources.chat import ASSISTANT
from logitless.workbench.sources.tokenizer import pretrained, prompt_ids
from tests.support.workbench.killing import curve
from tests.support.workbench.micro import MICRO_CHAT, micro_directory
from tests.support.workbench.processes import flags, killed_at
from tests.support.workbench.unmeasured import leave_unmeasured

QUIET = Console(quiet=True)
TRL_METRICS = {
    "intuitor": (
        "reward",
        "reward_std",
        "kl",
        "entropy",
        "completions/mean_length",
        "rewards/self_certainty/mean",
        "rewards/repetition_guard/mean",
        "self_certainty/mean",
        "num_tokens",
        "step_time",
    ),
    "grpo": ("reward", "kl", "entropy", "rewards/python_lines/mean", "self_certainty/mean", "num_tokens"),
    "rloo": ("reward", "kl", "entropy", "rewards/python_lines/mean", "self_certainty/mean", "num_tokens"),
    "dpo": (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "entropy",
        "mean_token_accuracy",
        "num_tokens",
    ),
}
MEMORY = ("memory/peak_bytes", "memory/dense_would_need_bytes")


@pytest.fixture
def undrawn(monkeypatch) -> None:
    """Runs without align.png, of whose records others draw one."""
    monkeypatch.setattr(align, "plot", lambda *_: None)


def steps(place: Path) -> list[dict]:
    return [record for record in read_lines(place / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize("method", METHODS)
def test_a_config_without_architectures_has_a_reference_too(start, tmp_path, monkeypatch, method):
    """TRL loads it from the model's directory, by the class that its config.json names."""
    model = tmp_path / "model"
    shutil.copytree(start.model, model)
    config = json.loads((model / "config.json").read_text())
    del config["architectures"]
    (model / "config.json").write_text(json.dumps(config))
    made = []

    def stop(parts, policy):
        made.append(trainer_of(parts, policy))
        raise OptionError("far enough")

    monkeypatch.setattr(align, "trainer_of", stop)
    given = {"method": method, "model": str(model), "rewards": None, "repetition_guard": None, "beta": None}
    with pytest.raises(OptionError, match="far enough"):
        run(replace(start, **given, output_dir=tmp_path / "run"), QUIET)
    assert type(made[0].ref_model) is type(made[0].model)


def test_every_pair_weighs_the_same(start, tmp_path, monkeypatch):
    """TRL averages over batches: a smaller one, or one filled up with pairs seen before, would weigh its pairs more."""
    made = []

    def stop(parts, policy):
        made.append(trainer_of(parts, policy))
        raise OptionError("far enough")

    monkeypatch.setattr(align, "trainer_of", stop)
    rows = [{"prompt": "d01", "chosen": "x" * (1 + i // 9), "rejected": " = 7" * (1 + i // 20)} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"method": "dpo", "data": str(tmp_path / "rows.jsonl"), "batch_size": 4}
    with pytest.raises(OptionError, match="far enough"):
        run(replace(start, **given, output_dir=tmp_path / "run"), QUIET)
    (trainer,) = made
    whole = trainer.evaluate()["eval_logps/rejected"]
    batches = [len(batch["input_ids"]) for batch in trainer.get_train_dataloader()]
    assert batches == [8] * 23  # of 95 pairs, chosen and rejected each
    trainer.args.dataloader_drop_last = False
    alone = [trainer.evaluate(trainer.eval_dataset.select([i]))["eval_logps/rejected"] for i in range(4)]
    assert alone == sorted(alone, reverse=True)
    assert whole == pytest.approx(sum(alone) / 4, rel=1e-5)


def test_weights_that_rounding_keeps_are_warned_of(start, tmp_path, monkeypatch, capsys):
    def stop(*parts):
        raise OptionError("far enough")

    monkeypatch.setattr(align, "trainer_of", stop)
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(OptionError, match="far enough"):
            run(replace(start, dtype=dtype, output_dir=tmp_path / dtype), Console(stderr=True))
        error = capsys.readouterr().err
        assert ("warning: weights of bfloat16 are trained" in error) == (dtype == "bfloat16")
        assert f"taking prompts from {start.data or 'the standard library'} ..." in error


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("method", ["grpo", "rloo", "dpo"])
def test_a_reference_with_sparse_attention_has_its_parameters_too(start, tmp_path, monkeypatch, method):
    """TRL loads it by transformers alone, which has no place for them."""
    sparse = attach(AutoModelForCausalLM.from_pretrained(start.model), NSAOptions(8, 4, 16, 4, 10))
    with torch.no_grad():
        for layer in sparse.model.layers:
            layer.self_attn.nsa.gates.bias.uniform_()
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(start.model, model)
    sparse.save_pretrained(model)
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}{i}{i}", "chosen": "a", "rejected": "b"}) + "\n" for i in range(9))
    )
    made = []
    monkeypatch.setattr(align, "trainer_of", lambda *parts: made.append(trainer_of(*parts)) or made[0])
    given = {"method": method, "model": str(model), "data": str(data), "rewards": None, "repetition_guard": None}
    run(replace(start, **given, beta=None, completion_length=2, max_steps=1, output_dir=tmp_path / "run"), QUIET)
    reference, began = made[0].ref_model.state_dict(), sparse.state_dict()
    assert reference.keys() == began.keys()
    assert all(reference[name].equal(tensor) for name, tensor in began.items())


@pytest.fixture(scope="module")
def finished(start, tmp_path_factory) -> tuple[Path, dict]:
    place = tmp_path_factory.mktemp("runs") / "intuitor"
    return place, run(replace(start, max_steps=8, output_dir=place), QUIET)


def test_an_intuitor_run_writes_everything(finished, start):
    place, summary = finished
    assert json.loads((place / "summary.json").read_text()) == summary
    assert summary["schema"] == 1
    assert summary["rewards"] == {"self_certainty": 1.0, "repetition_guard": 5.0}
    assert summary["beta"] == 0.04
    assert [record["step"] for record in steps(place)] == list(range(1, 9))
    assert (place / "align.png").read_bytes().startswith(b"\x89PNG")
    assert AutoModelForCausalLM.from_pretrained(place / "model").config.use_cache
    assert len(AutoTokenizer.from_pretrained(place / "model")) == summary["vocab_size"]
    assert summary["held_out_before"]["reward"] is not None
    assert summary["held_out_after"]["self_certainty/mean"] > 0
    assert summary["dense_would_need_bytes"] == 2 * 4 * 12 * 259 * 4
    assert summary["peak_memory_bytes"] > 2**27
    assert (place / "checkpoint-8").exists()
    assert all(p.name == RUN_FILE or any(map(p.match, WRITTEN)) for p in place.iterdir())
    assert not (place / "README.md").exists()


@pytest.mark.parametrize("method", ["grpo", "rloo", "dpo"])
def test_the_other_methods(start, method, tmp_path):
    summary = run(replace(start, method=method, output_dir=tmp_path / "run"), QUIET)
    assert summary["steps"] == 4
    assert (tmp_path / "run" / "align.png").exists()
    assert not (tmp_path / "run" / "README.md").exists()
    for record in steps(tmp_path / "run"):
        assert set(TRL_METRICS[method] + MEMORY) <= set(record)
    lines = read_lines(tmp_path / "run" / "rows.jsonl")
    assert {line["split"] for line in lines} == {"train", "held"}
    if method == "dpo":
        assert all(line["row"]["chosen"] and line["row"]["rejected"] for line in lines)
        assert steps(tmp_path / "run")[-1]["loss"] < steps(tmp_path / "run")[0]["loss"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_prompts_of_text_are_not_closed(start, tmp_path, monkeypatch, method):
    """Completions are of the ids that `logitless sample` would go on from, and no marker is in them."""
    model = tmp_path / "model"
    shutil.copytree(start.model, model)
    micro_directory(tmp_path / "closing", "<s> $A </s>")
    for path in (tmp_path / "closing").glob("tokenizer*"):
        shutil.copy(path, model)
    made, read = [], []

    def trainer(*parts: Any) -> Any:
        made.append(trainer_of(*parts))
        generate = made[0]._generate_single_turn
        made[0]._generate_single_turn = lambda ids, *more: read.extend(ids) or generate(ids, *more)
        return made[0]

    monkeypatch.setattr(align, "trainer_of", trainer)
    run(replace(start, method=method, model=str(model), max_steps=1, output_dir=tmp_path / "run"), QUIET)
    assert read
    assert all(ids[0] == 1 and 2 not in ids for ids in read)
    text = "a</s>"
    assert made[0].processing_class(text)["input_ids"] == [1, 67, 2, 2]
    assert made[0]._tokenize_prompts([text]) == (prompt_ids([text], pretrained(str(model))), None, {})


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("form", ["pairs", "messages"])
def test_preferences_in_conversations(start, tmp_path, monkeypatch, form):
    """TRL's tokens are the template's, with markers as whole tokens; without rejected answers, the model's own are."""
    model = tmp_path / "talker"
    shutil.copytree(start.model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = MICRO_CHAT
    tokenizer.save_pretrained(model)
    asked, said, wrong = ({"role": r, "content": c} for r, c in (("user", "ab"), (ASSISTANT, "cd"), (ASSISTANT, "x")))
    pair = {"prompt": [asked], "chosen": [said], "rejected": [wrong]}
    row = pair if form == "pairs" else {"messages": [asked, said]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 12)
    made = []
    monkeypatch.setattr(align, "trainer_of", lambda *parts: made.append(trainer_of(*parts)) or made[0])
    options = {
        "method": "dpo",
        "model": str(model),
        "data": str(tmp_path / "rows.jsonl"),
        "output_dir": tmp_path / "run",
    }
    run(replace(start, **options), QUIET)
    lines = read_lines(tmp_path / "run" / "rows.jsonl")
    assert all(line["row"]["rejected"][0]["role"] == ASSISTANT for line in lines)
    first = made[0].train_dataset[0]
    marks = [tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "</s>")]
    assert tokenizer.decode(first["prompt_ids"]) == "<s>user:ab</s><s>assistant:"
    assert tokenizer.decode(first["chosen_ids"]) == "cd</s>"
    assert sum(i in marks for i in first["prompt_ids"]) == 3
    assert first["chosen_ids"][-1] == marks[1]
    longest = len(first["prompt_ids"]) + len(first["chosen_ids"])
    if form == "pairs":
        rows = 2 * start.batch_size * longest  # of the texts that there are, not of the longest allowed
        assert steps(tmp_path / "run")[-1]["memory/dense_would_need_bytes"] == rows * len(tokenizer) * 8
        assert tokenizer.decode(first["rejected_ids"]) == "x</s>"
        assert steps(tmp_path / "run")[-1]["rewards/accuracies"] == 1


@pytest.mark.parametrize("method", ["grpo", "dpo", "ste"])
def test_positions_that_follow_what_came_before_are_refused(tmp_path, capsys, method):
    own = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    config = AutoConfig.from_pretrained(micro_directory(tmp_path / "model", rope_parameters=own))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    rows = [{"prompt": "x" * 70, **({"chosen": "a", "rejected": "b"} if method == "dpo" else {})} for _ in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--method", method, "--model", tmp_path / "model", "--data", tmp_path / "rows.jsonl", "--device", "cpu"]
    given += ["--prompt-length", 70, "--completion-length", 8, "--output-dir", tmp_path / "run"]
    expected = "past position 64" if method == "ste" else "64 positions"
    assert main(["align", *map(str, given)]) == 2
    assert expected in capsys.readouterr().err


def test_samples_without_text_are_no_pairs(start, tmp_path, monkeypatch):
    monkeypatch.setattr("logitless.workbench.align.data._samples", lambda prompts, *_: [" \n"] * len(prompts))
    with pytest.raises(DataError, match=r"--data .*: expected text in the model's own .*, got blank ones alone"):
        run(replace(start, method="dpo", output_dir=tmp_path / "run"), QUIET)
    assert not (tmp_path / "run" / RUN_FILE).exists()


def test_checkpointing_says_nothing_of_names_that_nobody_can_change(start, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        run(replace(start, gradient_checkpointing=True, max_steps=1, output_dir=tmp_path / "run"), QUIET)


def test_the_exact_kl(start, tmp_path):
    """In the first step policy and reference are the same, and so are the completions of a run without the option."""
    config = replace(start, max_steps=3, beta=1.0)
    summary = run(replace(config, exact_kl=True, output_dir=tmp_path / "exact"), QUIET)
    assert summary["exact_kl"] is True
    run(replace(config, output_dir=tmp_path / "sampled"), QUIET)
    exact, sampled = steps(tmp_path / "exact"), steps(tmp_path / "sampled")
    assert exact[0]["self_certainty/mean"] == pytest.approx(sampled[0]["self_certainty/mean"], rel=1e-5)
    assert exact[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert exact[2]["kl"] > 1e-9
    assert exact[2]["kl"] != pytest.approx(sampled[2]["kl"], rel=1e-3)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_nucleus_is_what_completions_are_scored_over(start, tmp_path, method):
    config = replace(start, method=method, max_steps=2, top_p=0.95, output_dir=tmp_path / "run")
    run(config, QUIET)
    for record in steps(tmp_path / "run"):
        assert abs(record["sampling/k1"]) < 1e-5
        assert 0 <= record["sampling/k3"] < 1e-5


@pytest.mark.usefixtures("undrawn")
def test_examples_are_sampled_as_the_steps_completions_are(start, tmp_path):
    """From a nucleus of one entry here, which is what a greedy search takes."""
    config = replace(start, method="grpo", max_steps=1, top_p=1e-6, output_dir=tmp_path / "run")
    run(config, QUIET)
    example = json.loads((tmp_path / "run" / "completions.json").read_text())["before"][0]
    tokenizer, model = (x.from_pretrained(start.model) for x in (AutoTokenizer, AutoModelForCausalLM))
    prompt = tokenizer(example["prompt"], return_tensors="pt")
    greedy = model.generate(**prompt, do_sample=False, max_new_tokens=start.completion_length)
    made = "".join(token["text"] for token in example["tokens"] if not token["special"])
    assert made == tokenizer.decode(greedy[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_metrics_have_trls_names(finished):
    for record in steps(finished[0]):
        assert set(TRL_METRICS["intuitor"] + MEMORY) <= set(record)


def test_adapters_and_rewards_of_ones_own(start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_rewards.py").write_text("def short(completion_ids, **_):\n    return [-len(c) for c in completion_ids]\n")
    config = replace(
        start, lora_rank=2, learning_rate=None, rewards="own_rewards:short=0.1", report_to="none", repetition_guard=0.0
    )
    summary = run(replace(config, output_dir=tmp_path / "run", max_steps=2), QUIET)
    assert 0 < summary["trainable_parameters"] < summary["parameters"] / 2
    assert summary["rewards"] == {"self_certainty": 1.0, "short": pytest.approx(0.1)}
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert steps(tmp_path / "run")[0]["rewards/short/mean"] < 0
    base = AutoModelForCausalLM.from_pretrained(start.model).num_parameters()
    assert summary["parameters"] == base + summary["trainable_parameters"]
    assert not (tmp_path / "run" / "adapter" / "ref").exists()  # TRL's copy of the adapters as they began


@pytest.mark.usefixtures("undrawn")
def test_a_finished_run_goes_on_with_more_steps(start, tmp_path):
    place = tmp_path / "more"
    run(replace(start, max_steps=2, output_dir=place), QUIET)
    again = replace(stored(place, AlignConfig()), resume=place)
    with pytest.raises(OptionError, match="finished at step 2; raise --max-steps"):
        run(again, QUIET)
    with pytest.raises(OptionError, match=r"--beta cannot change from 0\.04 to 0\.5$"):
        run(replace(again, max_steps=3, beta=0.5), QUIET)
    with pytest.raises(OptionError, match=r"--rewards cannot change from its default to python_lines$"):
        run(replace(again, max_steps=3, rewards="python_lines"), QUIET)
    assert run(replace(again, max_steps=3, beta=0.04), QUIET)["steps"] == 3
    assert [record["step"] for record in steps(place)] == [1, 2, 3]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_signal_keeps_the_work(start, tmp_path, monkeypatch, step):
    """Also one in the last step."""
    place = tmp_path / "stopped"
    begin = callbacks.GentleStop.on_step_begin

    def on_step_begin(self, args, state, control, **rest):
        begin(self, args, state, control, **rest)
        if state.global_step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(callbacks.GentleStop, "on_step_begin", on_step_begin)
    with pytest.raises(Interrupted, match=f"logitless align --resume {place} goes on from step {step + 1}"):
        run(replace(start, output_dir=place), QUIET)
    monkeypatch.undo()
    assert last_checkpoint(place) == (place / f"checkpoint-{step + 1}", step + 1)
    assert run(replace(stored(place, AlignConfig()), resume=place), QUIET)["steps"] == 4


@pytest.mark.slow  # the same in this process, bit for bit, is below, and kills of processes in runs/test_killed.py
def test_a_killed_run_resumes_with_the_same_completions(start, finished, tmp_path):
    place = tmp_path / "killed"
    killed_at(5, "align", *flags(replace(start, max_steps=8)), "--output-dir", place)
    assert last_checkpoint(place) == (place / "checkpoint-4", 4)
    run(replace(stored(place, AlignConfig()), resume=place), QUIET)
    for name in ("reward", "self_certainty/mean", "loss"):
        again, whole = ([record[name] for record in steps(x)] for x in (place, finished[0]))
        assert again == pytest.approx(whole, rel=1e-4, abs=1e-6)


class Killed(BaseException):
    """Ends a run as a signal that cannot be caught would, at a moment that a test chooses."""


@pytest.fixture(scope="module", params=["intuitor", "dpo"])
def epochs(request, start, tmp_path_factory) -> tuple[AlignConfig, list[dict]]:
    """Options of a run of three or six steps an epoch, with a checkpoint every second step, and its curve."""
    place = tmp_path_factory.mktemp("epochs")
    rows = [{"prompt": f"d{i:02d} x{i} =", "chosen": f" {i}", "rejected": f" {i} {i}"} for i in range(13)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"method": request.param, "data": str(place / "rows.jsonl"), "max_steps": 8}
    config = replace(start, **given, output_dir=place / "run")
    run(config, QUIET)
    return config, curve(place / "run")


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("step", [1, 4, 6, 8])
def test_a_run_resumes_to_the_same_curve_bit_for_bit(epochs, tmp_path, monkeypatch, step):
    """Killed before its first checkpoint, with one amid an epoch, at an epoch's end, and after the last step."""
    config, whole = epochs
    place, log = tmp_path / "run", callbacks.Records.on_log

    def on_log(self, args, state, control, **rest):
        log(self, args, state, control, **rest)
        if state.global_step == step + (step > 1):
            raise Killed

    def conclude(*_):
        raise Killed

    with monkeypatch.context() as until_then:
        until_then.setattr(callbacks.Records, "on_log", on_log)
        until_then.setattr("logitless.workbench.align.callbacks.HeldOutRows.conclude", conclude)
        with pytest.raises(Killed):
            run(replace(config, output_dir=place), QUIET)
    assert last_checkpoint(place) == (None if step == 1 else (place / f"checkpoint-{step}", step))
    run(replace(stored(place, AlignConfig()), resume=place), QUIET)
    assert curve(place) == whole


@pytest.mark.usefixtures("undrawn")
def test_a_models_own_way_of_sampling_is_not_the_policys(start, tmp_path, monkeypatch):
    """TRL takes forbidden tokens from generation_config.json, and scores completions as if there were none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("seen_rewards.py").write_text(
        "seen = []\ndef f(completion_ids, **_):\n    seen.extend(completion_ids)\n    return [0.0] * 4\n"
    )
    shutil.copytree(start.model, "model")
    own = {"suppress_tokens": list(range(3, 259)), "top_p": 0.5, "do_sample": True}
    Path("model/generation_config.json").write_text(json.dumps(own))
    given = {"model": "model", "method": "grpo", "rewards": "seen_rewards:f", "max_steps": 1}
    run(replace(start, **given, output_dir=Path("run")), QUIET)
    assert {i for ids in sys.modules["seen_rewards"].seen for i in ids} - {0, 1, 2}
    saved = json.loads(Path("run/model/generation_config.json").read_text())
    assert {name: saved[name] for name in own} == own


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_that_has_diverged_ends_the_run_in_one_line(start, tmp_path, monkeypatch, capsys, method):
    """transformers cannot sample from it, nor pairs' rejected completions; some looks find it before."""
    monkeypatch.chdir(tmp_path)
    given = flags(replace(start, method=method, max_steps=4, learning_rate=1e20))
    if method in ("rloo", "dpo"):  # the one without a reward here, the other samples before it learns
        shutil.copytree(start.model, "model")
        tensors = load_file("model/model.safetensors")
        tensors["model.norm.weight"][0] = torch.nan
        save_file(tensors, "model/model.safetensors", {"format": "pt"})
        given = [*given, "--model", "model"]
    if method == "grpo":  # a reward that differs whatever the text was that the model has learned
        given = [*given, "--repetition-guard", "1"]
    assert main(["align", *given, "--output-dir", "run"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error
    seen_earlier = {"rloo": "head: expected finite logits, got NaN or infinity"}
    assert seen_earlier.get(method, "the policy's probabilities are not finite") in error.splitlines()[-1]


def test_a_reward_that_is_not_a_number_ends_the_run(start, tmp_path, monkeypatch, capsys):
    """TRL alone takes NaN for a completion without a reward, and ends well."""
    monkeypatch.chdir(tmp_path)
    Path("nan_rewards.py").write_text("def f(completions, **_):\n    return [float('nan') for _ in completions]\n")
    options = [*flags(replace(start, max_steps=1)), "--rewards", "nan_rewards:f", "--output-dir", "run"]
    assert main(["align", *options]) == 1
    assert "--rewards nan_rewards:f returned nan: expected a finite number" in capsys.readouterr().err
    assert not Path("run/summary.json").exists()


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_completion_without_a_reward_teaches_nothing(start, tmp_path, monkeypatch, method):
    """Self-certainty, which weighs nothing there, is no reward of it; nor has a held-out row without any a reward."""
    monkeypatch.chdir(tmp_path)
    Path("some_rewards.py").write_text(
        "def f(answer, **_):\n    return [1.0, None, *answer[2:]] if len(answer) > 1 else answer\n"
    )
    rows = [{"prompt": f"d{i:02d} x{i} =", "answer": None if i == 6 else 1} for i in range(12)]  # 6 is held out
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = []
    monkeypatch.setattr(align, "trainer_of", lambda *parts: made.append(trainer_of(*parts)) or made[0])
    given = {"method": method, "data": "rows.jsonl", "rewards": "some_rewards:f", "max_steps": 1}
    summary = run(replace(start, **given, output_dir=Path("run")), QUIET)
    assert all(abs(x) < 1e-6 for x in made[0]._logs["advantages"])
    (record,) = steps(Path("run"))
    assert record["reward"] == 1.0
    assert record["self_certainty/mean"] > 0
    assert "reward" not in summary["held_out_before"]


def test_a_launcher_that_would_compile_is_refused(start, tmp_path, monkeypatch):
    """A compiled model gives its weights names of its own, by which nobody would find them."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(OptionError, match=r"told dynamo_backend eager, logitless align .* with dynamo_backend no"):
        run(replace(start, output_dir=tmp_path / "run"), QUIET)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"model": "tiny"},
            ConfigError,
            "--model tiny: .* got a configuration without weights",
        ),
        ({"model": "tinny"}, ConfigError, "--model tinny: expected a directory with weights"),
        (
            {"prompt_length": 60},
            DataError,
            "60 tokens, .* --completion-length 12 is more than the model's 64 positions",
        ),
        ({"report_to": "trackio"}, OptionError, "--report-to trackio needs it installed"),
        ({"rewards": "no_such:f"}, OptionError, "No module named 'no_such'"),
        *(
            ({"method": method, "batch_size": 2**14}, DataError, "a step needs 8,192 prompts .* got [0-9]+ beside")
            for method in ("intuitor", "grpo", "rloo")
        ),
    ],
)
def test_bad_input(start, tmp_path, monkeypatch, options, error, message):
    monkeypatch.setattr(
        "logitless.workbench.align.trainers.find_spec", lambda name: None if name == "trackio" else name
    )
    with pytest.raises(error, match=message) as caught:
        run(replace(start, output_dir=tmp_path / "run", **options), QUIET)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


LONG = {"prompt": "a", "chosen": "b", "rejected": "c" * 63}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("rows", "method", "message"),
    [
        ([{"prompt": f"a{i}"} for i in range(9)], "intuitor", None),
        (
            [{"prompt": f"{i}" * 53} for i in range(9)],
            "intuitor",
            "a prompt has 53 tokens, which with --completion",
        ),
        (
            [{"prompt": f"{i}" * 53, "chosen": "b"} for i in range(9)],
            "intuitor",
            "a prompt has 53 tokens, which with --completion",
        ),
        ([{**LONG, "rejected": f"c{i}"} for i in range(9)], "dpo", None),
        ([LONG] * 9, "dpo", "a prompt with its answer has 65 tokens, the model 64 positions: shorten it, or leave it"),
    ],
)
def test_lengths_are_those_of_the_rows(start, tmp_path, rows, method, message):
    """--prompt-length says nothing of prompts that are there; pairs longer than the positions were learned."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = replace(start, data=str(data), method=method, prompt_length=64, max_steps=1, output_dir=tmp_path / "run")
    with pytest.raises(DataError, match=message) if message else nullcontext():
        assert run(given, QUIET)["steps"] == 1
    assert given.output_dir.exists() == (message is None)  # where other rows could begin


@pytest.mark.usefixtures("undrawn")
def test_an_absent_default_model_is_trained_first(start, tmp_path, monkeypatch):
    """By the code of `logitless train`, in its place; here with a model that takes no minutes."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def train_text(config, console):
        seen.append(config)
        Path("runs/tiny").mkdir(parents=True)
        Path("runs/tiny/model").symlink_to(start.model)

    monkeypatch.setattr("logitless.workbench.sft.run.run", train_text)
    summary = run(replace(start, model=AlignConfig().model, max_steps=1), QUIET)
    assert [config.output_dir for config in seen] == [Path("runs/tiny")]
    assert summary["output_dir"] == "runs/intuitor"
    run(replace(start, model=AlignConfig().model, max_steps=1), QUIET)
    assert len(seen) == 1


@pytest.fixture(scope="module")
def default_place(tmp_path_factory) -> Path:
    """A directory with the default model of `logitless train`, Tekken's 131,072 entries, after two steps."""
    place = tmp_path_factory.mktemp("default")
    with pytest.MonkeyPatch.context() as patch:
        leave_unmeasured(patch)
        sft.run(TrainConfig(max_steps=2, context_length=64, batch_size=2, output_dir=place / "runs" / "tiny"), QUIET)
    return place


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", METHODS)
def test_the_default_model(default_place, monkeypatch, method):
    """Two steps of `logitless align --method ...` without a model or data: the tiny model, the standard library."""
    monkeypatch.chdir(default_place)
    summary = run(AlignConfig(method=method, max_steps=2, completion_length=8, batch_size=8), QUIET)
    assert (summary["model"], summary["data"], summary["vocab_size"]) == ("runs/tiny/model", "stdlib", 131_072)
    assert summary["output_dir"] == f"runs/{method}"
    for record in steps(Path(summary["output_dir"])):
        assert set(TRL_METRICS[method] + MEMORY) <= set(record)
        assert math.isfinite(record["loss"])
    held = [line for line in read_lines(Path(summary["output_dir"]) / "rows.jsonl") if line["split"] == "held"]
    assert len(held) == 32
