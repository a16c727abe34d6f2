"""A trainer that divides weights: which layers are its units, and what its checkpoints give back."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from logitless.workbench.runs.ending import Interrupted
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.launcher import by_options_alone
from logitless.workbench.sft.run import run
from logitless.workbench.sft.sharded import fsdp2_plugin
from tests.support.integrations.tiny import TINY
from tests.support.workbench.micro import micro_directory, micro_model
from tests.workbench.sft.test_ranks import launch, options
from tests.workbench.sft.test_run import at_step, losses, resume

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def with_a_tower(tmp_path_factory) -> Path:
    """A model of text and images, whose tower has no gradient where there is text alone."""
    config = micro_directory(tmp_path_factory.mktemp("tower"))
    TINY["gemma3-vision"].build(259).config.to_json_file(config)
    return config


def test_units_are_the_layers_that_a_model_has():
    """Not all that its class names: accelerate would look for each of those."""
    model = TINY["gemma3-vision"].build()
    plugin = fsdp2_plugin(model)
    assert "SiglipTextEmbeddings" in model._no_split_modules
    units = sorted(model._no_split_modules - {"SiglipTextEmbeddings"})
    assert plugin.transformer_cls_names_to_wrap == units
    plugin.set_auto_wrap_policy(model)
    assert {kind.__name__ for kind in plugin.auto_wrap_policy.keywords["transformer_layer_cls"]} == set(units)


def test_units_are_not_what_a_launcher_says(monkeypatch):
    model, config = micro_model(), TrainConfig(sharding="fsdp2")
    with by_options_alone(config):
        plain = fsdp2_plugin(model)
    told = {"TRANSFORMER_CLS_TO_WRAP": "Qwen3MLP", "RESHARD_AFTER_FORWARD": "false", "IGNORED_MODULES": ".*mlp"}
    told |= {"STATE_DICT_TYPE": "LOCAL_STATE_DICT", "ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}
    for name, value in told.items():
        monkeypatch.setenv(f"FSDP_{name}", value)
    with by_options_alone(config):
        assert vars(fsdp2_plugin(model)) == vars(plain)


@pytest.mark.usefixtures("unmeasured")
def test_what_had_no_gradient_is_no_damage(micro, with_a_tower, tmp_path, monkeypatch):
    config = replace(micro.config, model=str(with_a_tower), sharding="fsdp2", max_steps=6)
    run(replace(config, output_dir=tmp_path / "whole"), QUIET)
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(Interrupted):
            run(replace(config, output_dir=tmp_path / "parts"), QUIET)
    resume(tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("divided", [["--sharding", "fsdp2"], ["--gradient-checkpointing"]])
def test_two_ranks_of_a_model_with_a_tower(micro, with_a_tower, tmp_path, divided):
    more = ["--model", with_a_tower, "--gradient-accumulation-steps", 2, "--max-steps", 4, *divided]
    status, written = launch(2, *options(micro, tmp_path / "two", *more))
    assert status == 0, written[-4000:]
    run(replace(micro.config, model=str(with_a_tower), batch_size=4, max_steps=4, output_dir=tmp_path / "one"), QUIET)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
