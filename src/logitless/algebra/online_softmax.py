"""Online softmax: running sums of one token over any part of the vocabulary, and how two parts merge.

`xp` is the array namespace (`torch` or `jax.numpy`); every field is an array of shape (N,), or None when no
wanted statistic needs it. Weights are relative to the part's own maximum, w = e^(z-m), and the maximum itself is
kept apart: Σw = 1 + rest, so that a peaked row's tail keeps its digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Array = Any
MASK = -1e30  # stands for -inf inside the pass: its weight is 0 and 0·MASK = 0
FAR = 60.0  # nats: e^60 times a sum of weights is still a number, and e^-60 of it is no digit of another's
# sums whose terms need both log-sum-exps, so that their statistics look at the logits twice: see `stats.second_look`
SECOND_LOOK = (
    *("jsd", "kl_mixture", "reverse_kl_mixture", "excess"),
    *("acceptance", "total_variation", "ahead", "behind"),
)
IMPOSSIBLE = -1e4  # nats: a lower log-prob is of a probability of 0 in any dtype, but times a large number infinite
# the maximum of no entry: above MASK, so that masked entries weigh 0 even alone; a number that float32 holds exactly
EMPTY = -5.000000075237331e29


@dataclass
class Accumulation:
    """Running sums over a part of the vocabulary; an empty part has a very low finite `m` and rest 0."""

    m: Array  # max z
    rest: Array  # Σw - 1: the weights of everything but one maximum
    t: Array = None  # Σ w·(z-m)
    r: Array = None  # Σ w²
    above: Array = None  # count(z > z_label), int64
    m_ref: Array = None  # max of the reference's logits z'
    s_ref: Array = None  # Σ w', w' = e^(z'-m_ref)
    near: Array = None  # max (z + z'), or nearly, of an entry that both like; EMPTY where each masks what is there
    shift: Array = None  # d0: that entry's z - z', or 0, from which differences are measured: e = z - z' - d0
    a: Array = None  # Σ w·e
    b: Array = None  # Σ w·expm1(-e); inf or NaN where that overflows: `finish` then does without it
    a_ref: Array = None  # Σ w'·e
    m_tail: Array = None  # max z of everything but the candidates, the label included
    s_tail: Array = None  # Σ e^(z-m_tail) of these

    def items(self) -> list[tuple[str, Array]]:
        return [(name, value) for name, value in vars(self).items() if value is not None]


def empty(zeros: Array, count: Array, sums: frozenset[str], reference: bool) -> Accumulation:
    """The part of the vocabulary without an entry, with these sums; `zeros` and the whole numbers `count` are 0."""
    lowest = zeros + EMPTY
    none = Accumulation(m=lowest, rest=zeros)
    none.t = zeros if "t" in sums else None
    none.r = zeros if "r" in sums else None
    none.above = count if "above" in sums else None
    if reference:
        none.m_ref, none.s_ref, none.near, none.shift, none.a, none.b = lowest, zeros, lowest, zeros, zeros, zeros
        none.a_ref = zeros if "qe" in sums else None
    if "tail" in sums:
        none.m_tail, none.s_tail = lowest, zeros
    return none


def single(z: Array, z_ref: Array | None, like: Accumulation, xp: Any) -> Accumulation:
    """The part of the vocabulary that holds one entry, `z` (and `z_ref`) per token, with the sums that `like` has."""
    one = Accumulation(m=z, rest=xp.zeros_like(z))
    one.t = None if like.t is None else xp.zeros_like(z)
    one.r = None if like.r is None else xp.ones_like(z)
    one.above = None if like.above is None else xp.zeros_like(like.above)
    if like.s_tail is not None:  # the tail has seen the label, where it is no candidate
        one.m_tail, one.s_tail = like.m_tail, xp.zeros_like(z)
    if like.shift is not None:
        one.near = z + z_ref
        one.shift = xp.where(one.near > EMPTY, z - z_ref, like.shift)
        e = difference(z, z_ref, one.shift, xp)
        one.m_ref, one.s_ref = z_ref, xp.ones_like(z)
        one.a, one.b = e, xp.expm1(-e)
        one.a_ref = None if like.a_ref is None else e
    return one


def difference(z: Array, z_ref: Array, shift: Array, xp: Any) -> Array:
    """e = z - z_ref - d0, with 0 where both logits are -inf."""
    e = z - z_ref - shift
    return xp.where((z == z_ref) & xp.isinf(z), xp.zeros_like(e), e)


def merge(x: Accumulation, y: Accumulation, xp: Any) -> Accumulation:
    """The accumulation of the union of two disjoint parts of the vocabulary."""
    m = xp.maximum(x.m, y.m)
    fx, fy = xp.exp(x.m - m), xp.exp(y.m - m)
    rest = xp.where(x.m >= y.m, x.rest + (1 + y.rest) * fy, y.rest + (1 + x.rest) * fx)
    out = Accumulation(m=m, rest=rest)
    if x.t is not None:
        out.t = times(fx, x.t + (1 + x.rest) * (x.m - m), xp) + times(fy, y.t + (1 + y.rest) * (y.m - m), xp)
    if x.r is not None:
        out.r = fx * fx * x.r + fy * fy * y.r
    if x.above is not None:
        out.above = x.above + y.above
    if x.s_tail is not None:
        out.m_tail = xp.maximum(x.m_tail, y.m_tail)
        out.s_tail = xp.exp(x.m_tail - out.m_tail) * x.s_tail + xp.exp(y.m_tail - out.m_tail) * y.s_tail
    if x.shift is not None:
        out.near, out.shift = xp.maximum(x.near, y.near), xp.where(x.near >= y.near, x.shift, y.shift)
        out.b = moved_b(x, m, out.shift, xp) + moved_b(y, m, out.shift, xp)
        x, y = rebase(x, out.shift, xp), rebase(y, out.shift, xp)
        out.m_ref = xp.maximum(x.m_ref, y.m_ref)
        gx, gy = xp.exp(x.m_ref - out.m_ref), xp.exp(y.m_ref - out.m_ref)
        out.s_ref = gx * x.s_ref + gy * y.s_ref
        out.a = times(fx, x.a, xp) + times(fy, y.a, xp)
        if x.a_ref is not None:
            out.a_ref = times(gx, x.a_ref, xp) + times(gy, y.a_ref, xp)
    return out


def rebase(x: Accumulation, shift: Array, xp: Any) -> Accumulation:
    """`x` with its differences measured from another d0."""
    step = x.shift - shift
    moved = Accumulation(**dict(x.items()))
    moved.shift = shift
    moved.a = x.a + (1 + x.rest) * step
    moved.b = moved_b(x, x.m, shift, xp)
    if x.a_ref is not None:
        moved.a_ref = x.a_ref + x.s_ref * step
    return moved


def moved_b(x: Accumulation, m: Array, shift: Array, xp: Any) -> Array:
    """`b` relative to another maximum and measured from another d0.

    Where that is far, or Σ w·e^(-e) much less than Σw, it is taken from the reference's weights: its factors over- and
    underflow, and a sum that is nearly -Σw has lost what a growing factor would show.
    """
    s, step, down = 1 + x.rest, x.shift - shift, x.m - m
    f = xp.exp(down)
    far = x.s_ref * xp.exp((x.m_ref - m) + shift) - s * f
    keeps_digits = (xp.abs(step) < FAR) & (down > -FAR) & (x.b > -s / 2)
    return xp.where(keeps_digits, f * (x.b * xp.exp(-step) + s * xp.expm1(-step)), far)


def times(factor: Array, x: Array, xp: Any) -> Array:
    """factor·x with 0·(±inf) = 0."""
    return xp.where(factor == 0, xp.zeros_like(x), factor * x)


@dataclass
class Totals:
    """What one token's whole accumulation amounts to: what statistics are read from, and gradients are made of."""

    m: Array  # max z
    log_s: Array  # log Σ e^(z-m), so that log p = (z - m) - log_s is exact at the maximum
    label_logit: Array = None
    logprob: Array = None
    label_ref: Array = None  # the reference's logit of the label
    entropy: Array = None
    mean_logit: Array = None  # from the head's mean row, or summed over slices: not part of it
    sum_sq_prob: Array = None
    el2n: Array = None  # the norm of p less one-hot at the label, where there is one
    rank: Array = None
    shift: Array = None  # d0
    log_ratio: Array = None  # L = logsumexp(z') + d0 - logsumexp(z): log p - log q = e + L
    m_ref: Array = None  # max of the reference's logits
    log_s_ref: Array = None  # log q = (z' - m_ref) - log_s_ref
    kl: Array = None
    reverse_kl: Array = None
    jsd: Array = None
    kl_mixture: Array = None  # KL(p || M), the mixture of jsd
    reverse_kl_mixture: Array = None  # KL(q || M)
    excess: Array = None  # Σ p·(p - q)/M
    acceptance: Array = None  # Σ min(p, q)
    total_variation: Array = None  # Σ |p - q| / 2
    ahead: Array = None  # Σ p where p > q, half of it where p = q
    behind: Array = None  # Σ p where p < q, half of it where p = q
    log_inside: Array = None  # log Σ q over the policy's entries, where the reference has others
    tail_logprob: Array = None  # log of the mass of everything but the candidates
    tail_label: Array = None  # the label's share of it, 0 where it is a candidate: not part of the accumulation

    @property
    def logsumexp(self) -> Array:
        return self.m + self.log_s

    def items(self) -> list[tuple[str, Array]]:
        return [(name, value) for name, value in vars(self).items() if value is not None]


def total_names(sums: frozenset[str], label: bool) -> list[str]:
    """The fields that totals with these sums have."""
    names = ["m", "log_s"] + ["label_logit", "logprob"] * label
    names += ["label_ref"] * (label and "ref" in sums)
    names += ["el2n"] * (label and "r" in sums)
    for name, given in (("entropy", "t"), ("mean_logit", "zsum"), ("sum_sq_prob", "r"), ("rank", "above")):
        names += [name] * (given in sums)
    if "ref" in sums:
        names += ["shift", "log_ratio", "m_ref", "log_s_ref", "kl"] + ["reverse_kl"] * ("qe" in sums)
    names += [name for name in SECOND_LOOK if name in sums]
    return names + (["tail_logprob"] + ["tail_label"] * label) * ("tail" in sums)


def finish(state: Accumulation, label: tuple[Array, Array | None] | None, xp: Any) -> Totals:
    """The totals of an accumulation over all entries but the label, and of the label's (logit, reference logit).

    Where no entry is possible, every logit being -inf, so are maximum and log-sum-exp; what takes probabilities is NaN.
    """
    logprob = label_logit = label_ref = squares = None
    if label is not None:
        if state.r is not None:  # of the others' probabilities, as shares of what they are in all
            squares = state.r / ((1 + state.rest) * (1 + state.rest))
        label_logit, label_ref = label
        others = (state.m - label_logit) + xp.log1p(state.rest)  # of two logits, which may share a large part
        logprob = -xp.logaddexp(others, xp.zeros_like(others))
        state = merge(state, single(label_logit, label_ref, state, xp), xp)
    impossible = state.m <= EMPTY
    s = xp.where(impossible, math.nan, 1 + state.rest)
    m = xp.where(impossible, -math.inf, state.m)
    out = Totals(m, xp.log1p(state.rest), label_logit, logprob, label_ref)
    if label is not None:
        out.logprob = xp.where(impossible, math.nan, logprob)
    if state.t is not None:
        out.entropy = xp.clip(out.log_s - state.t / s, 0, None)
    if state.r is not None:
        out.sum_sq_prob = state.r / (s * s)
    if squares is not None:  # not by 1 - p, nor as a square: the score of a sure token would have no digits
        out.el2n = -xp.expm1(out.logprob) * xp.sqrt(1 + squares)
    if state.above is not None:
        out.rank = state.above + 1
    if state.s_tail is not None:  # by logarithms of its own: what the candidates leave of 1 has no digits
        empty = (state.s_tail == 0) | (state.m_tail <= EMPTY)
        tail = (state.m_tail - out.m) + (xp.log(xp.where(empty, 1, state.s_tail)) - out.log_s)
        out.tail_logprob = xp.where(impossible, math.nan, xp.where(empty, -math.inf, xp.clip(tail, None, 0)))
    if state.shift is not None:
        out.shift = state.shift
        out.m_ref, out.log_s_ref = state.m_ref, xp.log(state.s_ref)
        direct = (state.m_ref - out.m + state.shift) + (out.log_s_ref - out.log_s)
        out.log_ratio = xp.where(impossible, math.nan, _log_ratio(state.b / s, direct, xp))
        out.kl = xp.clip(state.a / s + out.log_ratio, 0, None)
        if state.a_ref is not None:
            out.reverse_kl = xp.clip(-state.a_ref / state.s_ref - out.log_ratio, 0, None)
    return out


def widen(totals: Totals, outside: Array, xp: Any) -> Array:
    """The totals where the reference has entries that the policy lacks, of which `outside` is the log-sum-exp.

    Each log q is less by what these add to the reference's log-sum-exp, so each log p - log q, and KL, is more by it.
    Returns that: infinite where the reference has none of the policy's entries, whose e are infinite themselves.
    """
    inside = totals.m_ref + totals.log_s_ref
    zero = xp.zeros_like(inside)
    more, none = xp.logaddexp(outside - inside, zero), (inside == -math.inf) & (outside > -math.inf)
    totals.log_s_ref = xp.where(none, zero, totals.log_s_ref + more)
    totals.log_ratio = xp.where(none, zero, totals.log_ratio + more)
    totals.kl = xp.where(none, math.inf, totals.kl + more)
    totals.log_inside = -more
    return more


def share_of_tail(logp: Array, tail_logprob: Array, xp: Any) -> Array:
    """The share that an entry outside of the candidates has of what they leave, by its log-prob."""
    return xp.exp(logp - xp.where(tail_logprob == -math.inf, xp.zeros_like(tail_logprob), tail_logprob))


def put_tail_label(totals: Totals, labels: Array, candidates: Array, xp: Any) -> None:
    """The label's share of the tail into `totals`, 0 where it is a candidate; nothing without a tail or labels."""
    if totals.tail_logprob is not None and labels is not None:
        outside = (candidates != labels[:, None]).all(1)
        totals.tail_label = xp.where(outside, share_of_tail(totals.logprob, totals.tail_logprob, xp), 0.0)


def _log_ratio(b: Array, direct: Array, xp: Any) -> Array:
    """L by log1p(b), which keeps its digits near 0, where b did not overflow; else the log-sum-exps' difference."""
    small = xp.log1p(xp.clip(b, -0.9, None))
    agree = (xp.abs(small) < 0.5) & (xp.abs(small - direct) < 1e-2)  # false for NaN
    return xp.where(agree, small, direct)
