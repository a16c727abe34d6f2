"""The process's own memory: peaks, and how much a piece of work adds."""

import mmap
import signal
import sys
import time

import pytest
import torch

from logitless.resident import INTERVAL, AllocationTracker, Watch, free_bytes, peak_bytes, thin

CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_watch_sees_a_peak_that_is_gone_at_the_end():
    with Watch(CPU) as watch:
        held = mmap.mmap(-1, 64 * MIB)  # not what an allocator may have at hand
        for page in range(0, 64 * MIB, mmap.PAGESIZE):
            held[page] = 1
        time.sleep(10 * INTERVAL)
        held.close()
        time.sleep(10 * INTERVAL)
    assert 60 * MIB <= watch.peak <= 100 * MIB
    assert watch.curve[-1][1] < 40 * MIB
    assert [seconds for seconds, _ in watch.curve] == sorted(seconds for seconds, _ in watch.curve)


def test_a_tracker_counts_each_storage_until_it_is_freed():
    given = torch.zeros(100)
    with AllocationTracker() as tracker:
        first = given + 1
        view = first[:10]
        second = first * 2
        assert (tracker.live, tracker.peak, tracker.largest) == (800, 800, 400)
        del first
        assert tracker.live == 800  # a view holds it
        del view
        assert tracker.live == 400
        second = second + 1
        assert tracker.peak == 800
        del second
    assert tracker.live == 0


def test_no_interrupt_is_lost_where_a_tracked_storage_is_freed(monkeypatch):
    """Python swallows what is raised within what it calls when an object dies."""
    swallowed = []
    monkeypatch.setattr(sys, "unraisablehook", swallowed.append)

    def interrupted(seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while not swallowed:
            torch.zeros(8)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for turn in range(300):
            with pytest.raises(KeyboardInterrupt), AllocationTracker():
                interrupted(0.002 + turn * 1e-6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not swallowed


def test_peaks_and_free_memory_are_the_machines():
    assert 50 * MIB < peak_bytes(CPU) < 1 << 40
    assert 50 * MIB < free_bytes(CPU) < 1 << 44


def test_a_thin_curve_keeps_the_highest_points():
    curve = [(float(i), i % 7) for i in range(1000)]
    short = thin(curve, 10)
    assert len(short) <= 11
    assert all(used == 6 for _, used in short)
    assert thin(curve[:5], 10) == curve[:5]
