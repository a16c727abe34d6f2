"""Completions before and after a run: the same noise each time, coloured, and the same over a resumption."""

import io
import json
import re

import pytest
import torch
from rich.console import Console

from logitless.workbench.runs import examples
from logitless.workbench.sources.tokenizer import pretrained
from tests.support.workbench.micro import micro_model

PROMPTS = [[5, 6, 7], [40, 41, 42, 43], [9], [10]]


@pytest.fixture
def kept(micro, tmp_path):
    """Keeps completions of a model at one moment of a run, and returns the run's directory."""
    tokenizer = pretrained(str(micro.model.parent))

    def keep(when: str, model, **more):
        examples.keep(tmp_path, when, model, tokenizer, PROMPTS, 6, **more)
        return tmp_path

    return keep


def test_an_unchanged_policy_says_the_same_before_and_after(kept):
    model = micro_model(initializer_range=0.2)
    state = torch.get_rng_state()
    kept("before", model, score=lambda ids: float(ids[0]))
    found = json.loads((kept("after", model) / examples.EXAMPLES_FILE).read_text())
    assert torch.get_rng_state().equal(state)
    assert model.training
    assert [len(made) for made in found.values()] == [examples.COUNT] * 2
    assert [x["tokens"] for x in found["before"]] == [x["tokens"] for x in found["after"]]
    assert len({json.dumps(x["tokens"]) for x in found["before"]}) == examples.COUNT  # each by noise of its own
    assert all(token["logprob"] < 0 for x in found["before"] for token in x["tokens"])
    assert found["before"][0]["reward"] > 0
    assert found["after"][0]["reward"] is None


@pytest.mark.parametrize("damaged", ["", "[1]", '{"before": [], "after": 5}'])
def test_a_resumed_run_says_what_was_before_whatever_lies_there(kept, damaged):
    model = micro_model(initializer_range=0.2)
    path = kept("before", model) / examples.EXAMPLES_FILE
    first = path.read_text()
    path.write_text(damaged)
    kept("before", model)
    assert path.read_text() == first
    found = json.loads((kept("after", micro_model(initializer_range=0.5)) / examples.EXAMPLES_FILE).read_text())
    assert found["after"] != found["before"]


def test_a_terminal_sees_them_coloured_and_safe(kept):
    place = kept("before", micro_model(initializer_range=0.2), score=lambda ids: 0.25)
    path = place / examples.EXAMPLES_FILE
    found = json.loads(path.read_text())
    sure = {"text": "a\x1b[31m\nb", "special": False, "logprob": -0.01}
    found["after"] = [{"prompt": "x" * 500, "tokens": [sure, sure | {"text": "rare", "logprob": -9.0}], "reward": 0.75}]
    path.write_text(json.dumps(found))
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    examples.show(place, console)
    text = console.file.getvalue()
    assert "before, reward 0.250:" in text
    assert "after, reward 0.750:" in text
    assert "a\\x1b[31m↵ b" in text
    # The key's own codes: rich keeps the first form of a style's, so it depends on what a process has shown before.
    ink = re.search(r"(\x1b\[[0-9;]+m) < 5 % ", text)[1]
    assert f"{ink}rare" in text
    assert "…" + "x" * 100 in text
    assert "x" * 101 not in text
    examples.show(place / "nothing", console)
