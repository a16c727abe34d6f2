"""What a pretrained model makes of text that it has not seen, and of its own: hidden states and the tokens that follow.

Unseen are this project's pages and code, written after the models. Its own are answers that it samples, at temperature
1 and without rules, to the questions that the package carries: what a policy is trained on.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import logitless as ll
from logitless.workbench.demo.run import CHATS
from logitless.workbench.sources.model import load_model, load_tokenizer, resolve
from logitless.workbench.sources.tokenizer import as_chat

ROOT = Path(__file__).parents[2]
FILES = {"prose": ("docs", "*.md"), "code": ("src", "*.py")}
KINDS = (*FILES, "own answers")


@dataclass
class Reading:
    """Hidden states (N, H) in fp32, the token after each (N,), and which of KINDS it is of (N,)."""

    model: Any
    tokenizer: Any
    hidden: Tensor
    head: ll.LMHead
    labels: Tensor
    kind: list[str]

    def of(self, kind: str) -> Tensor:
        """Which tokens are of this kind, (N,) bool."""
        return torch.tensor([each == kind for each in self.kind])


def texts(kind: str) -> list[str]:
    """The files of a kind, longest first: short ones are mostly headers."""
    folder, pattern = FILES[kind]
    found = [path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob(pattern))]
    return sorted(found, key=len, reverse=True)


def sequences(tokenizer: Any, kind: str, count: int, length: int) -> Tensor:
    """The first tokens of `count` files, (count, length + 1)."""
    rows: list[Sequence[int]] = []
    for text in texts(kind):
        ids = [*tokenizer.opening, *tokenizer.encode([text])[0]]
        if len(ids) > length and len(rows) < count:
            rows.append(ids[: length + 1])
    if len(rows) < count:
        raise ValueError(f"{kind}: {len(rows)} texts of more than {length} tokens, asked for {count}")
    return torch.tensor(rows)


def answers(model: Any, tokenizer: Any, count: int, length: int) -> tuple[Tensor, Tensor]:
    """The model's own answers to `count` questions with what they answer, (count, T), and which tokens it drew."""
    rows = [json.loads(line)["messages"][0] for line in CHATS.read_text(encoding="utf-8").splitlines()[:count]]
    asked = tokenizer.saved([as_chat([row], tokenizer.saved) for row in rows], padding=True, padding_side="left",
                            return_tensors="pt", split_special_tokens=False)  # fmt: skip
    made = ll.generate(
        *(model, dict(asked)), max_new_tokens=length, do_sample=True, temperature=1.0, top_k=0, keep=0,
        seeds=torch.arange(count), pad_token_id=tokenizer.eos_id,
    )  # fmt: skip
    drawn = torch.zeros(made.ids.shape, dtype=torch.bool)
    drawn[:, asked["input_ids"].shape[1] :] = made.record.token >= 0
    return made.ids, drawn


@torch.no_grad()
def read(model: str, count: int, length: int, kinds: Sequence[str] = KINDS) -> Reading:
    """`count` texts of each kind through a model such as smollm2, `length` tokens each, a quarter of answers."""
    source = resolve(model)
    tokenizer = load_tokenizer(source)
    body = load_model(source, dtype="float32", length=length).eval()
    hidden, labels, kind = [], [], []
    for name in [kind for kind in kinds if kind in FILES]:
        for ids in sequences(tokenizer, name, count, length):
            hidden.append(ll.hidden_states(body, {"input_ids": ids[None, :-1]})[0])
            labels.append(ids[1:])
            kind += [name] * length
    own_answers = answers(body, tokenizer, count, length // 4) if "own answers" in kinds else ((), ())
    for ids, drawn in zip(*own_answers, strict=True):
        begin = int((ids != tokenizer.saved.pad_token_id).int().argmax())  # padding is on the left
        states = ll.hidden_states(body, {"input_ids": ids[None, begin:-1]})[0]
        own = drawn[begin + 1 :]
        hidden.append(states[own])
        labels.append(ids[begin + 1 :][own])
        kind += ["own answers"] * int(own.sum())
    return Reading(body, tokenizer, torch.cat(hidden), ll.LMHead.of(body), torch.cat(labels), kind)
