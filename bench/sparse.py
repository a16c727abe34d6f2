"""A certified sparse backward against the dense one: time, the share of products skipped, what was left out.

python -m bench.sparse [--model smollm2 --kind prose] [--tokens 1024 --widths 256 512 2048 --bounds 1e-2 1e-3]

fp32, loss and gradients of hidden states and head. `any upstream` is per-token cross-entropy, whose slices backward
recomputes; `known loss` the mean, formed in the forward pass. Ratios are of processor time, dense and sparse in turn,
so that a busy machine changes them little. --model: a pretrained one, on text that it has not seen or on its own
answers; without it a head of 16,384 entries with Zipf's frequencies and tokens from uncertain to sure.
"""

import argparse
from functools import partial
from itertools import chain, product
from pathlib import Path

import torch

import logitless as ll
from bench.harness import in_turns, least, results
from logitless.vocab.head.sparse import SparseBackward


def synthetic(n: int, v: int = 16_384, h: int = 512):
    """Labels by Zipf's law; hidden states point to their label's row, from not at all to surely."""
    frequency = 1 / torch.arange(1.0, v + 1)
    labels = torch.multinomial(frequency, n, replacement=True)
    weight = torch.randn(v, h) / h**0.5
    strength = 4 + 8 * torch.randn(n, 1).abs()
    return strength * weight[labels] + 0.5 * torch.randn(n, h), weight, frequency.log(), labels


def trained(n: int, name: str, kind: str):
    """What a trained model makes of a kind of text: hidden states, head, no bias, and the tokens that follow."""
    from bench.real.text import read

    length = 256
    reading = read(name, -(-4 * n // length) if kind == "own answers" else -(-n // length), length, (kind,))
    return reading.hidden[:n].clone(), reading.head.weight.detach().clone(), None, reading.labels[:n]


def columns(operands, bounds, chunk=256):
    """Of the vocabulary, the share that a token needs to hold 1 - bound of its mass, and that any of a chunk needs."""
    hidden, weight, bias, _ = operands
    found = {bound: ([], []) for bound in bounds}
    for rows in hidden.detach().split(chunk):
        p, ids = torch.nn.functional.linear(rows, weight.detach(), bias).softmax(-1).sort(-1, descending=True)
        before = p.cumsum(-1) - p
        for bound, (each, together) in found.items():
            needed = before < 1 - bound
            each.append(needed.double().mean(1))
            together.append(float(torch.zeros(p.shape[1]).index_fill_(0, ids[needed].unique(), 1).mean()))
    return [
        {"way": "columns", "bound": bound, "of a token, median": float(torch.cat(each).median()),
         "of a token, mean": float(torch.cat(each).mean()), "of a chunk": sum(together) / len(together)}
        for bound, (each, together) in found.items()
    ]  # fmt: skip


def once(operands, sparse, reduction):
    hidden, weight, bias, labels = operands
    loss = ll.linear_cross_entropy(hidden, ll.LMHead(weight, bias, sparse=sparse), labels, reduction=reduction)
    return torch.autograd.grad(loss.mean(), (hidden, weight))


def compare(operands, width, bound, reduction, rounds):
    sparse = SparseBackward(bound, width)
    found = {}

    def step(way):
        found[way] = once(operands, way, reduction)

    turns = in_turns({way: partial(step, way) for way in (None, sparse)}, rounds)
    dense, ours = (least(each) for each in turns.values())
    moved = [float((x - y).norm() / y.norm()) for x, y in zip(found[sparse], found[None], strict=True)]
    return {
        "way": "any upstream" if reduction == "none" else "known loss", "width": width, "bound": bound,
        "dense_seconds": round(dense, 3), "ratio": round(ours / dense, 3),
        "skipped_share": round(float(sparse.skipped_share), 4), "skipped_mass": float(sparse.skipped_mass),
        "logit_error": float(sparse.logit_error), "moved_hidden": moved[0], "moved_weight": moved[1],
    }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--kind", default="prose", choices=("prose", "code", "own answers"), help="of the model's text")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--widths", type=int, nargs="+", default=(256, 512, 2048))
    parser.add_argument("--bounds", type=float, nargs="+", default=(1e-2, 1e-3, 1e-4, 1e-5))
    parser.add_argument("--ways", nargs="+", default=("none", "mean"), choices=("none", "mean"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    write = results(o.out)
    torch.manual_seed(0)
    operands = trained(o.tokens, o.model, o.kind) if o.model else synthetic(o.tokens)
    for x in operands[:2]:
        x.requires_grad_()
    with torch.no_grad():
        stats = ll.token_stats(operands[0], ll.LMHead(*operands[1:3]), operands[3], want=("logprob", "entropy"))
    sizes = {"tokens": len(operands[3]), "hidden": operands[1].shape[1], "vocabulary": operands[1].shape[0]}
    problem = {"way": "problem"} | sizes | {
        "what": f"{o.model}, {o.kind}" if o.model else "synthetic", "threads": o.threads,
        "loss": round(-float(stats.logprob.mean()), 3),
        "entropy": [round(float(x), 3) for x in stats.entropy.quantile(torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9]))],
    }  # fmt: skip
    print(problem, flush=True)
    write(problem)
    rows = (compare(operands, width, bound, way, o.rounds) for way, width, bound in product(o.ways, o.widths, o.bounds))
    for row in chain(columns(operands, o.bounds), rows):
        write(row)
        print(*(f"{k} {v:.3g}" if isinstance(v, float) else v for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
