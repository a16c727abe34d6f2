"""Two real ranks: gradients equal the single-process ones, however the model is wrapped."""

import json

import pytest
import torch

import logitless
from tests.integrations.transformers.test_trainer import losses
from tests.support import forked
from tests.support.integrations.launching import torchrun
from tests.support.integrations.trainer_ranks import evaluated, trained

ROUNDING = 1e-6  # of float64 models, whose norms and rotary embeddings are float32
WRAPPED = (
    *("ddp", "accelerate", "root", "norm and head", "head", "install after", "accelerate fsdp2"),
    *("first fsdp", "first fsdp, install after"),
)
ADAPTED = ("ddp, adapted", "root, adapted", "norm and head, adapted", "head, adapted", "factors, adapted")


def test_however_the_model_is_wrapped(tmp_path):
    """One launch for all: starting two ranks takes longer than what they do."""
    place = tmp_path / "results.json"
    forked.ranks("tests.support.integrations.ranks", place)
    results = json.loads(place.read_text())
    for how in (*WRAPPED, *ADAPTED):
        found, loss = results[how]["loss"]
        assert found == pytest.approx(loss, rel=ROUNDING), how
        heads = [name for name in results[how]["errors"] if "lm_head" in name]
        assert len(heads) == (2 if how in ADAPTED else 1)  # both factors, and not the frozen weight
    errors = {how: max(results[how]["errors"].values()) for how in (*WRAPPED, *ADAPTED, "statistics")}
    assert {how: error for how, error in errors.items() if not error <= ROUNDING} == {}
    assert results["statistics"]["hidden"] <= ROUNDING  # hidden_states of a sharded model
    assert results["statistics"]["logprob"] <= ROUNDING  # and numbers of one's own through its head
    assert results["mixed precision"] == {"loss_dtype": "torch.float32", "grad_dtype": "torch.float32", "finite": True}
    assert results["generated"] == [True, True]  # of unlike lengths


@pytest.mark.slow
def test_trainer_on_two_ranks(tmp_path):
    """Losses and parameters are those of one process with batches twice as large, and without us."""
    place = tmp_path / "results.pt"
    torchrun("tests.support.integrations.trainer_ranks", str(place))
    for smoothing, (found, parameters, metrics, tokens) in torch.load(place).items():
        own = trained(str(tmp_path / "own"), 1, smoothing, ours=False)
        assert found == pytest.approx(losses(own), rel=1e-4)
        torch.testing.assert_close(parameters, own.model.state_dict(), rtol=1e-4, atol=1e-5)
        logitless.install(own)
        expected = own.evaluate()
        names = ("eval_perplexity", "eval_accuracy", "eval_top_5_accuracy", "eval_entropy")
        assert {name: metrics[name] for name in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-4)
        torch.testing.assert_close(tokens, evaluated(own), rtol=1e-3, atol=1e-4)
