"""`--verbose`: what the library tells of its calls, on stderr alone."""

import logging

import pytest

from logitless.cli.main import main
from logitless.cli.verbose import HELP
from logitless.vocab.passes import told


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(told, "_told", set())


def lines(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "backend" in line]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_command_says_which_backend_each_kind_of_call_takes(place, capsys):
    arguments = ["verify", "--vocab-size", "300"]
    arguments.insert(place, "--verbose")
    assert main(arguments) == 0
    said = lines(capsys)
    assert len(set(said)) == len(said) == 2
    assert said[0].startswith("logitless: logprob: 3 GEMMs (in-forward), backend eager (not compiled: fewer than ")
    assert not logging.getLogger("logitless").handlers


@pytest.mark.parametrize("rank", ["0", "1"])
def test_without_it_and_on_other_ranks_nothing_is_said(rank, capsys, monkeypatch):
    monkeypatch.setenv("RANK", rank)
    assert main(["verify", "--vocab-size", "300"]) == 0
    assert lines(capsys) == []
    assert main(["verify", "--vocab-size", "300", "--verbose"]) == 0
    assert len(lines(capsys)) == (2 if rank == "0" else 0)


def test_help_tells_of_it_where_something_is_computed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command, told_of in (("score", True), ("plan", False)):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert (HELP in capsys.readouterr().out) is told_of
    for arguments, status in ((["--verbose", "--help"], 0), (["--verbose"], 2)):  # no command is asked for what to do
        assert main(arguments) == status
        assert "--verbose" in capsys.readouterr().out
