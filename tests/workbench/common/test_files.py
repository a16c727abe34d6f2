"""Files that appear whole or not at all, wherever their names lead."""

import errno
import os
import socket
import stat
from pathlib import Path

import pytest

from logitless.cli.main import main
from logitless.errors import OptionError
from logitless.workbench.common.files import (
    check_outputs,
    folders_for,
    remove_leftovers,
    target,
    write_text,
    write_whole,
)
from logitless.workbench.common.lock import LOCK_FILE, acquire


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_through_its_symlinks(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/next")
    (tmp_path / "far" / "next").symlink_to("file")  # not there yet
    for text in ("one", "two"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "far" / "file").read_text() == text
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "next").is_symlink()
    assert names(tmp_path) == ["far", "link"]
    assert names(tmp_path / "far") == ["file", "next"]


def test_a_device_is_written_into():
    before = os.stat("/dev/null")
    write_text(Path("/dev/null"), "text")
    after = os.stat("/dev/null")
    assert stat.S_ISCHR(after.st_mode)
    assert before.st_ino == after.st_ino


def test_a_full_device_is_an_error_of_the_system():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_text(Path("/dev/full"), "text")


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    def write(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/x'"):
        write_whole(tmp_path / "x", write)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/nowhere/at/all")])
def test_a_lock_that_is_no_file(tmp_path, make):
    make(tmp_path / LOCK_FILE)
    with pytest.raises(OptionError, match=f"{tmp_path / LOCK_FILE}: expected a file, got a link, a folder, a device"):
        acquire(tmp_path)


@pytest.fixture(params=["pipe", "socket", "circle", "stream"])
def special(request, tmp_path) -> Path:
    path = tmp_path / "special"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif request.param == "circle":
        path.symlink_to(path)
    else:
        return Path("/dev/stdout")
    return path


def test_what_is_neither_file_nor_device_is_refused(special, capfd):
    kind = special.lstat()
    with pytest.raises(OptionError, match=str(special)):
        write_text(special, "text")
    with pytest.raises(OptionError, match=f"--json {special}"):
        check_outputs({"json": special})
    assert special.lstat().st_mode == kind.st_mode
    capfd.readouterr()


def test_a_folder_replaces_a_folder(tmp_path):
    place = tmp_path / "model"
    for name in ("old", "new"):
        write_whole(place, lambda path, name=name: (path.mkdir(), (path / name).touch()))
        assert names(place) == [name]
    assert names(tmp_path) == ["model"]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    write_text(tmp_path / "written", "text")
    (tmp_path / "other").touch()
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_folders_stay_for_a_rank_that_ends_later(tmp_path):
    """What another rank, which began later and found them, is still to write into them."""
    path = tmp_path / "new" / "folder" / "a.json"
    with folders_for([path]):
        pass
    path.write_text("{}")
    later = tmp_path / "other" / "folder" / "b.json"
    with pytest.raises(OptionError), folders_for([path, later]):
        raise OptionError("refused")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new"]


def test_what_lies_there_is_of_the_other_kind(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="folder: a folder lies there: move it elsewhere"):
        write_whole(tmp_path / "folder", lambda path: path.touch())
    with pytest.raises(OptionError, match="file: a file lies there: move it elsewhere"):
        write_whole(tmp_path / "file", lambda path: path.mkdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_nobody_can_know_where_a_file_is_begun(tmp_path):
    """What lies there before is never followed: the folder is new, has a random name, and is closed to others."""
    begun = []

    def write(path: Path) -> None:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert not path.exists()
        begun.append(path)
        path.write_text("text")

    for _ in range(2):
        write_whole(tmp_path / "x", write)
    assert begun[0] != begun[1]
    assert names(tmp_path) == ["x"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    place = tmp_path / ("long" * 60 + "[x].json")
    left = []
    with pytest.raises(SystemExit):
        write_whole(place, lambda path: (left.append(path.parent.name), exit()))
    (tmp_path / left[0]).mkdir()
    (tmp_path / ".other.abc.tmp").mkdir()
    remove_leftovers(place)
    assert names(tmp_path) == [".other.abc.tmp"]


def test_outputs_that_are_inputs_or_each_other_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "link").symlink_to("text.txt")
    (tmp_path / "new").symlink_to("made")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").touch()
    one = "name one file"
    over = "would overwrite"
    for outputs, inputs, message in [
        ({"json": tmp_path / "x", "html": tmp_path / "corpus" / ".." / "x"}, {}, one),
        ({"json": tmp_path / "made", "html": tmp_path / "new"}, {}, one),
        ({"json": tmp_path / "text.txt"}, {"data": str(tmp_path / "text.txt")}, over),
        ({"json": tmp_path / "link"}, {"data": str(tmp_path / "text.txt")}, over),
        ({"json": tmp_path / "text.txt"}, {"prompt_file": (tmp_path / "no", tmp_path / "link")}, over),
        ({"json": corpus / "a.txt"}, {"data": str(corpus)}, over),
    ]:
        with pytest.raises(OptionError, match=message):
            check_outputs(outputs, inputs)
    check_outputs({"json": Path("/dev/null"), "html": Path("/dev/null")}, {"data": "/dev/null"})
    check_outputs({"json": Path("-"), "html": tmp_path / "x"}, {"prompt_file": (Path("-"),), "data": None})
    check_outputs({"json": corpus / "new"}, {"data": str(corpus)})
    assert names(tmp_path) == ["corpus", "link", "new", "text.txt"]


def test_standard_output_is_for_json_alone():
    check_outputs({"json": Path("-")})
    with pytest.raises(OptionError, match="--documents -: expected a file to write; --json alone takes -"):
        check_outputs({"json": None, "documents": Path("-")})


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    for path, message in [
        (tmp_path / "no" / "x", "does not exist"),
        (tmp_path / "file" / "x", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path, "is a folder"),
        (Path("/proc/x.json"), "No such file|Permission|Operation|not supported"),
    ]:
        with pytest.raises(OptionError, match=message):
            check_outputs({"json": path})
    check_outputs({"json": tmp_path / "a" / "b"}, new_folders=True)
    with pytest.raises(OptionError, match="File name too long"):
        check_outputs({"json": tmp_path / "a" / ("b" * 300)}, new_folders=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere" / "at" / "all")  # whose folder is made by nobody
    with pytest.raises(OptionError, match=f"{link}: the folder {link.resolve().parent} does not exist; make it first"):
        check_outputs({"json": link}, new_folders=True)
    assert names(tmp_path) == ["file", "link"]


def test_a_picture_is_named_as_the_png_that_it_is(tmp_path):
    for name in ("a.png", "A.PNG", "picture", "qwen2.5-1.5b"):
        check_outputs({"png": tmp_path / name})
    for name in ("a.jpg", "a.png.svg"):
        with pytest.raises(OptionError, match=rf"{name}: expected a name that ends in \.png, got \.{name[-3:]}; "):
            check_outputs({"png": tmp_path / name})
    check_outputs({"json": tmp_path / "a.jpg"})  # a text has any name


OUTPUTS = {
    "plan": ["--json", "--png", "--html"],
    "profile": ["--json", "--png", "--html"],
    "doctor": ["--json"],
    "verify": ["--json"],
    "train": ["--json"],
    "align": ["--json"],
    "score": ["--json", "--out", "--documents"],
    "eval": ["--json"],
    "demo": ["--json"],
    "sample": ["--json", "--html", "--parquet"],
}
INPUTS = {
    "train": ("--data", "--teacher-ids"),
    "align": ("--data",),
    "score": ("--data",),
    "eval": ("--data",),
    "sample": ("--prompt-file",),
    "plan": ("--model",),
}


@pytest.fixture
def a_run(tmp_path) -> Path:
    """A directory with some of what a run has written."""
    place = tmp_path / "run"
    (place / "model").mkdir(parents=True)
    for name in ("run.json", "summary.json", "metrics.jsonl", "tokens.npz", "model/config.json"):
        (place / name).write_text("{}")
    return place


@pytest.mark.parametrize("command", OUTPUTS)
def test_no_command_replaces_what_a_run_has_written(command, a_run, tmp_path, capsys):
    """Nor adds to it, nor through a symlink to the run or to one of its files."""
    (tmp_path / "input").write_text("text")
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "file").symlink_to("run/summary.json")
    needed = ["--data", str(tmp_path / "input")] if command in ("score", "eval") else []
    places = [a_run / name for name in ("summary.json", "tokens.npz", "model/new.json", "checkpoint-9")]
    for place in (*places, tmp_path / "link" / "metrics.jsonl", tmp_path / "file"):
        for option in OUTPUTS[command]:
            assert main([command, *needed, option, str(place)]) == 2, place
            error = capsys.readouterr().err
            assert error.count("\n") == 1, error
            assert f"{option} {place} is among what the run itself writes into" in error
    assert {path.read_text() for path in a_run.rglob("*") if path.is_file()} == {"{}"}


def test_an_evaluation_replaces_nothing_of_a_run(a_run, capsys):
    assert main(["eval", "--model", str(a_run / "model"), "--data", str(a_run / "text"), "--out", str(a_run)]) == 2
    assert f"--out {a_run}/summary.json is among what the run itself writes into" in capsys.readouterr().err


def test_a_runs_directory_takes_other_outputs(a_run):
    check_outputs({"out": a_run / "scores.parquet", "json": a_run / "eval" / "x"}, new_folders=True)


@pytest.mark.parametrize("command", OUTPUTS)
def test_no_command_begins_what_it_could_not_write(command, tmp_path, capsys):
    """Pipes, other outputs and inputs, for every option that writes: one line, no work, everything as it was."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "input").write_text("text")
    data = {"score": ["--data", str(tmp_path / "input")], "eval": ["--data", str(tmp_path / "input")]}
    needed = data.get(command, [])
    same = str(tmp_path / "same")
    calls = [[*needed, option, str(tmp_path / "pipe")] for option in OUTPUTS[command]]
    calls += [
        [*needed, first, same, other, same] for first in OUTPUTS[command] for other in OUTPUTS[command] if first < other
    ]
    for read in INPUTS.get(command, ()):
        both = [read, str(tmp_path / "input")]
        calls += [[*both, option, str(tmp_path / "input")] for option in OUTPUTS[command]]
    for call in calls:
        assert main([command, *call]) == 2, call
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        assert any(said in error for said in ("expected a file", "name one file", "would overwrite")), error
    assert (tmp_path / "input").read_text() == "text"
    assert names(tmp_path) == ["input", "pipe"]
    assert target(tmp_path / "input") == tmp_path / "input"
