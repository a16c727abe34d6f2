"""The benchmark of the maximum over tokens runs, and its records say what they are of."""

from bench import pooling
from bench.harness import read_lines


def test_rows(tmp_path, capsys):
    out = tmp_path / "pooling.jsonl"
    sizes = ["--vocabularies", "6000", "--documents", "8", "--length", "16", "--hidden", "16", "--active", "0.02"]
    pooling.main([*sizes, "--rounds", "1", "--out", str(out)])
    environment, *rows = read_lines(out)
    assert environment["threads"] == 1
    found = {row["method"]: row for row in rows}
    assert set(found) == {"dense", "loop", "logitless", "sparse"}
    assert all(0.01 < row["active"] < 0.04 and row["cpu_seconds"] > 0 and row["to_bare"] > 0 for row in rows)
    logits = 4 * 8 * 16 * 6000 / 2**20
    assert found["dense"]["peak_mib"] > 2 * logits > found["logitless"]["peak_mib"]
    assert found["dense"]["documents_in_24_gib"] < found["logitless"]["documents_in_24_gib"]
    assert "method logitless" in capsys.readouterr().out
