"""A whole step of `logitless train`'s default model, logitless and dense, in turn: `python -m bench.train_step`.

Forward pass, loss, backward pass and the optimizer's step on the first batch of the default data, in one process; wall
seconds, the least of the rounds and their median. Once with new memory for every large tensor, as glibc has it, and
once with the memory of the step before.
"""

import argparse
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench.harness import THREADS, busiest, environment, freed_memory_kept, in_turns, write_line
from logitless.integrations.transformers.install import install
from logitless.workbench.sft.config import TrainConfig
from logitless.workbench.sft.data import load, prepare
from logitless.workbench.sources.model import build, load_tokenizer, resolve
from logitless.workbench.sources.packing import collate

METHODS = ("logitless", "dense")


def measured(config, rounds):
    """Per method its seconds, the sizes, and the largest part of the machine that others kept busy."""
    source = resolve(config.model)
    tokenizer = load_tokenizer(source)
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.npz"
        prepare(config, tokenizer, source.vocab_size, tokens)
        rows, _ = load(tokens, config.context_length)
        batch = collate([rows[i] for i in range(config.batch_size)])
    model = build(config, source).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(method):
        install(model, loss=method)
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    turns = in_turns({method: partial(step, method) for method in METHODS}, rounds)
    seconds = {method: [turn.wall for turn in each] for method, each in turns.items()}
    vocabulary, hidden = model.get_output_embeddings().weight.shape
    sizes = {"tokens": batch["input_ids"].numel(), "vocabulary": vocabulary, "hidden": hidden}
    return seconds, sizes, busiest(turns)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=TrainConfig.model)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    o = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    env, config = environment(), replace(TrainConfig(), model=o.model)
    for memory, context in {"fresh": nullcontext, "kept": freed_memory_kept}.items():
        with context():
            seconds, sizes, busy = measured(config, o.rounds)
        print(f"freed memory {memory}, others {busy:.0%}")
        for method, each in seconds.items():
            print(f"{method:>10}: least {min(each):.2f} s, median {statistics.median(each):.2f} s")
        if o.out:
            row = {"kind": "train step", "model": o.model, "shape": sizes, "seconds": seconds, "others": round(busy, 3)}
            write_line(o.out, env | row | {"freed_memory": memory})


if __name__ == "__main__":
    main()
