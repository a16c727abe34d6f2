"""The pass in plain torch, on any device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....algebra.costs import Price, Slices, read_in_columns
from ....algebra.online_softmax import MASK, SECOND_LOOK, Accumulation, Totals, empty
from ....algebra.stats import Coefficients
from ...call.call import Call, Needs
from ...devices import bf16_products
from ..base import Backend, Gradients, Partial, is_dense, p_alone
from ..chunk import Chunk, Tile
from ..logits import GivenLogits, Operands, add_product, exp_, exp_into, logits_grad_dtype, product
from ..moves import Moves, normalised
from ..skip import SliceMass
from . import sets
from .formulas import RATIO, SURE, Form, add_slice, logits_grad, second_shares, without_maximum
from .skip import logits_grad_of_some
from .threads import collect, maxima, share_count, shares_of, sums
from .topk import TopK
from .weights import holds_weights, may_be_steady, scale_of, weigh, weigh_late, weights_grad

NEARER = 2.0  # nats, of both heads' logits together, from which on differences are measured from another entry


class Running(Form):
    """The accumulation of a chunk, updated slice by slice, by plain operations in the chunk's buffers."""

    def __init__(self, chunk: Chunk, bases: tuple[str, ...]) -> None:
        self.chunk, self.bases, self.infinite = chunk, frozenset(bases), chunk.may_be_infinite
        z = torch.zeros(chunk.n_tokens, dtype=chunk.policy.compute, device=chunk.inputs.hidden.device)
        self.state = empty(z, z.long(), chunk.sums, chunk.reference is not None)
        self.steady = may_be_steady(chunk)
        self.zsum = z.clone() if chunk.sums_logits else None
        self.topk = TopK(z, chunk.top_k) if chunk.top_k else None
        self.widths = chunk.policy.widths
        self.products = {basis: z.new_zeros(chunk.n_tokens, sum(self.widths)) for basis in bases}
        self.w: Operands | None = ()  # the slice of W, and of the adapters, where products with weights read it, too
        self.flat: Tensor | None = None  # the softcap's derivative on the slice
        self.keep: str | None = None  # what the slice holds afterwards
        self.known_gap: Tensor | None = None  # z_ref - z on the slice

    @property
    def label(self) -> Tensor | None:
        """The label's logit, where entries above it are counted."""
        return None if self.state.above is None else self.chunk.label_logit

    def add(self, tile: Tile, keep: str | None) -> None:
        """Take one slice in. `keep` says what tile.z holds afterwards."""
        chunk, self.keep = self.chunk, keep
        self.look(tile)
        if self.zsum is not None:
            self.zsum += sums(tile.z)
        if self.topk is not None:
            self.topk.add(tile.z, tile.v.start)
        tail = self._tail_with(tile)
        chunk.mask(tile)
        self.flat = chunk.policy.flatness(tile.z) if self.products else None
        self.state, mass = self.add_slice(tile)
        self.state.m_tail, self.state.s_tail = tail
        if chunk.slice_masses is not None:
            chunk.slice_masses.append(mass)

    def _tail_with(self, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
        """The maximum and sum over everything but the candidates with this slice, where they are wanted."""
        f = self.state
        if f.s_tail is None:
            return None, None
        z = self.chunk.scratch.take("y", tile.z).copy_(tile.z)
        self.chunk.cap_candidates(z.clamp_(min=MASK), tile.v, MASK)
        m = torch.maximum(f.m_tail, z.amax(1))
        return m, f.s_tail * torch.exp(f.m_tail - m) + exp_(z.sub_(m[:, None])).sum(1)

    def look(self, tile: Tile) -> None:
        """What is to be known of the logits before they are masked: which are infinite."""
        self.known_gap = None if tile.z_ref is None else self.chunk.gap(tile)

    def add_slice(self, tile: Tile) -> tuple[Accumulation, SliceMass]:
        """The running sums with this slice, and the slice's part."""
        if self.keep == "weights" and self.steady and self.chunk.materialised:
            new = weigh(tile.z, self.state.m)
            if new is not None:
                self.state.rest += new
                tile.m = self.state.m
                return self.state, SliceMass(self.state.m, new, None)
            self.steady = False  # where it was too low once, it may be again
            self.chunk.put_logits(tile.v, self.w, tile.z)
            self.chunk.mask(tile)
        out, mass = add_slice(self.state, tile.z, tile.z_ref, *peaks(tile), self.label, self)
        if self.keep == "weights":
            tile.m = out.m
        return out, mass

    def room(self, name: str, like: Tensor) -> Tensor:
        return like if name == "x" and self.keep != "logits" else self.chunk.scratch.take(name, like)

    def exp(self, x: Tensor, name: str) -> Tensor:
        return exp_into(x, self.room(name, x) if name else x)

    def sum(self, x: Tensor) -> Tensor:
        return sums(x)

    def gap(self, z: Tensor, z_ref: Tensor) -> Tensor:
        assert self.known_gap is not None
        return self.known_gap

    def move(self, moves: Moves) -> None:
        moves.apply(self.products, self.infinite)

    def others(self, rest: Tensor, w: Tensor, newest: Tensor) -> Tensor:
        rows = (newest & (rest < SURE)).nonzero().squeeze(1)
        if rows.numel():
            rest[rows] = without_maximum(w[rows]).sum(1)
        return rest

    def nearest(self, f: Accumulation, z: Tensor, z_ref: Tensor, gap: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """Looks only at tokens of which both heads' maxima say that it may be much nearer: few after the first slice.

        A little nearer is not worth the look: an entry that hides the others' digits stands far out.
        """
        shift, near = f.shift.clone(), f.near.clone()
        rows = (most > near + NEARER).nonzero().squeeze(1)
        if rows.numel():
            rows, both = self._sums_of_logits(z, z_ref, rows)
            found, at = both.max(1)
            nearer = found > near[rows]
            near[rows] = torch.where(nearer, found, near[rows])
            shift[rows] = torch.where(nearer, gap[rows, at].neg_(), shift[rows])
        return near, shift

    def _sums_of_logits(self, z: Tensor, z_ref: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """z + z_ref of some tokens, or where these are many of all, in one buffer, and which tokens these are."""
        buffer, n = self.chunk.scratch.take("y", z), rows.shape[0]
        if 2 * n > z.shape[0]:
            return torch.arange(z.shape[0], device=z.device), torch.add(z, z_ref, out=buffer)
        both, other = buffer[:n], buffer[n : 2 * n]
        torch.index_select(z, 0, rows, out=both)
        torch.index_select(z_ref, 0, rows, out=other)
        return rows, both.add_(other)

    def give(self, basis: str, weights: Tensor) -> None:
        """products[basis] += weights @ W."""
        if basis not in self.products:
            return
        if self.flat is not None:
            weights = weights * self.flat
        parts = self.products[basis].split(self.widths, 1)
        for factor, w, part in zip(self.chunk.policy.factors, self.w or (), parts, strict=True):
            with bf16_products(factor.in_tiles):
                add_product(weights.to(w.dtype), w, part)


def peaks(tile: Tile) -> tuple[Tensor, Tensor | None]:
    """The maxima of a slice's rows and of its reference's."""
    return maxima(tile.z), None if tile.z_ref is None else maxima(tile.z_ref)


def in_columns(chunk: Chunk, keep: str | None) -> bool:
    """Whether a slice's logits lie in columns: on a CPU the product of few tokens with many entries is faster so.

    Where no slice stays one thread gains nothing by it, nor do so few tokens that they are multiplied in columns and
    transposed. The best entries are looked for in rows, and a reference's logits that exist already come in rows.
    docs/decisions/0038, 0042, 0044
    """
    few = chunk.n_tokens < chunk.slices.width and chunk.inputs.hidden.device.type == "cpu" and not by_onednn()
    if keep is None:
        few = few and read_in_columns(chunk.n_tokens) and torch.get_num_threads() > 1
    return few and not chunk.top_k and not isinstance(chunk.reference, GivenLogits)


def by_onednn() -> bool:
    """Whether a CPU's products of fp32 are oneDNN's, which prefers rows: where torch is told that bf16 will do."""
    switches: Any = torch.backends.mkldnn  # whose types lack `matmul`
    return switches.matmul.fp32_precision == "bf16"


def again(chunk: Chunk, v: slice, w: Operands | None) -> Tile:
    """The slice as it was accumulated, made once more: of a product that lies otherwise the last bits are others."""
    tile = chunk.logits(v, w, columns=in_columns(chunk, "logits" if chunk.stays else None))
    chunk.mask(tile)
    return tile


class EagerBackend(Backend):
    """Plain torch operations, on any device.

    On a CPU a slice's logits stay in cache while a few in-place operations read them.
    """

    running = Running
    over_sets = sets

    def accumulate_local(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Partial:
        run, columns = self.running(chunk, bases), in_columns(chunk, keep)
        for i, v in enumerate(chunk.vocabulary()):
            run.w = ()  # the slice before, where it was converted, goes first
            run.w = chunk.operand(v)
            tile = chunk.logits(v, run.w, str(i) if keep else "", columns)
            run.add(tile, keep)
            if keep:
                chunk.materialised.append(tile)
        topk = None if run.topk is None else run.topk.flush()
        return Partial(run.state, partial(normalised, run.products, run.state), run.zsum, topk)

    def bytes_beside(self, call: Call, price: Price, needs: Needs, slices: Slices) -> int:
        if call.options.sparse is not None:
            return 0
        n, h = call.inputs.hidden.shape
        tokens = min(n, slices.tokens)
        shares = share_count(tokens, slices.width, call.compute, call.inputs.hidden.device)
        weighed = price.materialised and p_alone(call) and call.inputs.hidden.device.type == "cpu"
        # of weights that stayed a sum for hidden states, and hidden states that are scaled for the head
        beside = needs.hidden * (shares + weighed) + needs.weight * weighed
        return beside * tokens * h * call.compute.itemsize

    def second_sums(self, chunk: Chunk, totals: Totals) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(totals.m) for name in SECOND_LOOK if name in chunk.sums}
        for i, v in enumerate(chunk.vocabulary()):
            tile = chunk.materialised[i] if chunk.materialised else again(chunk, v, chunk.operand(v))
            for name, part in self.second_shares(chunk, tile, totals).items():
                sums[name] += part
        return sums

    def second_shares(self, chunk: Chunk, tile: Tile, totals: Totals) -> dict[str, Tensor]:
        """A slice's part of `second_sums`."""
        assert tile.z_ref is not None
        return second_shares(tile.z, tile.z_ref, chunk.gap(tile), totals, chunk.sums, chunk.jsd_beta, sums)

    def logits_grad(self, chunk: Chunk, totals: Totals, coefficients: Coefficients, grads: Gradients) -> None:
        if not is_dense(chunk, coefficients):
            return
        chained = {basis: chunk.policy.chain(c) for basis, c in coefficients.items()}
        if chunk.skip is not None:
            grads.clear()
            logits_grad_of_some(chunk, totals, chained, grads, self.add_slice)
            return
        if holds_weights(chunk):
            weights_grad(chunk, totals, chained["p"], grads)
            return
        begins = grads.begins()
        shared = replace(grads, hidden=shares_of(grads.hidden, chunk.slices.width))
        for i, v in enumerate(chunk.vocabulary()):
            tile = chunk.materialised[i] if chunk.materialised else None
            self.add_slice(chunk, v, tile, totals, chained, shared, begins)
        collect(shared.hidden, grads.hidden)

    def add_slice(
        self,
        chunk: Chunk,
        v: slice,
        tile: Tile | None,
        totals: Totals,
        coefficients: Coefficients,
        grads: Gradients,
        begins: bool = False,
    ) -> None:
        """One slice's share of the gradients: of a tile that stayed, or recomputed; `begins`: the weight's has none."""
        w = chunk.policy.operand(v)
        if tile is None:
            tile = again(chunk, v, w)
        dz = self.dz(chunk, tile, totals, coefficients)
        if grads.bias is not None:
            grads.bias[v] += dz.sum(0)
        for factor, part, (tokens, entries) in zip(chunk.policy.factors, w, grads.pairs, strict=False):
            narrow = dz.to(logits_grad_dtype(part.dtype, dz.dtype))
            with bf16_products(factor.in_tiles):
                if tokens is not None:
                    add_product(narrow, factor.operand_of_gradient(v, part, narrow.dtype), tokens)
                if entries is not None:
                    put = product if begins and entries is grads.weight else add_product
                    put(narrow.t(), factor.tokens.to(narrow.dtype), entries[v])

    def dz(self, chunk: Chunk, tile: Tile, totals: Totals, c: Coefficients) -> Tensor:
        """dL/dz of a slice, in its buffers, which are used up."""
        if tile.m is not None:
            base = c.get("p", torch.zeros_like(totals.m))
            return weigh_late(tile).mul_(scale_of(base, tile.m, totals))
        flat = chunk.policy.flatness(tile.z)
        gap = chunk.gap(tile) if RATIO & c.keys() else None

        def room(name: str, like: Tensor) -> Tensor:
            return like if name in ("z", "z_ref") else chunk.scratch.take(name, like)

        capped = partial(chunk.cap_candidates, v=tile.v, most=0.0) if "tail" in c else None
        return logits_grad(
            tile.z, tile.z_ref, gap, flat, totals, c, chunk.jsd_beta, room, capped, chunk.may_be_infinite
        )
