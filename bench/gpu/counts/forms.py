"""The forms of the kernel of the products that `bench/gpu.sh tune` tries, compiled without a GPU.

    python -m bench.gpu.counts.forms [--kinds weights,sums] [--capabilities 90,100]

What spills, or wants more shared memory than a processor has, is not worth a GPU's time: decision 0036.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu.counts.calls import CALLS
from bench.gpu.counts.claimed import claimed
from bench.gpu.counts.kernels import SHARED, Counted, Launch, compiled
from bench.gpu.counts.recording import Recording
from bench.gpu.tune import WEIGHING, Sizes, names_of
from logitless.vocab.backends.triton.tuned import table_for

OF = {"weights": "loss", "sums": "values"}  # a call that launches the kernel with the sizes of this name


def forms(
    kind: str, capability: int, shapes: tuple[tuple[int, ...], ...] = WEIGHING
) -> Iterator[tuple[Sizes, Counted]]:
    """Each shape as tuning tries it, persistent and with a block a program, and the kernel that it gives."""
    with claimed(capability) as recording:
        step = CALLS[OF[kind]].build()
        for shape, persistent in product(names_of(shapes), (1, 0)):
            sizes = shape | {"persistent": persistent}
            with patch.dict(table_for(torch.device("cuda"))[kind], sizes | {"used": 1}):
                kernel = compiled(_first(step, recording))
            yield sizes, kernel


def _first(step: Callable[[], Any], recording: Recording) -> Launch:
    """The step's first launch of the kernel."""
    recording.events.clear()
    step()
    return next(x for x in recording.of(Launch) if x.name == "weigh_products")


def described(sizes: Sizes, kernel: Counted) -> str:
    """One line of a form."""
    room = ", too much" if kernel.shared > SHARED else ""
    return (
        f"{sizes['rows']} tokens x {sizes['entries']} entries x {sizes['inner']}, {sizes['warps']} warps, "
        f"{sizes['stages']} stages, {'persistent' if sizes['persistent'] else 'a block a program'}: "
        f"{kernel.registers} registers, {kernel.spills} spills, {kernel.shared / 1e3:.0f} KB of shared memory{room}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu.counts.forms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", default=",".join(OF), help="comma-separated, of: %(default)s")
    parser.add_argument("--capabilities", default="90,100", help="compiled for, 90 or more (default: %(default)s)")
    options = parser.parse_args(arguments)
    kinds, capabilities = options.kinds.split(","), options.capabilities.split(",")
    if unknown := [kind for kind in kinds if kind not in OF]:
        parser.error(f"unknown kind {unknown[0]!r}; choose from {', '.join(OF)}")
    if old := [x for x in capabilities if not (x.isdigit() and int(x) >= 90)]:
        parser.error(f"capability {old[0]!r}: expected 90 or more, whose devices have the descriptors")
    for capability, kind in product(map(int, capabilities), kinds):
        for sizes, kernel in forms(kind, capability):
            print(f"sm_{capability} {kind}: {described(sizes, kernel)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
