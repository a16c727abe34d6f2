"""Scoring existing text: a record of the distribution that each token is the outcome of, never its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...algebra.options import whole_within
from ...errors import ConfigError, DeviceError, ShapeError
from ...models.instances import sees_ahead
from ...sample import SampleRecord
from ...vocab.face import LMHead, TokenStats, of_integers, token_stats
from .inputs import check_by_name
from .lm_head import causal_lm, evaluating, forward_with, head_of, through_head
from .masked import is_masked

WANT = ("logprob", "label_logit", "rank", "logsumexp", "mean_logit", "entropy", "self_certainty")


def score(
    model: nn.Module, inputs: Mapping[str, Any], *, keep: int = 10, memory_budget: int | None = None
) -> SampleRecord:
    """What a transformers model makes of existing text: each token scored by the position before it.

    Dense equivalent:

        logp = model(**inputs).logits[:, :-1].log_softmax(-1)
        logprob = logp.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]  # of tokens 1, 2, ...

    inputs: the text by name, as a tokenizer returns it: input_ids (B, T), attention_mask where it is padded, on
    either side. keep: the best entries of each distribution that the record holds. The model is in eval mode
    meanwhile; it may be wrapped or sharded. No gradient.
    Returns a SampleRecord (B, T) whose tokens are input_ids, drawn at temperature 1, as it were. A row's first token
    and padding are -1: nothing comes before them; put a begin-of-text token in front to score a first token.
    Raises DtypeError, ShapeError, DeviceError, LabelError, OptionError, ConfigError. Price: the body and one GEMM.
    Memory: the body's own, slices within the budget (256 MiB unless given, up to 1 GiB on a GPU), and 40 + 8·keep bytes
    per token.
    """
    ids, mask = _checked(inputs)
    # To the right: positions then count from each row's first token, and padding sees text rather than nothing.
    source = (torch.arange(ids.shape[1], device=ids.device) + mask.int().argmax(1, keepdim=True)) % ids.shape[1]
    alike = {k for k, x in inputs.items() if isinstance(x, Tensor) and x.shape == ids.shape}
    batch = {k: x.gather(1, source) if k in alike else x for k, x in inputs.items()}
    real = mask.gather(1, source)
    row, before = (real[:, 1:] & real[:, :-1]).nonzero(as_tuple=True)
    labels = batch["input_ids"][row, before + 1]
    stats, size = token_scores(model, batch, (row, before), labels, keep=keep, memory_budget=memory_budget)
    return _record(ids, (row, source[row, before + 1]), stats, size)


def token_scores(
    model: nn.Module,
    batch: dict[str, Any],
    at: tuple[Tensor, Tensor],  # (n,) rows, (n,) positions
    labels: Tensor,  # (n,)
    *,
    keep: int,
    memory_budget: int | None,
    want: tuple[str, ...] = WANT,
    reference: tuple[Tensor, LMHead] | None = None,
    look: Callable[[Tensor], None] | None = None,
) -> tuple[TokenStats, int]:
    """The statistics of the distributions at some positions of a batch, (n,) each, and the vocabulary's size.

    reference: as `head_inputs` gives them of another model. look: gets the hidden states (n, H) that the head gets.
    """
    _check_causal(causal_lm(model))
    size = 0

    def read(head: LMHead, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        nonlocal size
        size = head.rows
        if look is not None:
            look(hidden)
        best = whole_within("keep", keep, 0, size)
        options = {"want": want, "top_k": best, "reference": reference, "memory_budget": memory_budget}
        return vars(token_stats(hidden, head, labels, **options))

    with torch.no_grad(), evaluating(model):
        found = forward_with(model, batch, lambda inner, h: through_head(inner, read, h[at], labels))
    return TokenStats(found), size


def head_inputs(model: nn.Module, batch: dict[str, Any], at: tuple[Tensor, Tensor]) -> tuple[Tensor, LMHead]:
    """The hidden states (n, H) at some positions of a batch, and their head, of a model that is not sharded."""
    with torch.no_grad(), evaluating(model):
        return forward_with(model, batch, lambda inner, hidden: (hidden[at], head_of(inner)))


def _check_causal(model: Any) -> None:
    """ConfigError for a model whose tokens see those that they are to predict: it would score the text that it has."""
    if is_masked(model) or sees_ahead(model.config):
        raise ConfigError(
            f"model: expected a causal language model, got {type(model).__name__}, which sees what follows a token; "
            "score text with a model that predicts it"
        )


def _checked(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(ids (B, T), which of them are text (B, T))."""
    check_by_name("inputs", inputs)
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not of_integers(ids) or ids.dim() != 2:
        got = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ShapeError(f"input_ids: expected integer ids of shape (B, T), got {got}; pass return_tensors='pt'")
    if ids.numel() == 0:
        raise ShapeError(f"input_ids: expected texts of at least one token, got shape {tuple(ids.shape)}")
    if mask is None:
        return ids, torch.ones_like(ids, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.shape != ids.shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ShapeError(f"attention_mask: expected input_ids' shape {tuple(ids.shape)}, got {got}")
    if mask.device != ids.device:
        raise DeviceError(f"attention_mask is on {mask.device}, input_ids on {ids.device}; move one of them")
    return ids, mask.bool()


def _record(ids: Tensor, where: tuple[Tensor, Tensor], stats: TokenStats, size: int) -> SampleRecord:
    """The record of `ids` with the scored ones written."""
    z = stats.logsumexp
    keep = stats.top_k_ids.shape[1] if hasattr(stats, "top_k_ids") else 0
    shape = tuple(ids.shape)
    record = SampleRecord.empty(shape, keep=keep, vocab_size=size, dtype=z.dtype, device=z.device)
    none = z.new_zeros(z.shape[0], 0)
    part = SampleRecord(
        token=ids[where].to(z.device, torch.int32),
        token_logit=stats.label_logit,
        rank=stats.rank.int(),
        topk_logits=stats.top_k_logits if keep else none,
        topk_ids=stats.top_k_ids.int() if keep else none.int(),
        logsumexp=z,
        mean_logit=stats.mean_logit,
        entropy=stats.entropy,
        temperature=torch.ones_like(z),
        logsumexp_at_temperature=z,
        log_kept_mass=torch.zeros_like(z),
        n_kept=torch.full_like(z, size, dtype=torch.int32),
        vocab_size=size,
    )
    record.write(tuple(x.to(z.device) for x in where), part)
    return record
