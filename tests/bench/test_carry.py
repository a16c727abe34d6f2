"""The script that compares ways to carry the gradient, at a size that takes seconds."""

from bench.grade.carry import WAYS, main
from bench.harness import read_lines


def test_every_way_is_measured(tmp_path):
    out = tmp_path / "carry.jsonl"
    sizes = {"steps": 4, "vocab": 300, "hidden": 64, "layers": 1, "prompt": 3, "repeats": 1}
    main([*(f"--{name}={value}" for name, value in sizes.items()), "--out", str(out)])
    environment, record = read_lines(out)
    assert environment["kind"] == "environment"
    rows = {row["way"]: row for row in record["rows"]}
    assert list(rows) == list(WAYS)
    assert rows["recompute"]["error"] < 1e-4
    assert rows["sweeps, 0 at most"]["error"] > 1e-3
    assert rows["cached"]["peak_bytes"] < rows["recompute"]["peak_bytes"]
