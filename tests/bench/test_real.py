"""The benchmarks on real models: what they make of a model's numbers."""

import json
from types import SimpleNamespace

import pytest
import torch

import logitless as ll
from bench.harness import read_lines
from bench.real import align, bf16, stored
from bench.real.rounded import rounded
from bench.real.rules import without_e, words_without_e
from bench.real.statistics import calibration, quantiles
from bench.real.text import FILES, texts
from tests.support.vocab.processors import needs_a_compiler


def test_calibration_is_the_mean_distance_of_what_is_said_and_what_comes_true():
    sure = torch.tensor([0.95, 0.99, 0.97, 1.0, 0.1, 0.12])
    right = torch.tensor([True, True, True, False, False, True])
    error, bins = calibration(sure, right)
    assert [count for count, *_ in bins] == [2, 4]
    assert error == pytest.approx(2 / 6 * abs(0.11 - 0.5) + 4 / 6 * abs(0.9775 - 0.75))
    assert calibration(torch.ones(3), torch.ones(3, dtype=torch.bool))[0] == 0


def test_quantiles_by_their_share():
    found = quantiles(torch.arange(101))
    assert (found["10%"], found["50%"], found["99%"]) == (10, 50, 99)


@pytest.mark.parametrize("kind", FILES)
def test_texts_begin_with_the_longest(kind):
    found = [len(text) for text in texts(kind)]
    assert len(found) > 20
    assert found == sorted(found, reverse=True)


def test_what_storing_loses_is_the_dense_divergence():
    hidden, weight = torch.randn(30, 16), torch.randn(90, 16)
    reading = SimpleNamespace(hidden=hidden, head=ll.LMHead(weight), labels=torch.zeros(30, dtype=torch.long))
    found = {record["stored"]: record for record in stored.measure(reading)}
    p = (hidden @ weight.T).log_softmax(-1)
    q = (hidden.bfloat16().float() @ weight.T).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1)
    assert found["bfloat16"]["kl"]["largest"] == pytest.approx(kl.max().item(), rel=0.02)
    assert found["fp8"]["kl"]["mean"] > 10 * found["bfloat16"]["kl"]["mean"]
    assert [found[name]["bytes"] for name in ("bfloat16", "fp8", "best 10")] == [32, 20, 80]
    left = 1 - p.exp().topk(10).values.sum(-1)
    assert found["best 10"]["left"]["mean"] == pytest.approx(left.mean().item(), rel=0.01)


@needs_a_compiler
def test_what_bf16_loses_is_less_than_plain_torch_loses():
    hidden, weight, labels = torch.randn(40, 64), torch.randn(700, 64), torch.randint(700, (40,))
    found = {row["way"]: row for row in bf16.measure(hidden.bfloat16(), weight.bfloat16(), labels, 0)}
    plain = found.pop("plain")
    for row in found.values():
        assert row["logprob"] < 1e-4 < plain["logprob"]
        assert 1e-4 < row["hidden"] < plain["hidden"]
        assert 1e-4 < row["weight"] < plain["weight"]


def test_a_row_rounded_to_8_bits_is_whole_numbers_times_its_scale():
    matrix = torch.randn(5, 300) * torch.tensor([1.0, 1e-3, 50.0, 0.0, 1.0])[:, None]
    found, step = rounded(matrix), matrix.abs().amax(1, keepdim=True) / 127
    assert torch.equal(found[3], matrix[3])
    whole = (found / step)[matrix.any(1)]
    torch.testing.assert_close(whole, whole.round(), rtol=0, atol=1e-4)
    assert whole.abs().amax(1).tolist() == pytest.approx([127] * 4)
    assert ((found - matrix).abs() <= 0.5001 * step).all()
    assert (found != matrix).any(1).tolist() == [True, True, True, False, True]


def test_a_rule_of_letters():
    assert [without_e(x) for x in ("The", "E", " cat", "")] == [0, 0, 1, 1]
    assert words_without_e(["a tree of oak", "", [{"role": "assistant", "content": "Go on"}]]) == [0.75, 0.0, 1.0]


def test_what_an_alignment_came_to_is_read_from_its_run(tmp_path):
    run = tmp_path / "grpo"
    run.mkdir()
    (run / "summary.json").write_text('{"steps": 12}')
    lines = [json.dumps({"step": i, "reward": i / 10, "kl": 0.5}) for i in range(12)] + ['{"val/reward": 3}']
    (run / "metrics.jsonl").write_text("\n".join(lines))
    found = align.aligned("grpo", "smollm2", 12, tmp_path)
    assert found["first_and_last"] == {"reward": [0.05, 1.05], "kl": [0.5, 0.5]}
    assert len(found["curve"]) == 12
    align.main(["--runs", "grpo", "--steps", "12", "--keep", str(tmp_path), "--out", str(tmp_path / "out")])
    assert [line["kind"] for line in read_lines(tmp_path / "out")] == ["environment", "align"]


def test_a_method_of_soft_tokens_runs_by_itself_with_the_options_of_all(tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        (tmp_path / "reinforce").mkdir()
        (tmp_path / "reinforce" / "summary.json").write_text('{"method": "reinforce"}')

    monkeypatch.setattr(align.subprocess, "run", run)
    monkeypatch.setattr(align, "table", lambda runs: {"methods": {x["method"]: {} for x in runs}})
    found = align.aligned("reinforce", "smollm2", 12, tmp_path)
    assert found["methods"] == {"reinforce": {}}
    assert found["summary"] == {"method": "reinforce"}
    assert commands[0][-len(align.SOFT) - 2 :] == ["--method", "reinforce", *align.SOFT]
    assert align.RUNS["all"][2:] == align.SOFT
