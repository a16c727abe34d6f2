"""Whole runs: what they write, that they resume, and that they end in one line."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from logitless.errors import ConfigError, NotFiniteError, OptionError
from logitless.workbench.common.files import read_lines
from logitless.workbench.common.space import OutOfSpace
from logitless.workbench.common.written import WRITTEN
from logitless.workbench.runs.callbacks import HeldOut
from logitless.workbench.runs.checkpoints import KEPT, RUN_FILE, checkpoints, last_checkpoint, mark
from logitless.workbench.runs.ending import Interrupted, explained
from logitless.workbench.runs.rundir import stored
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.data import load
from logitless.workbench.sft.run import run
from tests.support import forked
from tests.support.workbench.micro import CONTEXT, micro_directory, micro_model
from tests.support.workbench.processes import killed_at

QUIET = Console(quiet=True)


def losses(place: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_lines(place / "metrics.jsonl") if "loss" in r}


def dense_held_out_loss(place: Path, length: int = CONTEXT) -> float:
    """transformers' own dense loss of the saved model, per token of the held-out rows."""
    model = AutoModelForCausalLM.from_pretrained(place / "model").eval()
    _, rows = load(place / "tokens.npz", length)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            batch = {name: x[None] for name, x in row.items()}
            total += model(**batch, use_cache=False, num_items_in_batch=1).loss.item()
            count += int((batch["labels"][:, 1:] != -100).sum())
    return total / count


@pytest.fixture(scope="module")
def finished(micro, tmp_path_factory) -> tuple[Path, dict]:
    """One run with everything, its memory measured."""
    place = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitless.workbench.sft.stepcost.subprocess.run", forked.run)
        summary = run(replace(micro.config, output_dir=place), QUIET)
    return place, summary


def test_a_run_learns_and_writes_everything(finished):
    place, summary = finished
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"] - 0.5
    assert summary["last_loss"] < summary["first_loss"] - 0.5
    assert list(losses(place)) == list(range(1, 11))
    assert json.loads((place / "summary.json").read_text()) == summary
    assert summary["schema"] == 1
    for name in ("loss.png", "memory.png"):
        assert (place / name).read_bytes().startswith(b"\x89PNG")
    assert not [p for p in place.iterdir() if p.name.startswith(".")]  # nothing half-written is left
    assert all(p.name == RUN_FILE or any(map(p.match, WRITTEN)) for p in place.iterdir())
    assert len(checkpoints(place)) == len([*place.glob("checkpoint-*")]) == KEPT
    assert all(b"pickle" not in p.name.encode() for p in (place / "model").iterdir())
    assert {p.suffix for p in (place / "model").iterdir()} <= {".json", ".safetensors"}


def test_the_same_step_is_measured_streamed_and_dense(finished):
    _, summary = finished
    measured = summary["step_memory"]
    assert measured["logitless"]["peak_bytes"] >= 0
    assert measured["dense"]["peak_bytes"] >= 0
    assert measured["logitless"]["loss"] == pytest.approx(measured["dense"]["loss"], rel=1e-5)


def test_the_checkpoint_gives_the_same_loss_in_transformers(finished):
    place, summary = finished
    assert dense_held_out_loss(place) == pytest.approx(summary["held_out_loss_after"], rel=2e-6)


def test_the_saved_tokenizer_is_the_one_of_the_run(finished, micro):
    place, _ = finished
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    text = "file 7: </s> aaa\n"
    again = AutoTokenizer.from_pretrained(micro.model.parent)
    assert tokenizer(text)["input_ids"] == again(text)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    assert model.config.eos_token_id == tokenizer.eos_token_id < model.config.vocab_size
    assert model.config.use_cache


def test_nothing_of_this_machine_is_in_the_checkpoint(finished, micro):
    place, _ = finished
    for path in (place / "model").glob("*.json"):
        assert str(micro.model.parent) not in path.read_text()
        assert str(Path.home()) not in path.read_text()


@pytest.mark.usefixtures("unmeasured")
class TestShortRuns:
    def test_dense_and_streamed_learn_the_same(self, micro, finished, tmp_path):
        place, _ = finished
        run(replace(micro.config, loss="dense", output_dir=tmp_path / "dense"), QUIET)
        assert losses(tmp_path / "dense") == pytest.approx(losses(place), rel=1e-4)

    def test_accumulation_is_a_larger_batch(self, micro, tmp_path):
        whole = replace(micro.config, batch_size=4, max_steps=4, output_dir=tmp_path / "whole")
        parts = replace(
            whole,
            batch_size=1,
            gradient_accumulation_steps=4,
            gradient_checkpointing=True,
            output_dir=tmp_path / "parts",
        )
        run(whole, QUIET)
        run(parts, QUIET)
        assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)

    def test_adapters(self, micro, finished, tmp_path):
        base, _ = finished
        config = replace(
            micro.config, model=str(base / "model"), lora_rank=2, max_steps=4, output_dir=tmp_path / "lora"
        )
        summary = run(config, QUIET)
        assert 0 < summary["trainable_parameters"] < summary["parameters"] / 2
        assert (tmp_path / "lora" / "adapter" / "adapter_model.safetensors").exists()
        assert dense_held_out_loss(tmp_path / "lora") == pytest.approx(summary["held_out_loss_after"], rel=1e-5)

    def test_adapters_on_random_weights_are_warned_of(self, micro, tmp_path, monkeypatch, capsys):
        def stop(*parts):
            raise OptionError("far enough")

        monkeypatch.setattr("logitless.workbench.sft.run._set_up", stop)
        for config, warned in ((replace(micro.config, lora_rank=2), True), (micro.config, False)):
            with pytest.raises(OptionError, match="far enough"):
                run(replace(config, output_dir=tmp_path / str(warned)), Console(stderr=True))
            warning = f"warning: --lora-rank 2 trains adapters alone, and --model {config.model} is a configuration"
            assert (warning in capsys.readouterr().err) == warned

    @pytest.mark.usefixtures("unmeasured")
    def test_the_rate_is_that_of_what_is_trained(self, micro, tmp_path, monkeypatch, capsys):
        """New weights learn fastest, adapters faster than trained weights; only adapters of new ones are warned of."""
        found = []

        def stop(config, place, rate, **more):
            found.append(rate)
            raise OptionError("far enough")

        monkeypatch.setattr("logitless.workbench.sft.run.arguments", stop)
        shutil.copytree(micro.model.parent, tmp_path / "trained")
        micro_model().save_pretrained(tmp_path / "trained")
        trained = str(tmp_path / "trained")
        for model, rank, rate in ((micro.model, 0, None), (trained, 0, None), (trained, 2, None), (trained, 2, 0.5)):
            given = {"model": str(model), "lora_rank": rank, "learning_rate": rate}
            with pytest.raises(OptionError, match="far enough"):
                run(replace(micro.config, **given, output_dir=tmp_path / "run"), Console(stderr=True))
        assert found == [3e-3, 2e-5, 2e-4, 0.5]
        assert "warning" not in capsys.readouterr().err

    def test_a_preset_is_said_to_begin_with_random_weights(self, micro, tmp_path, monkeypatch, capsys):
        def stop(*parts):
            raise OptionError("far enough")

        monkeypatch.setattr("logitless.workbench.sft.run._set_up", stop)
        for model, said in (("qwen3-4b", True), (micro.config.model, False)):
            with pytest.raises(OptionError, match="far enough"):
                run(replace(micro.config, model=model, output_dir=tmp_path / str(said)), Console(stderr=True))
            expected = "qwen3-4b begins with random weights; Qwen/Qwen3-4B has trained ones"
            assert (expected in capsys.readouterr().err) == said

    def test_a_model_that_keeps_no_documents_apart_is_warned_of(self, micro, tmp_path, unmeasured, monkeypatch, capsys):
        def stop(*parts):
            raise OptionError("far enough")

        monkeypatch.setattr("logitless.workbench.sft.run.train_steps", stop)
        opt = micro_directory(tmp_path / "opt", model_type="opt", ffn_dim=32)
        for config, warned in ((replace(micro.config, model=str(opt)), True), (micro.config, False)):
            with pytest.raises(OptionError, match="far enough"):
                run(replace(config, output_dir=tmp_path / str(warned)), Console(stderr=True))
            assert ("does not keep packed documents apart" in capsys.readouterr().err) == warned

    def test_weights_that_rounding_keeps_are_warned_of(self, micro, tmp_path, unmeasured, monkeypatch, capsys):
        def stop(*parts):
            raise OptionError("far enough")

        monkeypatch.setattr("logitless.workbench.sft.run.train_steps", stop)
        narrow = replace(micro.config, dtype="bfloat16")
        cases = {
            "narrow": (narrow, True),
            "adapted": (replace(narrow, lora_rank=2), False),
            "wide": (micro.config, False),
        }
        for name, (config, warned) in cases.items():
            with pytest.raises(OptionError, match="far enough"):
                run(replace(config, output_dir=tmp_path / name), Console(stderr=True))
            said = capsys.readouterr().err
            assert ("warning: weights of bfloat16 are trained" in said) == warned
            assert ("give --dtype float32 --mixed-precision bf16, or --lora-rank" in said) == warned
            assert f"reading and tokenising {config.data} ..." in said

    def test_bfloat16_and_steps_of_fewer_rows_than_they_ask_for(self, micro, tmp_path):
        config = replace(micro.config, dtype="bfloat16", max_steps=3, batch_size=999, output_dir=tmp_path / "bf16")
        summary = run(config, QUIET)
        assert summary["dtype"] == "bfloat16"
        tokens = len(load(tmp_path / "bf16" / "tokens.npz", CONTEXT)[0]) * CONTEXT
        assert summary["tokens"] == 3 * tokens
        assert summary["loss"]["logits_bytes"] == tokens * summary["vocab_size"] * 2
        assert dense_held_out_loss(tmp_path / "bf16") == pytest.approx(summary["held_out_loss_after"], rel=1e-2)

    def test_an_occupied_directory_is_refused(self, micro, finished):
        place, _ = finished
        with pytest.raises(OptionError, match="holds a run already: --resume"):
            run(replace(micro.config, output_dir=place), QUIET)

    def test_runs_below_their_text_read_none_of_what_they_write(self, micro, tmp_path, monkeypatch):
        """The lock of a run was a document of it, and the next one ended at the metrics of the one before."""
        shutil.copytree(micro.data, tmp_path / "corpus")
        monkeypatch.chdir(tmp_path / "corpus")
        apart, *below = (
            run(replace(micro.config, max_steps=1, data=data, output_dir=place), QUIET)["output_dir"]
            for data, place in ((str(micro.data), tmp_path / "apart"), (".", None), (".", Path("deep/run")))
        )
        expected = (Path(apart) / "tokens.npz").read_bytes()
        assert [(Path(place) / "tokens.npz").read_bytes() for place in below] == [expected, expected]

    def test_a_finished_run_goes_on_with_more_steps(self, micro, tmp_path):
        place = tmp_path / "more"
        run(replace(micro.config, max_steps=4, output_dir=place), QUIET)
        again = replace(stored(place, TrainConfig()), resume=place)
        with pytest.raises(OptionError, match="finished at step 4; raise --max-steps"):
            run(again, QUIET)
        with pytest.raises(OptionError, match="--seed cannot change from 0 to 1"):
            run(replace(again, max_steps=6, seed=1), QUIET)
        summary = run(replace(again, max_steps=6), QUIET)
        assert summary["steps"] == 6
        assert list(losses(place)) == [1, 2, 3, 4, 5, 6]
        steps = [{"tokens": 0, "seconds": 0.0}, *(r for r in read_lines(place / "metrics.jsonl") if "loss" in r)]
        for one, after in pairwise(steps):  # time and tokens go on, and the speed is of a step's own
            took, speed = after["seconds"] - one["seconds"], after["tokens_per_second"]
            assert after["tokens"] - one["tokens"] == pytest.approx(took * speed, abs=2e-3 * speed)

    def test_more_steps_are_gone_by_from_the_first_of_them(self, micro, tmp_path):
        """The rate of a longer run's curve, and checkpoints as far apart as it makes them."""
        place, long = tmp_path / "more", replace(micro.config, max_steps=8)
        run(replace(micro.config, max_steps=4, output_dir=place), QUIET)
        run(replace(stored(place, TrainConfig()), resume=place, max_steps=8), QUIET)
        run(replace(long, output_dir=tmp_path / "long"), QUIET)
        rates, expected = (
            [r["learning_rate"] for r in read_lines(x / "metrics.jsonl") if "loss" in r]
            for x in (place, tmp_path / "long")
        )
        assert rates[4:] == pytest.approx(expected[4:], rel=1e-9)
        assert checkpoints(place) == [place / "checkpoint-6", place / "checkpoint-8"]

    def test_a_signal_keeps_the_work(self, micro, finished, tmp_path, monkeypatch):
        """Asked to stop in mid-step, a run finishes the step, saves, and resumes to the same losses."""
        place = tmp_path / "stopped"
        at_step(monkeypatch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted, match=f"--resume {place} goes on from step 6"):
            run(replace(micro.config, output_dir=place), QUIET)
        monkeypatch.undo()
        monkeypatch.setattr("logitless.workbench.sft.run.measure", lambda config, tokens: {})
        assert last_checkpoint(place) == (place / "checkpoint-6", 6)
        resume(place)
        assert losses(place) == pytest.approx(losses(finished[0]), rel=1e-5)

    def test_a_signal_while_the_trained_model_is_measured_ends_that_at_once(self, micro, heard, tmp_path, monkeypatch):
        """It was said that a step would be finished, and all was measured first, for nothing."""
        place, measured = tmp_path / "run", HeldOut.conclude

        def conclude(*given):
            os.kill(os.getpid(), signal.SIGINT)
            measured(*given)

        monkeypatch.setattr(HeldOut, "conclude", conclude)
        with pytest.raises(Interrupted, match=f"goes on from step {micro.config.max_steps}"):
            run(replace(micro.config, output_dir=place), QUIET)
        assert [r["step"] for r in read_lines(place / "metrics.jsonl") if "held_out_loss" in r] == [0]
        with (place / "metrics.jsonl").open("a") as file:
            file.write('{"step": 10, "held')  # as a process killed while writing leaves it
        monkeypatch.undo()
        assert resume(place)["steps"] == micro.config.max_steps
        assert [r["step"] for r in read_lines(place / "metrics.jsonl") if "held_out_loss" in r] == [0, 10]

    def test_a_signal_in_the_last_step_is_one_too(self, micro, finished, heard, tmp_path, monkeypatch):
        """Else what trains a model first, and goes on with it, would go on."""
        place = tmp_path / "stopped"
        at_step(monkeypatch, micro.config.max_steps - 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Interrupted, match=f"--resume {place} goes on from step {micro.config.max_steps}"):
            run(replace(micro.config, output_dir=place), QUIET)
        monkeypatch.undo()
        monkeypatch.setattr("logitless.workbench.sft.run.measure", lambda config, tokens: {})
        resume(place)
        assert losses(place) == pytest.approx(losses(finished[0]), rel=1e-5)

    def test_a_full_disk_keeps_the_last_checkpoint(self, micro, tmp_path, monkeypatch):
        place = tmp_path / "full"
        save = torch.save

        def no_space(value, path, *rest, **options):
            if "checkpoint-4" in str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            return save(value, path, *rest, **options)

        monkeypatch.setattr(torch, "save", no_space)
        with pytest.raises(OutOfSpace, match=r"no space left at .*goes on from step 2"):
            run(replace(micro.config, output_dir=place), QUIET)
        assert checkpoints(place) == [place / "checkpoint-2"]
        assert not (place / "checkpoint-4").exists()

    def test_a_disk_that_fills_while_a_file_is_written(self, micro, tmp_path, monkeypatch):
        """A write that really ends short: torch says so in words of its own."""
        place, save = tmp_path / "full", torch.save

        def cut_short(value, path, *rest, **options):
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            if "checkpoint-4" in str(path) and "optimizer" in str(path):
                resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
            try:
                return save(value, path, *rest, **options)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        monkeypatch.setattr(torch, "save", cut_short)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(OutOfSpace, match=r"no space left at .*: free some, then .*goes on from step 2"):
            run(replace(micro.config, output_dir=place), QUIET)
        assert checkpoints(place) == [place / "checkpoint-2"]

    @pytest.mark.parametrize("fails", ["model.safetensors", "optimizer.pt"])
    def test_a_file_larger_than_a_process_may_write(self, micro, finished, tmp_path, monkeypatch, fails):
        """safetensors and torch each say so in words of their own."""
        place, before = tmp_path / "limited", resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = (finished[0] / "checkpoint-10" / fails).stat().st_size - 1000
        at_step(monkeypatch, 3, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1])))
        try:
            with pytest.raises(OutOfSpace, match=r"a file at .* is larger than this process may write: .*from step 2"):
                run(replace(micro.config, output_dir=place), QUIET)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert checkpoints(place) == [place / "checkpoint-2"]

    def test_nothing_to_go_on_from(self, tmp_path):
        with (
            pytest.raises(OutOfSpace, match="free some, then start again, nothing was trained yet"),
            explained(tmp_path, "train"),
        ):
            raise OSError(errno.ENOSPC, "No space left on device")

    @pytest.mark.parametrize(
        ("loss", "error", "message"),
        [
            ("logitless", NotFiniteError, "lower the learning rate and go back to the last checkpoint"),
            ("dense", NotFiniteError, r"the loss is nan at step .*lower --learning-rate"),
        ],
    )
    def test_a_loss_that_is_not_a_number_ends_the_run(self, micro, tmp_path, loss, error, message):
        with pytest.raises(error, match=message):
            run(replace(micro.config, loss=loss, learning_rate=1e30, output_dir=tmp_path / "nan"), QUIET)

    def test_a_model_that_is_not_finite_is_not_said_to_learn_too_fast(self, micro, tmp_path):
        micro_directory(tmp_path / "model")
        model = micro_model()
        torch.nn.init.constant_(model.lm_head.weight, torch.nan)
        model.save_pretrained(tmp_path / "model")
        config = replace(micro.config, model=str(tmp_path / "model"), loss="dense", output_dir=tmp_path / "run")
        with pytest.raises(NotFiniteError, match="nan at step 0: nothing was learned yet; give a --model of finite"):
            run(config, QUIET)


def test_a_killed_run_resumes_with_the_same_losses(micro, finished, tmp_path):
    place = tmp_path / "killed"
    options = ["--model", micro.model, "--data", micro.data, "--context-length", CONTEXT, "--max-steps", 10]
    options += ["--learning-rate", 1e-2, "--batch-size", 2, "--loss", "logitless", "--device", "cpu"]
    killed_at(7, "train", *options, "--output-dir", place)
    assert list(losses(place)) == [1, 2, 3, 4, 5, 6, 7]
    mark(place, place / "checkpoint-8")  # as a process killed while saving leaves it
    (place / "checkpoint-8" / "trainer_state.json").write_text('{"global_step": 8}')
    with (place / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    assert last_checkpoint(place) == (place / "checkpoint-6", 6)
    resume(place)
    assert losses(place) == pytest.approx(losses(finished[0]), rel=1e-5)
    assert list(losses(place)) == list(range(1, 11))
    summary = json.loads((place / "summary.json").read_text())
    assert summary["held_out_loss_before"] == pytest.approx(finished[1]["held_out_loss_before"], rel=1e-5)
    assert summary["held_out_loss_after"] == pytest.approx(finished[1]["held_out_loss_after"], rel=1e-5)


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@pytest.mark.usefixtures("unmeasured")
def test_a_run_of_a_model_of_experts_goes_on(micro, tmp_path):
    """Whose tensors have other names in files than in the model, where all experts are one."""
    model, place = micro_directory(tmp_path / "moe", **EXPERTS), tmp_path / "run"
    run(replace(micro.config, model=str(model), max_steps=4, output_dir=place), QUIET)
    shutil.copytree(place, tmp_path / "killed")
    for name in ("checkpoint-4", "model"):
        shutil.rmtree(tmp_path / "killed" / name)
    resume(tmp_path / "killed")
    assert losses(tmp_path / "killed") == losses(place)
    saved, again = ((x / "model" / "model.safetensors").read_bytes() for x in (place, tmp_path / "killed"))
    assert saved == again
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in tensors(place)


@pytest.mark.usefixtures("unmeasured")
def test_options_that_are_refused_do_not_stay(micro, tmp_path):
    """Those that only the model itself can refuse; a run that is refused as it begins leaves its place to another."""
    model, place = micro_directory(tmp_path / "moe", **EXPERTS), tmp_path / "run"
    config = replace(micro.config, model=str(model), output_dir=place, max_steps=2)
    with pytest.raises(ConfigError, match="--mlp-tiles needs dense MLPs"):
        run(replace(config, mlp_tiles=2), QUIET)
    assert not place.exists()
    run(config, QUIET)
    before = (place / RUN_FILE).read_bytes()
    further = replace(stored(place, TrainConfig()), resume=place, max_steps=4)
    with pytest.raises(ConfigError, match="--mlp-tiles needs dense MLPs"):
        run(replace(further, mlp_tiles=2), QUIET)
    assert (place / RUN_FILE).read_bytes() == before
    assert run(further, QUIET)["steps"] == 4


def test_a_single_step_learns(micro, tmp_path, unmeasured):
    """Its warm-up is no step at a rate of 0."""
    summary = run(replace(micro.config, max_steps=1, output_dir=tmp_path / "run"), Console(quiet=True))
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"]


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("options", [{"batch_size": 1000}, {"gradient_accumulation_steps": 500}])
def test_a_corpus_smaller_than_a_step(micro, tmp_path, options):
    """Each step is the whole corpus, and that is what is counted."""
    summary = run(replace(micro.config, max_steps=2, output_dir=tmp_path, **options), QUIET)
    rows = len(load(tmp_path / "tokens.npz", CONTEXT)[0])
    assert rows < 1000
    assert summary["tokens"] == 2 * rows * CONTEXT
    passed = min(options.get("batch_size", 2), rows)
    assert summary["loss"]["logits_bytes"] == passed * CONTEXT * summary["vocab_size"] * 4


def tensors(place: Path) -> set[str]:
    with safetensors.safe_open(place / "model" / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_a_run_killed_before_its_summary_is_finished(micro, tmp_path, sharding):
    """All steps done, the last checkpoint written, and nothing after it: the trained model's loss, not another's."""
    whole = run(replace(micro.config, sharding=sharding, max_steps=4, output_dir=tmp_path), QUIET)
    (tmp_path / "summary.json").unlink()
    saved = tensors(tmp_path)
    shutil.rmtree(tmp_path / "model")
    written = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(line for line in written if '"final"' not in line))
    found = resume(tmp_path)
    assert found["held_out_loss_after"] == pytest.approx(whole["held_out_loss_after"], rel=1e-6)
    assert found["held_out_loss_after"] < found["held_out_loss_before"] - 0.1
    assert found["device"] == "cpu"
    assert dense_held_out_loss(tmp_path) == pytest.approx(found["held_out_loss_after"], rel=1e-5)
    assert tensors(tmp_path) == saved
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert AutoConfig.from_pretrained(tmp_path / "model").eos_token_id == tokenizer.eos_token_id


RANK = """
import sys
from logitless.cli.main import main
from logitless.workbench.sft import run as sft
sft.measure = lambda config, tokens: {m: {"not_measured": "test"} for m in ("logitless", "dense")}
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_ranks_are_a_larger_batch(micro, tmp_path):
    """torchrun with two gloo ranks of one sequence each: the rows of one process with two, so the same losses."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    options = ["--model", micro.model, "--data", micro.data, "--context-length", CONTEXT, "--max-steps", 6]
    options += ["--learning-rate", 1e-2, "--loss", "logitless", "--device", "cpu", "--batch-size", 1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script]
    command = [*launch, "train", *options, "--output-dir", tmp_path / "two"]
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("training loss") == 1  # one summary, not one per rank
    alone = run(replace(micro.config, max_steps=6, output_dir=tmp_path / "one"), QUIET)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert dense_held_out_loss(tmp_path / "two") == pytest.approx(alone["held_out_loss_after"], rel=1e-3)


@pytest.mark.slow
def test_the_default_run_loads_in_transformers(tmp_path):
    """Two steps of `logitless train` without a model or data: Tekken, the standard library, both measurements."""
    place = tmp_path / "run"
    summary = run(TrainConfig(max_steps=2, context_length=128, batch_size=2, output_dir=place, loss="logitless"), QUIET)
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    assert len(tokenizer) == summary["vocab_size"] == 131_072
    assert dense_held_out_loss(place, 128) == pytest.approx(summary["held_out_loss_after"], rel=1e-5)
    measured = summary["step_memory"]
    logits = 4 * 256 * 131_072
    assert measured["dense"]["peak_bytes"] > 2.5 * logits  # logits, log-softmax, and a gradient
    assert measured["logitless"]["peak_bytes"] < measured["dense"]["peak_bytes"]
    assert measured["logitless"]["loss"] == pytest.approx(measured["dense"]["loss"], rel=1e-5)


def resume(place: Path) -> dict:
    return run(replace(stored(place, TrainConfig()), resume=place), QUIET)


@pytest.fixture
def heard():
    """SIGINT is not ignored, as it is where a shell has put the tests into the background."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def at_step(monkeypatch, step: int, act) -> None:
    """Calls `act` in the middle of the step after `step`."""
    from logitless.workbench.runs import callbacks

    begin = callbacks.GentleStop.on_step_begin

    def on_step_begin(self, args, state, control, **rest):
        begin(self, args, state, control, **rest)
        if state.global_step == step:
            act()

    monkeypatch.setattr(callbacks.GentleStop, "on_step_begin", on_step_begin)
