"""Quantised heads with the numbers that their own packages read from them, held against the oracle as any other."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from logitless.vocab.head.quantised import QuantisedWeight
from tests.support.vocab.comparing import Operands, operands

np = pytest.importorskip("numpy")
gguf = pytest.importorskip("gguf")

SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where a block has its fp16 numbers
SIZES = {"Q4_K": (7e-4, 5e-3), "Q5_K": (3e-4, 5e-3), "Q6_K": (1e-4,)}  # what makes numbers of about the same size
KINDS = (*SIMPLE, *HALVES)


def blocks_of(kind: str, v: int, h: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """(blocks, the numbers that `gguf` reads from them) of a random (v, h) weight; logits have about this spread."""
    rng = np.random.default_rng(int(torch.randint(2**31, ())))
    form = gguf.GGMLQuantizationType[kind]
    if kind in SIMPLE:
        found = gguf.quants.quantize((rng.normal(size=(v, h)) * spread / h**0.5).astype(np.float32), form)
    else:  # whose quantiser gguf does not have
        numbers, size = gguf.GGML_QUANT_SIZES[form]
        found = rng.integers(0, 256, (v, h // numbers * size), dtype=np.uint8)
        each = found.reshape(-1, size)
        for at, scale in zip(HALVES[kind], SIZES[kind], strict=True):
            halves = (rng.normal(size=(len(each), 1)) * scale * spread * (256 / h) ** 0.5).astype(np.float16)
            each[:, at : at + 2] = halves.view(np.uint8)
    return torch.from_numpy(found), torch.from_numpy(gguf.quants.dequantize(found, form))


def width_of(kind: str) -> int:
    return 256 if kind in HALVES else 96


@dataclass
class Stored(Operands):
    """Operands whose weight is quantised; in another dtype, as the oracle takes them, they are dense."""

    truth: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Operands:
        fields = {name: x for name, x in vars(self).items() if name != "truth"}
        return Operands(**{**fields, "weight": self.truth}).to(dtype)


def stored(
    weight: QuantisedWeight,
    truth: Tensor,
    lead: Sequence[int] = (7,),
    *,
    dtype: torch.dtype = torch.float32,
    training: Sequence[str] = ("hidden", "a", "b", "bias"),
    reference: tuple[QuantisedWeight, Tensor] | None = None,
    **options,
) -> Stored:
    """Random operands around a quantised weight, and around a quantised reference where there is one."""
    v, h = weight.shape
    around = operands(lead, h, v, dtype=dtype, **options).training(*training)
    ref = None if reference is None else stored(*reference, lead, dtype=dtype, training=(), **options)
    return Stored(**{**vars(around), "weight": weight, "ref": ref}, truth=truth)


def stored_blocks(kind: str, v: int, *args, h: int = 0, reference: bool = False, **options) -> Stored:
    """`stored` of GGUF blocks."""

    def one() -> tuple[QuantisedWeight, Tensor]:
        blocks, truth = blocks_of(kind, v, h or width_of(kind))
        return QuantisedWeight.gguf(blocks, kind), truth

    return stored(*one(), *args, reference=one() if reference else None, **options)
