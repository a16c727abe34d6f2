"""Methods that the gate must refuse, importable by a benchmark's own processes."""

import os
import time

import torch

from bench import peers
from bench.cases import Case, Tensors, step
from bench.gpu.rows import bare_gemms
from bench.logits.table import batched


def entropy_in_bits(case: Case, tensors: Tensors):
    """Right log-prob, entropy in another unit."""

    def forward(**t):
        values = case.dense(**t)
        return values | {"entropy": values["entropy"] * 1.4427}

    return lambda: step(case, forward, tensors)


def raises(case: Case, tensors: Tensors):
    def run():
        raise RuntimeError("not on this machine\nand a second line")

    return run


def raises_late(case: Case, tensors: Tensors):
    """Right, and out of memory in its turns."""
    right, calls = peers.dense(case, tensors), []

    def run():
        calls.append(1)
        if len(calls) > 3:
            raise torch.OutOfMemoryError("in its turns")
        return right()

    return run


def dies(case: Case, tensors: Tensors):
    return lambda: os._exit(3)


def gpu_methods(row, backend):
    """The floor, ours, and peers that fail in every way but the last."""
    yield peers.Method("bare GEMMs", lambda _, t: bare_gemms(row, t), "floor")
    yield peers.Method("late", raises_late)
    yield peers.Method("dead", dies)
    yield peers.Method("in bits", entropy_in_bits)
    yield peers.Method("torch", peers.dense)
    yield peers.Method("logitless", peers.logitless, "ours")


def logps_methods(batch: int):
    """The table's first method after one that raises."""

    def broken(logits, ids):
        raise RuntimeError("not on this machine")

    return {"broken": broken, "tutorial batch": batched}


class Sleeper:
    """A subject that answers after some seconds."""

    def sleep(self, seconds: float):
        time.sleep(seconds)
        return {"status": "ok"}
