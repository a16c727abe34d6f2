"""Names of files and models on the terminal: shown as they are, and never obeyed."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from logitless.cli.main import main
from logitless.cli.output import deliver
from logitless.cli.screen import Screen

PIECES = [
    "[/]",
    "[/bold]",
    "[bold]",
    "[link=file:x]",
    "[",
    "]",
    "\\",
    "\x1b[31m",
    "\x1b]0;x\x07",
    "\x9b",
    "a",
    ":smile:",
]
names = st.lists(st.sampled_from(PIECES), max_size=5).map("".join)


def printed(show) -> str:
    screen = Screen()
    screen.file, screen.width = io.StringIO(), 200
    show(screen)
    return screen.file.getvalue()


@given(names)
def test_no_name_is_obeyed_and_none_fails(name):
    """As a line, between this program's own tags, as a cell of a table, and as text that is no markup."""

    def show(screen: Screen) -> None:
        table = Table("name")
        table.add_row(f"a {name} b")
        screen.print(f"a {name} b", soft_wrap=True)
        screen.print(f"[bold]a {name} b[/bold]", soft_wrap=True)
        screen.print(table)
        screen.print(f"a {name} b", markup=False, soft_wrap=True)

    text = printed(show)
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    literal = name.replace("\x1b", "\\x1b").replace("\x07", "").replace("\x9b", "\\x9b")
    assert literal in text.splitlines()[-1]
    if "[bold]" not in name and "[/" not in name:
        assert text.count(literal) >= 4


def test_own_styles_are_styles():
    assert printed(lambda screen: screen.print("[bold]a[/bold] [red]b[/red]")) == "a b\n"


@pytest.mark.parametrize("name", ["\x1b[31mred", "two\nlines", "\u202eturned"])
def test_an_error_is_one_line_without_control_characters(name, capsys):
    assert main(["train", "--data", name]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not {"\x1b", "\u202e"} & set(error)


def test_a_file_is_there_though_the_tables_reader_has_left(tmp_path):
    def left(console):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        deliver({"loss": 1.5}, tmp_path / "summary.json", left)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"loss": 1.5}


@pytest.mark.parametrize(("gpus", "status"), [("1x80GiB", 0), ("1x8GiB", 1)])
def test_a_reader_that_leaves_changes_no_file_and_no_status(gpus, status, tmp_path):
    """`logitless plan --check --html plan.html | true`: the tables go nowhere, the page is written."""
    command = [sys.executable, "-m", "logitless.cli", "plan", "--check", "--gpus", gpus, "--html", "plan.html"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, b"")
    assert (tmp_path / "plan.html").read_text().endswith("</html>\n")


def test_numbers_that_are_none_are_null_on_standard_output(capsys):
    """NaN and Infinity are no JSON, which a reader in another language refuses."""
    deliver({"loss": math.nan, "rows": [math.inf, 1.5]}, Path("-"), lambda console: console.print("a table"))
    out, err = capsys.readouterr()
    assert json.loads(out, parse_constant=pytest.fail) == {"loss": None, "rows": [None, 1.5]}
    assert err == "a table\n"
