"""LLaMA-Factory's v1 fine-tuning with the kernel and without; `make test-llamafactory` brings it."""

import importlib
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("llamafactory", reason="llamafactory is not installed here: make test-llamafactory")

from llamafactory.v1.core.base_trainer import BaseTrainer
from transformers import Qwen3Config, Qwen3ForCausalLM

from logitless.errors import ConfigError
from logitless.integrations import llamafactory as ours
from tests.support.integrations.launching import ROOT, torchrun

TINY = Qwen3Config(vocab_size=64, hidden_size=32, num_hidden_layers=1)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("llamafactory")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.integrations.llamafactory_run", str(place)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    torchrun("tests.support.integrations.llamafactory_run", str(place), at=place)
    return json.loads((place / "results.json").read_text()) | json.loads((place / "ranks.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "lora", "ddp", "fsdp2", "fsdp2 lora"])
def test_training_is_llama_factorys_own(results, name):
    """All weights, LoRA on the head too, two ranks: losses and gradient norms of three steps; no logits."""
    got, want = results[f"{name}, streamed"], results[f"{name}, dense"]
    assert got.pop("logits") == 0 < want.pop("logits")
    assert got.pop("size") == (size := want.pop("size"))
    assert got.pop("largest") < size / 2 < size <= want.pop("largest")  # no allocation of logits' size
    assert len(got["loss"]) == 3
    for key, numbers in got.items():
        assert numbers == pytest.approx(want[key], rel=1e-4)


@pytest.mark.slow
def test_another_trainer_is_refused(results):
    assert "expected LLaMA-Factory's SFTTrainer, got Other" in results["refused"]["error"]


def test_nothing_is_replaced_before_the_kernel_is_named():
    assert BaseTrainer.compute_log_probs is ours.compute_log_probs
    assert BaseTrainer.fit is ours.fit


def test_its_other_kernels_are_applied_beside(monkeypatch):
    """Those that `include_kernels` names, by LLaMA-Factory: this kernel passed over what it said."""
    monkeypatch.setattr(BaseTrainer, "compute_log_probs", ours.compute_log_probs)  # what is replaced goes back
    monkeypatch.setattr(BaseTrainer, "fit", ours.fit)
    model = Qwen3ForCausalLM(TINY)
    assert ours.apply(model) is model
    with pytest.raises(ValueError, match="Kernel unknown not found"):
        ours.apply(model, include_kernels="unknown")


def test_what_computes_the_loss_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr(BaseTrainer, "compute_log_probs", lambda *_: None)
    with pytest.raises(ConfigError, match=r"llamafactory 0\.9\.5: something else has replaced .*compute_log_probs"):
        ours.apply(Qwen3ForCausalLM(TINY))
    monkeypatch.setattr(ours.DistributedInterface, "get_world_size", lambda self, dim: 2)
    with pytest.raises(ConfigError, match="kernel_config: logitless: expected cp_size 1"):
        ours.apply(Qwen3ForCausalLM(TINY))


def test_another_llama_factory_is_an_error_that_names_versions(monkeypatch):
    monkeypatch.setattr(BaseTrainer, "compute_log_probs", lambda self, logits: None)
    with pytest.raises(
        ConfigError, match=r"llamafactory 0\.9\.5: .*compute_log_probs takes \(self, logits\), expected"
    ):
        importlib.reload(ours)
