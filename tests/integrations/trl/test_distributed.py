"""Two real ranks: the fused forward's gradients equal the single-process ones, however the model is wrapped."""

import json

import pytest
import torch

from tests.support.integrations.launching import torchrun
from tests.support.integrations.trl import runs

ROUNDING = 1e-6  # of float64 models, whose norms and rotary embeddings are float32
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks") / "results.json"
    torchrun("tests.support.integrations.trl.ranks", str(place))
    return json.loads(place.read_text())


@pytest.mark.parametrize("wrapping", ["ddp", "root", "norm and head", "head"])
@pytest.mark.parametrize("kind", ["equal", "any", "frozen"])
def test_gradients_are_those_of_one_process(results, kind, wrapping):
    found = results[f"{kind}, {wrapping}"]
    assert max(found.values()) <= ROUNDING
    assert ("lm_head.weight" in found) == (kind != "frozen")


def test_trainers_on_two_ranks(tmp_path):
    """Each rank holds ours against TRL's; SFT, which samples nothing, also equals one process with larger batches."""
    runs.saved_model(tmp_path / "model")
    torchrun("tests.support.integrations.trl.trainer_ranks", str(tmp_path))
    assert {path.stem for path in tmp_path.glob("*.pt")} == {"sft", "dpo", "grpo", "rloo"}
    logs, parameters = torch.load(tmp_path / "sft.pt")
    alone = runs.run(lambda: runs.sft(tmp_path / "model", max_steps=2, per_device_train_batch_size=6), ours=True)
    for found, expected in zip(logs[:-1], alone.logs, strict=False):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    torch.testing.assert_close(parameters, alone.parameters, rtol=1e-4, atol=1e-5)
