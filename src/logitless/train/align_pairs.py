"""Preference pairs from text: what really follows is preferred to what the model itself goes on with."""

from __future__ import annotations

from typing import Any

import torch

from .align_config import AlignConfig
from .align_data import Row
from .tokenizer import TextTokenizer

MOST_PAIRS = 128  # a sample of the model for each; a longer run sees them again


@torch.no_grad()
def with_rejected(rows: list[Row], model: Any, tokenizer: TextTokenizer, config: AlignConfig) -> list[Row]:
    """Rows with `chosen`, the real continuation, and `rejected`, a sample of the model's own (Chen et al.,
    arXiv 2401.01335); rows that have both already stay as they are.
    """
    torch.manual_seed(config.seed)
    was_training = model.training
    model.eval()
    pairs: list[Row] = []
    for begin in range(0, len(rows), config.batch_size):
        part = rows[begin : begin + config.batch_size]
        if "chosen" in part[0]:
            pairs += part
            continue
        samples = _samples([row["prompt"] for row in part], model, tokenizer, config)
        for row, sample in zip(part, samples, strict=True):
            if sample.strip():
                pairs.append({"prompt": row["prompt"], "chosen": row["continuation"], "rejected": sample})
    model.train(was_training)
    return pairs


def _samples(prompts: list[str], model: Any, tokenizer: TextTokenizer, config: AlignConfig) -> list[str]:
    """One sampled continuation of each prompt."""
    padding = model.generation_config.pad_token_id
    ids = tokenizer.encode(prompts)
    longest = max(map(len, ids))
    left = torch.tensor([[padding] * (longest - len(x)) + x for x in ids], device=model.device)
    mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in ids], device=model.device)
    made = model.generate(
        input_ids=left, attention_mask=mask, do_sample=True, temperature=config.temperature, top_k=0,
        max_new_tokens=config.completion_length, min_new_tokens=1,
    )  # fmt: skip
    return tokenizer.saved.batch_decode(made[:, longest:], skip_special_tokens=True)
