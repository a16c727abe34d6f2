"""Every figure in the docs is what its result file gives."""

import pytest

from docs.tables import logits, pages


def test_the_committed_pages_are_up_to_date():
    assert pages.main(["--check"]) == 0


def test_a_changed_figure_is_noticed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    end = "<!-- end of table -->"
    written = tmp_path / "README.md", tmp_path / "docs" / "how-to" / "cpu.md"
    written[1].parent.mkdir(parents=True)
    for page in written:
        page.write_text(f"# Title\n<!-- table: train_step -->\n1.00 ×\n{end}\nrest\n{end}\n", "utf-8")
    assert pages.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert all(f"{page.relative_to(tmp_path)}: out of date" in said for page in written)
    assert pages.main([]) == 0
    assert pages.main(["--check"]) == 0
    for page in written:
        text = page.read_text("utf-8")
        assert text.startswith("# Title\n<!-- table: train_step -->\n| ")
        assert text.endswith(f"\n{end}\nrest\n{end}\n")
        assert "1.00 ×\n" not in text


def test_each_table_is_on_a_page():
    written = [pages.ROOT / "README.md", *(pages.ROOT / "docs").rglob("*.md")]
    names = {found[2] for page in written for found in pages.MARKED.finditer(page.read_text("utf-8"))}
    assert names == pages.OF_RESULTS.keys() | pages.OF_SEVERAL.keys()


def test_a_result_file_that_does_not_exist_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    assert pages.table("nsa") == "Not measured in this version: `bench/results/nsa.jsonl` does not exist yet."


METHODS = {"tutorial loop": (0.5, 0.9), "dense": (2.0, 4.0), "loop": (1.0, 5.0), "recompute": (1.5, 3.0)}


@pytest.fixture
def records():
    env = {"cpu": "A CPU", "threads": 2, "versions": {"torch": "2.13.0"}, "date": "2026-01-31 00:00 UTC"}
    rows = [
        {
            "status": "ok", "dtype": "fp32", "method": name, "forward_s_median": forward, "step_s_median": step,
            "forward_peak_mb": 100 * forward, "kept_mb": 7.0, "step_peak_mb": 100 * step, "value_error": 1e-6,
        }
        for name, (forward, step) in METHODS.items()
    ]  # fmt: skip
    return [{**env, "shape": [8, 912, 50_000]}, *rows]


def test_logits_table_is_relative_to_the_dense_method(records):
    page = logits.logits(records)
    assert "| loop | 1.00 s | 0.50 | 5.00 s | 1.25 | 100 MB | 7 MB | 500 MB | 1e-06 |" in page
    assert "1,459 MB" in page
    assert "fastest without gradient `loop`, with backward `recompute`" in page
    assert "A CPU, 2 threads, torch 2.13.0, 2026-01-31." in page
