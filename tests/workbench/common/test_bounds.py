"""Somebody else's program within bounds, which are gone behind it."""

import resource
import signal

import pytest

from logitless.workbench.common.bounds import bounded


@pytest.fixture(autouse=True)
def timed():
    """A timer of somebody else's, as pytest-timeout has one."""
    before = signal.setitimer(signal.ITIMER_REAL, 300)
    yield
    signal.setitimer(signal.ITIMER_REAL, *before)


def limits() -> tuple:
    timer = signal.getitimer(signal.ITIMER_REAL)[0]
    return signal.getsignal(signal.SIGALRM), timer == pytest.approx(300, abs=60), resource.getrlimit(resource.RLIMIT_AS)


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        ("while True: pass", TimeoutError, "it did not end in 0.2 s"),
        ("while True:\n try: 9 ** (9 ** 9)\n except Exception: pass", TimeoutError, "it did not end in 0.2 s"),
        ("b'a' * 10**10", MemoryError, "it needs more than 64 MiB of memory"),
        ("1 / 0", ZeroDivisionError, "division by zero"),
        ("raise SystemExit(3)", SystemExit, "3"),
    ],
)
def test_what_goes_too_far_is_stopped(program, error, said):
    before = limits()
    with pytest.raises(error, match=said), bounded(0.2, 2**26):
        exec(program)
    assert limits() == before


def test_what_stays_within_is_left_alone():
    before = limits()
    with bounded(5, 2**28):
        assert len(b"a" * 2**20) == 2**20
    assert limits() == before


def test_a_limit_that_was_there_stays():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    lower = 2**46
    resource.setrlimit(resource.RLIMIT_AS, (lower, hard))
    try:
        with bounded(5, 2**50):
            assert resource.getrlimit(resource.RLIMIT_AS)[0] == lower
        assert resource.getrlimit(resource.RLIMIT_AS) == (lower, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
