"""The eager backend with a slice's element-wise work compiled."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....algebra.costs import Price, Slices
from ....algebra.online_softmax import SECOND_LOOK, Accumulation, Totals
from ....algebra.stats import DENSE, Coefficients
from ...call.call import Call, Needs
from ..base import Gradients, Partial, is_dense, p_alone
from ..chunk import Chunk, Tile, lies_in_columns
from ..eager.backend import EagerBackend, Running, peaks
from ..eager.formulas import RATIO, SURE, Form, add_slice, logits_grad, second_shares, without_maximum
from ..logits import LOG2E
from ..moves import Moves
from ..skip import SliceMass
from . import backward, kernels, stream
from .kernels import Tensors

MIXED = {"jsd", "kl_mixture", "reverse_kl_mixture", "excess"}  # sums that β is part of
AT_ONCE = ("values", "one-hot", "in-forward")  # prices at which no logit is made again, whose last bits would be others
SUMMED = ("values", "one-hot", "basis")  # those whose backward has no need of logits
READ = ("m", "log_s", "shift", "log_ratio", "m_ref", "log_s_ref")  # of the totals, after the accumulation


class Traced(Form):
    """The formulas as a graph of new tensors: nothing is asked of them, so masks stand where eager looks at rows."""

    def __init__(self, bases: frozenset[str] = frozenset(), known_gap: Tensor | None = None) -> None:
        self.bases, self.known_gap = bases, known_gap
        self.infinite = known_gap is not None
        self.weights: Tensors = {}
        self.moves: Moves | None = None

    def room(self, name: str, like: Tensor) -> None:
        return None

    def exp(self, x: Tensor, name: str) -> Tensor:
        """exp is what Inductor computes once where it is both stored and summed; exp2 is what it never stores."""
        return torch.exp2(x * LOG2E) if lies_in_columns(x) and not self.bases else torch.exp(x)

    def sum(self, x: Tensor) -> Tensor:
        return kernels.by_block(torch.sum, x)

    def gap(self, z: Tensor, z_ref: Tensor) -> Tensor:
        return z_ref - z if self.known_gap is None else self.known_gap.clone()

    def move(self, moves: Moves) -> None:
        self.moves = moves

    def give(self, basis: str, weights: Tensor) -> None:
        if basis in self.bases:
            self.weights[basis] = weights

    def others(self, rest: Tensor, w: Tensor, newest: Tensor) -> Tensor:
        return torch.where(newest & (rest < SURE), self.sum(without_maximum(w)), rest)

    def nearest(self, f: Accumulation, z: Tensor, z_ref: Tensor, gap: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        both = z + z_ref
        found = kernels.by_block(torch.amax, both)
        at = kernels.by_block(torch.amax, torch.where(both == found[:, None], gap, -math.inf))
        nearer = found > f.near
        return torch.where(nearer, found, f.near), torch.where(nearer, -at, f.shift)


def _accumulate(tensors: Tensors, bases: frozenset[str]) -> Tensors:
    """`add_slice` of named tensors: the state's, the slice's, buffers for weights; p's may take the slice's place."""
    form = Traced(bases, tensors.get("gap"))
    state = Accumulation(**{name[6:]: x for name, x in tensors.items() if name.startswith("state.")})
    maxima = tensors["peak"], tensors.get("peak_ref")
    out, mass = add_slice(state, tensors["z"], tensors.get("z_ref"), *maxima, tensors.get("label"), form)
    for basis, weights in form.weights.items():
        tensors.get(basis, tensors["z"]).copy_(weights)
    found = {f"state.{name}": x for name, x in out.items()} | {"mass": mass.w}
    if mass.t is not None:
        found["mass.t"] = mass.t
    if bases and form.moves is not None:
        found |= {f"moves.{name}": x for name, x in vars(form.moves).items() if x is not None}
    return found


def _logits_grad(tensors: Tensors, bases: tuple[str, ...], beta: float, infinite: bool) -> Tensors:
    """`formulas.logits_grad` of named tensors, into the slice."""
    z = tensors["z"]
    totals = Totals(**{name: tensors[name] for name in READ if name in tensors})
    c = {basis: tensors[f"c.{basis}"] for basis in bases}
    given = z, tensors.get("z_ref"), None, tensors.get("flat"), totals, c, beta
    dz = logits_grad(*given, lambda name, like: None, infinite=infinite)
    z.copy_(dz)
    return {}


def _second_shares(tensors: Tensors, sums: frozenset[str], beta: float) -> Tensors:
    """`formulas.second_shares` of named tensors."""
    z, z_ref = tensors["z"], tensors["z_ref"]
    gap = tensors["gap"].clone() if "gap" in tensors else z_ref - z
    totals = Totals(**{name: tensors[name] for name in READ if name in tensors})
    return second_shares(z, z_ref, gap, totals, sums, beta, Traced().sum)


class CompiledRunning(Running):
    """The accumulation of a chunk by one compiled function a slice."""

    def look(self, tile: Tile) -> None:
        plain = self.keep == "weights" and lies_in_columns(tile.z)  # a difference, an exponential and a sum: as fast
        self.compiles = kernels.fits(tile.z) and not plain
        if self.infinite or not self.compiles:  # else the compiled function makes the gap
            super().look(tile)

    def add_slice(self, tile: Tile) -> tuple[Accumulation, SliceMass]:
        if not self.compiles:
            return super().add_slice(tile)
        tensors = {f"state.{name}": x for name, x in self.state.items()} | {"z": tile.z}
        tensors["peak"], peak_ref = peaks(tile)  # a plain maximum is the faster one
        if tile.z_ref is not None and peak_ref is not None:
            tensors |= {"z_ref": tile.z_ref, "peak_ref": peak_ref}
            if self.infinite and self.known_gap is not None:
                tensors["gap"] = self.known_gap
        if self.label is not None:
            tensors["label"] = self.label
        given = self.bases | ({"p"} if self.keep == "weights" else set())  # which stay in the slice, over its logits
        buffered = self.bases if self.keep == "logits" else self.bases - {"p"}
        tensors |= {basis: self.chunk.scratch.take(f"weights {basis}", tile.z) for basis in sorted(buffered)}
        found = kernels.run(("accumulate", given), partial(_accumulate, bases=given), tensors)
        if self.bases:
            Moves(**_named(found, "moves.")).apply(self.products, self.infinite)
            for basis in self.bases:
                self.give(basis, tensors.get(basis, tile.z))
        state = Accumulation(**_named(found, "state."))
        if self.keep == "weights":
            tile.m = state.m
        return state, SliceMass(state.m, found["mass"], found.get("mass.t"))


def _named(tensors: Tensors, kind: str) -> Tensors:
    return {name[len(kind) :]: x for name, x in tensors.items() if name.startswith(kind)}


class CompiledBackend(EagerBackend):
    """The eager backend, a slice of which is read by compiled loops instead of one operation after the other."""

    running = CompiledRunning

    def slices(self, call: Call, n_tokens: int, vocab_size: int, price: Price, **how: Any) -> Slices:
        def plain(call: Call, price: Price = price) -> Slices:
            return super(CompiledBackend, self).slices(call, n_tokens, vocab_size, price, **how)

        streamed, together = None, how.get("together", 0)
        if price.materialised and price.method in AT_ONCE:
            streamed = stream.slices_kept(call, n_tokens, plain, price.method == "in-forward", together)
        elif price.method == "recompute" and stream.takes(call):
            kept = replace(price, materialised=True)  # while backward lasts
            streamed = stream.slices_kept(call, n_tokens, lambda call: plain(call, kept), True, together)
        elif how.get("summed") or (price.bases and not price.materialised):
            streamed = stream.slices(call, n_tokens, price.bases)
        return plain(call) if streamed is None else streamed

    def bytes_beside(self, call: Call, price: Price, needs: Needs, slices: Slices) -> int:
        return 0 if slices.in_products else super().bytes_beside(call, price, needs, slices)

    def adds_up(self, call: Call, price: Price) -> bool:
        of_p = price.bases or p_alone(call)
        return bool(of_p or price.method in SUMMED) and stream.takes(call)

    def accumulate_local(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Partial:
        if chunk.slices.in_products:
            return stream.accumulate(chunk, bases, keep)
        return super().accumulate_local(chunk, bases, keep)

    def logits_grad(self, chunk: Chunk, totals: Totals, coefficients: Coefficients, grads: Gradients) -> None:
        if not (chunk.slices.stored and is_dense(chunk, coefficients)):
            super().logits_grad(chunk, totals, coefficients, grads)
            return
        if not chunk.materialised:  # made once more, by the same tiles: the same bits
            of_p = coefficients.keys() & DENSE == {"p"} and chunk.policy.outer is None
            again = replace(chunk, sums=chunk.sums & {"ref"}, top_k=0)
            stream.accumulate(again, (), "weights" if of_p else "logits")
        chained = {basis: chunk.policy.chain(c) for basis, c in coefficients.items()}
        backward.logits_grad(chunk, totals, chained, grads, self.dz)

    def second_shares(self, chunk: Chunk, tile: Tile, totals: Totals) -> dict[str, Tensor]:
        if tile.z_ref is None or not kernels.fits(tile.z):
            return super().second_shares(chunk, tile, totals)
        tensors = {name: x for name, x in totals.items() if name in READ} | {"z": tile.z, "z_ref": tile.z_ref}
        if chunk.may_be_infinite:
            tensors["gap"] = chunk.gap(tile)
        sums = chunk.sums.intersection(SECOND_LOOK)
        beta = chunk.jsd_beta if sums & MIXED else 0.0
        key = ("second look", sums, beta)
        return kernels.run(key, partial(_second_shares, sums=sums, beta=beta), tensors)

    def dz(self, chunk: Chunk, tile: Tile, totals: Totals, c: Coefficients) -> Tensor:
        if tile.m is not None or not kernels.fits(tile.z):  # weights are scaled by one plain operation
            return super().dz(chunk, tile, totals, c)
        tensors = {name: x for name, x in totals.items() if name in READ} | {"z": tile.z}
        tensors |= {f"c.{basis}": c[basis] for basis in c}
        if tile.z_ref is not None and (RATIO | {"q"}) & c.keys():
            tensors["z_ref"] = tile.z_ref
        if (flat := chunk.policy.flatness(tile.z)) is not None:
            tensors["flat"] = flat
        bases, beta = tuple(sorted(c)), chunk.jsd_beta if {"pM", "excess"} & c.keys() else 0.0
        infinite = chunk.may_be_infinite
        written = partial(_logits_grad, bases=bases, beta=beta, infinite=infinite)
        kernels.run(("logits_grad", bases, beta, infinite), written, tensors)
        return tile.z
