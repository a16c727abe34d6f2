"""One token and a few on a CPU, of a head in fp32 and in bf16: `python -m bench.cpu.few_tokens`.

A draw with its record and nuclei, and values alone, in turn in one process with torch's bare product in the head's
dtype and with dense draws of logits in it, without nuclei and with them. Wall time in ms, the least of the
rounds. Behind docs/decisions/0056; preload jemalloc, as docs/how-to/cpu.md says, for memory that is kept.
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path

import torch

import logitless as ll
from bench.harness import THREADS, environment, write_line

HEADS = "576x49152,640x262144,2048x32768"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def draw(hidden, weight):
    ll.sample_tokens(hidden, ll.LMHead(weight), temperature=0.8, top_p=0.95)


def values(hidden, weight):
    ll.token_stats(hidden, ll.LMHead(weight), want=("logsumexp", "entropy"))


def bare(hidden, weight):
    torch.mm(hidden, weight.t())


def dense_draw(hidden, weight):
    """Softmax, the best ten, and a token."""
    p = ((hidden @ weight.t()).float() / 0.8).softmax(1)
    p.topk(10)
    torch.multinomial(p, 1)


def dense_draw_with_nuclei(hidden, weight):
    """The same of the likeliest entries that make up 0.95."""
    p = ((hidden @ weight.t()).float() / 0.8).softmax(1)
    ordered, order = p.sort(descending=True)
    ordered[ordered.cumsum(1) - ordered > 0.95] = 0
    order.gather(1, torch.multinomial(ordered, 1))


WAYS = {x.__name__.replace("_", " "): x for x in (draw, values, bare, dense_draw, dense_draw_with_nuclei)}


@torch.no_grad()
def measured(tokens, inner, vocab, rounds):
    """A record of one size."""
    hidden, weight = torch.randn(tokens, inner), 3 * torch.randn(vocab, inner) / inner**0.5
    steps = {
        f"{name}, {kind}": partial(way, hidden.to(dtype), weight.to(dtype))
        for kind, dtype in DTYPES.items()
        for name, way in WAYS.items()
    }
    least = dict.fromkeys(steps, math.inf)
    for _ in range(rounds + 1):  # the first of which makes its pages
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            least[name] = min(least[name], time.perf_counter() - start)
    return {"kind": "few tokens", "shape": [tokens, inner, vocab], "ms": {name: x * 1e3 for name, x in least.items()}}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default=HEADS, help="hidden size x vocabulary, comma-separated")
    parser.add_argument("--tokens", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    env = environment()
    for head in o.heads.split(","):
        for tokens in map(int, o.tokens.split(",")):
            found = measured(tokens, *map(int, head.split("x")), o.rounds)
            print(
                f"{tokens} x {head}: {', '.join(f'{name} {ms:.1f}' for name, ms in found['ms'].items())} ms", flush=True
            )
            if o.out:
                write_line(o.out, env | found)


if __name__ == "__main__":
    main()
