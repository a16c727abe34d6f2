"""DeepSpeed ZeRO-3 on two ranks; `make test-deepspeed` brings DeepSpeed, which nothing else here needs."""

import json
import os
import re

import pytest

from tests.support.integrations.launching import ROOT, torchrun

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-deepspeed", exc_type=ImportError)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    place = tmp_path_factory.mktemp("deepspeed") / "results.json"
    torchrun("tests.support.integrations.deepspeed_ranks", str(place), DS_ACCELERATOR="cpu")
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


def test_self_certainty_of_a_sharded_policy(results):
    assert results["reward"]["found"] == pytest.approx(results["reward"]["expected"], rel=1e-5)


def test_the_page(tmp_path):
    """The code of docs/how-to/deepspeed.md, on two ranks."""
    page = (ROOT / "docs" / "how-to" / "deepspeed.md").read_text("utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    uncompiled = 'import deepspeed\ndeepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False\n'
    (tmp_path / "page.py").write_text(uncompiled + code)
    torchrun("page", DS_ACCELERATOR="cpu", PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(tmp_path)]))
