"""DeepSpeed ZeRO-3 on two ranks; `make test-deepspeed` brings DeepSpeed, which nothing else here needs."""

import json

import pytest

from tests.integrations.launching import torchrun

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-deepspeed", exc_type=ImportError)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("deepspeed") / "results.json"
    torchrun("tests.integrations.deepspeed_ranks", str(place), DS_ACCELERATOR="cpu")
    return json.loads(place.read_text())


HEADS = {
    "plain": ["weight"],
    "adapted": ["lora_A", "lora_B"],
    "trl, equal": ["weight"],
    "trl, any": ["weight"],
    "trl, frozen": [],
}


@pytest.mark.parametrize("kind", HEADS)
def test_gradients_are_those_of_one_process(results, kind):
    """Of the head itself, of both factors of LoRA on it, and of the forward of TRL's trainers."""
    found = results[kind]
    assert found["hidden"] <= 1e-5
    assert max(found["errors"].values()) <= 1e-4
    assert [name.split("lm_head.")[1].split(".")[0] for name in found["errors"] if "lm_head" in name] == HEADS[kind]
