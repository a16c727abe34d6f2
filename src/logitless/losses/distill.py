"""Distillation: a student (the pass's policy) towards a teacher (its reference, or a sparse record of it).

Shapes: one number per token, (...); sparse targets have K numbers per token, (..., K). Below, `s =
z_student.log_softmax(-1)` and `t = z_teacher.log_softmax(-1)`, both at the temperature of the pass.
"""

from typing import Literal

import torch
from torch import Tensor

from ..errors import OptionError
from ._numbers import check_record, logprob_of_record, same_shape


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


def skewed_kl(reverse_kl_mixture: Tensor, temperature: float = 1.0) -> Tensor:
    """KL of the teacher from a mixture of both: forward KL whose gradient stays bounded where the student has little.

        m = (a * t.exp() + (1 - a) * s.exp()).log()
        loss = temperature**2 * (t.exp() * (t - m)).sum(-1)

    Reads the statistic `reverse_kl_mixture`; the skew a, 0.1 in the paper, is the pass's `jsd_beta`. Ko et al.,
    "DistiLLM: Towards Streamlined Distillation for Large Language Models", arXiv:2402.03898.
    """
    return temperature**2 * reverse_kl_mixture


def skewed_reverse_kl(kl_mixture: Tensor, temperature: float = 1.0) -> Tensor:
    """KL of the student from a mixture of both: reverse KL that is finite where the teacher has nothing.

        m = ((1 - a) * t.exp() + a * s.exp()).log()
        loss = temperature**2 * (s.exp() * (s - m)).sum(-1)

    Reads the statistic `kl_mixture`; the pass's `jsd_beta`, the teacher's weight, is 1 - a: 0.9 for the paper's 0.1.
    Ko et al., "DistiLLM: Towards Streamlined Distillation for Large Language Models", arXiv:2402.03898.
    """
    return temperature**2 * kl_mixture


def total_variation(total_variation: Tensor) -> Tensor:
    """The share of a draft's tokens that speculative decoding rejects: 1 minus the acceptance rate.

        loss = (s.exp() - t.exp()).abs().sum(-1) / 2

    Reads the statistic `total_variation`; the student is the draft. Its gradient vanishes where the two hardly overlap:
    a draft is better begun with another loss. Leviathan et al., "Fast Inference from Transformers via Speculative
    Decoding", arXiv:2211.17192.
    """
    return total_variation


def negative_log_acceptance(acceptance: Tensor, least: float = 0.0) -> Tensor:
    """-log of the acceptance rate: the gradient of `total_variation`, by 1 / acceptance, which a far draft needs.

        loss = -torch.minimum(s.exp(), t.exp()).sum(-1).clamp_min(least).log()

    Reads the statistic `acceptance`. Against a teacher that is sure of one token it is cross-entropy. Rates below
    `least` count as that, without gradient; 0 stands for the least number above it. Samarin et al., "LK Losses: Direct
    Acceptance Rate Optimization for Speculative Decoding", arXiv:2602.23881.
    """
    return -acceptance.clamp_min(max(least, torch.finfo(acceptance.dtype).tiny)).log()


def lk_hybrid(reverse_kl: Tensor, total_variation: Tensor, eta: float = 3.0) -> Tensor:
    """Forward KL where the draft is rarely accepted, total variation where it mostly is, the weight a constant.

        tv = (s.exp() - t.exp()).abs().sum(-1) / 2
        weight = (-eta * (1 - tv)).exp().detach()
        loss = weight * (t.exp() * (t - s)).sum(-1) + (1 - weight) * tv

    Reads the statistics `reverse_kl`, which is KL(teacher‖student), and `total_variation`. eta: larger turns to total
    variation sooner. Of a draft vocabulary `reverse_kl` is infinite, and `reverse_kl_shared` takes its place. Raises
    ShapeError. Samarin et al., "LK Losses", arXiv:2602.23881.
    """
    same_shape(reverse_kl, total_variation=total_variation)
    weight = torch.exp(-eta * (1 - total_variation.detach()))
    return weight * reverse_kl + (1 - weight) * total_variation


def soft_targets(
    candidate_logits: Tensor,  # (..., K), of the student at the targets' ids
    logsumexp: Tensor,  # (...)
    weights: Tensor,  # (..., K), the teacher's probabilities at those ids
    tail: Literal["bucket", "renormalise", "ignore"] = "bucket",
    tail_logprob: Tensor | None = None,  # (...), of everything but those ids
) -> Tensor:
    """Cross-entropy against a sparse record of the teacher: K ids with their probabilities.

        logp = z.log_softmax(-1)
        inside = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids, True)
        loss = -(weights * logp.gather(-1, ids)).sum(-1)
        loss = loss - (1 - weights.sum(-1)) * logp.masked_fill(inside, -torch.inf).logsumexp(-1)

    `tail` says what becomes of the mass that the record leaves out: "bucket" (above) compares it as one more
    outcome, so the loss is least exactly where the student agrees with the record; "renormalise" and "ignore"
    drop the second term, with the weights scaled to sum to 1 or as they are, and make the student
    overconfident unless the weights are an unbiased sample of the teacher. Slots of weight 0 are padding; with "bucket"
    they name an id of the record once more, since any other is an outcome that the teacher gives nothing. Reads
    `candidate_logits`, `logsumexp` and, with "bucket", `tail_logprob`: what the ids leave of 1 would have no digits
    where the student is sure of them. Raises ShapeError, OptionError.
    Anshumann et al., "Sparse Logit Sampling", arXiv:2503.16870, on the bias.
    """
    if tail not in ("bucket", "renormalise", "ignore"):
        raise OptionError(f"tail must be 'bucket', 'renormalise' or 'ignore', got {tail!r}")
    if tail == "bucket" and tail_logprob is None:
        raise OptionError("tail='bucket' needs tail_logprob=stats.tail_logprob: add 'tail_logprob' to want")
    check_record(candidate_logits, logsumexp, tail_logprob, "weights", weights)
    real = weights > 0
    if tail_logprob is None:
        logp = candidate_logits - logsumexp[..., None]
    else:
        logp = logprob_of_record(candidate_logits, logsumexp, real, tail_logprob)
    logp = torch.where(real, logp, 0.0)
    if tail == "renormalise":
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    inside = -(weights * logp).sum(-1)
    if tail != "bucket" or tail_logprob is None:
        return inside
    left = (1.0 - weights.sum(-1)).clamp_min(0.0)
    # nothing but the record is possible: what rounding leaves of its weights is no outcome
    return inside - left * torch.where(tail_logprob.isneginf(), 0.0, tail_logprob)
