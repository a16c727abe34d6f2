"""Two real ranks: the fused forward's gradients equal the single-process ones, however the model is wrapped."""

import json

import pytest

from tests.integrations.launching import torchrun

ROUNDING = 1e-6  # of float64 models, whose norms and rotary embeddings are float32
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks") / "results.json"
    torchrun("tests.integrations.trl.ranks", str(place))
    return json.loads(place.read_text())


@pytest.mark.parametrize("wrapping", ["ddp", "root", "norm and head", "head"])
@pytest.mark.parametrize("kind", ["equal", "any", "frozen"])
def test_gradients_are_those_of_one_process(results, kind, wrapping):
    found = results[f"{kind}, {wrapping}"]
    assert max(found.values()) <= ROUNDING
    assert ("lm_head.weight" in found) == (kind != "frozen")
