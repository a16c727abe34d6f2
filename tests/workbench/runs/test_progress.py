"""Progress: the time that is left however slow the steps are, lines where there is no terminal, and what runs now."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from logitless.cli.main import main
from logitless.workbench.runs import progress
from logitless.workbench.runs.progress import Bar, working


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: found.now))
    return found


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)


def test_the_time_left_is_known_from_the_first_slow_step_on(clock):
    screen = console(terminal=True)
    with Bar(screen, "ste", 32, done=2) as bar:
        for step in range(3, 6):
            clock.now += 45.0
            bar.put(step, f"step {step} is done")
            bar.bar.refresh()
            shown = screen.file.getvalue().rpartition("is done")[2]
            minutes, seconds = divmod(45 * (32 - step), 60)
            assert f" {minutes}:{seconds:02d}" in shown  # without hours, where there are none
        clock.now += 40.0
        bar.bar.refresh()
        assert "19:35" in screen.file.getvalue().rpartition("is done")[2]  # 27 steps of 45 s less 40 s
    assert "-:--" not in screen.file.getvalue()
    with Bar(screen, "ste", 32) as bar:
        clock.now += 450.0
        bar.put(1, "a slow step")
        bar.bar.refresh()
    assert " 3:52:30" in screen.file.getvalue()


def test_without_a_terminal_there_are_some_lines():
    screen = console(terminal=False)
    with Bar(screen, "ste", 100) as bar:
        for step in range(1, 101):
            bar.put(step, "reward 0.5")
    lines = screen.file.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[-1] == "step   100/100 · reward 0.5"
    with working(screen) as tell:
        tell("something slow")
    assert len(screen.file.getvalue().splitlines()) == 11


def test_a_terminal_shows_what_runs_now():
    screen = console(terminal=True)
    with working(screen) as tell:
        tell("tracing a step, dense loss")
    assert "tracing a step, dense loss ..." in screen.file.getvalue()


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["verify", "--vocab-size", "500"], {"float32, mean", "float32, none", "bfloat16, mean", "bfloat16, none"}),
        (
            ["profile", "--model", "MODEL", "--context-length", "64", "--savings", "lora"],
            {"dense loss", "logitless loss", "lora"},
        ),
    ],
)
def test_slow_commands_say_what_they_do(micro, monkeypatch, capsys, command, told):
    heard = []

    class Heard:
        def __enter__(self):
            return heard.append

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(progress, "working", lambda screen: Heard())
    assert main([str(micro.model) if word == "MODEL" else word for word in command]) == 0
    assert {what.partition(", ")[2] for what in heard} == told
