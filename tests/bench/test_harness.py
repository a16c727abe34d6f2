"""What the benchmarks share: turns, what a result file begins with, and the machine's line."""

import subprocess
import time

import pytest
import torch

from bench import harness
from tests.support.switches import put_back


def test_steps_take_turns_and_a_first_round_is_left_out():
    called = []
    found = harness.in_turns({name: lambda name=name: called.append(name) for name in "ab"}, rounds=2)
    assert called == list("ababab")
    assert {name: len(turns) for name, turns in found.items()} == {"a": 2, "b": 2}


def test_a_turn_has_the_time_on_the_wall_and_of_this_process_alone():
    (turn,) = harness.in_turns({"sleep": lambda: time.sleep(0.1)}, rounds=1)["sleep"]
    assert turn.wall >= 0.1 > turn.cpu
    assert turn.others >= 0


def test_the_least_of_the_turns_by_either_clock():
    turns = [harness.Turn(3.0, 1.0, 0.1), harness.Turn(2.0, 1.5, 0.4)]
    assert (harness.least(turns), harness.least(turns, "wall")) == (1.0, 2.0)
    assert harness.busiest({"a": turns, "b": [harness.Turn(1.0, 1.0, 0.2)]}) == 0.4


def test_a_result_file_begins_with_the_machine_and_grows_by_rows(tmp_path):
    out = tmp_path / "new" / "results.jsonl"
    write = harness.results(out, 3, sizes={"tokens": 4})
    assert not out.parent.exists()  # so that a run that fails at its start can be started again
    write({"row": 1})
    machine, row = harness.read_lines(out)  # as they come: a run that is killed has left these
    assert machine["kind"] == "environment"
    assert (machine["threads"], machine["sizes"]) == (3, {"tokens": 4})
    assert row == {"schema": harness.SCHEMA, "row": 1}
    assert harness.results(None)({"row": 1}) is None


def test_a_result_file_that_exists_is_refused_and_stays(tmp_path, capsys):
    out = tmp_path / "results.jsonl"
    out.write_text("published\n")
    with pytest.raises(SystemExit) as stop:
        harness.results(out)
    assert stop.value.code == 2
    assert "expected a new file, got" in capsys.readouterr().err
    assert out.read_text() == "published\n"


def test_the_environment_says_what_this_process_computes_with(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libfast.so:/usr/lib/libjemalloc.so.2")
    with put_back():
        torch.set_num_threads(1)
        found = harness.environment()
    assert (found["threads"], found["allocator"]) == (1, "libjemalloc.so.2")
    assert {"torch", "jax", "gguf", "lm-eval"} <= set(found["versions"])
    monkeypatch.delenv("LD_PRELOAD")
    assert harness.environment(2)["threads"] == 2
    assert harness.environment()["allocator"] is None


def test_a_commit_without_the_script_is_dirty(tmp_path, monkeypatch):
    def git(*command):
        subprocess.run(("git", "-c", "user.name=a", "-c", "user.email=a@b", *command), check=True, capture_output=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert harness.commit() is None
    git("init")
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "run.py").touch()
    git("add", ".")
    git("commit", "--message", "a")
    clean = harness.commit()
    (tmp_path / "bench" / "results" / "new.jsonl").touch()
    assert harness.commit() == clean
    (tmp_path / "bench" / "script.py").touch()
    assert harness.commit() == f"{clean}-dirty"
