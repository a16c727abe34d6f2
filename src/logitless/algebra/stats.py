"""The statistics: one row each. A row says which running sums it reads, its value, and its coefficients:
the statistic's share of the one gradient formula,

    dL/dz_v = p_v·(α + β·log p_v + κ·D_v + ε·log(p_v/M_v) + ν·(p_v - q_v)/M_v + σ·[D_v > 0] + ρ·[D_v < 0] + η·p_v)
              + ζ·q_v + θ·t_v + δ + Σ_k c_k·[v = i_k]

one for each basis: p (α), plogp (β), pD (κ), pM (ε), excess (ν), ahead (σ), behind (ρ; D_v = 0 counts by half in both),
p2 (η), q (ζ), tail (θ: t is p of everything but the candidates, as shares of what that is in all), one (δ), and the
one-hot terms
`label` (c at the label), `logprob` (the label's one-hot minus p, kept together: it is -expm1(log p) at the label)
and `argmax`. Each coefficient is one number per token, linear in the upstream gradient `g`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .online_softmax import SECOND_LOOK, Totals, difference, times

Array = Any
Coefficients = dict[str, Array]
# bases with one number per vocabulary entry
DENSE = ("p", "plogp", "pD", "pM", "excess", "ahead", "behind", "p2", "q", "tail")


@dataclass(frozen=True)
class Statistic:
    """One number per token: how it is read off the totals, and the coefficients of its gradient."""

    value: Callable[[Totals, Any], Array]  # of the totals, and how many entries they are over
    # (totals, g, how many entries, jsd_beta, xp) -> coefficients; None where it has no gradient
    coefficients: Callable[[Totals, Array, Any, float, Any], Coefficients] | None
    sums: frozenset[str] = frozenset()  # of {"t", "r", "zsum", "above", "argmax", "ref", "qe", "tail"}, SECOND_LOOK
    bases: frozenset[str] = frozenset()  # dense bases that have coefficients; logprob's is p
    needs_label: bool = False

    @property
    def needs_reference(self) -> bool:
        return "ref" in self.sums

    @property
    def needs_candidates(self) -> bool:
        return "tail" in self.sums

    @property
    def looks(self) -> int:
        """How often it looks at the logits."""
        return 1 + looks_twice(self.sums)


def from_uniform(kl: Array, top: Array) -> Array:
    """KL(U‖p), which rounding may not make negative; NaN where no entry is possible.

    top: the maximum or the log-sum-exp, which are -inf there.
    """
    return kl.clip(0) + 0 * top


def _log(size: Any) -> Any:
    """Of the vocabulary's size, or of each token's set."""
    return math.log(size) if isinstance(size, int) else size.log()


def _row(
    value: Callable[[Totals, Any], Array],
    coefficients: Callable[..., Coefficients] | None,
    sums: str = "",
    bases: str = "",
    needs_label: bool = False,
) -> Statistic:
    return Statistic(value, coefficients, frozenset(sums.split()), frozenset(bases.split()), needs_label)


_REVERSE_KL = _row(lambda T, V: T.reverse_kl, lambda T, g, V, b, xp: {"p": g, "q": -g}, sums="ref qe", bases="p q")
STATISTICS: dict[str, Statistic] = {
    "logprob": _row(lambda T, V: T.logprob, lambda T, g, V, b, xp: {"logprob": g}, bases="p", needs_label=True),
    "logsumexp": _row(lambda T, V: T.logsumexp, lambda T, g, V, b, xp: {"p": g}, bases="p"),
    "label_logit": _row(lambda T, V: T.label_logit, lambda T, g, V, b, xp: {"label": g}, needs_label=True),
    "entropy": _row(
        lambda T, V: T.entropy,
        lambda T, g, V, b, xp: {"plogp": -g, "p": -times(g, T.entropy, xp)},
        sums="t",
        bases="p plogp",
    ),
    "self_certainty": _row(
        lambda T, V: from_uniform((T.m - T.mean_logit) + (T.log_s - _log(V)), T.m),
        lambda T, g, V, b, xp: {"p": g, "one": -g / V},
        sums="zsum",
        bases="p",
    ),
    "mean_logit": _row(lambda T, V: T.mean_logit, lambda T, g, V, b, xp: {"one": g / V}, sums="zsum"),
    "max_logit": _row(lambda T, V: T.m, lambda T, g, V, b, xp: {"argmax": g}, sums="argmax"),
    "rank": _row(lambda T, V: T.rank, None, sums="above", needs_label=True),
    "sum_sq_prob": _row(
        lambda T, V: T.sum_sq_prob,
        lambda T, g, V, b, xp: {"p2": 2 * g, "p": -2 * g * T.sum_sq_prob},
        sums="r",
        bases="p p2",
    ),
    "el2n": _row(lambda T, V: T.el2n, None, sums="r", needs_label=True),
    "kl": _row(
        lambda T, V: T.kl,
        lambda T, g, V, b, xp: {"pD": g, "p": -times(g, T.kl, xp)},
        sums="ref",
        bases="p pD",
    ),
    "reverse_kl": _REVERSE_KL,
    "reverse_kl_shared": _REVERSE_KL,
    "jsd": _row(
        lambda T, V: T.jsd,
        lambda T, g, V, b, xp: {"pM": (1 - b) * g, "p": -(1 - b) * times(g, T.kl_mixture, xp)},
        sums="ref jsd kl_mixture",
        bases="p pM",
    ),
    "kl_mixture": _row(
        lambda T, V: T.kl_mixture,
        lambda T, g, V, b, xp: {
            "pM": g,
            "excess": -b * (1 - b) * g,
            "p": b * (1 - b) * g * T.excess - times(g, T.kl_mixture, xp),
        },
        sums="ref kl_mixture excess",
        bases="p pM excess",
    ),
    "reverse_kl_mixture": _row(
        lambda T, V: T.reverse_kl_mixture,
        lambda T, g, V, b, xp: {"excess": (1 - b) ** 2 * g, "p": -((1 - b) ** 2) * g * T.excess},
        sums="ref reverse_kl_mixture excess",
        bases="p excess",
    ),
    "acceptance": _row(
        lambda T, V: T.acceptance,
        lambda T, g, V, b, xp: {"ahead": -g * T.behind, "behind": g * T.ahead},
        sums="ref acceptance ahead behind",
        bases="ahead behind",
    ),
    "total_variation": _row(
        lambda T, V: T.total_variation,
        lambda T, g, V, b, xp: {"ahead": g * T.behind, "behind": -g * T.ahead},
        sums="ref total_variation ahead behind",
        bases="ahead behind",
    ),
    "tail_logprob": _row(
        lambda T, V: T.tail_logprob,
        lambda T, g, V, b, xp: {"tail": g, "p": -xp.where(T.tail_logprob == -math.inf, 0.0, g)},  # of nothing: constant
        sums="tail",
        bases="p tail",
    ),
}


def cross_entropy_wants(smoothing: float, z_loss: float) -> tuple[str, ...]:
    """The statistics that cross-entropy reads."""
    lse = ("logsumexp",) if smoothing or z_loss else ()
    return ("logprob", *lse, *(("mean_logit",) if smoothing else ()))


def sums_of(want: Iterable[str]) -> frozenset[str]:
    """The running sums that the wanted statistics read."""
    return frozenset().union(*(STATISTICS[name].sums for name in want))


def best_entries(sums: frozenset[str], top_k: int) -> int:
    """How many of a token's best entries are found: the best of all is one."""
    return max(top_k, int("argmax" in sums))


def has_gradient(name: str) -> bool:
    """Whether a floating output of the pass, of the statistics or beside them, has a gradient."""
    return name not in STATISTICS or STATISTICS[name].coefficients is not None


def looks_twice(sums: frozenset[str]) -> bool:
    """Whether some of the running sums need both log-sum-exps first."""
    return any(name in sums for name in SECOND_LOOK)


def bases_of(want: Iterable[str]) -> frozenset[str]:
    """The dense bases in the wanted statistics' gradients."""
    return frozenset().union(*(STATISTICS[name].bases for name in want))


def coefficients_of(
    grads: dict[str, Array], totals: Totals, vocab_size: int | Array, jsd_beta: float, xp: Any
) -> Coefficients:
    """The coefficients of the gradient formula for upstream gradients `grads` of the statistics.

    vocab_size: how many entries the totals are over, for each token where they have sets of their own.
    """
    out: Coefficients = {}
    for name, g in grads.items():
        of = STATISTICS[name].coefficients
        if of is None:
            continue
        for basis, c in of(totals, g, vocab_size, jsd_beta, xp).items():
            out[basis] = out[basis] + c if basis in out else c
    return out


def mixture_logs(d: Array, beta: float, xp: Any, a: Array = None) -> tuple[Array, Array]:
    """log(p/M) and log(q/M) of M = (1-β)p + βq from d = log p - log q, without overflow or cancellation.

    a: expm1(-|d|) where that is known.
    """
    a = xp.expm1(-xp.abs(d)) if a is None else a
    lower = xp.log1p((1 - beta) * a)
    log_p = xp.where(d >= 0, -xp.log1p(beta * a), xp.minimum(d, xp.zeros_like(d)) - lower)
    return log_p, xp.where(d >= 0, log_p - xp.maximum(d, xp.zeros_like(d)), -lower)


def second_look(sums: frozenset[str], p: Array, q: Array, d: Array, beta: float, xp: Any) -> dict[str, Array]:
    """An entry's shares of those of the sums that SECOND_LOOK has, from its probabilities and d = log p - log q.

    Neither the overlap nor the distance is 1 minus the other, so that each keeps its digits near 0. To each side of JSD
    comes Σ (M - p) or Σ (M - q), which is 0: no term is negative then, and what rounding moves d by does not add up.
    """
    out: dict[str, Array] = {}
    if any(name in sums for name in ("jsd", "kl_mixture", "reverse_kl_mixture")):
        a = xp.expm1(-xp.abs(d))
        log_p, log_q = mixture_logs(d, beta, xp, a)
        zero = xp.zeros_like(p[..., :1])  # a number in its place is made anew for each `where`, on a GPU by a launch
        of_p, of_q = xp.where(p > 0, p * log_p, zero), xp.where(q > 0, q * log_q, zero)
        if "jsd" in sums:
            out["jsd"] = (1 - beta) * of_p + beta * of_q
        if "kl_mixture" in sums or "reverse_kl_mixture" in sums:
            more = -xp.sign(d) * xp.maximum(p, q) * a  # p - q
            if "kl_mixture" in sums:
                out["kl_mixture"] = of_p - beta * more
            if "reverse_kl_mixture" in sums:
                out["reverse_kl_mixture"] = of_q + (1 - beta) * more
    if "excess" in sums:
        out["excess"] = p * excess(d, beta, xp)
    if "acceptance" in sums:
        out["acceptance"] = xp.minimum(p, q)
    if "total_variation" in sums:  # |p - q| / 2
        out["total_variation"] = xp.maximum(p, q) * xp.expm1(-xp.abs(d)) * -0.5
    if "ahead" in sums:
        first, second = sides(d, xp)
        out["ahead"], out["behind"] = p * first, p * second
    return out


def excess(d: Array, beta: float, xp: Any) -> Array:
    """(p - q)/M from d = log p - log q, without overflow or cancellation."""
    a = -xp.expm1(-xp.abs(d))
    return xp.sign(d) * a / (1 - xp.where(d >= 0, beta * a, (1 - beta) * a))


def sides(d: Array, xp: Any) -> tuple[Array, Array]:
    """([d > 0], [d < 0]), a half each where it is 0. Of two sums, not one of signs: either may be far the smaller."""
    half = 0.5 * xp.sign(d)
    return 0.5 + half, 0.5 - half


def put_second_look(
    totals: Totals, sums: dict[str, Array], label: dict[str, Array] | None, beta: float, xp: Any
) -> None:
    """The second look's sums over all entries but the label into `totals`, with the label's own shares."""
    of_q = -math.log(beta)  # log(q/M) of what the reference has and the policy lacks
    missing = {
        "jsd": beta * of_q, "kl_mixture": beta, "reverse_kl_mixture": of_q - (1 - beta), "total_variation": 0.5,
    }  # fmt: skip
    for name, x in sums.items():
        least, most = BOUNDS.get(name, (None, None))
        total = x if label is None else x + label[name]
        if most is not None:  # a share of probability, NaN where a head has no possible entry, as distances are
            total = total + 0 * (totals.log_ratio + totals.log_s_ref)
        if totals.log_inside is not None:
            total = total - missing.get(name, 0.0) * xp.expm1(totals.log_inside)
        setattr(totals, name, total if least is None else xp.clip(total, least, most))


# which rounding may pass
BOUNDS: dict[str, tuple[float, float | None]] = {
    **dict.fromkeys(("jsd", "kl_mixture", "reverse_kl_mixture"), (0, None)),
    **dict.fromkeys(("acceptance", "total_variation"), (0, 1)),
}


def label_shares(totals: Totals, sums: frozenset[str], beta: float, xp: Any) -> dict[str, Array]:
    """The label's own shares of the second look's sums."""
    d, q = _label_sides(totals, xp)
    return second_look(sums, xp.exp(totals.logprob), q, d, beta, xp)


def _label_sides(totals: Totals, xp: Any) -> tuple[Array, Array]:
    """d = log p - log q of the label, and its q."""
    d = difference(totals.label_logit, totals.label_ref, totals.shift, xp) + totals.log_ratio
    return d, xp.exp((totals.label_ref - totals.m_ref) - totals.log_s_ref)


def label_coefficient(c: Coefficients, totals: Totals, jsd_beta: float, xp: Any) -> Array:
    """dL/dz at the label, the δ term aside: exact where the label has nearly all the mass."""
    lp = totals.logprob
    p = xp.exp(lp)
    total = c.get("label", xp.zeros_like(lp))
    if "logprob" in c:  # what nobody asked for may be NaN, where no entry is possible
        total = total - c["logprob"] * xp.expm1(lp)
    if "p" in c:
        total = total + p * c["p"]
    if "p2" in c:
        total = total + p * p * c["p2"]
    if "plogp" in c:
        total = total + times(p, lp, xp) * c["plogp"]
    if "tail" in c:
        total = total + c["tail"] * totals.tail_label
    if totals.shift is not None:
        d, q = _label_sides(totals, xp)
        if "pD" in c:
            total = total + times(c["pD"], times(p, d, xp), xp)
        if "pM" in c:
            total = total + c["pM"] * times(p, mixture_logs(d, jsd_beta, xp)[0], xp)
        if "excess" in c:
            total = total + c["excess"] * p * excess(d, jsd_beta, xp)
        if "ahead" in c:
            first, second = sides(d, xp)
            total = total + p * (c["ahead"] * first + c["behind"] * second)
        if "q" in c:
            total = total + c["q"] * q
    return total
