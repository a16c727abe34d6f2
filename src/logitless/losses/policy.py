"""Policy-gradient losses, KL penalties and the weights that turn per-token losses into a batch's loss.

Shapes: one number per token, (n,) inside `token_loss` or (B, T) on whole batches; the result has the same
shape. `old_logprob` is the log-prob under the policy that sampled the token, `ref_logprob` under the
reference: constants. Where a token is ignored they may hold anything but NaN: losses and slopes stay finite
(ratios above e^79 in fp32 count as that), so that a weight of 0 ends them. Write
`p = z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]` for the dense `logprob` below.
"""

from typing import Literal

import torch
from torch import Tensor

from ..errors import OptionError, ShapeError
from ._numbers import expm1_minus, gap, most, ratio, same_shape
from .preference import sequence_logprob


def reinforce(logprob: Tensor, advantages: Tensor) -> Tensor:
    """Score-function policy gradient.

        loss = -advantages * p

    Reads `logprob`. Williams, "Simple Statistical Gradient-Following Algorithms for Connectionist
    Reinforcement Learning", Machine Learning 8, 1992.
    """
    same_shape(logprob, advantages=advantages)
    return -advantages * logprob


def ppo_clip(
    logprob: Tensor,  # (...)
    old_logprob: Tensor,  # (...)
    advantages: Tensor,  # (...)
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    delta: float | None = None,
) -> Tensor:
    """Clipped importance-weighted policy gradient; with `delta`, bounded where the advantage is negative, too.

        r = (p - old_logprob).exp()
        clipped = r.clamp(1 - clip_low, 1 + clip_high)
        bounded = r if delta is None else r.clamp(max=delta)
        loss = -torch.min(advantages * bounded, advantages * clipped)

    Reads `logprob`. Raises OptionError unless delta > 1 + clip_high. Schulman et al., "Proximal Policy Optimization
    Algorithms", arXiv:1707.06347; delta: Prime Intellect, "INTELLECT-2", arXiv:2505.07291.
    """
    _check_clip(clip_low, clip_high)
    same_shape(logprob, old_logprob=old_logprob, advantages=advantages)
    r = ratio(logprob, old_logprob)
    clipped = r.clamp(1.0 - clip_low, 1.0 + clip_high)
    if delta is not None:
        if not delta > 1.0 + clip_high:
            raise OptionError(f"delta must be above 1 + clip_high = {1.0 + clip_high:g}, got {delta}")
        r = r.clamp_max(delta)
    return -torch.minimum(advantages * r, advantages * clipped)


def grpo(
    logprob: Tensor,  # (...)
    old_logprob: Tensor,  # (...)
    advantages: Tensor,  # (...)
    ref_logprob: Tensor | None = None,  # (...)
    clip: float = 0.2,
    beta: float = 0.04,
    delta: float | None = None,
) -> Tensor:
    """Group-relative policy optimisation: the clipped objective, with a k3 penalty when a reference is given.

        loss = ppo_clip(p, old_logprob, advantages, clip, clip, delta) + beta * kl_k3(p, ref_logprob)

    Reads `logprob`. The advantages come from `group_advantages`, the batch's loss from
    `token_weights(mask, "sequence")`. Shao et al., "DeepSeekMath", arXiv:2402.03300.
    """
    surrogate = ppo_clip(logprob, old_logprob, advantages, clip, clip, delta)
    return surrogate if ref_logprob is None else surrogate + beta * kl_k3(logprob, ref_logprob)


def dapo(
    logprob: Tensor,  # (...)
    old_logprob: Tensor,  # (...)
    advantages: Tensor,  # (...)
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """GRPO without a reference, with more room above than below, so that unlikely tokens can still grow.

        loss = ppo_clip(p, old_logprob, advantages, clip_low=0.2, clip_high=0.28)

    Reads `logprob`. The batch's loss weighs all tokens alike: `token_weights(mask, "token")`.
    Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv:2503.14476.
    """
    return ppo_clip(logprob, old_logprob, advantages, clip_low, clip_high)


def dr_grpo(
    logprob: Tensor,  # (...)
    old_logprob: Tensor,  # (...)
    advantages: Tensor,  # (...)
    clip: float = 0.2,
) -> Tensor:
    """GRPO with its two biases removed: no division by the group's spread, none by the response's length.

        loss = ppo_clip(p, old_logprob, rewards - rewards.mean(), clip, clip)

    Reads `logprob`. The advantages come from `group_advantages(rewards, scale=False)`, the batch's loss from
    `token_weights(mask, "constant", length)`. Liu et al., "Understanding R1-Zero-Like Training: A Critical
    Perspective", arXiv:2503.20783.
    """
    return ppo_clip(logprob, old_logprob, advantages, clip, clip)


def cispo(
    logprob: Tensor,  # (...)
    old_logprob: Tensor,  # (...)
    advantages: Tensor,  # (...)
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    *,
    epsilon_high: float | None = None,
) -> Tensor:
    """Policy gradient with a clipped, constant importance weight: every token keeps its gradient.

        r = (p - old_logprob).exp().clamp(1 - clip_low, 1 + clip_high).detach()
        loss = -r * advantages * p

    Reads `logprob`; `clip_low=1` means no lower bound. `epsilon_high` is the upper bound itself, in the place of
    1 + clip_high, and may lie below 1: what TRL and Liger call by this name.
    Raises OptionError for an upper bound that is not above 0 and the lower one. MiniMax, "MiniMax-M1",
    arXiv:2506.13585.
    """
    _check_clip(clip_low, clip_high)
    same_shape(logprob, old_logprob=old_logprob, advantages=advantages)
    low, high = 1.0 - clip_low, 1.0 + clip_high if epsilon_high is None else epsilon_high
    if not high > max(low, 0.0):
        raise OptionError(f"epsilon_high must be above 0 and 1 - clip_low = {low:g}, got {epsilon_high}")
    weight = ratio(logprob, old_logprob).clamp(low, high).detach()
    return -advantages * torch.where(weight == 0, 0.0, weight * logprob)  # 0 · inf is 0: of an impossible token


def sapo(
    logprob: Tensor,  # (...)
    old_logprob: Tensor,  # (...)
    advantages: Tensor,  # (...)
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """Soft adaptive policy optimisation: a smooth gate on the ratio in the place of the clip, slope 1 at a ratio of 1.

        r = (p - old_logprob).exp()
        t = torch.where(advantages > 0, temperature_positive, temperature_negative)
        loss = -advantages * (t * (r - 1)).sigmoid() * 4 / t

    Reads `logprob`; the batch's loss comes from `token_weights(mask, "sequence")`. Raises OptionError unless both
    temperatures are positive. Gao et al., "Soft Adaptive Policy Optimization", arXiv:2511.20347.
    """
    if not (temperature_positive > 0.0 and temperature_negative > 0.0):
        given = f"{temperature_positive} and {temperature_negative}"
        raise OptionError(f"temperature_positive and temperature_negative must be positive, got {given}")
    same_shape(logprob, old_logprob=old_logprob, advantages=advantages)
    t = torch.where(advantages > 0, torch.full_like(logprob, temperature_positive), temperature_negative)
    return -advantages * torch.sigmoid(t * (ratio(logprob, old_logprob) - 1.0)) * 4.0 / t


def gspo(
    logprob: Tensor,  # (B, T)
    old_logprob: Tensor,  # (B, T)
    advantages: Tensor,  # (B,)
    mask: Tensor,  # (B, T), true where a token counts
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Group sequence policy optimisation: one ratio and one clip for a whole response, its tokens' geometric mean.

        r = (((p - old_logprob) * mask).sum(-1) / mask.sum(-1)).exp()
        loss = -torch.min(advantages * r, advantages * r.clamp(1 - clip_low, 1 + clip_high))

    Reads `logprob` of whole responses: in `token_loss` with per="sequence". Returns (B,), one loss per response; the
    batch's is its mean. Zheng et al., "Group Sequence Policy Optimization", arXiv:2507.18071.
    """
    same_shape(logprob, old_logprob=old_logprob, mask=mask)
    _check_of_responses(advantages, logprob)
    mean = sequence_logprob(gap(logprob, old_logprob), mask, average=True)
    return ppo_clip(mean, torch.zeros_like(mean), advantages, clip_low, clip_high)


def gmpo(
    logprob: Tensor,  # (B, T)
    old_logprob: Tensor,  # (B, T)
    advantages: Tensor,  # (B,)
    mask: Tensor,  # (B, T), true where a token counts
    clip: float = 0.4,
) -> Tensor:
    """Geometric-mean policy optimisation: the mean of a response's log-ratios, each clipped on the side that gains.

        d = p - old_logprob
        d = torch.where(advantages[:, None] > 0, d.clamp(max=clip), d.clamp(min=-clip))
        loss = -advantages * ((d * mask).sum(-1) / mask.sum(-1)).exp()

    Reads `logprob` of whole responses: in `token_loss` with per="sequence". Returns (B,), one loss per response; the
    batch's is its mean. Zhao et al., "Geometric-Mean Policy Optimization", arXiv:2507.20673.
    """
    if not clip >= 0.0:
        raise OptionError(f"clip must be at least 0, got {clip}")
    same_shape(logprob, old_logprob=old_logprob, mask=mask)
    _check_of_responses(advantages, logprob)
    d = gap(logprob, old_logprob)
    d = torch.where(advantages[..., None] > 0, d.clamp_max(clip), d.clamp_min(-clip))
    mean = sequence_logprob(d, mask, average=True)
    return -advantages * torch.exp(mean.clamp_max(most(mean.dtype)))


def kl_k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Unbiased sampled estimate of KL(policy‖reference); its mean gradient is zero, so put it in the reward.

        penalty = p - ref_logprob

    Reads `logprob`. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html, 2020.
    """
    same_shape(logprob, ref_logprob=ref_logprob)
    return gap(logprob, ref_logprob)


def kl_k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Sampled estimate whose mean gradient, on tokens of the policy, is that of KL(policy‖reference).

        penalty = (p - ref_logprob) ** 2 / 2

    Reads `logprob`. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html, 2020.
    """
    same_shape(logprob, ref_logprob=ref_logprob)
    return 0.5 * gap(logprob, ref_logprob).square()


def kl_k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Unbiased, never negative sampled estimate of KL(policy‖reference), with KL(reference‖policy)'s mean gradient.

        d = ref_logprob - p
        penalty = d.exp() - 1 - d

    Reads `logprob`; keeps its digits when policy and reference nearly agree. `kl_k2` and `kl_exact` have the gradient
    of KL(policy‖reference) itself.
    Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html, 2020.
    """
    same_shape(logprob, ref_logprob=ref_logprob)
    return expm1_minus(gap(ref_logprob, logprob).clamp_max(most(logprob.dtype)))


def kl_exact(kl: Tensor, beta: float = 0.04) -> Tensor:
    """The whole KL(policy‖reference) of each token's distribution: no sampling noise, the right gradient.

        logp, logq = z.log_softmax(-1), z_ref.log_softmax(-1)
        penalty = beta * (logp.exp() * (logp - logq)).sum(-1)

    Reads `kl`, so the pass needs `reference=`. Ouyang et al., "Training language models to follow
    instructions with human feedback", arXiv:2203.02155, for the penalty.
    """
    return beta * kl


def entropy_bonus(entropy: Tensor, weight: float = 0.01) -> Tensor:
    """Reward for staying undecided: add it to a policy loss.

        logp = z.log_softmax(-1)
        loss = weight * (logp.exp() * logp).sum(-1)

    Reads `entropy`. Mnih et al., "Asynchronous Methods for Deep Reinforcement Learning", arXiv:1602.01783.
    """
    return -weight * entropy


def group_advantages(
    rewards: Tensor,  # (groups, completions of one prompt)
    scale: bool = True,
    epsilon: float = 1e-4,
) -> Tensor:
    """Rewards relative to the other completions of their prompt.

        advantages = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + epsilon)

    Returns the shape of `rewards`, fp32 for whole numbers. `scale=False` leaves out the division (Dr. GRPO). A group
    of one has no spread and gets zeros. Shao et al., "DeepSeekMath", arXiv:2402.03300.
    """
    rewards = rewards if rewards.is_floating_point() else rewards.float()
    centred = rewards - rewards.mean(-1, keepdim=True)
    if not scale or rewards.shape[-1] < 2:
        return centred
    return centred / (rewards.std(-1, keepdim=True) + epsilon)


def token_weights(
    mask: Tensor,  # (B, T), true where a token counts
    scheme: Literal["sequence", "token", "constant"],
    length: int | None = None,
) -> Tensor:
    """Weights (B, T) with which `(weights * loss).sum()` is the batch's loss.

        sequence (GRPO)      ((loss * mask).sum(-1) / mask.sum(-1)).mean()
        token (DAPO)         (loss * mask).sum() / mask.sum()
        constant (Dr. GRPO)  (loss * mask).sum() / (B * length)

    fp32, or fp64 for an fp64 mask. Pass them to `token_loss` in `inputs`, multiply, and reduce with "sum": there a
    loss sees no ignored token. A loss on a whole batch, written on `token_stats`, sees them, and a weight of 0 does not
    end a NaN: take `batch_loss`, or `torch.where(mask, loss, 0)` before the weights and `torch.where(mask, x, 0)` of
    whatever may be NaN before the loss. Sequences without tokens count as zero.
    Raises OptionError for an unknown scheme, or for "constant" without a length. Shao et al., "DeepSeekMath",
    arXiv:2402.03300; Yu et al., "DAPO", arXiv:2503.14476; Liu et al., "Understanding R1-Zero-Like Training",
    arXiv:2503.20783.
    """
    valid = mask.to(mask.dtype if mask.dtype == torch.float64 else torch.float32)
    if scheme == "sequence":
        return valid / valid.sum(-1, keepdim=True).clamp_min(1.0) / max(1, mask.shape[0])
    if scheme == "token":
        return valid / valid.sum().clamp_min(1.0)
    if scheme != "constant":
        raise OptionError(f"scheme must be 'sequence', 'token' or 'constant', got {scheme!r}")
    if length is None or length < 1:
        raise OptionError(f"scheme 'constant' needs length, the longest response allowed, got {length}")
    return valid / (max(1, mask.shape[0]) * length)


def batch_loss(
    loss: Tensor,  # (B, T)
    mask: Tensor,  # (B, T), true where a token counts
    scheme: Literal["sequence", "token", "constant"],
    length: int | None = None,
) -> Tensor:
    """The batch's loss from one loss per token, under `token_weights`; what lies under the mask does not matter.

        loss = (token_weights(mask, scheme, length) * torch.where(mask, loss, 0)).sum()

    Returns (). Papers and errors: `token_weights`.
    """
    same_shape(loss, mask=mask)
    counted = torch.where(mask.bool(), loss, torch.zeros_like(loss))
    return (token_weights(mask.bool().to(loss.dtype), scheme, length).to(loss.dtype) * counted).sum()


def _check_of_responses(advantages: Tensor, logprob: Tensor) -> None:
    expected = logprob.shape[:-1]
    if advantages.shape not in (expected, ()):
        raise ShapeError(
            f"advantages must have one number per response, {tuple(expected)}, got {tuple(advantages.shape)}: "
            "give each response's own, not expanded to its tokens"
        )


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise OptionError(f"clip_low must be in [0, 1] and clip_high at least 0, got {clip_low} and {clip_high}")
