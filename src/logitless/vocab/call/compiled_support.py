"""Whether the compiled backend can run here, said without loading it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache

import torch

PROGRAM = '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'
PATIENCE = 60.0  # seconds that a compiler may take for it


def why_not(device: torch.device | str) -> str | None:
    """The reason why slices cannot be compiled for this device, None where they can."""
    if torch.device(device).type != "cpu":
        return f"it compiles for a CPU, got {torch.device(device).type}"
    if not sys.platform.startswith("linux"):
        return f"it runs on Linux, got {sys.platform}"
    return _compiler_fails(compiler())


def compiler() -> str:
    """The command of the C++ compiler, as TorchInductor looks for it."""
    return os.environ.get("CXX", "").strip() or "g++"


@cache
def _compiler_fails(command: str) -> str | None:
    """Tries the compiler on three lines."""
    try:
        found = shlex.split(command)
        if shutil.which(found[0]) is None:
            return f"it needs a C++ compiler, {found[0]} is not installed; install one or name it in CXX"
        with tempfile.TemporaryDirectory() as folder:
            arguments = ["-x", "c++", "-shared", "-fPIC", "-fopenmp", "-o", f"{folder}/probe.so", "-"]
            done = subprocess.run(
                [*found, *arguments], input=PROGRAM, capture_output=True, text=True, check=False, timeout=PATIENCE
            )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # of a full disk or an open quotation mark, too
        return f"its C++ compiler {command!r} does not run: {error}"
    if done.returncode:
        return f"its C++ compiler {command!r} cannot make a library with OpenMP: {first_line(done.stderr)}"
    return None


def first_line(said: str) -> str:
    """Of what a compiler said: its first error."""
    lines = said.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])
