"""A rank that loses another, or is ended by a signal, says so, however it learns of it."""

import signal

import pytest

from logitless.errors import BackendError, RankError
from logitless.workbench.common.signals import STOPPING
from logitless.workbench.runs import ranks
from logitless.workbench.runs.ending import Interrupted, explained


@pytest.fixture(autouse=True)
def one_of_two(monkeypatch):
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks.dist, "get_rank", lambda: 0)
    before = {number: signal.getsignal(number) for number in STOPPING}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
    signal.signal(signal.SIGINT, signal.default_int_handler)  # and behind a shell's &
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def losing():
    return ranks.lost(lambda: "--resume run goes on from step 6")


@pytest.mark.parametrize(
    "said",
    [
        "Connection closed by peer",
        "Connection reset by peer",
        "Timed out waiting 60000ms for recv operation to complete",
        "Application timeout caused pair closure",
        "Socket is not open",
        "Gloo connectFullMesh failed",
        "NCCL communicator was aborted on rank 0",
    ],
)
@pytest.mark.parametrize("within_head", [False, True])
def test_a_collective_fails(said, within_head):
    error = RuntimeError(f"[file.cc:12] {said}")
    if within_head:
        error, error.__cause__ = RankError("head: expected an answer from all 2 ranks of its group"), error
    with pytest.raises(RankError, match=rf"rank 0 lost another rank \({said}\); .*from step 6"), losing():
        raise error
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # while this is said


@pytest.mark.parametrize("number", STOPPING)
def test_the_launcher_is_first(number):
    """Or a terminal that closes: the rank is interrupted, whatever the reason."""
    with (
        pytest.raises(
            Interrupted, match=rf"rank 0 was ended by its launcher \({number.name}\), .*; --resume run goes on"
        ),
        losing(),
    ):
        signal.raise_signal(number)
    assert signal.getsignal(number) is signal.SIG_IGN


def test_the_launcher_is_first_while_torch_dispatches():
    """Its C++ raises an error of its own in the place of one that a handler of Python's raised within it."""

    def dispatch() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Interrupted:
            raise RuntimeError("Unhandled exception in dispatch") from None

    with pytest.raises(Interrupted, match=r"rank 0 was ended by its launcher \(SIGTERM\)"), losing():
        dispatch()


def test_a_signal_within_a_runs_place(tmp_path):
    """Whose own line says nothing of the launcher."""
    with (
        pytest.raises(Interrupted, match=r"rank 0 was ended by its launcher .*; --resume run goes on from step 6"),
        losing(),
        explained(tmp_path, "train"),
    ):
        signal.raise_signal(signal.SIGTERM)


def test_nothing_is_lost():
    before = signal.getsignal(signal.SIGTERM)
    with losing():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    for error in (RuntimeError("a shape"), RankError("ranks disagree on model: nccl"), BackendError("no socket")):
        with pytest.raises(type(error), match=str(error)), losing():
            raise error
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with losing():
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
