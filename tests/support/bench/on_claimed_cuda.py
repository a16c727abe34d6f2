"""A command of the project on a CUDA device that is claimed.

    python -m tests.support.bench.on_claimed_cuda MODULE ARGUMENTS

Tensors live on the CPU and say that they are on CUDA; kernels run in Triton's interpreter, so set TRITON_INTERPRET=1.
What Python does on CUDA alone is so executed; numbers of memory and time mean nothing.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench import harness
from bench.gpu.counts.claimed import claimed
from logitless.workbench.sft import stepcost
from logitless.workbench.sft.config import TrainConfig
from tests.support.vocab.interpreter import hasten


class Here:
    """`harness.Worker` in this process: another one would see no device."""

    def __init__(self, build: Callable[..., Any], *args: Any) -> None:
        self.subject = build(*args)

    def call(self, method: str, *args: Any, **_: Any) -> Any:
        return getattr(self.subject, method)(*args)

    def stop(self) -> None: ...


UNTUNED = "NVIDIA GPU"  # whose launch sizes are the default ones: the interpreter multiplies the bits of bf16 numbers


def measure(config: TrainConfig, tokens: Path) -> dict[str, Any]:
    """`stepcost.measure` in this process, for the same reason."""
    return dict(stepcost.measure_here(config, tokens))


def main() -> None:
    hasten()
    module, *sys.argv[1:] = sys.argv[1:]
    here = patch.object(harness, "Worker", Here), patch.object(stepcost, "measure", measure)
    with claimed(name=UNTUNED, home="cpu"), here[0], here[1]:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
