"""The dense float64 oracle, from whole logits: what tests and `logitless verify` hold the pass against."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .head.quantised import plain

if TYPE_CHECKING:
    from .call.sampling_mask import SamplingMask
    from .head.lm_head import LMHead


def dense_logits(
    hidden: Tensor,  # (..., H)
    head: "LMHead",
    temperature: float | Tensor = 1.0,  # a number, or broadcastable to (...)
) -> Tensor:  # (..., V) float64
    """Whole logits in float64; the rows of a padded head beyond `vocab_size` do not exist."""
    z = hidden.double() @ plain(head.weight[: head.vocab_size]).double().T
    if head.bias is not None:
        z = z + head.bias[: head.vocab_size].double()
    for x in head.adapters:
        low = torch.nn.functional.dropout(hidden.double(), x.dropout) @ x.a.double().T
        z = z + x.scaling * low @ x.b[: head.vocab_size].double().T
    z = z * head.scale
    if head.softcap is not None:
        z = head.softcap * torch.tanh(z / head.softcap)
    return z / (temperature.detach().double()[..., None] if isinstance(temperature, Tensor) else temperature)


def _log_softmax(z: Tensor) -> Tensor:
    """log p, to full relative accuracy for the largest too: float64 alone would lose it 37 nats above the rest."""
    top = z.argmax(-1, keepdim=True)
    gap = (z - z.gather(-1, top)).scatter(-1, top, 0.0)  # a constant 0 at the top: nothing to cancel
    return gap - gap.exp().scatter(-1, top, 0.0).sum(-1, keepdim=True).log1p()


class _Rows(NamedTuple):
    """The rows that are not ignored, as logits and their softmaxes."""

    z: Tensor  # (n, V), -inf outside of a sampling mask
    labels: Tensor | None  # (n,)
    logp: Tensor  # (n, V)
    logq: Tensor | None  # the reference's, a constant
    beta: float
    kept: Tensor | None = None  # (n, V), the sampling mask
    candidates: Tensor | None = None  # (n, K)

    @property
    def size(self) -> Tensor:
        """How many entries the statistics of each row are over, (n,)."""
        whole = self.z.new_full(self.z.shape[:1], self.z.shape[1])
        return whole if self.kept is None else self.kept.sum(-1).double()

    @property
    def mean(self) -> Tensor:
        z = self.z if self.kept is None else self.z.masked_fill(~self.kept, 0.0)
        return z.sum(-1) / self.size

    def at_label(self, x: Tensor) -> Tensor:
        if self.labels is None:
            raise ValueError("this statistic needs labels")
        return x.gather(-1, self.labels[:, None])[:, 0]

    @property
    def log_reference(self) -> Tensor:
        if self.logq is None:
            raise ValueError("this statistic needs a reference")
        return self.logq


def _tail(rows: _Rows) -> Tensor:
    if rows.candidates is None:
        raise ValueError("this statistic needs candidates")
    return rows.logp.scatter(-1, rows.candidates, -math.inf).logsumexp(-1)


def _el2n(rows: _Rows) -> Tensor:
    """Of p less one-hot at the label, which is log p's expm1 there."""
    if rows.labels is None:
        raise ValueError("this statistic needs labels")
    at_label = torch.expm1(rows.at_label(rows.logp))
    return rows.logp.exp().scatter(-1, rows.labels[:, None], at_label[:, None]).norm(dim=-1)


def _mean_under(p: Tensor, x: Tensor) -> Tensor:
    """Σ p·x where 0·(±inf) is 0, in the gradient too."""
    return (p * x.masked_fill(p == 0, 0.0)).sum(-1)


def _divergence(log_from: Tensor, log_to: Tensor) -> Tensor:
    return _mean_under(log_from.exp(), log_from - log_to)


def _of_mixture(rows: _Rows) -> tuple[Tensor, Tensor]:
    """KL(policy || M) and KL(reference || M)."""
    logp, logq, b = rows.logp, rows.log_reference, rows.beta
    mixture = (1 - b) * logp.exp() + b * logq.exp()
    log_m = mixture.masked_fill(mixture == 0, 1.0).log()
    return _divergence(logp, log_m), _divergence(logq, log_m)


def _jsd(rows: _Rows) -> Tensor:
    of_policy, of_reference = _of_mixture(rows)
    return (1 - rows.beta) * of_policy + rows.beta * of_reference


_FORMULAS: dict[str, Callable[[_Rows], Tensor]] = {
    "logprob": lambda r: r.at_label(r.logp),
    "logsumexp": lambda r: r.z.logsumexp(-1),
    "label_logit": lambda r: r.at_label(r.z),
    "entropy": lambda r: -_mean_under(r.logp.exp(), r.logp),
    "self_certainty": lambda r: r.z.logsumexp(-1) - r.mean - r.size.log(),
    "mean_logit": lambda r: r.mean,
    "max_logit": lambda r: r.z.max(-1).values,
    "rank": lambda r: 1 + (r.z > r.at_label(r.z)[:, None]).sum(-1),
    "sum_sq_prob": lambda r: r.logp.exp().square().sum(-1),
    "el2n": _el2n,
    "kl": lambda r: _divergence(r.logp, r.log_reference),
    "reverse_kl": lambda r: _divergence(r.log_reference, r.logp),
    "reverse_kl_shared": lambda r: _divergence(r.log_reference, r.logp),  # both heads have the same rows here
    "jsd": _jsd,
    "kl_mixture": lambda r: _of_mixture(r)[0],
    "reverse_kl_mixture": lambda r: _of_mixture(r)[1],
    "acceptance": lambda r: torch.minimum(r.logp.exp(), r.log_reference.exp()).sum(-1),
    "total_variation": lambda r: (r.logp.exp() - r.log_reference.exp()).abs().sum(-1) / 2,
    "tail_logprob": _tail,
}


def _kept(mask: "SamplingMask", rows: int) -> Tensor:  # (N, V)
    kept = torch.zeros(len(mask), rows, dtype=torch.bool, device=mask.token_ids.device)
    kept[mask.tokens, mask.token_ids] = True
    return kept


def _over(kept: Tensor | None, z: Tensor) -> Tensor:
    return z if kept is None else z.masked_fill(~kept, -math.inf)


def _select(x: float | Tensor, keep: Tensor) -> float | Tensor:
    return x.expand(keep.shape)[keep] if isinstance(x, Tensor) else x


def _spread(kept: Tensor, keep: Tensor, fill: float = 0) -> Tensor:
    """Rows back among the ignored ones, which hold `fill`."""
    out = kept.new_full((*keep.shape, *kept.shape[1:]), fill)
    out[keep] = kept
    return out


def dense_token_stats(
    hidden: Tensor,  # (..., H)
    head: "LMHead",
    labels: Tensor | None = None,  # (...)
    *,
    want: Sequence[str] = ("logprob",),
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    top_k: int = 0,
    candidates: Tensor | None = None,  # (..., K)
    sampling_mask: "SamplingMask | None" = None,
    reference: "tuple[Tensor, LMHead] | None" = None,
    jsd_beta: float = 0.5,
) -> dict[str, Tensor]:
    """Every statistic of `token_stats` by name, float64, differentiable; ignored tokens hold 0 (ids -1)."""
    everything = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device)
    keep = everything if labels is None else labels != ignore_index
    temperature = _select(temperature, keep)
    kept = None if sampling_mask is None else _kept(sampling_mask, head.rows)[keep.flatten()]
    z = _over(kept, dense_logits(hidden[keep], head, temperature))
    logq = None
    if reference is not None:
        logq = _log_softmax(_over(kept, dense_logits(reference[0][keep], reference[1], temperature))).detach()
    ids = None if candidates is None else candidates[keep]
    rows = _Rows(z, None if labels is None else labels[keep], _log_softmax(z), logq, jsd_beta, kept, ids)
    stats = {name: _spread(_FORMULAS[name](rows), keep) for name in want}
    if top_k:
        best = z.topk(top_k)
        stats["top_k_ids"] = _spread(best.indices, keep, fill=-1)
        stats["top_k_logits"] = _spread(best.values, keep)
    if ids is not None:
        stats["candidate_logits"] = _spread(z.gather(-1, ids), keep)
    return stats


def dense_cross_entropy(
    hidden: Tensor,  # (..., H)
    head: "LMHead",
    labels: Tensor,  # (...)
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    denominator: float | Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """`linear_cross_entropy` from whole logits in float64; a mean over no token is 0 with a live graph."""
    keep = labels != ignore_index
    z = dense_logits(hidden[keep], head, _select(temperature, keep))
    logp = _log_softmax(z)
    loss = -(1 - label_smoothing) * logp.gather(-1, labels[keep][:, None])[:, 0]
    if label_smoothing:
        loss = loss - label_smoothing * logp.mean(-1)
    if z_loss:
        loss = loss + z_loss * z.logsumexp(-1).square()
    if reduction == "none":
        return _spread(loss, keep)
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / (keep.sum().clamp_min(1) if denominator is None else denominator)
