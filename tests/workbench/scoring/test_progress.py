"""How far a run is: shares, speed and the time that is left, of what this run does itself."""

import io
import re

import pytest
from rich.console import Console

from logitless.workbench.scoring import progress as module
from logitless.workbench.scoring.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when told to."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("terminal", [False, True], ids=["lines", "bar"])
def test_the_time_that_is_left(clock, terminal, kept):
    """A fifth was done before; a quarter of the rest takes 20 seconds, so 60 are left."""
    file = io.StringIO()
    with Progress(Console(file=file, width=120, force_terminal=terminal)) as progress:
        progress.kept = kept
        clock[0] += 50  # looking at what is there
        progress.passed(0.2)
        clock[0] += 20
        progress.scored(3_000, 0.5, 0.6)
        assert progress._line(0.4) == "3,000 tokens · 150 tokens/s · 0:01:00 left"
        progress.passed(0.6)
        clock[0] += 40
        progress.scored(3_000, 1.0, 1.0)
        progress.passed(1.0)
    said = re.sub(r"\x1b\[[\d;?]*\w", "", file.getvalue())
    assert "6,000 tokens · 100 tokens/s · 0:00:00 left" in said
    assert "100%" in said
    if not terminal:
        lines = said.splitlines()
        assert lines[0] == f" 20% · {'scored before, and kept' if kept else 'nothing to score so far'}"
        assert lines[1] == " 40% · 3,000 tokens · 150 tokens/s · 0:01:00 left"


def test_a_line_for_each_tenth_and_one_at_the_end():
    file = io.StringIO()
    with Progress(Console(file=file, width=120)) as progress:
        for i in range(1, 65):
            progress.passed(i / 64)
    assert [line[:4] for line in file.getvalue().splitlines()] == [
        f"{-(-64 * i // 10) / 64:>4.0%}" for i in range(1, 11)
    ]


def test_other_ranks_say_nothing(capsys):
    with Progress(None) as progress:
        progress.passed(0.5)
        progress.scored(9, 1.0, 1.0)
        progress.problems([{"document": 0, "name": "a", "why": "empty"}])
    assert capsys.readouterr() == ("", "")
    assert progress.tokens == 9


def test_a_few_skipped_documents_are_named():
    file = io.StringIO()
    with Progress(Console(file=file, width=80)) as progress:
        names = [{"name": f"a:{i}", "why": "empty"} if i % 2 else {"name": "fine"} for i in range(40)]
        pieces = [{"document": i, **name} for i, name in enumerate(names)]
        progress.problems(pieces[:22])  # eleven
        lines = file.getvalue().splitlines()
        progress.problems(pieces[22:])
    assert lines == file.getvalue().splitlines()
    assert lines[0] == "skipped a:1: empty"
    assert len(lines) == 10 + 1
    assert "counted at the end" in lines[-1]


def test_a_document_in_pieces_is_named_once():
    """A long one without a finite score was named for each 131,072 characters, and left no room for others."""
    file = io.StringIO()
    with Progress(Console(file=file, width=80)) as progress:
        for document in (3, 3, 4):
            progress.problems([{"document": document, "name": f"{document}.txt", "why": "strange"}] * 2)
    assert file.getvalue().splitlines() == ["skipped 3.txt: strange", "skipped 4.txt: strange"]
