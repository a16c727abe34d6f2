"""Learned sparse retrieval (SPLADE): a max over tokens of a head's logits without the logits, and losses on it.

pooled = retrieval.max_pool_logits(hidden, head, mask)
documents = retrieval.splade_activation(pooled.values)
loss = retrieval.in_batch_loss(retrieval.scores(queries, documents)) + 3e-4 * retrieval.flops(documents)
"""

from .losses import distillation_kl, flops, in_batch_loss, margin_mse
from .pooling import MaxPooled, max_pool_logits, splade_activation
from .sparse import SparseRows, scores

__all__ = [
    "MaxPooled",
    "SparseRows",
    "distillation_kl",
    "flops",
    "in_batch_loss",
    "margin_mse",
    "max_pool_logits",
    "scores",
    "splade_activation",
]
