"""The pass on one slice of logits, element by element: plain operations in reused buffers, or traced to be compiled.

A `Form` says how the formulas run: where an operation's result lies, and what happens to weights that a product with W
needs. Nothing here depends on numbers that the device would have to be asked for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from ....algebra.online_softmax import IMPOSSIBLE, MASK, Accumulation, Totals, moved_b, share_of_tail, times
from ....algebra.stats import Coefficients, excess, mixture_logs, second_look, sides
from ..logits import exp_, exp_into
from ..moves import Moves
from ..skip import SliceMass

RATIO = frozenset({"pD", "pM", "excess", "ahead", "behind"})  # bases that are made from log p - log q
SURE = 1 / 64  # of the maximum's weight: below it, what the other weights add up to is summed without it


class Form(ABC):
    """How the formulas of a slice run."""

    bases: frozenset[str] = frozenset()  # whose weights a product with W needs
    infinite = False  # whether a logit can be -inf

    @abstractmethod
    def room(self, name: str, like: Tensor) -> Tensor | None:
        """Where an operation's result goes: a buffer, which may be the slice itself; None for a new tensor."""

    @abstractmethod
    def exp(self, x: Tensor, name: str) -> Tensor:
        """e^x, in x's place or, where a name is given, in the room of that name."""

    def sum(self, x: Tensor) -> Tensor:
        """Σx over the slice's entries, (C,)."""
        return x.sum(1)

    @abstractmethod
    def gap(self, z: Tensor, z_ref: Tensor) -> Tensor:
        """z_ref - z, infinite where one of them is and 0 where both are; used up."""

    @abstractmethod
    def move(self, moves: Moves) -> None:
        """Bring the products so far to the slice's maximum; comes before any `give`."""

    @abstractmethod
    def give(self, basis: str, weights: Tensor) -> None:
        """Weights of a basis that a product needs, whose buffer is written again afterwards."""

    @abstractmethod
    def others(self, rest: Tensor, w: Tensor, newest: Tensor) -> Tensor:
        """Σw - 1: of `without_maximum` where that is small and the maximum the slice's own."""

    @abstractmethod
    def nearest(self, f: Accumulation, z: Tensor, z_ref: Tensor, gap: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
        """`near` and `shift` with this slice, whose z + z_ref is at most `most`."""


def without_maximum(w: Tensor) -> Tensor:
    """w without the maximum's own 1, which in a sum would swallow the digits of the others."""
    return torch.where(w == 1, 0.0, w)


def add_slice(
    f: Accumulation,
    z: Tensor,
    z_ref: Tensor | None,
    peak: Tensor,
    peak_ref: Tensor | None,
    label: Tensor | None,
    form: Form,
) -> tuple[Accumulation, SliceMass]:
    """The running sums with one slice more, and the slice's own part.

    z, z_ref: (C, S), the label's entry masked, and their maxima; label: the label's logit where entries above it are
    counted.
    """
    m = torch.maximum(f.m, peak)
    out = Accumulation(m=m, rest=f.rest, above=f.above)
    if f.above is not None and label is not None:
        # As numbers: a sum of booleans converts each of them first, and takes six times as long.
        higher = torch.gt(z, label.clamp(min=MASK)[:, None], out=form.room("w", z))
        out.above = f.above + form.sum(higher.to(z.dtype)).long()
    moves = Moves(torch.exp(f.m - m), f.m - m)
    gap = None if z_ref is None else form.gap(z, z_ref)
    if z_ref is not None and peak_ref is not None and gap is not None:
        out.near, out.shift = form.nearest(f, z, z_ref, gap, peak + peak_ref)
        out.m_ref = torch.maximum(f.m_ref, peak_ref)
        _move_reference(f, out, moves)
    form.move(moves)
    w, mass = _add_policy(f, z, peak, out, moves, form)
    if z_ref is not None and gap is not None:
        _add_reference(f, z_ref, gap.add_(out.shift[:, None]), w, out, moves, form)
    return out, mass


def _move_reference(f: Accumulation, out: Accumulation, moves: Moves) -> None:
    """The sums of KL before this slice, relative to its maxima and measured from its d0."""
    moves.grow_ref, moves.shift = torch.exp(f.m_ref - out.m_ref), f.shift - out.shift
    out.a = times(moves.grow, f.a + (1 + f.rest) * moves.shift, torch)
    out.b = moved_b(f, out.m, out.shift, torch)
    out.s_ref = f.s_ref * moves.grow_ref
    if f.a_ref is not None:
        out.a_ref = times(moves.grow_ref, f.a_ref + f.s_ref * moves.shift, torch)


def _add_policy(
    f: Accumulation, z: Tensor, peak: Tensor, out: Accumulation, moves: Moves, form: Form
) -> tuple[Tensor, SliceMass]:
    """The sums over the policy alone; returns the weights e^(z-m) and the slice's part."""
    x = torch.sub(z, out.m[:, None], out=form.room("x", z))
    w = form.exp(x, "" if f.t is None else "w")
    new, newest = form.sum(w), peak > f.m
    rest, sharp = new - 1, None
    if f.t is not None:
        rest = form.others(rest, w, newest)
        sharp = form.sum(x.mul_(w))
        out.t = (f.t + (1 + f.rest) * moves.step) * moves.grow + sharp
        form.give("plogp", x)
    form.give("p", w)
    if f.r is not None:
        squares = torch.mul(w, w, out=form.room("y", z))
        out.r = f.r * (moves.grow * moves.grow) + form.sum(squares)
        form.give("p2", squares)
    out.rest = torch.where(newest, rest + (1 + f.rest) * moves.grow, f.rest + new)
    return w, SliceMass(out.m, new, sharp)


def _add_reference(
    f: Accumulation, z_ref: Tensor, gap: Tensor, w: Tensor, out: Accumulation, moves: Moves, form: Form
) -> None:
    """The sums of KL: Σw·e, Σw·expm1(-e), and the reference's own log-sum-exp; `gap` is -e, and used up."""
    y = _times_gap(w, gap, form)
    out.a = out.a - form.sum(y)
    if "pD" in form.bases:
        form.give("pD", y.neg_())
    w_ref = form.exp(torch.sub(z_ref, out.m_ref[:, None], out=form.room("y", z_ref)), "")
    out.s_ref = out.s_ref + form.sum(w_ref)
    form.give("q", w_ref)
    if f.a_ref is not None:
        out.a_ref = out.a_ref - form.sum(_times_gap(w_ref, gap, form))
    out.b = out.b + form.sum(gap.expm1_().mul_(w))  # the others moved with the maximum


def _times_gap(weights: Tensor, gap: Tensor, form: Form) -> Tensor:
    y = torch.mul(weights, gap, out=form.room("y", gap))
    return y.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf) if form.infinite else y


def logits_grad(
    z: Tensor,
    z_ref: Tensor | None,
    gap: Tensor | None,
    flat: Tensor | None,
    totals: Totals,
    c: Coefficients,
    beta: float,
    room: Callable[[str, Tensor], Tensor | None],
    outside: Callable[[Tensor], Tensor] | None = None,
    infinite: bool = False,
) -> Tensor:
    """dL/dz of a slice of logits, the label's entry masked, times the chain's row factor; 0 at the label but for δ.

    gap: z_ref - z where that is known, used up; flat: the softcap's derivative; beta: of jsd; room: as a `Form`'s;
    outside: its argument with 0 at the candidates, where the rest's tail has a coefficient; infinite: as `_times_p`'s.
    """
    base = c.get("p", torch.zeros_like(totals.m))
    terms: list[tuple[Tensor, Tensor]] = []  # what multiplies p, and its coefficient
    if z_ref is not None and RATIO & c.keys():
        gap = torch.sub(z_ref, z, out=room("gap", z)) if gap is None else gap
        gap.add_(totals.shift[:, None])  # D = log_ratio - gap
        if "pM" in c:
            terms.append((mixture_logs(totals.log_ratio[:, None] - gap, beta, torch)[0], c["pM"]))
        if "excess" in c:
            terms.append((excess(totals.log_ratio[:, None] - gap, beta, torch), c["excess"]))
        if "ahead" in c:
            first, second = sides(totals.log_ratio[:, None] - gap, torch)
            terms += [(first, c["ahead"]), (second, c["behind"])]
        if "pD" in c:
            base = base + c["pD"] * totals.log_ratio
            terms.append((gap, -c["pD"]))
    log_p = torch.sub(z, totals.m[:, None], out=room("z", z)).sub_(totals.log_s[:, None])
    p = exp_into(log_p, room("w", z))
    shares = None
    if outside is not None:  # before what follows writes over log p
        shares = outside(share_of_tail(log_p, totals.tail_logprob[:, None], torch))
    if "plogp" in c:
        terms.append((log_p.clamp_(min=IMPOSSIBLE), c["plogp"]))
    if "p2" in c:
        terms.append((p.clone(), c["p2"]))
    dz = _times_p(p, terms, base, infinite)
    if "q" in c and z_ref is not None:
        log_q = torch.sub(z_ref, totals.m_ref[:, None], out=room("z_ref", z_ref)).sub_(totals.log_s_ref[:, None])
        dz.add_(exp_(log_q).mul_(c["q"][:, None]))
    if shares is not None:
        dz.add_(shares.mul_(c["tail"][:, None]))
    if flat is not None:
        dz.add_(c.get("one", torch.zeros_like(totals.m))[:, None]).mul_(flat)
    return dz


def second_shares(
    z: Tensor,
    z_ref: Tensor,
    gap: Tensor,
    totals: Totals,
    sums: frozenset[str],
    beta: float,
    add_up: Callable[[Tensor], Tensor],
) -> dict[str, Tensor]:
    """A slice's part of the sums of a second look, (C,) each; gap: z_ref - z, used up; add_up: as `Form.sum`."""
    d = totals.log_ratio[:, None] - gap.add_(totals.shift[:, None])
    p = exp_((z - totals.m[:, None]).sub_(totals.log_s[:, None]))
    q = exp_((z_ref - totals.m_ref[:, None]).sub_(totals.log_s_ref[:, None]))
    return {name: add_up(share) for name, share in second_look(sums, p, q, d, beta, torch).items()}


def _times_p(p: Tensor, terms: list[tuple[Tensor, Tensor]], base: Tensor, infinite: bool) -> Tensor:
    """p·(base + Σ term·coefficient), in the buffer of the first term, or of p; infinite: 0 where p is, as `times`."""
    if not terms:
        return p.mul_(base[:, None])
    found = _weighted(terms, base).mul_(p)
    return found.masked_fill_(p == 0, 0.0) if infinite else found


def _weighted(terms: list[tuple[Tensor, Tensor]], base: Tensor) -> Tensor:
    """base + Σ term·coefficient, in the first term's buffer; a column product is cheaper than addcmul here."""
    total, coefficient = terms[0]
    total.mul_(coefficient[:, None])
    for term, coefficient in terms[1:]:
        total.add_(term.mul_(coefficient[:, None]))
    return total.add_(base[:, None])
