"""The page of tasks from a summary alone, which needs no harness: its rows, their bars, charts and what it took."""

import re
from typing import Any

import pytest

from logitless.workbench.evaluation.answers import Certainty
from logitless.workbench.evaluation.page import page_of_tasks


def task(documents: int, certainty: dict[str, Any] | None = None, **metrics: tuple[float, float | None]):
    found = {name: {"value": value, "standard_error": error} for name, (value, error) in metrics.items()}
    return {"documents": documents, "metrics": found, "certainty": certainty}


def rows(page: str) -> list[list[str]]:
    """The cells of each row of a page's tables but those of their heads."""
    found = re.findall(r"<tr>(<th>.*?)</tr>", "".join(re.findall(r"<tbody>.*?</tbody>", page, re.DOTALL)))
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in found]


@pytest.fixture
def summary() -> dict[str, Any]:
    certainty = Certainty("documents", 2)
    certainty.add([(0.75, 0.5, True), (0.25, 1.0, False)])
    tasks = {
        "a<b": task(1200, certainty.summary(), acc=(0.25, 0.0125), f1=(0.5, None)),
        "text": task(3, None, exact_match=(1.0, None), word_perplexity=(123456.7, 0.5)),
    }
    return {
        "options": {"tasks": ["suite/a.yaml", "text"], "model": "m&m"},
        "tasks": tasks,
        "requests": 1203,
        "requests_per_second": 20.0,
        "cut_requests": 0,
        "longest": 64,
        "seconds": 60.0,
        "peak_memory_bytes": 3 << 20,
        "versions": {"lm-eval": "9.8.7"},
    }


def bar(width: str) -> str:
    return f'<span class="share" style="width: {width}"></span>'


def test_a_row_for_each_metric_of_each_task(summary):
    page = page_of_tasks(summary)
    assert rows(page) == [
        ["a&lt;b", "1,200", "acc", "0.2500", "± 0.0125", bar("25.0%")],
        ["a&lt;b", "1,200", "f1", "0.5000", "", bar("0.0%")],  # which is no share of the documents
        ["a&lt;b", "1,200", "calibration error", "0.2500", "", bar("0.0%")],
        ["text", "3", "exact_match", "1.0000", "", bar("100.0%")],
        ["text", "3", "word_perplexity", "1.235e+05", "± 0.5000", bar("0.0%")],
        ["speed", "20 requests/s, 60 s"],
        ["peak memory", "3 MiB"],
    ]
    assert "<h1>m&amp;m, evaluated on a, text</h1>" in page
    assert "with lm-eval 9.8.7" in page


def test_charts_of_the_tasks_whose_answers_are_right_or_wrong(summary):
    page = page_of_tasks(summary)
    titles = [f"a&lt;b: {what} of documents" for what in ("reliability", "accuracy by entropy")]
    assert re.findall(r"<h2>(.*?)</h2>", page) == [*titles, "What it took"]
    assert page.count("<svg") == 2
    assert "confidence in the answer" in page
    assert page.count("<title>1 document: confidence 0.750, accuracy 1.000</title>") == 2  # of its bar and its point
    assert "Of a right and a wrong document the right one has the higher number 0.0% of the time." in page


def test_requests_that_were_cut_are_said(summary):
    assert "cut on their left" not in page_of_tasks(summary)
    cut = rows(page_of_tasks(summary | {"cut_requests": 1001}))[-1]
    assert cut == ["cut", "1,001 of 1,203 requests: longer than the 64 tokens that the model sees, cut on their left"]
