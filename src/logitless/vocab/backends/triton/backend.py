"""The pass on a GPU: products by the device's own library, and one kernel per slice that reads them in place.

A slice's products with W stay as they are, in fp32; the kernels apply the head's scale, bias, softcap and temperature
to what they read. The gradient of bf16 operands is written in bf16 over the products. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from ....algebra.costs import Price, Slices, fused_slices_of
from ....algebra.online_softmax import FAR, MASK, SECOND_LOOK, Accumulation, Totals
from ....algebra.stats import Coefficients, bases_of, sums_of
from ...call.call import Call
from ...devices import has_tf32, processors, tf32_products
from ...head.lm_head import LMHead
from ...head.quantised import plain
from ..base import Backend, Gradients, Partial, is_dense, p_alone
from ..chunk import Chunk, Tile
from ..conversions import multiplied_dtype
from ..logits import Operands, add_product, logits_grad_dtype, product
from ..moves import normalised
from . import accumulate_kernels, logits_grad_kernels, plain_kernels, rows, sets
from .device import on
from .parts import accumulation_of, flags_of, flags_of_reference, merge
from .slices import Heads, ahead, buffer_of, heads_of, narrow, of_gradient, of_slice, rows_of, slice_of
from .topk import TopK
from .tuned import launch, table_for
from .weights import state_bytes, sum_products, sums_products, weigh_products, weights_grad, writes_weights
from .written import finished, label_coefficients

accumulating: Any = accumulate_kernels  # a launch turns plain numbers into what a kernel's signature says
differentiating: Any = logits_grad_kernels
plainly: Any = plain_kernels
NEAR = {torch.float16: 10.0}  # nats that a weight may be above its level, for want of range; others' are FAR
SUMMED_TOKENS = 4096  # at a time whose logits no memory has seen: more would fill no more of any device
STEEPEST = 1e6  # factor of a product, up to which masked entries stay finite in the kernel for plain heads


class Running:
    """The running accumulations of a chunk's tokens, of several parts of every slice where there are few tokens."""

    def __init__(self, chunk: Chunk, bases: tuple[str, ...], keep: str | None, parts: int | None = None) -> None:
        self.chunk, self.bases, self.heads, n = chunk, bases, heads_of(chunk), chunk.n_tokens
        like = {"dtype": chunk.policy.compute, "device": self.heads.device}
        self.flags = flags_of(chunk.sums)
        local_rows = chunk.policy.head.local_rows
        stays = keep == "logits" and chunk.slices.width >= local_rows  # one slice, which is all of them
        self.topk = TopK(chunk.top_k, n, local_rows if stays else 0, **like)
        self.lean = self.is_lean(keep)
        asked = chunk.sums, chunk.top_k, bases
        self.weighs = weighs_plainly(chunk.policy.head, chunk.reference, chunk.policy.compute, *asked)
        sizes = self.sizes = table_for(self.heads.device)[self.kind]
        self.blocks = triton.cdiv(n, sizes["rows"])
        most = min(sizes["programs"] // max(1, self.blocks), chunk.slices.width // sizes["block"])
        self.parts = parts or (1 if bases else max(1, most))
        self.reference = flags_of_reference(chunk.sums, chunk.reference is not None)
        fields = len(accumulating.FIELDS) if chunk.reference is not None else accumulating.ALONE
        self.state = torch.empty(fields, self.parts, n, **like)
        if not local_rows:  # no slice begins it
            self.state.zero_()
            for maximum in (0, accumulating.ALONE)[: 1 if chunk.reference is None else 2]:
                self.state[maximum] = MASK
        self.topk.begin(self.parts)
        self.final = (keep == "logits" or self.topk.reads_logits) and not self.heads.plain
        self.growth = torch.empty(4, n, **like)  # of the maximum, its logarithm, the reference's, the shift's step
        self.widths = chunk.policy.widths
        begins = self.weighs and local_rows  # the first slice writes the level and its product
        filled = torch.empty if begins else torch.zeros
        self.products = {basis: filled(n, sum(self.widths), **like) for basis in bases}
        self.levels = filled(n if self.weighs else 0, **like)  # that the kernel for plain heads keeps weights near to

    @property
    def kind(self) -> str:
        """The kernel's sizes, by the registers that it takes."""
        if self.lean:
            return "plain"
        if self.weighs:
            return "plain_basis"
        return "best" if self.bases or self.topk.in_kernel or self.chunk.reference is not None else "accumulate"

    def is_lean(self, keep: str | None) -> bool:
        """Whether the kernel for plain heads has all that is asked for."""
        chunk, late = self.chunk, self.chunk.policy.factors[0].late
        scaled = late is None or (isinstance(late, float) and 0 < late < STEEPEST)
        grouped = 4 * self.topk.group <= table_for(self.heads.device)["plain"]["block"]  # within a block's quarter
        best = chunk.top_k and not (self.topk.group and grouped)
        simple = not (best or self.flags["WITH_R"] or self.flags["RANK"])
        if self.bases:  # of entropy's, which are relative to the maximum
            simple &= self.bases == ("p", "plogp") and not chunk.top_k
        bare = chunk.reference is None and chunk.policy.bias is None and chunk.policy.outer is None
        as_is = keep != "logits" or self.heads.plain
        return simple and bare and scaled and as_is and chunk.policy.compute == torch.float32

    def add(self, tile: Tile, w: Operands) -> None:
        """Accumulates one slice."""
        if self.lean:
            self.add_plain(tile, w)
        elif self.weighs:
            self.add_weighed(tile, w)
        else:
            self.add_any(tile, w)
        tile.raw = not (self.final or self.heads.plain)

    def add_any(self, tile: Tile, w: Operands) -> None:
        """`add` by the kernel that has every statistic."""
        sizes, best = self.sizes, self.topk
        blocks = triton.cdiv(triton.cdiv(self.chunk.slices.width, self.parts), sizes["block"])
        weights, names = self.weights(tile, w), (*self.bases, "", "")
        accumulating.accumulate_slice[(self.blocks, self.parts)](
            **of_slice(tile),
            **self.heads.tensors,
            **self.heads.flags,
            **self.flags,
            **launch(sizes),
            state=self.state,
            best_keys=best.keys,
            label_logits=self.heads.label_logits,
            **written(weights, tile),
            growth=self.growth,
            n_parts=self.parts,
            part_width=blocks * sizes["block"],
            FIRST=tile.v.start == 0,
            WRITE_BACK=self.final,
            WITH_QE=self.reference["WITH_QE"],
            BEST=best.in_kernel,
            TOP=best.lanes,
            GROUP=best.group,
            BASIS0=accumulating.BASES[names[0]],
            BASIS1=accumulating.BASES[names[1]],
            ROWS=sizes["rows"],
            BLOCK=sizes["block"],
        )
        best.add(tile)
        self.add_products(weights, w)

    def add_products(self, weights: list[Tensor], w: Operands) -> None:
        """The bases' products with a slice more, relative to its maximum."""
        self.rescale()
        for basis, x in zip(self.bases, weights, strict=True):
            self.multiply(x, w, basis, add_product)

    def multiply(self, x: Tensor, w: Operands, basis: str, put: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        """A slice's weights times the head's rows into a basis' product."""
        for part, out in zip(w, self.products[basis].split(self.widths, 1), strict=True):
            put(x, part.to(x.dtype), out)

    def add_plain(self, tile: Tile, w: Operands) -> None:
        """`add` by the kernel for plain heads."""
        of_tile, sizes, weights = of_slice(tile), self.sizes, self.weights(tile, w)
        blocks = triton.cdiv(triton.cdiv(self.chunk.slices.width, self.parts), sizes["block"])
        plainly.accumulate_plain_slice[(self.blocks, self.parts)](
            **{name: of_tile[name] for name in ("raw", "raw_stride", "width", "padded", "start")},
            **{name: self.heads.tensors[name] for name in ("labels", "row_scales", "n")},
            **launch(sizes),
            **written(weights, tile),
            growth=self.growth,
            state=self.state,
            peaks=self.topk.keys,
            n_parts=self.parts,
            part_width=blocks * sizes["block"],
            FIRST=tile.v.start == 0,
            LABEL=self.heads.flags["LABEL"],
            WITH_T=self.flags["WITH_T"],
            WITH_SUM=self.flags["WITH_SUM"],
            BASES=bool(weights),
            GROUP=self.topk.group,
            ROWS=sizes["rows"],
            BLOCK=sizes["block"],
        )
        self.topk.add(tile)
        self.add_products(weights, w)

    def add_weighed(self, tile: Tile, w: Operands) -> None:
        """`add` by the kernel for plain heads that writes weights, beside the products, which it may read twice."""
        of_tile, sizes, dtype = of_slice(tile), self.sizes, w[0].dtype
        (basis,), first = self.bases, tile.v.start == 0
        weights = buffer_of(self.chunk, "weights", tile.z.shape[1], dtype)
        plainly.weigh_plain_slice[(self.blocks,)](
            **{name: of_tile[name] for name in ("raw", "raw_stride", "width", "padded", "start", "RAGGED")},
            **{name: self.heads.tensors[name] for name in ("labels", "row_scales", "n")},
            **launch(sizes),
            weights=weights,
            weights_stride=weights.stride(0),
            state=self.state,
            levels=self.levels,
            products=self.products[basis],
            depth=sum(self.widths),
            far=NEAR.get(dtype, FAR),
            FIRST=first,
            LABEL=self.heads.flags["LABEL"],
            WITH_SUM=self.flags["WITH_SUM"],
            ROWS=sizes["rows"],
            BLOCK=sizes["block"],
        )
        self.multiply(weights, w, basis, product if first else add_product)

    def weights(self, tile: Tile, w: Operands) -> list[Tensor]:
        """Where each basis' weights go: the first's over the products, unless these are read again."""
        dtype, width, over = w[0].dtype, tile.z.shape[1], not self.topk.reads_logits
        return [
            narrow(tile.z, dtype) if over and k == 0 else buffer_of(self.chunk, f"weights{k}", width, dtype)
            for k in range(len(self.bases))
        ]

    def rescale(self) -> None:
        """The products relative to the new maximum."""
        gaining = next((basis for basis in ("plogp", "pD") if basis in self.products), None)
        for basis, total in self.products.items():
            if basis == gaining:  # with p, from which it gains
                continue
            gains = self.products[gaining] if basis == "p" and gaining else None
            n, width = total.shape
            accumulating.rescale[(n,)](
                total,
                total if gains is None else gains,
                self.growth[2 if basis == "q" else 0],
                self.growth[3 if gaining == "pD" else 1],
                n,
                width,
                GAINS=gains is not None,
                SQUARED=basis == "p2",
                BLOCK=1024,
            )

    def result(self) -> Partial:
        """What all slices amount to."""
        flags = self.flags | self.reference
        whole, zsum = accumulation_of(merge(self.state, flags)[:, 0], flags)
        relative = replace(whole, m=self.levels) if self.weighs else whole
        return Partial(
            whole,
            partial(normalised, self.products, relative),
            zsum,
            self.topk.result() if self.chunk.top_k else None,
        )


def written(weights: list[Tensor], tile: Tile) -> dict[str, Any]:
    """What a kernel is told of the weights that it writes, of none up to two bases."""
    out0, out1 = (*weights, tile.z, tile.z)[:2]
    return {"out0": out0, "out1": out1, "out0_stride": out0.stride(0), "out1_stride": out1.stride(0)}


def weighs_plainly(
    head: LMHead,
    reference: object,
    compute: torch.dtype,
    sums: frozenset[str],
    top_k: int,
    bases: Collection[str],
) -> bool:
    """Whether the kernel for plain heads writes the weights of a product: of p alone, with no sum but the logits'."""
    bare = reference is None and head.bias is None and not head.softcap and compute == torch.float32
    return bare and set(bases) == {"p"} and not top_k and sums <= {"zsum"}


def in_one_kernel(chunk: Chunk, bases: tuple[str, ...], keep: str | None) -> bool:
    """Whether products and accumulation share a kernel: for values of one head, if the device's table says so."""
    first, *adapters = chunk.policy.factors
    sizes = table_for(chunk.inputs.hidden.device)["gemm"]
    simple = not (bases or keep or adapters or chunk.top_k or chunk.reference is not None)
    same = first.dtype == first.entries.dtype and first.compute == torch.float32
    dense = isinstance(first.entries, Tensor) and first.entries.stride(1) == 1
    return simple and same and dense and sizes["least_tokens"] <= chunk.n_tokens <= sizes["most_tokens"]


def overlaps(chunk: Chunk, bases: int, keep: str | None) -> bool:
    """Whether a slice's products are made while the one before is read: of values, where the table says so."""
    return bool(table_for(chunk.inputs.hidden.device)["overlap"]) and not bases and not keep


def accumulate_products(chunk: Chunk) -> Partial:
    """The accumulation of all rows here with no slice of logits in memory."""
    first, sizes = chunk.policy.factors[0], table_for(chunk.inputs.hidden.device)["gemm"]
    entries = plain(first.entries)  # which it is where `in_one_kernel` says so
    width, depth = entries.shape
    parts = triton.cdiv(width, sizes["entries"] * sizes["group"])
    run = Running(chunk, (), None, parts)
    x, tensors, flags = first.rows.contiguous(), run.heads.tensors, run.heads.flags
    accumulating.accumulate_products[(parts * triton.cdiv(chunk.n_tokens, sizes["rows"]),)](
        x,
        entries,
        x.stride(0),
        entries.stride(0),
        run.state,
        tensors["labels"],
        run.heads.label_logits,
        tensors["row_scales"],
        tensors["bias"],
        chunk.n_tokens,
        width,
        depth,
        parts,
        LABEL=flags["LABEL"],
        BIAS=flags["BIAS"],
        CAP=flags["CAP"],
        **run.flags,
        GROUP=sizes["group"],
        ROWS=sizes["rows"],
        BLOCK=sizes["entries"],
        INNER=sizes["inner"],
        **launch(sizes),
    )
    return run.result()


class TritonBackend(Backend):
    """Kernels of Triton that read a slice's products in place, on CUDA or, interpreted, on a CPU."""

    few_rows, over_sets = rows, sets
    draws_on_device = True
    sums_logits_anyway = True

    def accumulate_local(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Partial:
        with on(chunk.inputs.hidden.device):
            if in_one_kernel(chunk, bases, keep):
                return accumulate_products(chunk)
            if chunk.slices.in_products:
                return weigh_products(chunk, bases) if bases or keep else sum_products(chunk)
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
                    chunk.materialised.append(tile)
            return run.result()

    def finish(self, state: Accumulation, label: tuple[Tensor, Tensor | None] | None) -> Totals:
        return finished(state, label)

    def second_sums(self, chunk: Chunk, totals: Totals) -> dict[str, Tensor]:
        device = totals.m.device
        with on(device):
            heads, sizes = heads_of(chunk), table_for(device)["look"]
            numbers = rows_of(differentiating.TOTALS, dict(totals.items()), totals.m)
            out = torch.zeros(len(SECOND_LOOK), chunk.n_tokens, dtype=totals.m.dtype, device=device)
            flags = heads.flags | {name.upper(): name in chunk.sums for name in SECOND_LOOK if name != "behind"}
            del flags["REF"]  # without which there is no second look
            stays = iter(chunk.materialised)
            for v in chunk.vocabulary():
                tile = next(stays) if chunk.materialised else slice_of(chunk, v, chunk.policy.operand(v), "")
                differentiating.look_again[(triton.cdiv(chunk.n_tokens, sizes["rows"]),)](
                    **of_slice(tile),
                    **heads.tensors,
                    **flags,
                    totals=numbers,
                    out=out,
                    BETA=chunk.jsd_beta,
                    RAW=tile.raw,
                    ROWS=sizes["rows"],
                    BLOCK=sizes["block"],
                    **launch(sizes),
                )
        return {name: x for name, x in zip(SECOND_LOOK, out.unbind(0), strict=True) if name in chunk.sums}

    def logits_grad(self, chunk: Chunk, totals: Totals, coefficients: Coefficients, grads: Gradients) -> None:
        if not is_dense(chunk, coefficients):
            return
        with on(totals.m.device):
            if chunk.materialised and chunk.materialised[0].m is not None:
                weights_grad(chunk, totals, chunk.policy.chain(coefficients["p"]), grads)
            else:
                self._logits_grad(chunk, totals, coefficients, grads)

    def _logits_grad(self, chunk: Chunk, totals: Totals, coefficients: Coefficients, grads: Gradients) -> None:
        heads = heads_of(chunk)
        given = of_gradient(chunk.policy, totals, coefficients)
        sizes = table_for(totals.m.device)["logits_grad"]
        # an fp16 head's products with dL/dz in fp32: TF32 has all of its digits
        tf32 = chunk.policy.factors[0].dtype == torch.float16 and has_tf32(totals.m)
        dtype, pairs = logits_grad_dtype(chunk.policy.factors[0].dtype, chunk.policy.compute), grads.pairs
        tokens_wide = [  # once for all slices
            f.tokens if entries is None else f.tokens.to(dtype)
            for f, (_, entries) in zip(chunk.policy.factors, pairs, strict=False)
        ]
        stays, begins = iter(chunk.materialised), grads.begins()
        for v in chunk.vocabulary():
            w = chunk.policy.operand(v)
            tile = next(stays) if chunk.materialised else slice_of(chunk, v, w, "")
            dz, of_tile = narrow(tile.z, dtype), of_slice(tile)
            del of_tile["RAGGED"]  # what is past a row's end is written as well: nobody reads it
            differentiating.logits_grad_slice[(triton.cdiv(chunk.n_tokens, sizes["rows"]),)](
                **of_tile,
                **heads.tensors,
                **heads.flags,
                **given,
                **launch(sizes),
                out=dz,
                out_stride=dz.stride(0),
                BETA=chunk.jsd_beta,
                RAW=tile.raw,
                TEN_DIGITS=tf32,
                ROWS=sizes["rows"],
                BLOCK=sizes["block"],
            )
            if grads.bias is not None:
                grads.bias[v] += dz.sum(0, dtype=grads.bias.dtype)
            for factor, part, x, (tokens, entries) in zip(chunk.policy.factors, w, tokens_wide, pairs, strict=False):
                with tf32_products(tf32 and factor.dtype == torch.float16):
                    if tokens is not None:
                        add_product(dz, factor.operand_of_gradient(v, part, dtype), tokens)
                    if entries is not None:
                        put = product if begins and entries is grads.weight else add_product
                        put(dz.t(), x, entries[v])

    def at_label(self, coefficients: Coefficients, totals: Totals, beta: float) -> Tensor:
        return label_coefficients(coefficients, totals, beta)

    def slices(
        self,
        call: Call,
        n_tokens: int,
        vocab_size: int,
        price: Price,
        *,
        wide: bool = False,
        together: int = 0,
        summed: bool = False,
    ) -> Slices:
        hidden, materialised, bases = call.inputs.hidden, price.materialised, len(price.bases)
        table, (demand, held) = table_for(hidden.device), self.within(call, vocab_size, price.skips)
        if table["overlap"] and not (materialised or bases):  # two slices live at once
            demand["heads"] *= 2
        own, reference = (sums_of(call.options.want), call.options.top_k), call.reference or call.reference_rows
        asked = call.inputs, call.head, reference, *own
        each = max(1, state_bytes(table["sums"], 1, vocab_size))
        tokens = min(n_tokens, SUMMED_TOKENS, demand["budget"] // each)
        if summed and tokens >= max(1, table["sums"]["least_tokens"]) and sums_products(*asked):
            return Slices(tokens, vocab_size, tokens * each + held, held, in_products=True)
        plainly = bases and weighs_plainly(call.head, reference, call.compute, *own, bases_of(call.options.want))
        weights = (plainly or (materialised and p_alone(call))) and writes_weights(*asked)
        if weights:
            demand["itemsize"] = torch.bfloat16.itemsize
        found = fused_slices_of(
            n_tokens,
            vocab_size,
            **demand,
            whole=materialised or weights,
            bases=0 if weights else bases,
            beside=multiplied_dtype(call, call.head.weight).itemsize if plainly else 0,
            streamed=table["streamed_bytes"],
            processors=processors(hidden.device),
            hidden=hidden.shape[1],
            together=together,
        )
        beside = 0
        if weights:  # the blocks' sums, and a product; of a loss scaled hidden states
            beside = state_bytes(table["weights"], found.tokens, vocab_size)
            beside += found.tokens * hidden.shape[1] * (4 + 2 * materialised)
        return replace(found, nbytes=found.nbytes + held + beside, copied=held, in_products=weights)

    def prepared(self, chunk: Chunk) -> Heads:
        with on(chunk.inputs.hidden.device):
            return Heads(chunk)

    def sums_once(self, call: Call, slices: Slices) -> bool:
        if call.n_tokens > slices.tokens or not self.scatters_once(call):
            return False
        return slices.in_products and not sums_of(call.options.want) and call.inputs.candidates is None

    def scatters_once(self, call: Call) -> bool:
        weight = call.inputs.weight
        if weight is None or weight.dtype != torch.bfloat16:
            return False
        if weight.is_leaf and weight.grad_dtype != weight.dtype:
            return False
        return call.inputs.hidden.stride(1) == weight.stride(1) == 1  # the kernel reads and writes no columns

    def scaled(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """In place it costs nothing where the number is 1, and nobody waits to know."""
        out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
        truncates = x.device.type == "cpu" and dtype == torch.bfloat16 != x.dtype  # as the interpreter does, no GPU
        if truncates or out.stride() != x.stride():  # or a tensor with gaps
            return super().scaled(x, factor, dtype)
        with on(x.device):
            programs = max(1, min(1024, triton.cdiv(x.numel(), 4096)))
            differentiating.scaled[(programs,)](
                x, factor, out, x.numel(), CONVERTS=out is not x, BLOCK=4096, num_warps=8
            )
        return out
