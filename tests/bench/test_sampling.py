"""The benchmark of sampling: its parts at a size that takes seconds, and that it can say no."""

import json

import pytest
import torch

from bench.sampling import run as sampling
from bench.sampling import score
from bench.sampling.run import main, missed
from logitless.vocab.call import compiled_support


def test_a_part_is_measured_and_written(tmp_path, capsys):
    main(["--parts", "score", "--size", "tiny", "--rounds", "1", "--out", str(tmp_path / "r.jsonl")])
    (record,) = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    assert record["ours"] == "logitless"
    assert record["environment"]["versions"]["torch"] == torch.__version__
    assert set(record["ratios"]) == set(score.SCORE.ways) - {"logitless"}
    assert all(way["reason"] is None and len(way["seconds"]) == 1 for way in record["ways"].values())
    assert "| bare GEMM |" in capsys.readouterr().out


class Wrong(score.Dense):
    def run(self):
        found = super().run()
        return {**found, "entropy": found["entropy"] + 1e-3}


def test_what_is_wrong_or_late_is_said():
    scoring = Wrong("tiny")
    assert 9e-4 < scoring.error() < 2e-3
    ways = {"a": {"reason": None, "seconds": [2.0], "peak_mb": 200.0}, "b": {"reason": None, "seconds": [1.0]}}
    part = sampling.Part("", dict.fromkeys(ways, Wrong), {}, "nat", 1e-4, limits={"b": 1.5}, memory_limit_mb=128)
    record = {"kind": "x", "ways": ways, **sampling._reached(part, ways)}
    assert record["ratios"] == {"b": 2.0}
    assert missed(record) == ["x: 2.00 × b, wanted 1.50", "x: 200 MB, wanted 128"]
    ways["b"]["reason"] = "off by 1"
    assert missed(record)[0] == "x, b: off by 1"


@pytest.mark.parametrize("name", sampling.parts())
def test_every_way_works_and_is_right(name):
    part = sampling.parts()[name]
    for method, way in part.ways.items():
        if method.endswith("compiled") and compiled_support.why_not("cpu"):
            continue
        made = way("tiny")
        assert made.error() <= part.error_limit
        made.run()
