"""The pass on a GPU: products by the device's own library, and one kernel per slice that reads them in place.

A slice's products with W stay as they are, in fp32; the kernels apply the head's scale, bias, softcap and temperature
to what they read. The gradient of bf16 operands is written in bf16 over the products. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from ....algebra.fold import Fold, Totals
from ....algebra.stats import DENSE, Slope
from ..base import Chunk, Folded, Grads, Part, Tile, put_mixture
from ..eager.backend import normalised
from ..logits import Operands, add_product, product, slope_dtype
from . import fold_kernels, unfold_kernels
from .device import on
from .slices import Heads, ahead, buffer, narrow, of_slice, slice_of
from .topk import Best
from .tuned import launch, table_for
from .written import finished, label_slopes

folding: Any = fold_kernels  # a launch turns plain numbers into what a kernel's signature says
unfolding: Any = unfold_kernels
F = TypeVar("F", bound=Callable[..., Any])
MERGED = 64  # partial folds that one program merges


class Running:
    """The running folds of a chunk's tokens, of several parts of every slice where there are few tokens."""

    def __init__(self, chunk: Chunk, bases: tuple[str, ...], keep: str | None, parts: int | None = None) -> None:
        self.chunk, self.bases, self.heads, n = chunk, bases, Heads(chunk), chunk.n_tokens
        like = {"dtype": chunk.policy.compute, "device": self.heads.device}
        sizes = self.sizes = table_for(self.heads.device)["fold"]
        self.blocks = triton.cdiv(n, sizes["rows"])
        most = min(sizes["programs"] // max(1, self.blocks), chunk.slices.width // sizes["block"])
        self.parts = parts or (1 if bases else max(1, most))
        self.flags = {
            "WITH_T": "t" in chunk.sums,
            "WITH_R": "r" in chunk.sums,
            "RANK": "above" in chunk.sums,
            "WITH_SUM": "zsum" in chunk.sums,
        }
        self.reference = {"REF": chunk.reference is not None, "WITH_QE": "qe" in chunk.sums}
        fields = len(folding.FIELDS) if chunk.reference is not None else folding.ALONE
        self.state = torch.empty(fields, self.parts, n, **like)
        held = chunk.policy.head.held
        stays = keep == "logits" and chunk.slices.width >= held  # one slice, which is all of them
        self.best = Best(chunk.top_k, n, self.parts, held if stays else 0, **like)
        self.final = (keep == "logits" or self.best.reads_logits) and not self.heads.plain
        self.growth = torch.empty(3, n, **like)
        self.widths = chunk.policy.widths
        self.products = {basis: torch.zeros(n, sum(self.widths), **like) for basis in bases}

    def add(self, tile: Tile, w: Operands) -> None:
        """Fold one slice in."""
        sizes, best = self.sizes, self.best
        blocks = triton.cdiv(triton.cdiv(self.chunk.slices.width, self.parts), sizes["block"])
        weights = [self.room(tile, w, k) for k in range(len(self.bases))]
        out0, out1 = (*weights, tile.z, tile.z)[:2]
        names = (*self.bases, "", "")
        folding.fold_slice[(self.blocks, self.parts)](
            **of_slice(tile), **self.heads.tensors, **self.heads.flags, **self.flags, **launch(sizes),
            state=self.state, best_keys=best.keys, label_logits=self.heads.label_logits, out0=out0, out1=out1,
            out0_stride=out0.stride(0), out1_stride=out1.stride(0), growth=self.growth, n_parts=self.parts,
            part_width=blocks * sizes["block"], FIRST=tile.v.start == 0, WRITE_BACK=self.final,
            WITH_QE=self.reference["WITH_QE"], BEST=best.in_kernel, TOP=best.lanes, GROUP=best.group,
            BASIS0=folding.BASES[names[0]], BASIS1=folding.BASES[names[1]], ROWS=sizes["rows"],
            BLOCK=triton.next_power_of_2(tile.z.shape[1]) if self.bases else sizes["block"],
        )  # fmt: skip
        tile.raw = not (self.final or self.heads.plain)
        best.add(tile)
        self.rescale()
        for basis, x in zip(self.bases, weights, strict=True):
            for part, out in zip(w, self.products[basis].split(self.widths, 1), strict=True):
                add_product(x, part.to(x.dtype), out)

    def room(self, tile: Tile, w: Operands, k: int) -> Tensor:
        """Where the k-th basis' weights go: over the products, unless these are read again or have no room for them."""
        dtype, width = w[0].dtype, tile.z.shape[1]
        if self.best.reads_logits or (k > 0 and dtype == tile.z.dtype):
            return narrow(buffer(self.chunk, f"weights{k}", width), dtype)
        return narrow(tile.z, dtype, k)

    def rescale(self) -> None:
        """The products relative to the new maximum."""
        for basis, total in self.products.items():
            if basis == "plogp":  # with p, from which it gains
                continue
            plogp = self.products.get("plogp") if basis == "p" else None
            growth = self.growth[2:] if basis == "q" else self.growth
            n, width = total.shape
            folding.rescale[(n,)](
                total, total if plogp is None else plogp, growth, n, width,
                PLOGP=plogp is not None, SQUARED=basis == "p2", BLOCK=1024,
            )  # fmt: skip

    def merged(self) -> Fold:
        """The fold of all parts; also sets `zsum`."""
        state = merge(self.state, self.flags | self.reference)
        rows = dict(zip(folding.FIELDS, state[:, 0], strict=False))
        self.zsum = rows.pop("zsum")
        for name, given in (("t", "WITH_T"), ("r", "WITH_R"), ("above", "RANK")):
            if not self.flags[given]:
                del rows[name]
        if "a_ref" in rows and not self.reference["WITH_QE"]:
            del rows["a_ref"]
        return Fold(**rows)  # `above` as a number of the others' dtype

    def result(self) -> Part:
        whole = self.merged()
        return Part(
            whole,
            partial(normalised, self.products, whole) if self.bases else lambda _: {},
            self.zsum if self.flags["WITH_SUM"] else None,
            self.best.result() if self.chunk.top_k else None,
            finished,
        )


def merge(state: Tensor, flags: dict[str, bool]) -> Tensor:
    """(fields, parts, n) -> (fields, 1, n)."""
    fields, parts, n = state.shape
    while parts > 1:
        group = min(parts, MERGED)
        count = triton.cdiv(parts, group)
        out = torch.empty(fields, count, n, dtype=state.dtype, device=state.device)
        folding.merge_parts[(triton.cdiv(n, 16), count)](
            state, out, n, parts, count, group, **flags, PARTS=triton.next_power_of_2(group), ROWS=16
        )
        state, parts = out, count
    return state


def _there(function: F) -> F:
    """`function` with the device of its chunk, or tensor, as the current one: a kernel runs on no other."""

    @wraps(function)
    def run(first: Any, *args: Any, **options: Any) -> Any:
        device = first.device if isinstance(first, Tensor) else first.inputs.hidden.device
        with on(device):
            return function(first, *args, **options)

    return run  # pyright: ignore[reportReturnType]


def in_one_kernel(chunk: Chunk, bases: tuple[str, ...], keep: str | None) -> bool:
    """Whether products and fold share a kernel: for values of one head, where the device's table says it is faster."""
    first, *adapters = chunk.policy.factors
    sizes = table_for(chunk.inputs.hidden.device)["gemm"]
    simple = not (bases or keep or adapters or chunk.top_k or chunk.reference is not None)
    same = first.dtype == first.entries.dtype and first.compute == torch.float32
    dense = first.entries.stride(1) == 1
    return simple and same and dense and sizes["least_tokens"] <= chunk.n_tokens <= sizes["most_tokens"]


def overlaps(chunk: Chunk, bases: int, keep: str | None) -> bool:
    """Whether a slice's products are made while the one before is folded: of values, where the table says so."""
    return bool(table_for(chunk.inputs.hidden.device)["overlap"]) and not bases and not keep


def fold_products(chunk: Chunk) -> Part:
    """The fold of all rows here with no slice of logits in memory."""
    first, sizes = chunk.policy.factors[0], table_for(chunk.inputs.hidden.device)["gemm"]
    width, depth = first.entries.shape
    parts = triton.cdiv(width, sizes["entries"] * sizes["group"])
    run = Running(chunk, (), None, parts)
    x, tensors, flags = first.rows.contiguous(), run.heads.tensors, run.heads.flags
    folding.fold_products[(parts * triton.cdiv(chunk.n_tokens, sizes["rows"]),)](
        x, first.entries, x.stride(0), first.entries.stride(0), run.state, tensors["labels"], run.heads.label_logits,
        tensors["heat"], tensors["bias"], chunk.n_tokens, width, depth, parts,
        LABEL=flags["LABEL"], BIAS=flags["BIAS"], CAP=flags["CAP"], **run.flags, GROUP=sizes["group"],
        ROWS=sizes["rows"], BLOCK=sizes["entries"], INNER=sizes["inner"], **launch(sizes),
    )  # fmt: skip
    return run.result()


def fold(chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Folded:
    """One pass over the vocabulary; with `keep` whole rows stay in `chunk.kept`, as logits where it says so."""
    return part(chunk, bases, keep).folded(chunk)


@_there
def part(chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Part:
    """`fold` of the rows here, unfinished: what ranks that share a vocabulary merge."""
    if in_one_kernel(chunk, bases, keep):
        return fold_products(chunk)
    run = Running(chunk, bases, keep)
    if overlaps(chunk, len(bases), keep):
        for tile, w in ahead(chunk):
            run.add(tile, w)
        return run.result()
    for i, v in enumerate(chunk.vocabulary()):
        w = chunk.policy.operand(v)
        tile = slice_of(chunk, v, w, str(i) if keep else "")
        run.add(tile, w)
        if keep:
            chunk.kept.append(tile)
    return run.result()


def _rows_of(names: Iterable[str], values: dict[str, Tensor], other: Tensor) -> Tensor:
    """(len(names), n), anything where there is no value: nobody reads it."""
    return torch.stack([values.get(name, other) for name in names])


def second_look(chunk: Chunk, totals: Totals) -> None:
    """jsd and KL(p‖M) into `totals`, from the kept rows: both need the log-sum-exps first. No GEMM."""
    put_mixture(chunk, totals, *mixture_sums(chunk, totals))


@_there
def mixture_sums(chunk: Chunk, totals: Totals) -> tuple[Tensor, Tensor]:
    """The kept rows' shares of jsd and of KL(p‖M), the label's left out."""
    heads, sizes = Heads(chunk), table_for(totals.m.device)["look"]
    numbers = _rows_of(unfolding.TOTALS, dict(totals.items()), totals.m)
    out = torch.zeros(2, chunk.n_tokens, dtype=totals.m.dtype, device=totals.m.device)
    for tile in chunk.kept:
        unfolding.look_again[(triton.cdiv(chunk.n_tokens, sizes["rows"]),)](
            **of_slice(tile), labels=heads.tensors["labels"], n=chunk.n_tokens, totals=numbers, out=out,
            BETA=chunk.jsd_beta, LABEL=heads.flags["LABEL"], ROWS=sizes["rows"], BLOCK=sizes["block"], **launch(sizes),
        )  # fmt: skip
    return out[0], out[1]


@_there
def unfold(chunk: Chunk, totals: Totals, slope: Slope, grads: Grads) -> None:
    """Add the dense bases' share of every gradient to `grads`: rows kept by `fold`, or recomputed."""
    capped = chunk.policy.outer is not None
    if not any(basis in slope for basis in DENSE) and not (capped and "one" in slope):
        return
    heads, chained = Heads(chunk), {basis: chunk.policy.chain(c) for basis, c in slope.items()}
    if "p" not in chained:
        chained["p"] = torch.zeros_like(totals.m)
    slopes = _rows_of(unfolding.SLOPES, chained, chained["p"])
    numbers = _rows_of(unfolding.TOTALS, dict(totals.items()), totals.m)
    sizes = table_for(totals.m.device)["unfold"]
    flags = {name.upper(): name in slope for name in unfolding.SLOPES[1:]}
    kept, begins = iter(chunk.kept), grads.begins(grads.weight)
    for v in chunk.vocabulary():
        w = chunk.policy.operand(v)
        tile = next(kept) if chunk.kept else slice_of(chunk, v, w, "")
        dz = narrow(tile.z, slope_dtype(w[0].dtype, tile.z.dtype))
        unfolding.unfold_slice[(triton.cdiv(chunk.n_tokens, sizes["rows"]),)](
            **of_slice(tile), **heads.tensors, **heads.flags, **flags, **launch(sizes), out=dz,
            out_stride=dz.stride(0), totals=numbers, slopes=slopes, BETA=chunk.jsd_beta, RAW=tile.raw,
            ROWS=sizes["rows"], BLOCK=sizes["block"],
        )  # fmt: skip
        if grads.bias is not None:
            grads.bias[v] += dz.sum(0, dtype=grads.bias.dtype)
        for factor, part, (tokens, entries) in zip(chunk.policy.factors, w, grads.pairs, strict=False):
            if tokens is not None:
                add_product(dz, part.to(dz.dtype), tokens)
            if entries is not None:
                put = product if begins and entries is grads.weight else add_product
                put(dz.t(), factor.tokens.to(dz.dtype), entries[v])
    if begins and grads.weight is not None:
        grads.weight[chunk.policy.head.held :].zero_()


def label_coefficient(chunk: Chunk, totals: Totals, slope: Slope) -> Tensor:
    """dL/d(hW) at the label, (C,): what `unfold` leaves out."""
    total = label_slopes(slope, totals, chunk.jsd_beta)
    if chunk.policy.outer is not None and "one" in slope:
        total = total + slope["one"]
    return chunk.policy.chain(total, totals.label_logit)


@_there
def scale_(x: Tensor, factor: Tensor) -> None:
    """x times a scalar on the device, in place; costs nothing where that is 1, and nobody waits to know."""
    unfolding.scale[(max(1, min(1024, triton.cdiv(x.numel(), 4096))),)](x, factor, x.numel(), BLOCK=4096)
