"""What a head does to training, seen token by token: how much of the logits' gradient reaches the hidden states."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .vocab.face import LMHead, token_stats


def gradient_share(
    hidden: Tensor,  # (..., H)
    head: LMHead,
    labels: Tensor,  # (...)
    *,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    memory_budget: int | None = None,
    backend: str | None = None,
) -> Tensor:  # (...)
    """The norm of the hidden state's gradient over that of the logits' gradient, of each token's cross-entropy.

    Dense equivalent:

        z = softcap(scale * F.linear(hidden, weight, bias)) / temperature  # and the head's adapters
        g = z.softmax(-1) - F.one_hot(labels, V)  # the gradient of cross-entropy with respect to z
        (reached,) = torch.autograd.grad(z, hidden, g)  # g @ weight, for a plain head
        share = reached.norm(dim=-1) / g.norm(dim=-1)

    g is that of the final logits, which the loss sees; a scale, softcap, temperature or adapter is part of the way back
    from there. A head of orthonormal columns has a share of at most 1; in general it is at most the largest singular
    value of ∂z/∂hidden, by which shares of two heads compare. The norm of g, the statistic `el2n`, is summed apart from
    the label, so that a sure token's share keeps its digits; NaN where g is 0 or underflows, 0 where ignored.
    Returns fp32 (fp64 for fp64 inputs), without gradient. Price: 2 products. Raises what `token_stats` raises.
    Memory: slices within the budget, two (N, H).
    Godey and Artzi, "Lost in Backpropagation: The LM Head is a Gradient Bottleneck", arXiv 2603.10145.
    """
    with torch.inference_mode(False), torch.enable_grad():
        rows = hidden.clone() if hidden.is_inference() else hidden.detach()
        stats = token_stats(
            rows.requires_grad_(),
            _frozen(head),
            labels,
            want=("logprob", "el2n"),
            temperature=temperature,
            ignore_index=ignore_index,
            memory_budget=memory_budget,
            backend=backend,
        )
        norm, counts = stats.el2n, labels.long() != ignore_index  # in which it wraps around in no narrow dtype
        possible = torch.where(norm < torch.finfo(norm.dtype).tiny, torch.nan, norm)
        # divided before the product, which half precision would not hold where the norm is small
        (reached,) = torch.autograd.grad(stats.logprob, rows, torch.where(counts, 1 / possible, 0.0))
    return torch.linalg.vector_norm(reached, dim=-1, dtype=norm.dtype)


def _frozen(head: LMHead) -> LMHead:
    """The head as a constant, whose gradient leaves nothing out."""
    weight = head.weight.detach() if isinstance(head.weight, Tensor) else head.weight
    bias = None if head.bias is None else head.bias.detach()
    adapters = tuple(replace(x, a=x.a.detach(), b=x.b.detach()) for x in head.adapters)
    return replace(head, weight=weight, bias=bias, adapters=adapters, sparse=None)
