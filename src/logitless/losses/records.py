"""Divergences from a teacher's record: its best entries with their log-probabilities, and what it gave to all others.

Shapes: one number per token, (...); a record has K entries per token, (..., K). Below, `s = z_student.log_softmax(-1)`
at the record's ids is `logp` (..., K), and `t` (..., K) the record's `log_weights`, -inf in slots of padding.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import OptionError
from ._numbers import check_record, logprob_of_record, same_shape

LEAST_TAIL = 1e-7  # of the teacher: what its fp32 weights leave of 1 has no digits below
LEAST_SHARE = 1e-3  # of a tail whose inside is told from the whole divergence: three digits are left there


class _Parts(NamedTuple):
    """Both distributions as a record splits them, in logs: at its ids, of all of them together, of all others."""

    real: Tensor  # (..., K) bool: no padding
    t: Tensor  # (..., K), 0 in padding
    s: Tensor  # (..., K), 0 in padding
    head_t: Tensor  # (...)
    tail_t: Tensor  # (...), at least log LEAST_TAIL
    tail_s: Tensor  # (...), 0 where the record holds the whole vocabulary
    tail: Tensor  # (...), the teacher's mass there, 0 where nothing is there


def record_kl(
    candidate_logits: Tensor,  # (..., K), of the student at the record's ids
    logsumexp: Tensor,  # (...)
    log_weights: Tensor,  # (..., K), the teacher's log-probabilities at those ids
    tail_logprob: Tensor,  # (...), of everything but those ids
    direction: Literal["forward", "reverse"] = "forward",
) -> Tensor:
    """KL between a teacher's record and the student over K + 1 outcomes: its entries, and one bucket of all others.

        t = torch.cat([log_weights, log1p(-log_weights.exp().sum(-1))[..., None]], -1)
        s = torch.cat([logp, log1p(-logp.exp().sum(-1))[..., None]], -1)
        loss = (t.exp() * (t - s)).sum(-1) if direction == "forward" else (s.exp() * (s - t)).sum(-1)

    forward is KL(teacher‖student), whose gradient is that of `soft_targets(tail="bucket")`; reverse is
    KL(student‖teacher). Both are at most the divergence over the whole vocabulary, as the bucket hides what is in it.
    A slot of padding has a log-weight of -inf and names an id of the record once more. In reverse a teacher's tail
    below 1e-7, which its weights cannot tell from none, counts as that. Reads `candidate_logits`, `logsumexp` and
    `tail_logprob`. Raises ShapeError, OptionError.
    """
    if direction not in ("forward", "reverse"):
        raise OptionError(f"direction must be 'forward' or 'reverse', got {direction!r}")
    x = _parts(candidate_logits, logsumexp, log_weights, tail_logprob)
    if direction == "forward":
        inside = torch.where(x.real, x.t.exp() * (x.t - x.s), 0.0).sum(-1)
        return inside + x.tail * (x.tail_t - x.tail_s)
    inside = torch.where(x.real, x.s.exp() * (x.s - x.t), 0.0).sum(-1)
    return inside + torch.where(tail_logprob.isneginf(), 0.0, x.tail_s.exp() * (x.tail_s - x.tail_t))


def decoupled_kl(
    candidate_logits: Tensor,  # (..., K), of the student at the record's ids
    logsumexp: Tensor,  # (...)
    log_weights: Tensor,  # (..., K), the teacher's log-probabilities at those ids
    tail_logprob: Tensor,  # (...), of everything but those ids
    reverse_kl: Tensor | None = None,  # (...), KL(teacher‖student) over the whole vocabulary
    head_weight: float = 1.0,
    tail_weight: float = 1.0,
) -> Tensor:
    """KL(teacher‖student) taken apart at the teacher's K best entries, each part with a weight of its own.

        m, n = log_weights.exp().sum(-1), logp.exp().sum(-1)  # what each gives to the K
        mass = m * (m / n).log() + (1 - m) * ((1 - m) / (1 - n)).log()
        head = KL(teacher among the K ‖ student among the K)  # both renormalised
        tail = KL(teacher among all others ‖ student among all others)
        loss = mass + head_weight * head + tail_weight * tail

    The plain divergence is the same sum with the weights m and 1 - m, so that a tail of little mass hardly counts: here
    it does. tail needs `reverse_kl`, of a teacher at hand or of stored hidden states, and is
    (reverse_kl - mass - m * head) / (1 - m), with 1 - m counted as at least 1e-3, below which no digits would be left;
    of a record alone the inside of the tail is not known, and that term is left out. Reads `candidate_logits`,
    `logsumexp`, `tail_logprob` and, where given, `reverse_kl`. Raises ShapeError.
    Decoupling as Zhao et al., "Decoupled Knowledge Distillation", arXiv:2203.08679, do it at the label; at the top K
    entries, so that the tail counts: Dasgupta et al., arXiv:2602.20816, whose own weights are `tail_aware_kl`'s.
    """
    x = _parts(candidate_logits, logsumexp, log_weights, tail_logprob)
    same_shape(logsumexp, reverse_kl=reverse_kl)
    some = x.real.any(-1)  # of a record of padding alone the tail is all there is
    head_t = torch.where(some, x.head_t, 0.0)
    head_s = torch.where(some, torch.where(x.real, x.s, -torch.inf).logsumexp(-1), 0.0)
    m = 1.0 - x.tail
    mass = m * (head_t - head_s) + x.tail * (x.tail_t - x.tail_s)
    among = (x.t - head_t[..., None]) - (x.s - head_s[..., None])
    head = torch.where(x.real, (x.t - head_t[..., None]).exp() * among, 0.0).sum(-1)
    loss = mass + head_weight * head
    if reverse_kl is None:
        return loss
    return loss + tail_weight * (reverse_kl - mass - m * head) / x.tail.clamp_min(LEAST_SHARE)


def tail_aware_kl(
    candidate_logits: Tensor,  # (..., K), of the student at the record's ids
    logsumexp: Tensor,  # (...)
    log_weights: Tensor,  # (..., K), the teacher's log-probabilities at those ids
    tail_logprob: Tensor,  # (...), of everything but those ids
    reverse_kl: Tensor,  # (...), KL(teacher‖student) over the whole vocabulary
    mean_tail: Tensor,  # (...), what the teacher gives to all others, its mean over the token's sequence
    weight: float = 2.0,
) -> Tensor:
    """KL(teacher‖student) in which all entries but the teacher's K best count `weight / mean_tail` times as much.

        tail = 1 - log_weights.exp().sum(-1)  # (B, T)
        mean_tail = tail.mean(-1, keepdim=True).expand_as(tail)
        among = KL(teacher among all others ‖ student among all others)
        loss = record_kl + weight / mean_tail * tail * among

    `record_kl`, over the K entries and one bucket of all others, and `tail * among` add up to `reverse_kl`. mean_tail
    counts as at least 1e-3. Reads `candidate_logits`, `logsumexp`, `tail_logprob` and `reverse_kl`. Raises ShapeError.
    Dasgupta et al., "Don't Ignore the Tail", arXiv:2602.20816, where K = 10 and a weight of 2 did best.
    """
    bucket = record_kl(candidate_logits, logsumexp, log_weights, tail_logprob)
    same_shape(logsumexp, reverse_kl=reverse_kl, mean_tail=mean_tail)
    return bucket + weight / mean_tail.clamp_min(LEAST_SHARE) * (reverse_kl - bucket)


def _parts(candidate_logits: Tensor, logsumexp: Tensor, log_weights: Tensor, tail_logprob: Tensor) -> _Parts:
    check_record(candidate_logits, logsumexp, tail_logprob, "log_weights", log_weights)
    real = ~log_weights.isneginf()
    t = torch.where(real, log_weights, 0.0)
    s = torch.where(real, logprob_of_record(candidate_logits, logsumexp, real, tail_logprob), 0.0)
    everything = tail_logprob.isneginf()  # what rounding leaves of the weights is no outcome then
    head_t = torch.where(everything, 0.0, log_weights.logsumexp(-1).clamp_max(0.0))
    tail = -torch.expm1(head_t)
    tail_t = tail.clamp_min(LEAST_TAIL).log()
    return _Parts(real, t, s, head_t, tail_t, torch.where(everything, 0.0, tail_logprob), tail)
