"""What `test_parallel.py` runs under Triton's interpreter: its kernels as the backend that two ranks wrap."""

from typing import Any

import torch
import torch.distributed as dist

from logitless.sample import SamplingMask
from tests.support.allocations import poison
from tests.support.vocab.comparing import EVERYTHING, operands
from tests.support.vocab.interpreter import hasten
from tests.support.vocab.parallel_split import Split, V, check
from tests.support.vocab.sharding import run

ROUNDING = {"backend": "triton", "tolerance": 4e-5}


def kernels(group: Any) -> None:
    if group is dist.group.WORLD:
        return  # interpreted kernels are slow: two ranks are enough
    poison()
    ops = operands(v=V, dtype=torch.float32, reference=True, ranks=(2, 1), scale=0.7, vocab_size=V - 2)
    ops.labels[3] = -100
    check(Split(ops, group, (3, 20)), EVERYTHING, top_k=8, temperature=1.3, jsd_beta=0.3, **ROUNDING)
    for want in (("logprob",), ("kl",)):
        ops = operands(v=V, dtype=torch.float32, reference=True, bias=False).training("hidden")
        check(Split(ops, group, (3, 20)), want, **ROUNDING)
    check(Split(operands(v=V, dtype=torch.float32), group, (0, V)), ("logprob", "entropy", "rank"), **ROUNDING)
    check(Split(operands(v=V, dtype=torch.float32), group, (3, 20)), ("logprob", "rank"), **ROUNDING)  # gathered labels
    ops = operands(v=V, dtype=torch.float32, reference=True)
    labels = ops.labels.flatten().tolist()
    mask = SamplingMask.of([{label, (label + 7) % V, (5 * i) % V} for i, label in enumerate(labels)])
    check(Split(ops, group, (3, 20)), EVERYTHING, sampling_mask=mask, **ROUNDING)
    for want in (("logprob",), ("logprob", "mean_logit"), ("entropy",), ("kl",)):  # a rank that has no slice
        ops = operands(v=V, dtype=torch.float32, reference="kl" in want, bias=False).training("hidden")
        check(Split(ops, group, (0, V)), want, **ROUNDING)


if __name__ == "__main__":
    hasten()
    run({"kernels": kernels})
