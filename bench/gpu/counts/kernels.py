"""A launch of a Triton kernel as it was asked for, and the kernel's machine code, compiled without a GPU."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from bench.gpu.counts import sass

RUN: Any = JITFunction.run  # as it is before anything stands in its place
WARPS = 64  # that a processor holds
REGISTERS = 65_536
SHARED = 232_448  # bytes; of shared memory on Hopper
PROGRAMS = 32


@dataclass(frozen=True)
class Argument:
    """A tensor as a kernel's launch sees it, its dtype and where it lies relative to an aligned address; its size."""

    dtype: Any
    offset: int
    numbers: int = 0

    def data_ptr(self) -> int:
        return self.offset


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel, its arguments by name, options and all, and its grid."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]
    grid: tuple[int, ...]
    capturing: bool = False

    @property
    def name(self) -> str:
        return self.function.fn.__name__

    @cached_property
    def key(self) -> str:
        """What tells its compiled code from that of other launches, as Triton sees it."""
        binder = self.function.create_binder()[-1]
        _, specialization, options = binder(**self.arguments, **self.options)
        return f"{self.function.cache_key}{specialization}{options}"

    @property
    def programs(self) -> int:
        count = 1
        for size in self.grid:
            count *= size
        return count

    @property
    def switches(self) -> dict[str, Any]:
        """Its compile-time options, those that are off left out."""
        constants = {p.name for p in self.function.params if p.is_constexpr}
        return {name: x for name, x in self.arguments.items() if name in constants and x}


@dataclass(frozen=True)
class Counted:
    """A compiled kernel's counts; those of its hot loop, where it has one, for one thread's pass through it."""

    kernel: str
    switches: dict[str, Any]
    warps: int
    registers: int
    stack: int
    spills: int  # instructions that read or write local memory
    atomics: int  # instructions that add to memory in the order in which threads come
    shared: int
    per_processor: int  # programs that a processor holds at once
    entries: float  # of a block that one thread has
    loop: sass.Loop | None
    way: sass.Way
    loads: dict[str, int]  # bits -> instructions
    stores: dict[str, int]
    tensor_cores: int

    @property
    def instructions(self) -> float | None:
        """Of an entry in the hot loop, without what a branch mostly skips."""
        return None if self.loop is None else self.loop.always / self.entries

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"instructions": self.instructions}


def compiled(launch: Launch) -> Counted:
    """The launch's kernel for the device that Triton takes to be there."""
    kernel = RUN(launch.function, grid=(1,), warmup=True, **launch.arguments, **launch.options)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        code = _said(knobs.nvidia.nvdisasm.path, "-c", str(file))
        used = sass.resources(_said(knobs.nvidia.cuobjdump.path, "-res-usage", str(file)))
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    instructions = sass.parse(code)
    threads = 32 * warps
    return Counted(
        kernel=launch.name,
        switches=launch.switches,
        warps=warps,
        registers=used["REG"],
        stack=used["STACK"],
        spills=sum(i.opcode in ("LDL", "STL") for i in instructions),
        atomics=sum(i.opcode in sass.ATOMICS for i in instructions),
        shared=shared,
        per_processor=per_processor(used["REG"], warps, shared),
        entries=_block(launch.arguments) / threads,
        # to write weights a kernel goes over its entries once more
        loop=sass.hot_loop(instructions, reads=1 + any(map(launch.switches.get, ("BASIS0", "BASES")))),
        way=sass.way(instructions),
        loads=sass.widths(instructions, ("LDG", "LDGSTS")),
        stores=sass.widths(instructions, ("STG",)),
        tensor_cores=sum(i.opcode in ("HGMMA", "HMMA", "UTCHMMA") for i in instructions),
    )


def per_processor(registers: int, warps: int, shared: int) -> int:
    """How many programs a processor holds at once."""
    each = max(8, triton.cdiv(registers, 8) * 8) * 32 * warps
    most = min(PROGRAMS, WARPS // warps, REGISTERS // each)
    return min(most, SHARED // shared) if shared else most


def _block(arguments: dict[str, Any]) -> int:
    """Entries of a program's block: of rows, of a row, or of a flat tensor."""
    return arguments.get("ROWS", 1) * arguments.get("BLOCK", arguments.get("GROUPS", 1)) * arguments.get("PLACES", 1)


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
