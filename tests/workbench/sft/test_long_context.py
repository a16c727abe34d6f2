"""Runs with a tiled MLP, offloaded activations, sparse attention and scaled positions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from logitless.errors import ConfigError, OptionError
from logitless.models.nsa.saved import load
from logitless.workbench.common.files import read_lines
from logitless.workbench.runs.ending import Interrupted
from logitless.workbench.runs.rundir import stored
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.run import run
from logitless.workbench.sources.model import build, resolve
from tests.support.workbench.micro import CONTEXT, micro_directory
from tests.workbench.sft.test_run import at_step, losses, resume

QUIET = Console(quiet=True)
SIZES = {"block": 8, "stride": 4, "selected_block": 8, "selected": 2, "window": 6}
pytestmark = pytest.mark.usefixtures("unmeasured")


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory) -> Path:
    """A configuration that names nsa, with blocks small enough to matter at CONTEXT tokens."""
    return micro_directory(tmp_path_factory.mktemp("sparse"), nsa=SIZES)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_tiles_and_offload_do_not_change_what_is_learned(micro, tmp_path, lora_rank):
    plain = replace(micro.config, max_steps=4, lora_rank=lora_rank, output_dir=tmp_path / "plain")
    light = replace(
        plain, mlp_tiles=5, gradient_checkpointing=True, offload_activations=True, output_dir=tmp_path / "light"
    )
    run(plain, QUIET)
    run(light, QUIET)
    assert losses(tmp_path / "light") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


def test_sparse_attention_learns_saves_and_resumes(micro, sparse_model, tmp_path, monkeypatch):
    config = replace(micro.config, model=str(sparse_model), max_steps=8, output_dir=tmp_path / "whole")
    whole = run(config, QUIET)
    assert whole["held_out_loss_after"] < whole["held_out_loss_before"] - 0.5
    at_step(monkeypatch, 3, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(Interrupted):
        run(replace(config, output_dir=tmp_path / "parts"), QUIET)
    monkeypatch.undo()
    monkeypatch.setattr("logitless.workbench.sft.run.measure", lambda config, tokens: {})
    resume(tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_positions_that_follow_what_came_before_are_refused(micro, tmp_path):
    config = replace(micro.config, rope_scaling="dynamic:2", context_length=128, output_dir=tmp_path / "run")
    expected = "--context-length 128: past position 64, dynamic rotary embeddings follow .*; use yarn or linear"
    with pytest.raises(OptionError, match=expected):
        run(config, QUIET)
    own = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = str(micro_directory(tmp_path / "own", rope_parameters=own))
    with pytest.raises(OptionError, match=expected):
        run(replace(config, model=model, rope_scaling=""), QUIET)
    short = replace(config, model=model, rope_scaling="", context_length=64, max_steps=1)
    assert run(short, QUIET)["steps"] == 1  # as far as nothing is stretched


def test_a_saved_sparse_model_goes_on(micro, tmp_path):
    first = run(replace(micro.config, attention="nsa", max_steps=4, output_dir=tmp_path / "first"), QUIET)
    saved = tmp_path / "first" / "model"
    assert json.loads((saved / "config.json").read_text())["nsa"]["block"] == 32
    again = TrainConfig(model=str(saved), context_length=CONTEXT, device="cpu")
    built, own = build(again, resolve(again.model)), load(saved)
    assert any(p.abs().max() > 0 for n, p in built.named_parameters() if n.endswith("gates.weight"))  # learned: from 0
    for name, parameter in own.state_dict().items():
        assert torch.equal(built.state_dict()[name], parameter), name
    second = replace(micro.config, model=str(saved), max_steps=2, output_dir=tmp_path / "second")
    assert run(second, QUIET)["held_out_loss_before"] == pytest.approx(first["held_out_loss_after"], rel=1e-5)
    with pytest.raises(OptionError, match=r"--attention sdpa: the config of .* names nsa"):
        build(replace(again, attention="sdpa"), resolve(again.model))


def test_adapters_of_a_sparse_model_are_merged_into_it(micro, tmp_path):
    config = replace(micro.config, attention="nsa", lora_rank=2, max_steps=3, output_dir=tmp_path / "run")
    found = run(config, QUIET)
    again = replace(micro.config, model=str(tmp_path / "run" / "model"), max_steps=1, output_dir=tmp_path / "again")
    assert run(again, QUIET)["held_out_loss_before"] == pytest.approx(found["held_out_loss_after"], rel=1e-5)


def test_attention_is_the_one_that_was_asked_for(micro):
    source = resolve(str(micro.model))
    for attention in ("sdpa", "eager"):
        model = build(replace(micro.config, attention=attention), source)
        assert model.config._attn_implementation == attention


def test_a_context_beyond_the_models_positions(micro, tmp_path):
    longer = replace(micro.config, context_length=100, max_steps=2, output_dir=tmp_path / "run")
    with pytest.raises(OptionError, match=r"positions up to 64; --rope-scaling yarn:2"):
        run(longer, QUIET)
    run(replace(longer, rope_scaling="yarn:2"), QUIET)
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (saved["rope_parameters"]["rope_type"], saved["max_position_embeddings"]) == ("yarn", 128)
    assert stored(tmp_path / "run", TrainConfig()).rope_scaling == "yarn:2"
    again = replace(longer, model=str(tmp_path / "run" / "model"), output_dir=tmp_path / "again")
    run(again, QUIET)  # the config says it now
    assert len(read_lines(tmp_path / "again" / "metrics.jsonl")) == 4


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mlp_tiles": 0}, OptionError, "--mlp-tiles must be at least 1, got 0"),
        ({"offload_activations": True}, OptionError, "--offload-activations needs --gradient-checkpointing"),
        ({"tensor_parallel": 2}, OptionError, "expected a number of ranks that 2 divides, got 1; launch with torchrun"),
        ({"tensor_parallel": 2, "loss": "dense"}, OptionError, "--loss dense: expected whole logits"),
        (
            {"context_parallel": 2},
            OptionError,
            "--context-parallel 2: expected a number of ranks that 2 divides, got 1",
        ),
        ({"context_parallel": 2, "attention": "eager"}, OptionError, "2 knows no --attention eager: use sdpa or nsa"),
        (
            {"context_parallel": 5},
            OptionError,
            "--context-length must be a multiple of --context-parallel 5, such as 35",
        ),
        ({"rope_scaling": "yarn"}, OptionError, "--rope-scaling must be a kind"),
    ],
)
def test_options_without_a_meaning(micro, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        run(replace(micro.config, **changes, output_dir=tmp_path / "run"), QUIET)


def test_sparse_attention_needs_a_model_of_its_shape(micro, tmp_path):
    other = tmp_path / "config.json"
    other.write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 131_072}))
    with pytest.raises(ConfigError, match="nsa needs a model of Qwen3's or Llama's shape"):
        build(replace(micro.config, model=str(other), attention="nsa"), resolve(str(other)))
