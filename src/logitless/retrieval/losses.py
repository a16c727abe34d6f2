"""Losses of learned sparse retrieval: how often entries are used, and how documents rank.

Q queries, B documents, V vocabulary entries; weights are those of `splade_activation`, which are not negative.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..algebra.options import is_number
from ..errors import DtypeError, LabelError, OptionError, ShapeError
from ..vocab.face import dtype_of, of_integers
from .sparse import SparseRows, check_rows

IGNORED = -100  # torch's mark of a label that does not count


def flops(weights: Tensor | SparseRows) -> Tensor:
    """How many products a score takes on average, smoothed: what makes documents sparse, evenly over the vocabulary.

        loss = weights.mean(0).square().sum()

    weights: (B, V), dense or `SparseRows`, else ShapeError. Paria et al., "Minimizing FLOPs to Learn Efficient Sparse
    Representations", arXiv 2004.05665; in SPLADE: arXiv 2107.05720.
    """
    check_rows("weights", weights)
    if isinstance(weights, Tensor):
        return (weights.mean(0) if len(weights) else weights.sum(0)).square().sum()  # of no document 0, as below
    sums = weights.values.new_zeros(weights.size).index_add(0, weights.ids, weights.values)
    return (sums / max(len(weights), 1)).square().sum()


def in_batch_loss(scores: Tensor, positives: Tensor | None = None, temperature: float = 1.0) -> Tensor:
    """Cross-entropy of each query's own document against all others of the batch.

        loss = F.cross_entropy(scores / temperature, positives)

    scores: (Q, B), B ≥ Q; positives: (Q,), each query's document, the first Q in their order unless given, -100 for a
    query that does not count; further documents are hard negatives. 0 of no query. Raises ShapeError, DtypeError,
    LabelError, OptionError. Karpukhin et al., arXiv 2004.04906; in SPLADE v2: arXiv 2109.10086.
    """
    if scores.dim() != 2 or (positives is None and scores.shape[0] > scores.shape[1]):
        raise ShapeError(f"scores: expected (queries, documents), a document for each query, got {tuple(scores.shape)}")
    number = is_number(temperature) or (isinstance(temperature, Tensor) and temperature.numel() == 1)
    if not number or not 0 < temperature < math.inf:
        raise OptionError(f"temperature: expected a positive number, got {temperature!r}")
    if positives is None:
        positives = torch.arange(scores.shape[0], device=scores.device)
    else:
        positives = _checked(positives, *scores.shape)
    losses = F.cross_entropy(scores / temperature, positives, reduction="none")
    return (losses / (positives != IGNORED).sum().clamp(min=1)).sum()


def _checked(positives: Tensor, queries: int, documents: int) -> Tensor:
    if not of_integers(positives):
        raise DtypeError(f"positives: expected a tensor of integers, got {dtype_of(positives)}")
    if positives.shape != (queries,):
        got = f"({queries},), got {tuple(positives.shape)}"
        raise ShapeError(f"positives: expected a document for each query, {got}; a query without one has {IGNORED}")
    positives = positives.long()
    if torch.compiler.is_compiling():
        return positives  # a graph looks at no values
    wrong = positives[((positives < 0) | (positives >= documents)) & (positives != IGNORED)]
    if wrong.numel():
        raise LabelError(
            f"positives: expected documents in 0..{documents - 1}, got {int(wrong[0])}; count them in the batch"
        )
    return positives


def margin_mse(positive: Tensor, negative: Tensor, teacher_positive: Tensor, teacher_negative: Tensor) -> Tensor:
    """The teacher's margin between a query's two documents, learnt by its size.

        loss = ((positive - negative) - (teacher_positive - teacher_negative)).square().mean()

    All of one shape, else ShapeError; 0 of no query. Hofstätter et al., arXiv 2010.02666; in SPLADE v2 and v3:
    arXiv 2109.10086, 2403.06789.
    """
    shapes = {tuple(x.shape) for x in (positive, negative, teacher_positive, teacher_negative)}
    if len(shapes) > 1:
        raise ShapeError(f"margin_mse: expected four tensors of one shape, got {sorted(shapes)}")
    losses = F.mse_loss(positive - negative, teacher_positive - teacher_negative, reduction="none")
    return losses.mean() if losses.numel() else losses.sum()  # of none 0, with a graph


def distillation_kl(scores: Tensor, teacher_scores: Tensor) -> Tensor:
    """KL(teacher‖student) of each query's distribution over its documents, mean over queries.

        t, s = teacher_scores.log_softmax(-1), scores.log_softmax(-1)
        loss = (t.exp() * (t - s)).sum(-1).mean()

    scores, teacher_scores: (Q, K), -inf in both past the documents of a query that has fewer; a query that has none
    does not count. 0 of no query. Raises ShapeError. Lassance et al., "SPLADE-v3", arXiv 2403.06789.
    """
    if scores.shape != teacher_scores.shape:
        got = f"{tuple(scores.shape)} and {tuple(teacher_scores.shape)}"
        raise ShapeError(f"distillation_kl: expected scores of one shape, got {got}")
    none = ((scores == -math.inf) & (teacher_scores == -math.inf)).all(-1, keepdim=True)
    s, t = (x.masked_fill(none, 0.0).log_softmax(-1) for x in (scores, teacher_scores))
    terms = F.kl_div(s, t, reduction="none", log_target=True).masked_fill((t == -math.inf) | none, 0.0)
    return (terms.sum(-1) / (~none).sum().clamp(min=1)).sum()
