"""Text that is hard to show, as tokens with made-up records; a byte-level tokenizer without merges."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from logitless.sample import SampleRecord
from logitless.sample.shown import to_dict
from tests.support.workbench.micro import micro_directory

HARD = {
    "markup": "if a < b & c > d: '</script><b>\"",
    "half characters": "naïve 中文 ½",
    "emoji": "🙂 👩‍👩‍👧 👍🏽 é",
    "right to left": "say שלום و مرحبا, 12",
    "turned around": "a\u202eb\u2066c\u2028d",
    "control": "x\x1b[31my\x07\x00z\x9b",
    "space": "  a\tb\n\n   c \r\n",
    "ends": "é"[:1] + "</s>",
}


def byte_tokenizer(place: Path) -> Any:
    """Every byte of a text is a token of its own."""
    return AutoTokenizer.from_pretrained(micro_directory(place).parent)


def made_up(ids: list[int], keep: int = 3, vocab_size: int = 259) -> SampleRecord:
    """The record of tokens with probabilities from nearly 1 to nearly 0."""
    z = torch.randn(len(ids), vocab_size, generator=torch.Generator().manual_seed(0))
    z[torch.arange(len(ids)), ids] += torch.linspace(12, -4, len(ids))
    best, logit = z.topk(keep), z.gather(1, torch.tensor(ids)[:, None])
    lse, one = z.logsumexp(1), torch.ones(len(ids))
    return SampleRecord(
        token=torch.tensor(ids).int(), token_logit=logit[:, 0], rank=1 + (z > logit).sum(1).int(),
        topk_logits=best.values, topk_ids=best.indices.int(), logsumexp=lse, mean_logit=z.mean(1),
        entropy=lse - (z.softmax(1) * z).sum(1), temperature=one, logsumexp_at_temperature=lse, log_kept_mass=0 * one,
        n_kept=one.int() * vocab_size, vocab_size=vocab_size,
    )  # fmt: skip


def hard_summary(tokenizer: Any, prompt: str = "<i>prompt\x1b[1m\n") -> dict[str, Any]:
    """What `logitless sample` would tell of the hard texts, had it drawn them."""
    sequences = []
    for name, text in HARD.items():
        ids = tokenizer(text, split_special_tokens=name != "ends")["input_ids"]
        about = to_dict(made_up(ids), tokenizer, tokenizer(prompt)["input_ids"])
        given = {"prompt": prompt, "shown_prompt": "<i>prompt\\x1b[1m\n", "prompt_tokens": 3, "seed": 1}
        sequences.append({**given, "finish": f"ended by {name}", **about})
    return {"schema": 1, "model": "<model>", "options": {"temperature": 0.8, "top_k": 0}, "sequences": sequences}
