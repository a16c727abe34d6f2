"""The benchmark of the sparse backward runs, and its records say what they are of."""

import pytest

from bench import sparse
from bench.harness import read_lines


def test_one_row(tmp_path, capsys):
    out = tmp_path / "sparse.jsonl"
    options = ["--tokens", "12", "--widths", "2048", "--bounds", "1e-2", "--rounds", "1", "--ways", "mean"]
    sparse.main([*options, "--out", str(out)])
    environment, problem, columns, row = read_lines(out)
    assert (environment["kind"], problem["vocabulary"]) == ("environment", 16_384)
    assert 0 < columns["of a token, median"] < columns["of a chunk"] < 1
    assert (row["way"], row["bound"], row["width"]) == ("known loss", 1e-2, 2048)
    assert row["skipped_mass"] <= 1e-2
    assert 0 < row["skipped_share"] < 1
    assert max(row["moved_hidden"], row["moved_weight"]) < 0.1
    assert "known loss" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # of the file that exists, before the model is read
        sparse.main(["--model", "none", "--out", str(out)])
