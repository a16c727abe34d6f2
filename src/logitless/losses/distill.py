"""Distillation: a student (the pass's policy) towards a teacher (its reference, or a sparse record of it).

Shapes: one number per token, (...); sparse targets have K numbers per token, (..., K). Below, `s =
z_student.log_softmax(-1)` and `t = z_teacher.log_softmax(-1)`, both at the temperature of the pass.
"""

from typing import Literal

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError
from ._numbers import log1mexp, same_shape


def forward_kl(reverse_kl: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher‖student), the classical objective: the student covers all that the teacher does.

        loss = temperature**2 * (t.exp() * (t - s)).sum(-1)

    Reads the statistic `reverse_kl`, which is KL(reference‖policy). The square keeps gradients of one size as
    the temperature changes. Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv:1503.02531.
    """
    return temperature**2 * reverse_kl


def reverse_kl(kl: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(student‖teacher): the student keeps to what the teacher finds likely.

        loss = temperature**2 * (s.exp() * (s - t)).sum(-1)

    Reads the statistic `kl`, which is KL(policy‖reference).
    Gu et al., "MiniLLM: Knowledge Distillation of Large Language Models", arXiv:2306.08543.
    """
    return temperature**2 * kl


def jsd(jsd: Tensor, temperature: float = 1.0) -> Tensor:
    """Generalised Jensen-Shannon divergence; the pass's `jsd_beta` is the teacher's weight b in the mixture.

        m = ((1 - b) * s.exp() + b * t.exp()).log()
        loss = temperature**2 * ((1 - b) * (s.exp() * (s - m)).sum(-1) + b * (t.exp() * (t - m)).sum(-1))

    Reads the statistic `jsd`. Agarwal et al., "On-Policy Distillation of Language Models: Learning from
    Self-Generated Mistakes", arXiv:2306.13649.
    """
    return temperature**2 * jsd


def soft_targets(
    candidate_logits: Tensor,  # (..., K), of the student at the targets' ids
    logsumexp: Tensor,  # (...)
    weights: Tensor,  # (..., K), the teacher's probabilities at those ids
    tail: Literal["bucket", "renormalise", "ignore"] = "bucket",
    logprob: Tensor | None = None,  # (...), of the targets' first ids as the pass's labels
) -> Tensor:
    """Cross-entropy against a sparse record of the teacher: K ids with their probabilities.

        logp = z.log_softmax(-1).gather(-1, ids)
        loss = -(weights * logp).sum(-1) - (1 - weights.sum(-1)) * (1 - logp.exp().sum(-1)).log()

    `tail` says what becomes of the mass that the record leaves out: "bucket" (above) compares it as one more
    outcome, so the loss is least exactly where the student agrees with the record; "renormalise" and "ignore"
    drop the second term, with the weights scaled to sum to 1 or as they are, and make the student
    overconfident unless the weights are an unbiased sample of the teacher. Slots of weight 0 are padding,
    whatever their id. Reads `candidate_logits`, `logsumexp`.

    The tail's mass is what the ids leave of 1: in fp32 its slope is 1 % off at 1e-5, and below 1e-7 it stays there.
    With `labels=ids[..., 0]` in the pass and its `logprob` here, it is what the other ids leave of the mass beside the
    first, which keeps its digits however sure the student is of that one.
    Raises ShapeError, OptionError. Anshumann et al., "Sparse Logit Sampling", arXiv:2503.16870, on the bias.
    """
    _check_sparse(candidate_logits, logsumexp, weights, logprob)
    used = weights > 0
    logp = candidate_logits - logsumexp[..., None]
    if logprob is not None:
        logp = torch.cat([logprob[..., None], logp[..., 1:]], -1)
    logp = torch.where(used, logp, torch.zeros_like(logp))
    if tail == "renormalise":
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    inside = -(weights * logp).sum(-1)
    if tail != "bucket":
        if tail not in ("renormalise", "ignore"):
            raise OptionError(f"tail must be 'bucket', 'renormalise' or 'ignore', got {tail!r}")
        return inside
    left = (1.0 - weights.sum(-1)).clamp_min(0.0)
    logp = torch.where(used, logp, -torch.inf)
    log_tail = _log_left(logp)
    if logprob is not None:  # what the first id leaves, and the share of it that the others leave
        beside = log1mexp(logprob)
        log_tail = torch.where(used[..., 0], beside + _log_left(logp[..., 1:] - beside[..., None]), log_tail)
    return inside - left * log_tail


def _log_left(logp: Tensor) -> Tensor:
    """The log of what probabilities (..., K) leave of 1: at least a rounding error, for a finite derivative."""
    if logp.shape[-1] == 0:
        return logp.new_zeros(logp.shape[:-1])
    # a row of -inf alone would have a gradient of NaN
    logp = torch.where(logp.isneginf().all(-1, keepdim=True), torch.finfo(logp.dtype).min, logp)
    return log1mexp(logp.logsumexp(-1).clamp_max(-torch.finfo(logp.dtype).eps))


def _check_sparse(candidate_logits: Tensor, logsumexp: Tensor, weights: Tensor, logprob: Tensor | None) -> None:
    if candidate_logits.ndim == 0 or weights.shape != candidate_logits.shape:
        expected, got = tuple(candidate_logits.shape), tuple(weights.shape)
        raise ShapeError(f"weights must have candidate_logits' shape (..., K), here {expected}, got {got}")
    if weights.shape[-1] == 0:
        raise ShapeError(f"candidate_logits must have K of 1 or more ids per token, got {tuple(weights.shape)}")
    same_shape(candidate_logits[..., 0], logsumexp=logsumexp, logprob=logprob)
