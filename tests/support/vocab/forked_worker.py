"""Run by `test_compiled_slices.py` in a process without threads: a worker forked from one that has compiled."""

import multiprocessing
import warnings
from typing import Any

import torch

import logitless as ll
from tests.support.vocab.comparing import Operands, operands


def entropies(ops: Operands) -> list[float]:
    with torch.no_grad():
        stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=("logprob", "entropy"), backend="compiled")
    return stats.entropy.tolist()


def work(queue: Any, ops: Operands) -> None:
    torch.set_num_threads(1)  # as each worker of a DataLoader does: OpenMP's threads do not survive a fork
    queue.put(entropies(ops))


if __name__ == "__main__":
    ops = operands((13,), 8, 257, dtype=torch.float32, bias=False).training()
    expected = entropies(ops)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads beside a fork
        child = context.Process(target=work, args=(queue, ops))
        child.start()
    assert queue.get(timeout=60) == expected
    child.join(60)
    assert child.exitcode == 0
