"""Tables on a narrow terminal: no number loses its end, and what can be folded is."""

import io

import pytest

from logitless.cli.screen import Screen
from logitless.workbench.common.tables import columns
from logitless.workbench.evaluation.report import _table_of_tasks


@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("width", [10, 30, 44, 200])
def test_every_number_is_whole_whatever_the_width(ruled, width):
    table = columns("<call", ">slices", "=where", ">bytes", ruled=ruled)
    table.add_row("log-prob of any head", "256 × 2,048", "loss backward", "11,870 MiB")
    screen = Screen()
    screen.file, screen.width = io.StringIO(), width
    screen.print(table)
    lines = screen.file.getvalue().splitlines()
    first = next(line for line in lines if "256" in line)
    assert all(cell in first for cell in ("256 × 2,048", "loss backward", "11,870 MiB"))
    assert all(word in "".join(lines) for word in ("call", "slices", "where", "bytes"))
    assert max(map(len, lines)) <= max(width, 54)


def test_what_is_folded_keeps_its_letters_whatever_the_width():
    table = columns("<call", ">bytes")
    table.add_row("log-probability", "11,870 MiB")
    screen = Screen()
    screen.file, screen.width = io.StringIO(), 5
    screen.print(table)
    parts, *others = (line.split() for line in screen.file.getvalue().splitlines()[3:] if line.strip())
    assert parts[1:] == ["11,870", "MiB"]
    assert "".join([parts[0], *(part for (part,) in others)]) == "log-probability"


def test_a_metric_is_whole_on_a_narrow_terminal():
    metric = {"bits_per_byte": {"value": 1234.5678, "standard_error": 0.1234}}
    found = {"documents": 123_456, "metrics": metric, "certainty": None}
    screen = Screen()
    screen.file, screen.width = io.StringIO(), 30
    screen.print(_table_of_tasks({"a_task_of_a_long_name": found}))
    assert all(number in screen.file.getvalue() for number in ("123,456", "1234.5678", "0.1234", "standard error"))
