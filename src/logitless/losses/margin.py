"""Margins at the label: its logit, a scaled cosine, is edited before the softmax. One number per token, (...).

Both losses read the numbers of a head whose rows, like the hidden states, have norm 1:

    head = ll.LMHead(F.normalize(weight, dim=-1), scale=scale)
    ll.token_loss(lambda s: cosface(s.logprob, scale), F.normalize(hidden, dim=-1), head, labels)

The others' logits stay as they are, so that what the pass knows of the label suffices to put another in its place.
"""

import math
import sys
from numbers import Real

import torch
from torch import Tensor

from ..errors import OptionError
from ._numbers import log1mexp, same_shape


def cosface(logprob: Tensor, scale: float = 64.0, margin: float = 0.35) -> Tensor:
    """Cross-entropy with the cosine at the label less by `margin`.

        cosine = F.normalize(hidden, dim=-1) @ F.normalize(weight, dim=-1).T
        z = scale * (cosine - margin * F.one_hot(labels, len(weight)))
        loss = F.cross_entropy(z, labels, reduction="none")

    Reads `logprob`, of the logits scale · cosine. Raises OptionError for a scale or a margin that cannot be, and where
    scale · margin passes 71 in fp32: of a label that is ahead by more `logprob` is 0.
    Wang et al., "CosFace: Large Margin Cosine Loss for Deep Face Recognition", arXiv:1801.09414.
    """
    _check(scale, margin, math.inf)
    _check_move(logprob.dtype, scale, margin)
    return _with_label_moved(logprob, -scale * margin)


def arcface(logprob: Tensor, label_logit: Tensor, scale: float = 64.0, margin: float = 0.5) -> Tensor:
    """Cross-entropy with the angle at the label more by `margin` radians.

        cosine = F.normalize(hidden, dim=-1) @ F.normalize(weight, dim=-1).T
        at_label = F.one_hot(labels, len(weight)).bool()
        z = scale * torch.where(at_label, (cosine.acos() + margin).cos(), cosine)
        loss = F.cross_entropy(z, labels, reduction="none")

    Reads `logprob` and `label_logit`, of the logits scale · cosine. As in the paper, the edited logit rises again where
    the angle is within `margin` of a half turn. The gradient of the angle's sine, infinite at an angle of 0, is left
    out where the cosine is within rounding of 1 or -1. Raises ShapeError, and OptionError as `cosface`, for an edit by
    up to scale · 2 sin(margin / 2).
    Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", arXiv:1801.07698.
    """
    _check(scale, margin, math.pi)
    _check_move(logprob.dtype, scale, 2 * math.sin(margin / 2))
    same_shape(logprob, label_logit=label_logit)
    cosine = label_logit / scale
    sine = ((1 - cosine) * (1 + cosine)).clamp_min(torch.finfo(cosine.dtype).eps).sqrt()
    # cos(θ + m) - cos θ, of which the first part is cos θ · (cos m - 1)
    moved = -2 * math.sin(margin / 2) ** 2 * cosine - math.sin(margin) * sine
    return _with_label_moved(logprob, scale * moved)


def _with_label_moved(logprob: Tensor, by: Tensor | float) -> Tensor:
    """The label's negative log-likelihood after its own logit alone is changed: right where it has all but no loss."""
    others = log1mexp(logprob) - logprob  # their log-sum-exp, less the label's logit
    gap = others - by
    return torch.logaddexp(gap, torch.zeros_like(gap))


def _check(scale: float, margin: float, most: float) -> None:
    if not isinstance(scale, Real) or not 0.0 < scale <= sys.float_info.max:
        raise OptionError(f"scale must be a positive number, the one of the head, got {scale!r}")
    if not isinstance(margin, Real) or not 0.0 <= margin <= min(most, sys.float_info.max):
        limit = "a number of at least 0" if math.isinf(most) else "a number, an angle in [0, pi]"
        raise OptionError(f"margin must be {limit}, got {margin!r}")


def _check_move(dtype: torch.dtype, scale: float, most: float) -> None:
    """Refuse an edit that lets others count whose log-sum-exp is further below the label's logit than logprob tells."""
    info = torch.finfo(dtype)
    limit = math.log(info.eps / info.tiny)
    if scale * most > limit:
        got = f"scale={scale:g} and a margin that lower it by up to {scale * most:.4g}"
        raise OptionError(f"margin: expected the label's logit at most {limit:.4g} lower, in {dtype}, got {got}")
