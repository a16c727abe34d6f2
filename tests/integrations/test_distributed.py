"""Two real ranks: gradients equal the single-process ones, however the model is wrapped."""

import json

import pytest

from tests.integrations.launching import torchrun

ROUNDING = 1e-6  # of float64 models, whose norms and rotary embeddings are float32


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks") / "results.json"
    torchrun("tests.integrations.ranks", str(place))
    return json.loads(place.read_text())


@pytest.mark.parametrize("how", ["ddp", "accelerate", "root", "norm and head", "head", "install after"])
def test_gradients_are_those_of_one_process(results, how):
    found, loss = results[how]["loss"]
    assert found == pytest.approx(loss, rel=ROUNDING)
    assert max(results[how]["errors"].values()) <= ROUNDING
    assert "lm_head.weight" in results[how]["errors"]


def test_statistics_through_a_sharded_model(results):
    found = results["statistics"]
    assert found["hidden"] <= ROUNDING
    assert found["logprob"] <= ROUNDING
    assert max(found["errors"].values()) <= ROUNDING


def test_mixed_precision(results):
    assert results["mixed precision"] == {"loss_dtype": "torch.float32", "grad_dtype": "torch.float32", "finite": True}
