"""Two real ranks: heads that transformers' tensor-parallel plan splits, and how often FSDP2 gathers a head."""

import json

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support import forked
from tests.support.integrations.tiny import WIDTH, randomised

ROUNDING = 1e-6  # of float64 models, whose norms and rotary embeddings are float32


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    for name, tied in (("own head", False), ("tied head", True)):
        config = Qwen3Config(**{**WIDTH, "vocab_size": 97, "num_key_value_heads": 2, "tie_word_embeddings": tied})
        randomised(Qwen3ForCausalLM(config)).save_pretrained(folder / name)
    forked.ranks("tests.support.integrations.parallel_ranks", folder / "results.json", folder)
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("name", ["own head", "tied head"])
def test_a_head_that_transformers_splits(results, name):
    found = results[name]
    assert found["head"] == ["DTensor", 49, 97, True]  # the first rank's rows, of all; no logits
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=ROUNDING)
    assert found["entropy"] <= 1e-5
    assert found["generated"]
    assert found["unlike seeds"].endswith("the same torch.manual_seed where `generate` draws the seeds")
    assert {name: error for name, error in found["errors"].items() if not error <= ROUNDING} == {}


@pytest.mark.parametrize(
    ("how", "gathers", "reductions"),
    # Two layers are gathered in forward and backward, the root once; with the head's own unit one more of each,
    [("root", 5, 3), ("norm and head", 7, 4), ("head", 7, 4), ("head, once", 6, 4)],  # once: not in backward
)
def test_a_step_gathers_the_head_and_reduces_its_gradient_once(results, how, gathers, reductions):
    found = results[f"collectives, {how}"]
    assert (found["gathers"], found["reductions"]) == (gathers, reductions)
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=ROUNDING)
    assert max(found["errors"].values()) <= ROUNDING
