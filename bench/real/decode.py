"""Decoding with a pretrained model: `logitless.generate` with its records against transformers' own generate.

python -m bench.real.decode [--model smollm2 --batch 8 --tokens 64 --rounds 3 --out FILE]

Answers to questions that the package carries, at temperature 0.8 and top-p 0.95. `transformers` keeps nothing of the
logits; `transformers, logits` all of them, for log-probs and entropies at the end; `logitless` keeps each token's
log-prob, entropy, rank and so on, `logitless, best 20` the best entries too. Methods take turns in one process, and the
least processor seconds of a few rounds count. Answers have one length: no token ends them.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import logitless as ll
from bench.harness import busiest, in_turns, least, results
from logitless.resident import AllocationTracker
from logitless.workbench.demo.run import CHATS
from logitless.workbench.sources.model import load_model, load_tokenizer, resolve
from logitless.workbench.sources.tokenizer import as_chat

SAMPLED = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}


def asked(tokenizer: Any, count: int) -> dict[str, Tensor]:
    """The first questions, padded on the left."""
    rows = [json.loads(line)["messages"][0] for line in CHATS.read_text(encoding="utf-8").splitlines()[:count]]
    texts = [as_chat([row], tokenizer.saved) for row in rows]
    return dict(tokenizer.saved(texts, padding=True, padding_side="left", return_tensors="pt"))


def methods(model: Any, prompts: dict[str, Tensor], tokens: int, pad: int) -> dict[str, Callable[[], Any]]:
    options = SAMPLED | {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": pad}

    def with_logits() -> tuple[Tensor, Tensor]:
        made = model.generate(**prompts, **options, output_logits=True, return_dict_in_generate=True)
        logp = torch.stack(made.logits, 1).float().log_softmax(-1)
        ids = made.sequences[:, -tokens:, None]
        return logp.gather(-1, ids), -(logp.exp() * logp).sum(-1)

    return {
        "transformers": lambda: model.generate(**prompts, **options),
        "transformers, logits": with_logits,
        "logitless": lambda: ll.generate(model, prompts, keep=0, **options),
        "logitless, best 20": lambda: ll.generate(model, prompts, keep=20, **options),
    }


@torch.no_grad()
def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    write, source = results(o.out, model=o.model), resolve(o.model)
    tokenizer = load_tokenizer(source)
    model = load_model(source, dtype="float32", length=512).eval()
    runs = methods(model, asked(tokenizer, o.batch), o.tokens, tokenizer.eos_id)
    peaks = {}
    for name, run in runs.items():
        with AllocationTracker() as tracker:
            run()
        peaks[name] = tracker.peak
    turns = in_turns(runs, o.rounds)
    seconds = {name: least(each) for name, each in turns.items()}
    for name in runs:
        row = {
            "kind": "decode", "method": name, "batch": o.batch, "tokens": o.tokens,
            "cpu_seconds": round(seconds[name], 2),
            "to_transformers": round(seconds[name] / seconds["transformers"], 3),
            "peak_mib": round(peaks[name] / 2**20, 1), "others_busy": round(busiest(turns), 2),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        write(row)


if __name__ == "__main__":
    main()
