"""The benchmark of quantised heads: what it measures, and its table."""

import pytest

pytest.importorskip("gguf", reason="gguf is not installed")

from bench import quantised
from bench.harness import read_lines
from docs.tables.quantised import quantised as quantised_page


def test_a_small_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(quantised.SHAPES, "smollm2", (700, 64))
    out = tmp_path / "quantised.jsonl"
    quantised.main(["--shapes", "smollm2", "--formats", "Q8_0", "--tokens", "16", "--rounds", "1", "--out", str(out)])
    records = read_lines(out)
    assert "head Q8_0" in capsys.readouterr().out
    assert {(r["work"], r["head"]) for r in records[1:]} == {
        (work, head) for work in ("score", "train", "decode") for head in ("fp32", "bf16", "Q8_0")
    }
    held = {r["head"]: r["head_bytes"] for r in records[1:]}
    assert held == {"fp32": 700 * 64 * 4, "bf16": 700 * 64 * 2, "Q8_0": 700 * 64 * 34 // 32}
    assert all(r["moved"] < 1e-6 for r in records[1:] if r["head"] == "Q8_0")
    page = quantised_page(records)
    assert "**smollm2**, V=700, H=64" in page
    assert "| head | bytes | score, 16 tokens | train, 16 tokens | decode, 8 tokens |" in page
    assert "(1.00 ×)" in page
