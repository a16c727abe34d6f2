"""A few completions before and after training, each token with the probability that the policy gave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from ...integrations.transformers.generation import generate
from ...printable import shown
from ...sample.terminal import FAINT, Painter, legend
from ...sample.text import pieces
from ..common.files import read_object, write_json
from ..common.say import say
from ..sources.generation import from_all_entries
from ..sources.tokenizer import TextTokenizer

EXAMPLES_FILE = "completions.json"  # of the run's directory
COUNT = 3
MOST_TOKENS = 48  # of a completion that is shown
MOST_OF_PROMPT = 100  # characters
Record = dict[str, Any]
Score = Callable[[Tensor], float]


def keep(
    place: Path,
    when: str,  # before or after
    model: Any,
    tokenizer: TextTokenizer,
    prompts: Sequence[list[int]],
    length: int,
    *,
    score: Score | None = None,
    **sampling: Any,  # temperature, top_k, top_p, min_p, order
) -> None:
    """Samples a completion of the first prompts and puts them into completions.json, by the same noise each time.

    A resumed run makes those of before anew, which may have been damaged. score: the reward of a completion's ids (T,).
    """
    path = place / EXAMPLES_FILE
    was_training = model.training
    model.eval()
    with from_all_entries(model):
        made = [
            _completion(model, tokenizer, ids, seed, min(length, MOST_TOKENS), score, sampling)
            for seed, ids in enumerate(prompts[:COUNT])
        ]
    model.train(was_training)
    before = read_object(path) if when == "after" else {}
    write_json(path, before | {when: made})


@torch.no_grad()
def _completion(
    model: Any, tokenizer: TextTokenizer, ids: list[int], seed: int, length: int, score: Score | None, sampling: Record
) -> Record:
    prompt = torch.tensor([ids], device=model.device)
    seeds = torch.tensor([seed], device=model.device)
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": length, "pad_token_id": tokenizer.eos_id} | sampling
    record = generate(model, given, keep=0, seeds=seeds, **options).record[0]
    parts = pieces(tokenizer.saved, ids, record.token.tolist())
    tokens = [
        {"text": piece.text, "special": piece.special, "logprob": logprob}
        for piece, logprob in zip(parts, record.logprob.tolist(), strict=True)
    ]
    reward = None if score is None else score(record.token)
    return {"prompt": tokenizer.saved.decode(ids), "tokens": tokens, "reward": reward}


def show(place: Path, console: Console) -> None:
    """The completions of a run, each token coloured by its probability; nothing where there are none."""
    path = place / EXAMPLES_FILE
    if not path.exists():
        return
    found = read_object(path)
    say(console, "\ncompletions before and after")
    for number in range(max(len(made) for made in found.values())):
        for when, made in found.items():
            if number < len(made):
                console.print(_shown(when, made[number]), highlight=False, soft_wrap=True)
    console.print(legend(), highlight=False)
    console.print()


def first_of(place: Path) -> Record:
    """{before, after}: the first completion of each; nothing where there are none."""
    path = place / EXAMPLES_FILE
    return {when: made[0] for when, made in read_object(path).items() if made} if path.exists() else {}


def cut(prompt: str) -> str:
    """The end of a prompt."""
    return f"…{prompt[-MOST_OF_PROMPT:]}" if len(prompt) > MOST_OF_PROMPT else prompt


def _shown(when: str, example: Record) -> Text:
    reward = "" if example["reward"] is None else f", reward {example['reward']:.3f}"
    out, painter = Text().append(f"{when}{reward}: ", "bold"), Painter()
    out.append(shown(cut(example["prompt"])).replace("\n", "↵ "), FAINT)
    for token in example["tokens"]:
        out.append_text(painter(shown(token["text"]).replace("\n", "↵ "), token["special"], token["logprob"]))
    return out
