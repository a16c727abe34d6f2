"""DeepSpeed ZeRO-3 on two ranks; `make test-deepspeed` brings DeepSpeed, which nothing else here needs."""

import json

import pytest

from tests.integrations.launching import torchrun

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-deepspeed", exc_type=ImportError)
pytestmark = pytest.mark.slow


def test_gradients_are_those_of_one_process(tmp_path):
    place = tmp_path / "results.json"
    torchrun("tests.integrations.deepspeed_ranks", str(place), DS_ACCELERATOR="cpu")
    results = json.loads(place.read_text())
    assert results["no_logits"]
    assert results["hidden"] <= 1e-5
    assert max(results["errors"].values()) <= 1e-4
    assert "lm_head.weight" in results["errors"]
