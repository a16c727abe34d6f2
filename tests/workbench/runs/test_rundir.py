"""Directories of runs: one process at a time, nothing of another's replaced, and checkpoints of one's own only."""

import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from logitless.errors import ConfigError, OptionError
from logitless.workbench.common.lock import LOCK_FILE, acquire, holder, release
from logitless.workbench.common.sealed import read_sealed
from logitless.workbench.common.written import RUN_FILE, WRITTEN
from logitless.workbench.runs.checkpoints import (
    MARK,
    begin_checkpoint,
    checkpoints,
    discard_unfinished,
    last_checkpoint,
    mark,
    prune,
    seal,
    strange_checkpoint,
)
from logitless.workbench.runs.ending import explained
from logitless.workbench.runs.rundir import claim, name_of, ranks_at_start, record, stored
from logitless.workbench.sft.config import TrainConfig

HOLDS = """
import sys, time
from pathlib import Path
from logitless.workbench.common.sealed import read_sealed
from logitless.workbench.common.lock import acquire
assert acquire(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def begun(place: str) -> Path:
    """The directory of a run that has ended."""
    config = TrainConfig(output_dir=Path(place))
    found = claim(config, "any")
    record(config, found)
    (found / "metrics.jsonl").touch()
    release(found)
    return found


def checkpoint(run: Path, step: int) -> Path:
    """A checkpoint as Trainer leaves it, empty files in the place of weights."""
    begin_checkpoint(run, step)
    path = run / f"checkpoint-{step}"
    return finished(path, step)


def finished(path: Path, step: int) -> Path:
    path.mkdir(exist_ok=True)
    seal(path)
    return path


def test_runs_that_start_at_once_get_a_directory_each():
    together = Barrier(12)

    def start(_: int) -> Path:
        together.wait()
        return claim(TrainConfig(), "tiny")

    with ThreadPoolExecutor(12) as pool:
        places = list(pool.map(start, range(12)))
    assert len(set(places)) == 12
    for place in places:
        release(place)


def test_two_cannot_resume_one_run():
    place = begun("run")
    again = TrainConfig(resume=place)
    with explained(claim(again, "any"), "train"):
        with pytest.raises(OptionError, match=rf"--resume run: process {os.getpid()} on .* is writing there; wait"):
            claim(again, "any")
        with pytest.raises(OptionError, match="run holds a run already"):
            claim(TrainConfig(output_dir=place), "any")
    with explained(claim(again, "any"), "train"):
        pass
    assert not (place / LOCK_FILE).exists()


def test_two_cannot_begin_in_one_directory():
    place = claim(TrainConfig(output_dir=Path("run")), "any")
    with pytest.raises(OptionError, match="is writing to run: wait for its end, or choose another --output-dir"):
        claim(TrainConfig(output_dir=place), "any")


def test_a_process_that_is_killed_gives_its_lock_back(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    assert not acquire(tmp_path)
    assert f"process {process.pid} " in holder(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert acquire(tmp_path)
    release(tmp_path)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_new_run_replaces_nothing(name):
    """`train --model model --output-dir .` among them: the input stays what it is."""
    Path(name.replace("*", "9")).mkdir()
    with pytest.raises(OptionError, match=r"holds .*, which a run would replace: move it elsewhere, or choose another"):
        claim(TrainConfig(output_dir=Path()), "any")
    assert not Path(LOCK_FILE).exists()
    place = Path("runs/tiny")
    place.mkdir(parents=True)
    Path(name.replace("*", "9")).rename(place / name.replace("*", "9"))
    assert claim(TrainConfig(), "tiny") == Path("runs/tiny-2")


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "run.json", "checkpoint-5", "model", "prompts.jsonl", "model/x.json"]
)
def test_json_is_not_among_what_the_run_writes(name):
    with pytest.raises(OptionError, match=rf"--json run/{name} is among what the run itself writes into run"):
        claim(TrainConfig(output_dir=Path("run"), json=Path("run", name)), "any")
    assert not Path("run").exists()
    assert claim(TrainConfig(json=Path("runs/tiny", name)), "tiny") == Path("runs/tiny-2")
    claim(TrainConfig(output_dir=Path("run"), json=Path("run/results.json")), "any")


def test_json_is_no_folder_that_the_run_writes_into():
    """Before it is one: at the end of a run there would be no place for the summary."""
    expected = "--json {}: expected a file, got the folder that the run writes into"
    for place, json in (("run", "run"), ("a/b", "a"), (None, "runs")):
        with pytest.raises(OptionError, match=expected.format(json)):
            claim(TrainConfig(output_dir=place and Path(place), json=Path(json)), "tiny")
        assert not Path(json).exists()
    assert claim(TrainConfig(json=Path("runs/tiny")), "tiny") == Path("runs/tiny-2")


@pytest.mark.parametrize("place", ["run", "link"])
@pytest.mark.parametrize("option", ["model", "data", "teacher", "teacher_ids"])
def test_inputs_are_never_among_what_is_replaced(option, place):
    """Nor where a killed run has left its lock, so that what lies there might be its own."""
    Path("run").mkdir()
    Path("run/run.lock").touch()
    Path("run/model").symlink_to("../elsewhere")
    Path("link").symlink_to("run")
    Path("elsewhere").mkdir()
    given = option.replace("_", "-")
    for path in ("run/model", "elsewhere", "run/model/part", "run/tokens.npz"):
        with pytest.raises(OptionError, match=rf"--{given} {path} is among what the run itself writes into {place}"):
            claim(TrainConfig(output_dir=Path(place), **{option: path}), "any")


def test_a_run_that_was_killed_before_it_could_be_resumed_starts_again():
    """Here by a failure on the way, and then without: its own files are no others'."""
    place = claim(TrainConfig(output_dir=Path("run")), "any")
    (place / "rows.jsonl").write_text("")
    with pytest.raises(ValueError, match="such"), explained(place, "train"):
        raise ValueError("such")
    assert claim(TrainConfig(output_dir=place), "any") == place


def test_where_no_run_is_the_hint_is_of_one_that_has_begun():
    Path("a b").mkdir()
    nothing = "--resume a b: no run in this directory (expected run.json)"
    with pytest.raises(ConfigError, match=f"{re.escape(nothing)}$"):
        stored(Path("a b"), TrainConfig())
    place = claim(TrainConfig(output_dir=Path("a b")), "any")
    remedy = "; if no process is writing there, start it again with --output-dir 'a b'"
    with pytest.raises(ConfigError, match=f"{re.escape(nothing + remedy)}$"):
        stored(place, TrainConfig())
    release(place)


def test_a_relative_model_is_looked_for_where_the_run_began(tmp_path, monkeypatch):
    """From elsewhere its name would be taken for a hub id, and the hub asked for it."""
    Path("models/m").mkdir(parents=True)
    config = TrainConfig(model="models/m", output_dir=Path("run"))
    place = claim(config, "any")
    record(config, place)
    release(place)
    assert stored(place, TrainConfig()).model == "models/m"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    said = f"--resume ../run: its --model models/m is in {tmp_path}, where the run began: go on from there"
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        stored(Path("../run"), TrainConfig())


def test_a_refused_run_takes_away_what_it_made_alone():
    Path("own").mkdir()
    Path("file").write_text("")
    for place in ("own", "own/new/run", "runs/tiny", "file/run"):
        with pytest.raises(OptionError), explained(claim(TrainConfig(output_dir=Path(place)), "any"), "train"):
            raise OptionError("refused")
        assert sorted(Path().rglob("*")) == [Path("file"), Path("own")], place


def test_a_directory_that_cannot_be_written():
    Path("file").write_text("")
    for place, why in (("file/run", "Not a directory"), ("file", "expected a folder, got a file")):
        with pytest.raises(OptionError, match=f"--output-dir {place}: {why}$"):
            claim(TrainConfig(output_dir=Path(place)), "any")


def test_checkpoints_of_another_run_are_neither_resumed_nor_removed():
    place, other = begun("run"), begun("other")
    own = [checkpoint(place, step) for step in (1, 2, 3)]
    theirs = checkpoint(other, 900).rename(place / "checkpoint-900")
    unmarked = finished(place / "checkpoint-901", 901)
    assert last_checkpoint(place) == (own[-1], 3)
    prune(place)
    assert checkpoints(place) == own[1:]
    with pytest.raises(OptionError, match=r"checkpoint-900 is not of the run in this directory: move it elsewhere"):
        begin_checkpoint(place, 900)
    for path in (theirs, unmarked):
        with pytest.raises(OptionError, match=rf"--resume run: {path} is not of the run in this directory"):
            claim(TrainConfig(resume=place), "any")
        assert (path / "seal.json").exists()
        path.rename(path.with_name(f"elsewhere-{path.name}"))
    mark(place, unfinished := place / "checkpoint-4")
    Path(place / "checkpoint-3").rename("third")  # it holds no weights
    Path(place / "checkpoint-2").rename("second")
    with explained(claim(TrainConfig(resume=place), "any"), "train"):
        assert not unfinished.exists()


def test_a_kill_while_checkpoints_are_removed_leaves_none_without_its_mark(monkeypatch):
    """Their files go in any order, so that the mark may go first."""
    place = begun("run")
    for step in (1, 2, 3):
        checkpoint(place, step)

    def mark_first(folder):
        for path in Path(folder).rglob(MARK):
            path.unlink()
        raise SystemExit

    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", mark_first)
        with pytest.raises(SystemExit):
            prune(place)
    assert strange_checkpoint(place) is None
    discard_unfinished(place)
    assert sorted(path.name for path in place.iterdir()) == ["checkpoint-2", "checkpoint-3", "metrics.jsonl", RUN_FILE]


def test_a_kill_before_checkpoints_are_removed_leaves_no_more_of_them():
    """A run that is killed behind its last checkpoint saves no other, after which it would remove the older ones."""
    place = begun("run")
    newest = [checkpoint(place, step) for step in (1, 2, 3)][1:]
    with explained(claim(TrainConfig(resume=place), "any"), "train"):
        assert checkpoints(place) == newest


def test_a_run_stays_what_it_was_begun_as():
    place = begun("run")
    before = read_sealed(place / RUN_FILE)
    record(TrainConfig(resume=place, max_steps=77), place, ranks=2)
    after = read_sealed(place / RUN_FILE)
    assert (after["id"], after["ranks"], ranks_at_start(place)) == (before["id"], 1, 1)
    assert after["config"]["max_steps"] == 77
    (place / "rows.jsonl").touch()  # there was none
    record(TrainConfig(resume=place), place)


def rewarded() -> Path:
    """The directory of a run that trained its own reward."""
    place = claim(TrainConfig(output_dir=Path("run")), "any")
    (place / "reward").mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / "reward" / name).write_text(name)
    record(TrainConfig(output_dir=place), place)
    release(place)
    return place


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda reward: (reward / "config.json").write_text("other"), "config.json"),
        (lambda reward: (reward / "model.safetensors").unlink(), "model.safetensors"),
        (lambda reward: (reward / "adapter_config.json").write_text("{}"), "adapter_config.json"),
    ],
)
def test_a_reward_is_trained_anew_as_a_whole(change, name):
    place = rewarded()
    change(place / "reward")
    with pytest.raises(ConfigError, match=rf"run/reward/{name} is not what .*: put it back; or remove run/reward, to"):
        claim(TrainConfig(resume=place), "any")
    shutil.rmtree(place / "reward")
    assert claim(TrainConfig(resume=place), "any") == place
    with pytest.raises(ConfigError, match=r"reward/config.json was made anew, and is not what the run began with"):
        record(TrainConfig(resume=place), place)
    release(place)


def test_what_a_killed_process_prepared_is_not_taken_by_other_options():
    """Killed before its run had begun: prompts, a reward and half of its tokens lie there, and its lock's file."""
    place = claim(TrainConfig(output_dir=Path("run")), "any")
    release(place, keep_file=True)
    (place / "reward").mkdir()
    (place / "prompts.jsonl").write_text("{}")
    (place / ".tokens.npz.abc.tmp").mkdir()
    (place / ".mine.tmp").write_text("")
    with pytest.raises(ConfigError, match=r"expected run.json\); if no process .* again with --output-dir run$"):
        claim(TrainConfig(resume=place), "any")
    assert claim(TrainConfig(output_dir=place), "any") == place
    assert sorted(path.name for path in place.iterdir()) == [".mine.tmp", LOCK_FILE]
    release(place)


def test_what_a_user_calls_a_checkpoint_is_kept():
    """A copy of one that did well, say: its mark is the run's, its name is not."""
    place = begun("run")
    kept = Path(shutil.copytree(checkpoint(place, 2), place / "checkpoint-best"))
    discard_unfinished(place)
    assert (kept / "seal.json").exists()
    assert checkpoints(place) == [place / "checkpoint-2"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen3-0.6b", "qwen3-0.6b"),
        ("owner/my-model-v1.5-chat", "my-model-v1.5-chat"),
        ("models/m-v1.5", "m-v1.5"),
        ("models/m-v1.5/config.json", "m-v1.5"),
        ("models/m-v1.5/", "m-v1.5"),
        ("models/m-v1.5/wider-v2.json", "wider-v2"),
    ],
)
def test_the_name_of_a_run(model, name):
    folder = Path("models/m-v1.5")
    folder.mkdir(parents=True)
    for file in ("config.json", "wider-v2.json"):
        (folder / file).write_text("{}")
    assert name_of(model) == name


def test_a_model_without_a_name_is_called_as_its_folder(tmp_path):
    Path("config.json").write_text("{}")
    assert name_of("config.json") == name_of(".") == tmp_path.name
