"""A chunk's slices as the kernels see them: the head's bare products, and what turns them into logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....algebra.costs import ALIGNED, aligned
from ....algebra.online_softmax import Totals
from ....algebra.stats import Coefficients
from ..chunk import Chunk, Tile
from ..logits import Operands, Projection, add_product, product
from .logits_grad_kernels import COEFFICIENTS, TOTALS


def row_scales_of(p: Projection, n: int, device: torch.device) -> Tensor:
    """(late, inner, outer) per token, (3, n): see `kernels.logits`."""
    out = torch.ones(3, n, dtype=p.compute, device=device)
    for row, x in zip(out, (p.factors[0].late, p.inner, p.outer), strict=True):
        if isinstance(x, Tensor):
            row.copy_(x.squeeze(1))
        elif x not in (None, 1.0):
            row.fill_(x)
    return out


class Head:
    """A head's arguments of a kernel."""

    def __init__(self, p: Projection, n: int, device: torch.device) -> None:
        self.row_scales = row_scales_of(p, n, device)
        self.bias, self.capped = p.bias, p.outer is not None
        self.plain = self.bias is None and not self.capped and p.factors[0].late is None

    def bias_or(self, other: Tensor) -> Tensor:
        return other if self.bias is None else self.bias


def products(p: Projection, w: Operands, out: Tensor) -> None:
    """The head's products of one slice, without scale and bias where these come late, into `out`."""
    first, *rest = p.factors
    product(first.rows, w[0].t(), out)
    for f, part in zip(rest, w[1:], strict=True):
        add_product(f.rows if first.late is None else f.tokens, part.t(), out)


def buffer(chunk: Chunk, name: str, width: int) -> Tensor:
    """A reused (C, width) buffer whose rows start at aligned addresses."""
    return chunk.scratch.take(name, (chunk.n_tokens, aligned(width)))[:, :width]


def buffer_of(chunk: Chunk, name: str, width: int, dtype: torch.dtype) -> Tensor:
    """`buffer` of the compute dtype or a narrower one."""
    taken = aligned(width) * dtype.itemsize // chunk.scratch.dtype.itemsize
    return chunk.scratch.take(name, (chunk.n_tokens, taken)).view(dtype)[:, :width]


def narrow(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for a slice of `dtype` in the memory of a wider one."""
    if tile.dtype == dtype:
        return tile
    whole = torch.as_strided(tile, (tile.shape[0], tile.stride(0)), (tile.stride(0), 1))
    return whole.view(dtype)[:, : tile.shape[1]]


def slice_of(chunk: Chunk, v: slice, w: Operands, name: str) -> Tile:
    """The slice's products, the policy's and the reference's."""
    width = v.stop - v.start
    tile = Tile(v, buffer(chunk, "z" + name, width), raw=True)
    products(chunk.policy, w, tile.z)
    if chunk.reference is not None:
        tile.z_ref = buffer(chunk, "z_ref" + name, width)
        products(chunk.reference, chunk.reference.operand(v), tile.z_ref)
    return tile


@cache
def side_stream(device: torch.device) -> Any:
    """The stream that makes products ahead, one a device: the matrix library keeps memory for each that it meets."""
    return torch.cuda.Stream(device)


def ahead(chunk: Chunk) -> Iterator[tuple[Tile, Operands]]:
    """Each slice with its operands, while the next one's products are made on a stream of their own.

    The sums wait for memory and a product computes, so they can share a device. Two slices live at once.
    """
    device = chunk.inputs.hidden.device
    side = side_stream(device) if device.type == "cuda" else None
    read: list[Any] = []
    for name in ("za", "zb") if chunk.reference is None else ("za", "zb", "z_refa", "z_refb"):
        buffer(chunk, name, chunk.slices.width)  # of this stream's memory
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    made: tuple[Tile, Operands, Any] | None = None
    for i, v in enumerate([*chunk.vocabulary(), None]):
        last, made = made, None
        if v is not None:
            with nullcontext() if side is None else torch.cuda.stream(side):
                if side is not None and i >= 2:
                    side.wait_event(read[i - 2])  # its buffer has been read
                w = chunk.policy.operand(v)
                made = slice_of(chunk, v, w, "ab"[i % 2]), w, None if side is None else side.record_event()
        if last is not None:
            if last[2] is not None:
                torch.cuda.current_stream().wait_event(last[2])
            yield last[:2]
            if side is not None:
                read.append(torch.cuda.current_stream().record_event())


def heads_of(chunk: Chunk) -> Heads:
    """What every kernel of the chunk is told, made once."""
    if chunk.prepared is None:
        chunk.prepared = Heads(chunk)
    return chunk.prepared


class Heads:
    """What every kernel of a chunk is told: both heads, the labels, and which of these exist."""

    def __init__(self, chunk: Chunk) -> None:
        n, self.device = chunk.n_tokens, chunk.inputs.hidden.device
        self.policy = Head(chunk.policy, n, self.device)
        self.reference = None if chunk.reference is None else Head(chunk.reference, n, self.device)
        labels, row_scales, first = chunk.inputs.labels, self.policy.row_scales, chunk.policy.head.vocab_start
        self.chunk = chunk
        ref = self.reference or self.policy
        self.tensors = {
            "labels": row_scales if labels is None else (labels - first if first else labels).contiguous(),
            "row_scales": row_scales,
            "ref_row_scales": ref.row_scales,
            "bias": self.policy.bias_or(row_scales),
            "ref_bias": ref.bias_or(row_scales),
            "n": n,
        }
        self.flags = {
            "LABEL": labels is not None,
            "BIAS": self.policy.bias is not None,
            "CAP": self.policy.capped,
            "REF": self.reference is not None,
            "REF_BIAS": ref.bias is not None,
            "REF_CAP": ref.capped,
        }

    @property
    def label_logits(self) -> Tensor:
        """The labels' logits, which ranks may have gathered since."""
        label = self.chunk.label_logit
        return self.policy.row_scales if label is None else label

    @property
    def plain(self) -> bool:
        """Whether products are the logits."""
        return self.policy.plain and (self.reference is None or self.reference.plain)


def rows_of(names: Iterable[str], values: dict[str, Tensor], other: Tensor) -> Tensor:
    """(len(names), n), anything where there is no value: nobody reads it."""
    return torch.stack([values.get(name, other) for name in names])


def of_gradient(policy: Projection, totals: Totals, coefficients: Coefficients) -> dict[str, Any]:
    """A gradient kernel's numbers per token, and which coefficients there are."""
    chained = {basis: policy.chain(c) for basis, c in coefficients.items()}
    if "p" not in chained:
        chained["p"] = torch.zeros_like(totals.m)
    return {
        "totals": rows_of(TOTALS, dict(totals.items()), totals.m),
        "coefficients": rows_of(COEFFICIENTS, chained, chained["p"]),
        **{name.upper(): name in coefficients for name in COEFFICIENTS[1:] if name != "behind"},  # it comes with ahead
    }


def of_slice(tile: Tile) -> dict[str, Any]:
    """A slice's arguments of a kernel; RAGGED: its rows end in memory that is theirs but holds nothing."""
    ref, width = tile.z if tile.z_ref is None else tile.z_ref, tile.z.shape[1]
    return {
        "raw": tile.z, "ref_raw": ref, "raw_stride": tile.z.stride(0), "ref_stride": ref.stride(0),
        "width": width, "padded": aligned(width), "start": tile.v.start, "RAGGED": width % ALIGNED != 0,
    }  # fmt: skip
