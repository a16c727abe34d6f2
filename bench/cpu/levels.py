"""A loss whose weights keep to a level, over one that looks for each slice's maximum: `python -m bench.cpu.levels`.

Cross-entropy with its gradients by plain operations, with the level and without, and with exp and with exp2 of a scaled
number, in turn in one process with the bare products of as many tokens. CPU seconds over the bare products', the least
and the middle of the rounds. Behind docs/decisions/0048; preload jemalloc, as docs/how-to/cpu.md says, for memory
that is kept.
"""

import argparse
import random
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

import logitless as ll
from bench.harness import THREADS, environment, write_line
from logitless.algebra.costs import WHOLE_WIDTH
from logitless.vocab.backends import logits
from logitless.vocab.backends.eager import backend

TOKENS, HIDDEN = 2048, 512
LEVEL = ("may_be_steady", "holds_weights")
WAYS = {f"{level}, {exp}": (level, exp) for level in ("maxima", "level") for exp in ("exp2", "exp")}


def no(*_):
    return False


def steps_of(tokens, vocab):
    """The bare products and the loss, of so many tokens at a time."""
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocab, HIDDEN) / HIDDEN**0.5).requires_grad_()
    labels, room = torch.randint(vocab, (TOKENS,)), torch.empty(WHOLE_WIDTH, tokens)
    into, head = torch.zeros(tokens, HIDDEN), torch.zeros(vocab, HIDDEN)

    @torch.no_grad()
    def bare():
        for own in hidden.split(tokens):
            for part, entries in zip(weight.split(WHOLE_WIDTH), head.split(WHOLE_WIDTH), strict=True):
                torch.mm(part, own.t(), out=room)
                into.addmm_(room.t(), part)
                entries.addmm_(room, own)

    def loss():
        hidden.grad = weight.grad = None
        budget = 2 * 4 * tokens * vocab  # of which half is for the tokens' whole rows
        ll.linear_cross_entropy(hidden, ll.LMHead(weight), labels, memory_budget=budget, backend="eager").backward()

    return bare, loss


def measured(tokens, vocab, rounds):
    """A record: CPU seconds by way."""
    bare, loss = steps_of(tokens, vocab)
    seconds = {name: [] for name in ("bare", *WAYS)}
    for i in range(rounds + 1):  # the first of which warms up
        for name in random.Random(i).sample(list(seconds), len(seconds)):
            with ExitStack() as changed:
                if name != "bare":
                    level, exp = WAYS[name]
                    for function in LEVEL if level == "maxima" else ():
                        changed.enter_context(patch.object(backend, function, no))
                    changed.enter_context(patch.object(logits, "exp_is_fast", lambda x, exp=exp: exp == "exp"))
                start = time.process_time()
                (bare if name == "bare" else loss)()
                if i:
                    seconds[name].append(time.process_time() - start)
    least, middle = min(seconds["bare"]), median(seconds["bare"])
    ratios = {name: [min(x) / least, median(x) / middle] for name, x in seconds.items()}
    return {
        "kind": "levels",
        "shape": [TOKENS, HIDDEN, vocab],
        "tokens": tokens,
        "bare_s": [least, middle],
        "ratios": ratios,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="256,1024", help="comma-separated, instead of %(default)s")
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    env = environment()
    for tokens in map(int, o.tokens.split(",")):
        found = measured(tokens, o.vocab, o.rounds)
        ratios = "; ".join(f"{name} {least:.3f}, {middle:.3f}" for name, (least, middle) in found["ratios"].items())
        print(f"{tokens} tokens, {o.threads} threads: {ratios}", flush=True)
        if o.out:
            write_line(o.out, env | found)


if __name__ == "__main__":
    main()
