"""Preference losses: from sequence log-probs to one loss per pair.

Shapes: every log-prob is (B,), summed or averaged over a response's tokens by `sequence_logprob`; the result
is (B,). `ref_*` come from the reference model and are constants.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..errors import OptionError
from ._numbers import log1mexp, same_shape


def sequence_logprob(
    logprob: Tensor,  # (..., T)
    mask: Tensor | None = None,  # (..., T), true where a token counts
    average: bool = False,
) -> Tensor:
    """Log-prob of whole responses: the sum over their tokens, or the mean with `average=True`.

        token = z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        sequence = (token * mask).sum(-1)

    Returns (...). Without a mask every position counts; tokens that the pass ignored add 0 to a sum, but a
    mean needs the mask. A response without tokens gives 0.
    """
    if mask is None:
        return logprob.mean(-1) if average and logprob.shape[-1] else logprob.sum(-1)
    same_shape(logprob, mask=mask)
    # A padded position may hold anything, even an infinity, so it is replaced rather than multiplied by zero.
    total = torch.where(mask.bool(), logprob, torch.zeros_like(logprob)).sum(-1)
    return total / mask.bool().sum(-1).clamp_min(1) if average else total


def dpo(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Direct preference optimisation; `label_smoothing` is the share of pairs believed to be swapped.

        margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        loss = -(1 - label_smoothing) * margin.sigmoid().log() - label_smoothing * (-margin).sigmoid().log()

    Takes summed log-probs. Rafailov et al., "Direct Preference Optimization", arXiv:2305.18290.
    """
    _check_smoothing(label_smoothing)
    margin = beta * _log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected)
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def robust_dpo(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
    label_smoothing: float = 0.1,
) -> Tensor:
    """DPO whose mean over pairs is that of clean labels, where a share `label_smoothing` of them is swapped.

        margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        kept, swapped = -margin.sigmoid().log(), -(-margin).sigmoid().log()
        loss = ((1 - label_smoothing) * kept - label_smoothing * swapped) / (1 - 2 * label_smoothing)

    Takes summed log-probs. Chowdhury et al., "Provably Robust DPO: Aligning Language Models with Noisy Feedback",
    arXiv:2403.00409.
    """
    _check_smoothing(label_smoothing)
    margin = beta * _log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected)
    kept, swapped = -logsigmoid(margin), -logsigmoid(-margin)
    return ((1.0 - label_smoothing) * kept - label_smoothing * swapped) / (1.0 - 2.0 * label_smoothing)


def hinge(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
) -> Tensor:
    """SLiC's hinge on the margin of log-ratios: no gradient once the pair is apart by 1 / beta.

        loss = (1 - beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).clamp(min=0)

    Takes summed log-probs. Zhao et al., "SLiC-HF", arXiv:2305.10425; with the reference: Liu et al., "Statistical
    Rejection Sampling Improves Preference Optimization", arXiv:2309.06657.
    """
    return torch.relu(1.0 - beta * _log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected))


def exo_pair(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
    label_smoothing: float = 1e-3,
) -> Tensor:
    """Efficient exact optimisation of a pair: the reverse KL from what the policy prefers to what was preferred.

        q = (beta * ((chosen - ref_chosen) - (rejected - ref_rejected))).sigmoid()
        loss = q * (q / (1 - label_smoothing)).log() + (1 - q) * ((1 - q) / label_smoothing).log()

    Takes summed log-probs. Raises OptionError unless 0 < label_smoothing < 0.5.
    Ji et al., "Towards Efficient Exact Optimization of Language Model Alignment", arXiv:2402.00856.
    """
    _check_smoothing(label_smoothing)
    if label_smoothing == 0.0:
        raise OptionError("label_smoothing must be above 0 here: a certain preference has no finite divergence")
    margin = beta * _log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected)
    log_q, log_not = logsigmoid(margin), logsigmoid(-margin)
    wins = log_q.exp() * (log_q - math.log1p(-label_smoothing))
    return wins + log_not.exp() * (log_not - math.log(label_smoothing))


def discopop(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.05,
    tau: float = 0.05,
) -> Tensor:
    """The log-ratio modulated loss that a search found: logistic for pairs in the wrong order, exponential for others.

        margin = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
        gate = (margin / tau).sigmoid()
        loss = -(1 - gate) * margin.sigmoid().log() + gate * (-margin).exp()

    Takes summed log-probs. Raises OptionError unless tau > 0. Lu et al., "Discovering Preference Optimization
    Algorithms with and for Large Language Models", arXiv:2406.08414.
    """
    if not tau > 0.0:
        raise OptionError(f"tau must be positive, got {tau}")
    margin = beta * _log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected)
    # the gate within the exponent, which could overflow alone
    return -torch.sigmoid(-margin / tau) * logsigmoid(margin) + torch.exp(logsigmoid(margin / tau) - margin)


def nca_pair(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
) -> Tensor:
    """Noise contrastive alignment of a pair: the chosen response's likelihood rises, rather than the margin alone.

        good, bad = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
        loss = -good.sigmoid().log() - ((-good).sigmoid().log() + (-bad).sigmoid().log()) / 2

    Takes summed log-probs. Chen et al., "Noise Contrastive Alignment of Language Models with Explicit Rewards",
    arXiv:2402.05369.
    """
    good, bad = _gains(chosen, rejected, ref_chosen, ref_rejected, beta)
    return -logsigmoid(good) - 0.5 * (logsigmoid(-good) + logsigmoid(-bad))


def bco_pair(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
    baseline: float | Tensor = 0.0,
) -> Tensor:
    """Binary classifier optimisation of a pair: chosen responses are one class and rejected ones the other.

        good, bad = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
        loss = -(good - baseline).sigmoid().log() - (baseline - bad).sigmoid().log()

    Takes summed log-probs. baseline: the paper's reward shift, a running mean of good and bad; a constant.
    Jung et al., "Binary Classifier Optimization for Large Language Model Alignment", arXiv:2404.04656.
    """
    good, bad = _gains(chosen, rejected, ref_chosen, ref_rejected, beta)
    same_shape(good, baseline=baseline if isinstance(baseline, Tensor) else None)
    return -logsigmoid(good - baseline) - logsigmoid(baseline - bad)


def sppo_hard(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
) -> Tensor:
    """Self-play preference optimisation with sure preferences: log-ratios of 1 / (2 beta) and -1 / (2 beta).

        loss = (chosen - ref_chosen - 0.5 / beta) ** 2 + (rejected - ref_rejected + 0.5 / beta) ** 2

    Takes summed log-probs. Raises OptionError unless beta > 0. Wu et al., "Self-Play Preference Optimization for
    Language Model Alignment", arXiv:2405.00675.
    """
    if not beta > 0.0:
        raise OptionError(f"beta must be positive, got {beta}")
    good, bad = _gains(chosen, rejected, ref_chosen, ref_rejected, 1.0)
    return (good - 0.5 / beta).square() + (bad + 0.5 / beta).square()


def apo_zero(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
) -> Tensor:
    """Anchored preference optimisation for a model worse than the chosen responses: these rise, the rejected fall.

        good, bad = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
        loss = 1 - good.sigmoid() + bad.sigmoid()

    Takes summed log-probs. D'Oosterlinck et al., "Anchored Preference Optimization and Contrastive Revisions",
    arXiv:2408.06266.
    """
    good, bad = _gains(chosen, rejected, ref_chosen, ref_rejected, beta)
    return torch.sigmoid(-good) + torch.sigmoid(bad)


def apo_down(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    beta: float = 0.1,
) -> Tensor:
    """Anchored preference optimisation for a model better than the chosen responses: both fall, the rejected further.

        good, bad = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
        loss = good.sigmoid() + 1 - (good - bad).sigmoid()

    Takes summed log-probs. D'Oosterlinck et al., "Anchored Preference Optimization and Contrastive Revisions",
    arXiv:2408.06266.
    """
    good, bad = _gains(chosen, rejected, ref_chosen, ref_rejected, beta)
    return torch.sigmoid(good) + torch.sigmoid(bad - good)


def ipo(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    ref_chosen: Tensor,  # (B,)
    ref_rejected: Tensor,  # (B,)
    tau: float = 0.1,
) -> Tensor:
    """Identity preference optimisation: a target for the margin, where DPO would push it without end.

        loss = ((chosen - ref_chosen) - (rejected - ref_rejected) - 1 / (2 * tau)) ** 2

    Takes averaged log-probs, so that tau means the same at every length. Raises OptionError unless tau > 0.
    Azar et al., "A General Theoretical Paradigm to Understand Learning from Human Preferences",
    arXiv:2310.12036.
    """
    if not tau > 0.0:
        raise OptionError(f"tau must be positive, got {tau}")
    return (_log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected) - 0.5 / tau).square()


def kto(
    logprob: Tensor,  # (B,)
    ref_logprob: Tensor,  # (B,)
    desirable: Tensor,  # (B,) bool
    baseline: Tensor,  # () from kto_baseline
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Kahneman-Tversky optimisation: single responses, each good or bad, one loss per response.

        gain = beta * (logprob - ref_logprob - baseline)
        loss = torch.where(desirable, desirable_weight * (1 - gain.sigmoid()),
                           undesirable_weight * (1 - (-gain).sigmoid()))

    Takes summed log-probs. Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization",
    arXiv:2402.01306.
    """
    same_shape(logprob, ref_logprob=ref_logprob, desirable=desirable, baseline=baseline)
    gain = beta * (logprob - ref_logprob - baseline)
    # 1 - sigmoid(x) = sigmoid(-x), without the subtraction.
    return torch.where(
        desirable.bool(), desirable_weight * torch.sigmoid(-gain), undesirable_weight * torch.sigmoid(gain)
    )


def kto_baseline(
    mismatched: Tensor,  # (B,)
    ref_mismatched: Tensor,  # (B,)
) -> Tensor:
    """KTO's reference point, from the summed log-probs of responses paired with other responses' prompts.

        baseline = (mismatched - ref_mismatched).mean().clamp(min=0).detach()

    Returns (). Ethayarajh et al., arXiv:2402.01306.
    """
    same_shape(mismatched, ref_mismatched=ref_mismatched)
    return (mismatched - ref_mismatched).mean().clamp_min(0.0).detach()


def orpo(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    beta: float = 0.1,
) -> Tensor:
    """Odds-ratio preference optimisation: likelihood of the chosen response plus a penalty, no reference.

        odds = lambda logp: logp.exp() / (1 - logp.exp())
        loss = -chosen - beta * (odds(chosen) / odds(rejected)).log().sigmoid().log()

    Takes averaged log-probs. Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model",
    arXiv:2403.07691.
    """
    same_shape(chosen, rejected=rejected)
    log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    return -chosen - beta * logsigmoid(log_odds)


def simpo(
    chosen: Tensor,  # (B,)
    rejected: Tensor,  # (B,)
    beta: float = 2.0,
    margin: float = 1.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Simple preference optimisation: a margin between average log-probs, without a reference.

        x = beta * (chosen - rejected) - margin
        loss = -(1 - label_smoothing) * x.sigmoid().log() - label_smoothing * (-x).sigmoid().log()

    Takes averaged log-probs; `label_smoothing` is the share of pairs believed to be swapped, as in `dpo`.
    Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward", arXiv:2405.14734.
    """
    _check_smoothing(label_smoothing)
    same_shape(chosen, rejected=rejected)
    x = beta * (chosen - rejected) - margin
    return -(1.0 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def _log_ratio_margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    same_shape(chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def _gains(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """The implied rewards of both responses."""
    same_shape(chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)


def _check_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing < 0.5:
        raise OptionError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
