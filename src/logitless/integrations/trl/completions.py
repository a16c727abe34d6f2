"""Completions behind their prompts as a batch, and which position scores which token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...errors import LabelError, ShapeError
from ...models.positions import reach
from ..transformers.lm_head import causal_lm

Ids = Sequence[int]


@dataclass(frozen=True)
class Row:
    """One completion behind its prompt, and which of its tokens count."""

    prompt: list[int]
    completion: list[int]
    valid: list[bool]


def rows_of(prompts: Sequence[Ids], completions: Sequence[Ids], masks: Sequence[Sequence[int]] | None) -> list[Row]:
    """The rows to score. Raises ShapeError for lists that do not fit together, and where there is nothing to score."""
    if not len(completions):
        raise ShapeError("self-certainty needs at least one completion, got none")
    if len(prompts) != len(completions) or (masks is not None and len(masks) != len(completions)):
        got = f"{len(prompts)} prompts" if len(prompts) != len(completions) else f"{len(masks or ())} masks"
        raise ShapeError(f"expected one prompt (and mask) per completion, got {len(completions)} completions and {got}")
    rows = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = [int(x) for x in completion]
        valid = [True] * len(ids) if masks is None else [bool(x) for x in masks[i]]
        if not ids:
            raise ShapeError(f"completion {i} is empty: expected at least one token; generate with min_new_tokens=1")
        if not len(prompt):
            raise ShapeError(
                f"prompt {i} is empty: nothing comes before its completion's first token; add a start token"
            )
        if len(valid) != len(ids):
            raise ShapeError(f"completion {i} has {len(ids)} tokens, its mask {len(valid)}: expected one per token")
        if not any(valid):
            raise ShapeError(f"completion {i}: its mask leaves none of {len(ids)} tokens to score; drop the completion")
        rows.append(Row([int(x) for x in prompt], ids, valid))
    return rows


def check_rows(rows: list[Row], model: nn.Module) -> None:
    """ShapeError for a row longer than the model's positions, LabelError for an id without an embedding."""
    config = causal_lm(model).config
    longest, vocab = reach(config), config.get_text_config().vocab_size
    for i, row in enumerate(rows):
        length = len(row.prompt) + len(row.completion)
        if longest is not None and length > longest:
            raise ShapeError(
                f"completion {i}: {len(row.prompt)} prompt and {len(row.completion)} completion tokens exceed the "
                f"model's context of {longest}; lower max_completion_length or shorten the prompt"
            )
        low, high = min(row.prompt + row.completion), max(row.prompt + row.completion)
        if low < 0 or high >= vocab:
            raise LabelError(f"completion {i}: token ids must be in [0, {vocab}), got {low if low < 0 else high}")


def batch_of(rows: list[Row], device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """(model inputs (B, T), and for each valid token its row and the position before it, (n,) each).

    Padded on the right, where positions count from each row's first token with any model.
    """
    sequences = [row.prompt + row.completion for row in rows]
    longest = max(map(len, sequences))
    ids = torch.tensor([x + [0] * (longest - len(x)) for x in sequences], device=device)
    mask = torch.tensor([[1] * len(x) + [0] * (longest - len(x)) for x in sequences], device=device)
    scored = [
        (r, len(row.prompt) - 1 + t) for r, row in enumerate(rows) for t, counts in enumerate(row.valid) if counts
    ]
    at, before = torch.tensor(scored, device=device).T
    return {"input_ids": ids, "attention_mask": mask}, at, before
