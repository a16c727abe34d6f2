"""A loss's three products where its logits lie in rows or in columns: `python -m bench.cpu.columns [--out FILE]`.

So many tokens with slices of the vocabulary, whose logits all stay, as in the first pass of a loss. CPU seconds, as ns
per logit, both orders in turn in one process: the least and the most of the rounds, since a product of few tokens has
two speeds, by where the cores lie (`bench.cpu.cores`). Beside them, logits in rows that are made in columns and
transposed, as some tokens' are.
"""

import argparse
from functools import partial
from pathlib import Path

import torch

from bench.harness import THREADS, environment, in_turns, write_line
from logitless.algebra.costs import WHOLE_WIDTH
from logitless.vocab.backends.logits import product_in_columns

HIDDEN, VOCAB = 512, 131_072


def products(tokens, inner, width, columns):
    """The logits' product, those for the gradients of hidden and of the head, as functions of a slice's number."""
    number = VOCAB // width
    hidden, weight = torch.randn(tokens, inner), torch.randn(VOCAB, inner)
    into, head = torch.zeros_like(hidden), torch.zeros_like(weight)
    logits = [torch.ones(width, tokens).t() if columns else torch.ones(tokens, width) for _ in range(number)]

    def rows(i):
        return slice(i * width, (i + 1) * width)

    transposed = {"logits, transposed": lambda i: product_in_columns(hidden, weight[rows(i)].t(), logits[i])}
    return ({} if columns else transposed) | {
        "logits": lambda i: torch.mm(hidden, weight[rows(i)].t(), out=logits[i]),
        "gradient of hidden": lambda i: into.addmm_(logits[i], weight[rows(i)]),
        "gradient of the head": lambda i: head[rows(i)].addmm_(logits[i].t(), hidden),
    }


def measured(tokens, inner, width, rounds):
    """Records of each product and order."""
    ways = {columns: products(tokens, inner, width, columns) for columns in (False, True)}

    def every_slice(product):
        for i in range(VOCAB // width):
            product(i)

    steps = {(columns, name): partial(every_slice, f) for columns, known in ways.items() for name, f in known.items()}
    about = {"kind": "columns", "tokens": tokens, "hidden": inner, "width": width}
    rows = []
    for (columns, name), turns in in_turns(steps, rounds).items():
        ns = [turn.cpu / (tokens * VOCAB) * 1e9 for turn in turns]
        rows.append({**about, "product": name, "columns": columns, "least": min(ns), "most": max(ns)})
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="256,512,1024", help="comma-separated, instead of %(default)s")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="the hidden size, instead of %(default)s")
    parser.add_argument("--width", type=int, help=f"entries of a slice, instead of {WHOLE_WIDTH}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    env = environment()
    for tokens in map(int, o.tokens.split(",")):
        for r in measured(tokens, o.hidden, o.width or WHOLE_WIDTH, o.rounds):
            order = "columns" if r["columns"] else "rows"
            print(f"{tokens} tokens, {order}: {r['product']}: {r['least']:.1f} to {r['most']:.1f} ns", flush=True)
            if o.out:
                write_line(o.out, env | r)


if __name__ == "__main__":
    main()
