"""Calls of some tokens whose logits lie in columns, over the same in rows: `python -m bench.cpu.calls_in_columns`.

Log-prob and entropy, those with KL to a reference, and any upstream gradient of a trained and of a frozen head, by
plain operations and compiled, in turn in one process. Wall time, the least of the rounds whose cores lay alike before
and after (`bench.cpu.cores`), near and far apart. Behind docs/decisions/0044; preload jemalloc, as docs/how-to/cpu.md
says, for memory that is kept.
"""

import argparse
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

import logitless as ll
from bench.cpu.cores import PLACES, place, round_trip
from bench.harness import THREADS, environment, write_line
from logitless.vocab.backends.eager import backend

HIDDEN, VOCAB = 512, 32_768
CALLS = ("entropy", "kl", "trained", "frozen")
BACKENDS = ("eager", "compiled")


def call(name, tokens, by):
    """A function that makes one call."""
    hidden, weight = torch.randn(tokens, HIDDEN), torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5
    labels = torch.randint(VOCAB, (tokens,))
    gradient = name in ("trained", "frozen")
    hidden.requires_grad_(gradient)
    weight.requires_grad_(name == "trained")
    reference = (torch.randn(tokens, HIDDEN), ll.LMHead(torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5))
    want = ("logprob",) if gradient else ("logprob", "entropy", *(("kl",) if name == "kl" else ()))
    options = {"want": want, "backend": by, "reference": reference if name == "kl" else None}

    def step():
        hidden.grad = weight.grad = None
        stats = ll.token_stats(hidden, ll.LMHead(weight), labels, **options)
        if gradient:
            stats.logprob.sum().backward()

    return step


@contextmanager
def lying(columns):
    """Logits that no slice keeps lie so while it lasts."""
    with patch.object(backend, "read_in_columns", lambda tokens: columns):
        yield


def measured(name, tokens, by, rounds):
    """By where the cores lie: seconds in columns and in rows, and their ratio."""
    step, least = call(name, tokens, by), {}
    for columns in (True, False):
        with lying(columns):
            step()
    for _ in range(rounds):
        for columns in (True, False):
            with lying(columns):
                before, start = round_trip(), time.perf_counter()
                step()
                seconds = time.perf_counter() - start
            where = place(before, round_trip())
            if where is not None:
                key = where, columns
                least[key] = min(least.get(key, seconds), seconds)
    found = {"kind": "calls in columns", "call": name, "tokens": tokens, "backend": by}
    for where in PLACES:
        if (where, True) in least and (where, False) in least:
            columns, rows = least[where, True], least[where, False]
            found |= {f"{where}_columns_s": columns, f"{where}_rows_s": rows, f"{where}_ratio": columns / rows}
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", default=",".join(CALLS), help="comma-separated, of: %(default)s")
    parser.add_argument("--tokens", default="64,128,144,200,256,300,384,512", help="comma-separated")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated, of: %(default)s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    env = environment() | {"hidden": HIDDEN, "vocab": VOCAB}
    for name in o.calls.split(","):
        for tokens in map(int, o.tokens.split(",")):
            for by in o.backends.split(","):
                found = measured(name, tokens, by, o.rounds)
                ratios = ", ".join(
                    f"{where} {found[f'{where}_ratio']:.2f}" for where in PLACES if f"{where}_ratio" in found
                )
                print(f"{name}, {tokens} tokens, {by}: {ratios or 'cores that moved'}", flush=True)
                if o.out:
                    write_line(o.out, env | found)


if __name__ == "__main__":
    main()
