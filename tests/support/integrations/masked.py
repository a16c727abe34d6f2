"""Tiny random masked language models, one of each kind of head, with a batch of which few tokens are labelled."""

from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from .tiny import Tiny

WIDTH = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODERN = {**WIDTH, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
SPARSE = {"sparse_prediction": True, "sparse_pred_ignore_index": -7}
DISTIL = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
MASKED = {
    "bert": Tiny(t.BertForMaskedLM, t.BertConfig, NO_DROPOUT, WIDTH),
    "bert-untied": Tiny(t.BertForMaskedLM, t.BertConfig, {**NO_DROPOUT, "tie_word_embeddings": False}, WIDTH),
    "modernbert": Tiny(t.ModernBertForMaskedLM, t.ModernBertConfig, {}, MODERN),
    "modernbert-sparse": Tiny(t.ModernBertForMaskedLM, t.ModernBertConfig, SPARSE, MODERN),
    "xlm-roberta": Tiny(t.XLMRobertaForMaskedLM, t.XLMRobertaConfig, NO_DROPOUT, WIDTH),
    "distilbert": Tiny(t.DistilBertForMaskedLM, t.DistilBertConfig, DISTIL, {"pad_token_id": 0}),
    "electra": Tiny(t.ElectraForMaskedLM, t.ElectraConfig, {**NO_DROPOUT, "embedding_size": 12}, WIDTH),
}


def masked_batch(name: str, vocab: int = 97, rows: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Ids with padding on the right; every fifth token or so is labelled."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(8, vocab, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    labelled = (torch.rand(ids.shape, generator=generator) < 0.2) & (mask == 1)
    labels = torch.randint(8, vocab, ids.shape, generator=generator).masked_fill(~labelled, -100)
    if name == "modernbert-sparse":
        labels[:, ::2] = labels[:, ::2].masked_fill(~labelled[:, ::2], -7)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def dense_masked_loss(
    logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> Tensor:
    """transformers' ForMaskedLMLoss without its rounding to float32."""
    labels = labels.reshape(-1)
    total = nn.functional.cross_entropy(logits.reshape(-1, vocab_size), labels, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
