"""The functions in C++ that are compiled at their first call, and kept on disk beside what torch compiles."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
import threading
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ....algebra.online_softmax import EMPTY, FAR, MASK
from ....hashes import hash_of
from ...call.compiled_support import PATIENCE, compiler, first_line
from ...devices import has_bf16_pairs, has_bf16_tiles
from ...noise import MULTIPLIERS, ROUNDS, WEYL

SOURCES = Path(__file__).with_name("cpp")
MAIN = SOURCES / "stream.cpp"
FLAGS = {"AVX512": ("-mavx512f", "-mavx2", "-mfma"), "AVX2": ("-mavx2", "-mfma")}  # by what torch says of a processor
PAIRS = ("-mavx512bf16", "-mavx512vl")  # beside those, where a processor has it
TILES = ("-DTILES", "-mamx-tile", "-mamx-bf16")  # beside those, where it has them and the system allows them
OPTIONS = ("-O2", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")  # more optimisation spills the sums
NUMBERS = (
    *(f"-D{name}={x}f" for name, x in (("EMPTY", EMPTY), ("MASK", MASK), ("FAR", FAR))),
    *(f"-D{name}={','.join(f'{x}u' for x in words)}" for name, words in (("MULTIPLIERS", MULTIPLIERS), ("WEYL", WEYL))),
    f"-DROUNDS={ROUNDS}",
)

_lock = threading.Lock()


def library() -> Any:
    """The compiled functions with their sizes; None, said once, where this processor or its compiler has none."""
    with _lock:
        return _library(compiler(), torch.backends.cpu.get_cpu_capability(), _more())


def in_pairs(are_bf16: bool) -> bool:
    """Whether a product's operands, both bf16 or not, are multiplied two numbers at a time: docs/decisions/0055."""
    return are_bf16 and bool(library().multiplies_pairs())


def is_made() -> bool:
    """Whether it lies on the disk, so that `library` compiles nothing."""
    processor = torch.backends.cpu.get_cpu_capability()
    try:
        return processor in FLAGS and _place(_command(compiler(), processor, _more())).exists()
    except (OSError, ValueError):  # no folder can be made for it, or CXX is no command
        return False


def _more() -> tuple[str, ...]:
    """Flags for what the processor multiplies of bf16."""
    return () if not has_bf16_pairs() else PAIRS + TILES if has_bf16_tiles("cpu") else PAIRS


@cache
def _library(compiler: str, processor: str, more: tuple[str, ...]) -> Any:
    if processor not in FLAGS:
        return None
    try:
        return _loaded(_command(compiler, processor, more))
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        if more and isinstance(error, subprocess.CalledProcessError):  # by a compiler that knows none of them
            return _library(compiler, processor, ())
        said = first_line(error.stderr) if isinstance(error, subprocess.CalledProcessError) else error
        warnings.warn(
            f"backend 'compiled': {compiler} could not compile a product, slices of logits are made instead ({said})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def _command(compiler: str, processor: str, more: tuple[str, ...]) -> tuple[str, ...]:
    return *shlex.split(compiler), *OPTIONS, *NUMBERS, *FLAGS[processor], *more


def _place(command: tuple[str, ...]) -> Path:
    """Where the library lies that this command makes of the sources."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "logitless" / f"{_hash(command)}.so"


@cache
def _hash(command: tuple[str, ...]) -> str:
    sources = [x.read_text(encoding="utf-8") for x in sorted(SOURCES.iterdir())]
    return hash_of(chr(0).join([*command, *sources]).encode())


def _loaded(command: tuple[str, ...]) -> Any:
    """The library that this command makes: from the disk where it was made before, and lies there whole."""
    place = _place(command)
    with suppress(OSError):
        return _load(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as own:
        made = Path(own, place.name)
        done = [*command, "-o", str(made), str(MAIN)]
        subprocess.run(done, check=True, capture_output=True, text=True, timeout=PATIENCE)
        os.replace(made, place)
    return _load(place)


def _load(place: Path) -> Any:
    found: Any = ctypes.CDLL(str(place))
    products = (found.multiply_entries, OfEntries), (found.multiply_tokens, OfTokens), (found.multiply_few, OfFew)
    for function, given in ((found.accumulate, Streamed), *products, (found.search, Search)):
        function.argtypes = [ctypes.POINTER(given), ctypes.c_int]
    for size in (found.lanes, found.parts, found.entries, found.rows, found.room, found.pairs_of):
        size.restype = ctypes.c_long
    found.room.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_long]
    found.place = place
    return found


def is_plain(x: Tensor) -> bool:
    """Whether a tensor holds numbers that nobody watches: no fake one, no subclass, no dispatch mode around it."""
    return _get_current_dispatch_mode() is None and type(x) is Tensor


def run(function: Any, call: ctypes.Structure) -> None:
    """One of the library's functions, by all threads. Raises MemoryError."""
    if function(ctypes.byref(call), torch.get_num_threads()):
        raise MemoryError("no memory for a thread's rows of the head")


_address, _number = ctypes.c_void_p, ctypes.c_int64


class Factor(ctypes.Structure):
    """As in cpp/product.h: tokens (C, size) in fp32 and entries (V, size), which have `half` the bits in bf16.

    pairs: whether both are bf16, and multiplied two numbers at a time.
    """

    _fields_ = (
        ("tokens", _address),
        ("tokens_stride", _number),
        ("entries", _address),
        ("entries_stride", _number),
        ("size", _number),
        ("half", _number),
        ("pairs", _number),
    )

    @property
    def length(self) -> int:
        """Of a packed row, where a pair has a float's place."""
        return library().pairs_of(self.size) if self.pairs else self.size


class Head(ctypes.Structure):
    """As in cpp/product.h."""

    _fields_ = (
        ("factors", ctypes.POINTER(Factor)),
        ("n_factors", _number),
        ("inner", _address),
        ("outer", _address),
        ("packed", _address),
    )


SUMS = ("m", "rest", "peaks", "t", "r", "above", "zsum")
REFERENCE_SUMS = ("m_ref", "s_ref", "near", "shift", "a", "b", "a_ref")


class Sums(ctypes.Structure):
    """As in cpp/sums.h."""

    _fields_ = tuple((name, _address) for name in SUMS + REFERENCE_SUMS)


BASES = ("plogp", "p2", "pD", "q")  # of which one may accumulate beside p


class Products(ctypes.Structure):
    """As in cpp/products.h."""

    _fields_ = (("p", _address), ("second", _address), ("basis", _number), ("width", _number), ("pairs", _number))


class Tile(ctypes.Structure):
    """As in cpp/backward.h."""

    _fields_ = (("numbers", _address), ("m", _address), ("n_tokens", _number), ("vocab", _number))


class OfEntries(ctypes.Structure):
    """As in cpp/backward.h."""

    _fields_ = (
        ("tile", Tile),
        ("tokens", Head),
        ("size", _number),
        ("out", _address),
        ("stride", _number),
        ("adds", _number),
        ("scale", _address),
    )


class OfTokens(ctypes.Structure):
    """As in cpp/backward.h."""

    _fields_ = (("tile", Tile), ("head", Head), ("products", Products), ("parts", _number))


class OfFew(ctypes.Structure):
    """As in cpp/few.h."""

    _fields_ = (
        ("head", Head),
        ("n_tokens", _number),
        ("vocab", _number),
        ("out", _address),
        ("token_stride", _number),
        ("entry_stride", _number),
    )


class Best(ctypes.Structure):
    """As in cpp/best.h."""

    _fields_ = (("keys", _address), ("least", _address), ("waiting", _address), ("k", _number), ("room", _number))


class Streamed(ctypes.Structure):
    """As `Call` in cpp/stream.cpp."""

    _fields_ = (
        ("head", Head),
        ("ref", Head),
        ("n_tokens", _number),
        ("vocab", _number),
        ("parts", _number),
        ("labels", _address),
        ("label", _address),
        ("sums", Sums),
        ("products", Products),
        ("best", Best),
        ("kept", _address),
        ("ref_kept", _address),
        ("best_logits", _address),
        ("best_entries", _address),
    )


class Search(ctypes.Structure):
    """As in cpp/noise.h."""

    _fields_ = (
        ("seeds", _address),
        ("positions", _address),
        ("least", _address),
        ("blocks", _address),
        ("n_tokens", _number),
        ("n_blocks", _number),
        ("reached", _address),
    )
