"""Two real ranks: gradients equal the single-process ones, however the model is wrapped."""

import json

import pytest

from tests.integrations.launching import torchrun

ROUNDING = 1e-6  # of float64 models, whose norms and rotary embeddings are float32
WRAPPED = ("ddp", "accelerate", "root", "norm and head", "head", "install after", "first fsdp")


def test_however_the_model_is_wrapped(tmp_path):
    """One launch for all: starting two ranks takes longer than what they do."""
    place = tmp_path / "results.json"
    torchrun("tests.integrations.ranks", str(place))
    results = json.loads(place.read_text())
    for how in WRAPPED:
        found, loss = results[how]["loss"]
        assert found == pytest.approx(loss, rel=ROUNDING), how
        assert "lm_head.weight" in results[how]["errors"]
    errors = {how: max(results[how]["errors"].values()) for how in (*WRAPPED, "statistics")}
    assert {how: error for how, error in errors.items() if not error <= ROUNDING} == {}
    assert results["statistics"]["hidden"] <= ROUNDING  # hidden_states of a sharded model
    assert results["statistics"]["logprob"] <= ROUNDING  # and numbers of one's own through its head
    assert results["mixed precision"] == {"loss_dtype": "torch.float32", "grad_dtype": "torch.float32", "finite": True}
