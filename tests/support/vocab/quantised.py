"""Quantised heads with the numbers that their own packages read from them, held against the oracle as any other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import logitless as ll
from logitless.vocab.head.quantised import QuantisedWeight
from tests.support.vocab.comparing import ALONE, Operands, assert_near, assert_near_in_norm, compare, operands

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


def read_q8_head(path: str | Path, shape: tuple[int, int]) -> tuple[QuantisedWeight, Tensor]:
    """(the head of a published file, the numbers that `gguf` reads from it); it holds the file's own bytes."""
    weight = QuantisedWeight.from_gguf(path)
    assert (tuple(weight.shape), weight.format.name) == (shape, "Q8_0")
    assert weight.nbytes == shape[0] * shape[1] * 34 // 32
    truth = torch.from_numpy(gguf.quants.dequantize(weight.parts[0].numpy(), gguf.GGMLQuantizationType.Q8_0))
    return weight, truth


def compare_real_head(weight: QuantisedWeight, truth: Tensor, labels: Tensor, hidden: Tensor | None = None) -> None:
    """Statistics, loss and gradients against the dequantised head in float64; hidden states are random unless given."""
    ops = stored(weight, truth, labels.shape, bias=False, ranks=(4,))
    ops.labels.copy_(labels)
    if hidden is not None:
        ops.hidden.data.copy_(hidden)
    compare(ops, ALONE, top_k=5)
    exact = ops.to(torch.float64)
    loss, expected = (ll.linear_cross_entropy(x.hidden, x.head, x.labels) for x in (ops, exact))
    assert_near(loss.detach(), expected.detach(), 2e-5)
    found, wanted = (torch.autograd.grad(x, list(y.leaves.values())) for x, y in ((loss, ops), (expected, exact)))
    for got, want in zip(found, wanted, strict=True):
        assert_near_in_norm(got, want, 5e-5)
