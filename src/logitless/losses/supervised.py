"""Supervised losses: from the statistics of each token to one loss per token.

Shapes: every argument is (...), one number per token; the result too.
"""

import torch
from torch import Tensor

from ..errors import OptionError
from ._numbers import most, same_shape


def nll(
    logprob: Tensor,  # (...)
) -> Tensor:
    """Negative log-likelihood of the label.

        loss = F.cross_entropy(z, labels, reduction="none")

    Reads `logprob`.
    """
    return -logprob


def label_smoothing(logprob: Tensor, logsumexp: Tensor, mean_logit: Tensor, smoothing: float = 0.1) -> Tensor:
    """Cross-entropy against (1 - smoothing) on the label and `smoothing` spread evenly over the vocabulary.

        loss = F.cross_entropy(z, labels, reduction="none", label_smoothing=smoothing)

    Reads `logprob`, `logsumexp`, `mean_logit`. Raises OptionError for a smoothing outside [0, 1].
    Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567.
    """
    if not 0.0 <= smoothing <= 1.0:
        raise OptionError(f"smoothing must be in [0, 1], got {smoothing}")
    same_shape(logprob, logsumexp=logsumexp, mean_logit=mean_logit)
    if smoothing == 0.0:  # 0 * inf is NaN where an entry of the vocabulary is impossible
        return -logprob
    return smoothing * (logsumexp - mean_logit) - (1.0 - smoothing) * logprob


def z_loss(logsumexp: Tensor, weight: float = 1e-4) -> Tensor:
    """Penalty that keeps the softmax's normaliser near 1; add it to a cross-entropy.

        loss = weight * torch.logsumexp(z, -1) ** 2

    Reads `logsumexp`. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", arXiv:2204.02311.
    """
    return weight * logsumexp.square()


def focal(logprob: Tensor, gamma: float = 2.0) -> Tensor:
    """Cross-entropy with less weight on tokens that the model already predicts.

        p = z.softmax(-1).gather(-1, labels[..., None])[..., 0]
        loss = -((1 - p) ** gamma) * p.log()

    Reads `logprob`; 1 - p keeps its digits when p is near 1. Raises OptionError unless gamma >= 0.
    Lin et al., "Focal Loss for Dense Object Detection", arXiv:1708.02002.
    """
    if not gamma >= 0.0:
        raise OptionError(f"gamma must be at least 0, got {gamma}")
    # Off zero, where a power below one has an infinite derivative.
    bounded = logprob.clamp_min(-most(logprob.dtype))  # whose slope would be 0 · inf at an impossible label
    missed = (-torch.expm1(bounded)).clamp_min(torch.finfo(logprob.dtype).tiny)
    return -(missed**gamma) * logprob


def dft(logprob: Tensor) -> Tensor:
    """Dynamic fine-tuning: cross-entropy weighted by the label's own probability, held constant.

        p = z.softmax(-1).gather(-1, labels[..., None])[..., 0]
        loss = -p.detach() * p.log()

    Reads `logprob`; 0 for an impossible label, the limit, where the product above is 0 · inf. Wu et al., "On the
    Generalization of SFT: A Reinforcement Learning Perspective with Reward Rectification", arXiv:2508.05629.
    """
    return -logprob.detach().exp() * logprob.masked_fill(logprob == -torch.inf, torch.finfo(logprob.dtype).min)
