"""Comparisons of all methods: what is stopped, moved, damaged or foreign, and what they come to."""

import dataclasses
import errno
import io
import json
import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from logitless.errors import ConfigError, OptionError
from logitless.workbench.common.files import read_lines
from logitless.workbench.common.sealed import read_sealed, write_sealed
from logitless.workbench.common.space import OutOfSpace
from logitless.workbench.grade import single
from logitless.workbench.grade.comparison import compare
from logitless.workbench.grade.config import GradeConfig
from logitless.workbench.grade.method import Method
from logitless.workbench.grade.methods import Reinforce
from logitless.workbench.grade.run import run, show
from logitless.workbench.runs.ending import Interrupted
from tests.support.workbench.grading import of


def test_all_methods_on_one_task_and_what_is_finished_is_not_run_again(small, monkeypatch):
    changes = {"max_steps": 1, "gradient_accumulation_steps": 1, "completion_length": 3, "variance_samples": 2}
    config = of(small, "all", method="all", seeds=2, **changes)
    place = config.output_dir
    real, ran = compare.run_one, []

    def until(method: str | None):
        def run_one(config, console, whole):
            if config.method == method:
                raise KeyboardInterrupt
            ran.append((config.method, config.seed))
            return real(config, console, whole)

        return run_one

    monkeypatch.setattr(compare, "run_one", until("ppo"))
    with pytest.raises(Interrupted, match=f"--resume {place}"):
        run(config)
    assert ran == [("ste", 0), ("gumbel", 0), ("reinforce", 0)]
    ran.clear()
    monkeypatch.setattr(compare, "run_one", until(None))
    summary = run(dataclasses.replace(config, output_dir=None, resume=place))
    methods = ("ste", "gumbel", "reinforce", "ppo", "ste_legacy", "gumbel_legacy")
    assert ran == [*((m, 0) for m in methods[3:]), *((m, 1) for m in methods)]
    assert tuple(summary["methods"]) == methods
    assert summary == json.loads((place / "summary.json").read_text())
    page = (place / "comparison.html").read_text()
    assert all(f"<td>{name}</td><td>{when}</td>" in page for name in methods for when in ("before", "after"))
    for name, found in summary["methods"].items():
        reward = found["test_reward"]
        assert reward["low"] <= reward["mean"] <= reward["high"]
        assert len(reward["values"]) == 2
        assert found["grad_variance"] > 0
        assert (name == "ste") == ("test_reward_minus_ste" not in found)
    before = {found["val_reward_before"] for found in summary["methods"].values()}
    assert len(before) == 1  # one policy, one reward, one evaluation
    ste, legacy = summary["methods"]["ste"], summary["methods"]["ste_legacy"]
    assert legacy["coverage"] == 1.0 > ste["coverage"]
    records = read_lines(place / "metrics.jsonl")
    assert {(x["method"], x["seed"], x["step"]) for x in records} == {
        (m, s, i) for m in methods for s in (0, 1) for i in range(2)
    }
    assert (place / "comparison.png").stat().st_size > 10_000
    console = Console(file=io.StringIO(), width=160)
    show(summary, console)
    assert all(name in console.file.getvalue() for name in methods)


TIGHT = {"method": "all", "max_steps": 1, "completion_length": 2, "variance_samples": 0}


@pytest.fixture(scope="module")
def tight(small) -> tuple[Path, dict, str]:
    """A comparison in bfloat16 where the legacy methods do not fit: its place, what it came to, and what it said."""
    console = Console(file=io.StringIO())
    config = of(small, "tight", dtype="bfloat16", lora_rank=0, **TIGHT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitless.workbench.grade.legacy.free_bytes", lambda device: 0)
        return config.output_dir, run(config, console), console.file.getvalue()


def test_weights_that_rounding_keeps_are_warned_of_once(tight):
    assert tight[2].count("warning: weights of bfloat16 are trained") == 1


@pytest.fixture(scope="module")
def half_compared(small) -> Path:
    """A comparison that trained its own reward and was killed before its third method."""
    place, real = small.root / "half-compared", compare.run_one

    def two(config, console, whole):
        if config.method == "reinforce":
            raise KeyboardInterrupt
        return real(config, console, whole)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "run_one", two)
        with pytest.raises(Interrupted):
            run(dataclasses.replace(small.config, output_dir=place, reward_model=None, **TIGHT))
    return place


@pytest.fixture
def begun(half_compared, tmp_path, monkeypatch) -> Path:
    """It, where the legacy methods do not fit."""
    monkeypatch.setattr("logitless.workbench.grade.legacy.free_bytes", lambda device: 0)
    return Path(shutil.copytree(half_compared, tmp_path / "begun", symlinks=True))


def going_on(small, place: Path, **changes) -> GradeConfig:
    given = {**TIGHT, "output_dir": None, "resume": place, "reward_model": None, **changes}
    return dataclasses.replace(small.config, **given)


def test_a_comparison_that_was_moved_has_its_own_reward(small, begun, compared, tmp_path):
    begun.rename(tmp_path / "moved")
    shutil.copytree(small.reward, begun / "reward")  # another one, where its own was
    run(going_on(small, tmp_path / "moved"))
    for method in ("reinforce-0", "ppo-0"):
        records = [read_lines(path / method / "metrics.jsonl") for path in (compared, tmp_path / "moved")]
        assert [x["train/reward"] for x in records[0][1:]] == [x["train/reward"] for x in records[1][1:]]
        assert (tmp_path / "moved" / method / "reward").samefile(tmp_path / "moved" / "reward")


OTHER = {
    "prompt_length": 11,
    "completion_length": 3,
    "batch_size": 2,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "carry": "cached",
    "max_steps": 2,
    "learning_rate": 1e-3,
    "beta": 0.1,
    "tau_start": 1.0,
    "tau_end": 0.1,
    "top_k": 0,
    "baseline_decay": 0.5,
    "variance_samples": 2,
    "max_grad_norm": 2.0,
    "evaluation_prompts": 4,
    "lora_rank": 0,
    "seed": 1,
    "seeds": 2,
    "reward_model": "other/reward",
    "reward_label": 0,
    "token_reward": "math:sqrt",
    "memory_budget": "1MiB",
    "dtype": "bfloat16",
    "device": "auto",
}


def test_nothing_that_methods_are_compared_by_can_change(small, half_compared):
    """An option that a single run may change would set what is finished against runs of another kind."""
    for name, value in OTHER.items():
        with pytest.raises(OptionError, match=f"--{name.replace('_', '-')} cannot change .* in a comparison: .* begin"):
            run(going_on(small, half_compared, **{name: value}))
    given = {"model", "data", "report_to", "method"}  # which are read first, or may change
    assert set(OTHER) | given == set(small.config.to_dict())


def numbers(place: Path) -> dict:
    """What a comparison came to, but for times."""
    found = json.loads((place / "summary.json").read_text())
    for one in found["methods"].values():
        del one["seconds_per_step"], one["peak_memory_bytes"]
    return {name: found[name] for name in ("methods", "criteria", "curves", "left_out")}


@pytest.fixture(scope="module")
def compared(small, half_compared, tmp_path_factory) -> Path:
    """The same comparison to its end."""
    place = Path(shutil.copytree(half_compared, tmp_path_factory.mktemp("compared") / "all", symlinks=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("logitless.workbench.grade.legacy.free_bytes", lambda device: 0)
        run(going_on(small, place))
    return place


def another_digit(path: Path) -> None:
    text = path.read_text()
    at = max(text.rfind(digit) for digit in "345678")
    path.write_text(f"{text[:at]}{int(text[at]) - 1}{text[at + 1 :]}")


def nothing_in_it(path: Path) -> None:
    path.write_text("{}\n")


@pytest.mark.parametrize("change", [another_digit, nothing_in_it, Path.unlink])
@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "completions.json", "run.json"])
def test_what_is_compared_is_what_each_run_ended_with(small, begun, name, change):
    place = begun / "gumbel-0"
    change(place / name)
    with pytest.raises(ConfigError) as caught:
        run(going_on(small, begun))
    said = f"{place / name} is not what the run ended with: put it back, or remove {place}, to run it again"
    assert str(caught.value) == said


def test_what_was_removed_is_run_again(small, begun, compared):
    shutil.rmtree(begun / "gumbel-0")
    run(going_on(small, begun))
    assert numbers(begun) == numbers(compared)


def test_a_run_that_was_made_longer_by_itself(small, begun):
    place = begun / "gumbel-0"
    longer = dataclasses.replace(going_on(small, place), method="gumbel", max_steps=2)
    run(longer)
    with pytest.raises(ConfigError, match=r"gumbel-0/\S+ is not what the run ended with: put it back, or remove"):
        run(going_on(small, begun))


def test_runs_of_another_comparison(small, begun):
    shutil.copytree(begun / "gumbel-0", begun / "reinforce-0", symlinks=True)
    with pytest.raises(ConfigError, match=r"reinforce-0 is of a run with another --method than .*: move it elsewhere"):
        run(going_on(small, begun))
    shutil.rmtree(begun / "reinforce-0")
    forget(begun, "gumbel-0")
    path = begun / "gumbel-0" / "run.json"
    known = read_sealed(path)
    write_sealed(path, {**known, "files": {**known["files"], "prompts.jsonl": "0"}})
    with pytest.raises(ConfigError, match=r"gumbel-0 is of a run with another prompts.jsonl than .*: move it"):
        run(going_on(small, begun))
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"run.json is damaged, or of another version: remove .*gumbel-0, to run it"):
        run(going_on(small, begun))


def forget(whole: Path, name: str) -> None:
    """As a kill leaves a comparison just before it has recorded that a run has ended."""
    known = read_sealed(whole / "run.json")
    del known["finished"][name]
    write_sealed(whole / "run.json", known)


def test_a_kill_between_the_end_of_a_run_and_its_record(small, begun, compared):
    """What lies there is not taken for what the run came to, and nothing of the kill is left."""
    forget(begun, "gumbel-0")
    another_digit(begun / "gumbel-0" / "summary.json")
    (begun / "gumbel-0" / "run.lock").touch()
    (begun / "gumbel-0" / ".summary.json.abc.tmp").mkdir()
    run(going_on(small, begun))
    assert numbers(begun) == numbers(compared)
    names = [sorted(path.relative_to(place) for path in place.rglob("*")) for place in (begun, compared)]
    assert names[0] == names[1]


def test_a_signal_in_the_last_step_of_a_method_stops_the_comparison(small, begun, compared, monkeypatch):
    step = Method.step

    def signalled(self, *given):
        signal.raise_signal(signal.SIGTERM)
        return step(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Reinforce, "step", signalled)
        with pytest.raises(Interrupted, match=f"logitless align --resume {begun} goes on from what is not finished"):
            run(going_on(small, begun))
    assert (begun / "reinforce-0" / "checkpoint-1").exists()
    assert not (begun / "ppo-0").exists()
    run(going_on(small, begun))
    assert numbers(begun) == numbers(compared)


def test_a_run_within_a_comparison_that_goes_on_keeps_what_it_prepared(small, begun, compared, monkeypatch):
    """A kill, or a full disk, while its prompts were written anew would leave half of them."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(single, "_conclude", stop)
        with pytest.raises(Interrupted):
            run(going_on(small, begun))
    prompts, reward = (begun / "reinforce-0" / name for name in ("prompts.jsonl", "reward"))
    before = prompts.stat().st_mtime_ns
    reward.unlink()
    reward.symlink_to("nowhere")
    run(going_on(small, begun))
    assert prompts.stat().st_mtime_ns == before
    assert reward.samefile(begun / "reward")
    assert numbers(begun) == numbers(compared)


def test_a_reward_that_does_not_fit_is_said_before_a_comparison_has_begun(small):
    """Of one that had begun, no option could be mended."""
    config = of(small, "label", **TIGHT)
    with pytest.raises(ConfigError, match="--reward-label 7: the reward model has labels"):
        run(dataclasses.replace(config, reward_label=7))
    assert not (config.output_dir / "run.json").exists()


@pytest.mark.parametrize("option", ["model", "reward_model"])
def test_models_are_those_that_a_comparison_began_with(small, tmp_path, monkeypatch, option):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    path = Path(shutil.copytree(getattr(small.config, option), tmp_path / "other"))
    config = of(small, f"other-{option}", **{**TIGHT, option: str(path)})
    monkeypatch.setattr(compare, "run_one", stop)
    with pytest.raises(Interrupted):
        run(config)
    tensors = load_file(path / "model.safetensors")
    save_file({name: 1.5 * x for name, x in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    said = f"model.safetensors of --{option.replace('_', '-')} {path} is not what the run began with: put it back, or"
    with pytest.raises(ConfigError, match=said):
        run(dataclasses.replace(config, output_dir=None, resume=config.output_dir))


def test_a_full_disk_within_a_comparison_names_the_comparison(small, begun, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(single, "steps", full)
    with pytest.raises(OutOfSpace, match=f"no space left at .*, then logitless align --resume {begun} goes on from"):
        run(going_on(small, begun))


def test_only_what_does_not_fit_is_left_out(small, begun):
    (begun / "ste_legacy-0" / "model").mkdir(parents=True)
    (begun / "ste_legacy-0" / "run.lock").unlink(missing_ok=True)
    with pytest.raises(OptionError, match=r"ste_legacy-0 holds .*, which a run would replace"):
        run(going_on(small, begun))


def test_a_method_that_does_not_fit_is_left_out_with_its_reason(tight):
    place, summary, _ = tight
    assert not list(place.glob("*legacy*"))
    assert set(summary["left_out"]) == {"ste_legacy", "gumbel_legacy"}
    assert "a batch needs" in summary["left_out"]["ste_legacy"]
    assert set(summary["methods"]) == {"ste", "gumbel", "reinforce", "ppo"}
