"""Preference losses: from sequence log-probs to one loss per pair.

Shapes: every log-prob is (B,), summed or averaged over a response's tokens by `sequence_logprob`; the result
is (B,). `ref_*` come from the reference model and are constants.
"""

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
        return logprob.mean(-1) if average else logprob.sum(-1)
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
    if not 0.0 <= label_smoothing < 0.5:
        raise OptionError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}")
    margin = beta * _log_ratio_margin(chosen, rejected, ref_chosen, ref_rejected)
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


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
    if tau <= 0.0:
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
) -> Tensor:
    """Simple preference optimisation: a margin between average log-probs, without a reference.

        loss = -(beta * (chosen - rejected) - margin).sigmoid().log()

    Takes averaged log-probs. Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free
    Reward", arXiv:2405.14734.
    """
    same_shape(chosen, rejected=rejected)
    return -logsigmoid(beta * (chosen - rejected) - margin)


def _log_ratio_margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    same_shape(chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
    return (chosen - ref_chosen) - (rejected - ref_rejected)
