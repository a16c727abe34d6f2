"""Sums of log-probs against lm-evaluation-harness; `make test-lm-eval` puts it beside the other packages."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import logitless
from logitless.workbench.scoring.run import run
from logitless.workbench.sources.tokenizer import pretrained
from tests.workbench.scoring.conftest import config

huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="needs lm-eval: make test-lm-eval")

TEXTS = ["a plain sentence, of one window.", "two", "ä longer text " * 9]


def request(kind: str, *arguments: str):
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def harness(micro):
    model = AutoModelForCausalLM.from_pretrained(micro).eval()
    return huggingface.HFLM(
        pretrained=model, tokenizer=pretrained(str(micro)).saved, device="cpu", batch_size=2, max_length=64
    )


def test_log_likelihood_of_continuations(harness, micro):
    """The sum of the continuation's log-probs, and whether greedy decoding gives it."""
    tokenizer, model = pretrained(str(micro)), AutoModelForCausalLM.from_pretrained(micro).eval()
    pairs = [("a plain", " sentence"), ("x", "y"), ("the same again", " and again")]
    theirs = harness.loglikelihood([request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (total, greedy) in zip(pairs, theirs, strict=True):
        (ids,), (prompt,) = tokenizer.encode([context + continuation]), tokenizer.encode([context])
        record = logitless.score(model, {"input_ids": torch.tensor([ids])}, keep=1)[0, len(prompt) :]
        assert float(record.logprob.sum()) == pytest.approx(total, abs=1e-4)
        assert bool((record.rank == 1).all()) == greedy


def test_log_likelihood_of_whole_texts(harness, micro, tmp_path):
    """Windows of theirs do not overlap: `--stride` of the whole context does the same, after a begin-of-text token."""
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    lines = tmp_path / "documents.jsonl"
    run(config(micro, data, tmp_path / "a.parquet", bos="yes", context_length=64, stride=64, documents=lines))
    requests = [request("loglikelihood_rolling", text) for text in TEXTS]
    theirs = harness.loglikelihood_rolling(requests, disable_tqdm=True)
    ours = [-json.loads(line)["nats"] for line in lines.read_text().splitlines()]
    assert ours[:2] == pytest.approx(theirs[:2], abs=1e-4)
    assert ours[2] == pytest.approx(theirs[2], rel=2e-2)  # its last window reaches back further: more context
