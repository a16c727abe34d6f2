"""axolotl's training entry point with the plugin and with its own loss; `make test-axolotl` brings it."""

import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

pytest.importorskip("axolotl", reason="axolotl is not installed here: make test-axolotl")

from axolotl.integrations.base import BasePlugin, load_plugin
from axolotl.utils.dict import DictDefault

from logitless.errors import ConfigError
from logitless.integrations import axolotl as ours
from tests.support.integrations.launching import ROOT
from tests.support.integrations.tiny import TINY


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("axolotl")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.integrations.axolotl_run", str(place)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((place / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["lora", "head", "full"])
def test_training_is_axolotls_own(results, name):
    """LoRA, LoRA on the head too, and all weights, on packed samples: losses, gradient norms, evaluation; no logits."""
    got, want = results[f"{name}, streamed"], results[f"{name}, dense"]
    assert got["logits"] == 0 < want["logits"]
    assert got["largest"] < want["size"] / 2 < want["size"] <= want["largest"]  # no allocation of logits' size
    assert [log.keys() for log in got["log"]] == [log.keys() for log in want["log"]]
    numbers = [[x for log in found["log"] for x in log.values()] for found in (got, want)]
    assert len(numbers[0]) >= 7
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)


@pytest.mark.slow
def test_another_loss_is_refused(results):
    assert "expected axolotl's cross-entropy, got chunked_cross_entropy" in results["refused"]["error"]


def test_the_name_in_its_yaml_is_the_plugin():
    (name,) = yaml.safe_load((ROOT / "examples" / "axolotl_tiny.yaml").read_text())["plugins"]
    assert type(load_plugin(name)) is ours.LogitlessPlugin


@pytest.mark.parametrize(
    "name", ["flash_attn_cross_entropy", "use_dft", "diffusion", "diffusion_lm", "diffusion_decision"]
)
def test_losses_of_one_version_or_another_are_refused(name):
    plugin = ours.LogitlessPlugin()
    with pytest.raises(ConfigError, match=f"expected axolotl's cross-entropy, got {name};"):
        plugin.post_model_load(DictDefault({name: {"eps": 0.001}}), None)
    with pytest.raises(ConfigError, match="got a compute_loss_func"):
        plugin.post_trainer_create(DictDefault(), SimpleNamespace(compute_loss_func=print))


@pytest.mark.parametrize("size", [None, 2])
def test_a_part_of_a_batch_may_have_no_token_that_counts(size):
    """NaN without a gradient, as the model's own, whose step goes on; 0 where axolotl cuts sequences over ranks, whose
    losses it weighs by their tokens itself."""
    model, ids = TINY["qwen3-tied"].build(), torch.arange(1, 9)[None]
    masked = torch.full_like(ids, -100)
    own, expected = model(input_ids=ids, labels=masked).loss, model(input_ids=ids, labels=ids).loss
    ours.LogitlessPlugin().post_model_load(DictDefault({"context_parallel_size": size}), model)
    loss = model(input_ids=ids, labels=masked).loss
    loss.backward()
    assert own.isnan()
    assert loss == 0 if size else loss.isnan()
    assert sum(x.grad.abs().sum() for x in model.parameters() if x.grad is not None) == 0
    assert model(input_ids=ids, labels=masked, num_items_in_batch=7).loss == 0
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_another_axolotl_is_an_error_that_names_versions(monkeypatch):
    monkeypatch.setattr(BasePlugin, "post_model_load", lambda self, model: None)
    with pytest.raises(ConfigError, match=r"axolotl 0\.\S*: .*post_model_load takes \(self, model\), expected"):
        importlib.reload(ours)
