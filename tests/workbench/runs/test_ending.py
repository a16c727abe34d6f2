"""What ends a run from outside: signals, a terminal that closes."""

import os
import pty
import signal
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Event

import pytest
from rich.console import Console

from logitless.workbench.common.signals import STOPPING, interrupted_by_signals
from logitless.workbench.runs.callbacks import GentleStop
from tests.support.forked import begin


@pytest.mark.parametrize("number", STOPPING)
def test_a_step_is_finished_unless_a_signal_comes_twice(number):
    def outside(*_: object) -> None:
        """What stands there before a run, and after it."""

    before = signal.signal(number, outside)
    try:
        with GentleStop(Console(quiet=True)) as stop:
            stop.stepping = True
            signal.raise_signal(number)
            assert stop.asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        assert signal.getsignal(number) is outside
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_that_is_ignored_stays_so(number):
    """As under nohup, which ignores SIGHUP on purpose."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with GentleStop(Console(quiet=True)) as stop:
            stop.stepping = True
            signal.raise_signal(number)
        assert not stop.asked
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def on_a_terminal() -> int:
    """The other end of a terminal that this process writes to from now on."""
    here, there = pty.openpty()
    for number in (1, 2):
        os.dup2(there, number)
    os.close(there)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    return here


def in_the_middle_of_a_step() -> None:
    here, console = on_a_terminal(), Console(stderr=True)
    with GentleStop(console) as stop:
        stop.stepping = True
        os.close(here)
        signal.raise_signal(signal.SIGHUP)
        console.print("the step goes on")
    assert stop.asked


def outside_the_steps() -> None:
    here, console = on_a_terminal(), Console(stderr=True)
    try:
        with interrupted_by_signals():
            os.close(here)
            signal.raise_signal(signal.SIGHUP)
    except KeyboardInterrupt:
        console.print("interrupted")
        os._exit(130)


def test_a_terminal_that_closes_ends_no_step():
    """What is written to it is an error: the step would end there, and its checkpoint would not be saved."""
    process = begin(in_the_middle_of_a_step)
    process.join(60)
    assert process.exitcode == 0


def test_a_terminal_that_closes_outside_the_steps():
    process = begin(outside_the_steps)
    process.join(60)
    assert process.exitcode == 130


def waits(begun: Event) -> None:
    begun.set()
    time.sleep(60)


def ends_a_worker() -> None:
    forking = get_context("fork")
    with interrupted_by_signals():
        begun = forking.Event()
        worker = forking.Process(target=waits, args=(begun,))
        worker.start()
        begun.wait()
        worker.terminate()
        worker.join()
    assert worker.exitcode == -signal.SIGTERM


def test_a_forked_worker_ends_without_a_traceback():
    """As a pool of multiprocessing ends its own, such as lm-eval's."""
    process = begin(ends_a_worker)
    process.join(60)
    assert process.exitcode == 0
