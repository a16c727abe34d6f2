"""SPLADE's maximum over tokens against the dense form: processor time, peak bytes, documents that a memory holds.

python -m bench.pooling [--vocabularies 30522 250002 --documents 8 4 --length 128 --active 0.005 0.5]

A training step of the head alone, in fp32: embeddings log(1 + relu(max z)), the in-batch loss with a FLOPS regulariser,
the gradients of hidden states, weight and bias. `dense` is what sentence-transformers' SpladePooling does with whole
logits; `loop` makes those of one document at a time and again in backward; `logitless` is max_pool_logits, `sparse` its
`above=0`. The floor is the bare product of one forward pass. The share of active (document, entry) pairs is set by the
bias: a trained model has about 0.005, an untrained one half or more. Methods take turns in one process, and the least
processor seconds of a few rounds count, so that a busy machine changes them little. Bytes are every operator's outputs
alive at once; documents in 24 GiB follow from these at two batches, the head's own gradients included.
"""

import argparse
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import logitless as ll
from bench.harness import busiest, in_turns, least, results
from logitless import retrieval
from logitless.resident import AllocationTracker

MEMORY = 24 * 2**30
FLOPS_WEIGHT = 1e-3


def dense(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(hidden, weight, bias).relu_().log1p().amax(1)


def loop(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = [checkpoint(dense, x[None], weight, bias, use_reentrant=False) for x in hidden]
    return torch.cat(rows)


def logitless(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return retrieval.splade_activation(retrieval.max_pool_logits(hidden, ll.LMHead(weight, bias)).values)


def sparse(hidden: Tensor, weight: Tensor, bias: Tensor) -> retrieval.SparseRows:
    pooled = retrieval.max_pool_logits(hidden, ll.LMHead(weight, bias), above=0.0)
    return pooled.map(retrieval.splade_activation)


def bare(hidden: Tensor, weight: Tensor, bias: Tensor, width: int = 512) -> None:
    x, out = hidden.detach().flatten(0, 1), torch.empty(hidden.shape[0] * hidden.shape[1], width)
    for rows in weight.detach().split(width):
        torch.mm(x, rows.T, out=out[:, : rows.shape[0]])


METHODS: dict[str, Callable[..., Tensor | retrieval.SparseRows]] = {
    "dense": dense,
    "loop": loop,
    "logitless": logitless,
    "sparse": sparse,
}


def step(method: str, operands: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of the loss, whose first half of documents are the queries of the second."""
    weights = METHODS[method](*operands)
    half = len(weights) // 2
    whole = weights.dense() if isinstance(weights, retrieval.SparseRows) else weights
    loss = retrieval.in_batch_loss(retrieval.scores(whole[:half], whole[half:])) + FLOPS_WEIGHT * retrieval.flops(
        weights
    )
    return torch.autograd.grad(loss, operands)


def problem(documents: int, length: int, hidden: int, vocabulary: int, active: float) -> tuple[Tensor, ...]:
    """Random operands whose share of active pairs is `active`."""
    torch.manual_seed(0)
    h, weight = torch.randn(documents, length, hidden), torch.randn(vocabulary, hidden) / hidden**0.5
    with torch.no_grad():
        best = retrieval.max_pool_logits(h, ll.LMHead(weight)).values
        bias = -best.kthvalue(max(1, round((1 - active) * vocabulary)), dim=1).values.mean()
    return tuple(x.requires_grad_() for x in (h, weight, torch.full((vocabulary,), float(bias))))


def check(operands: tuple[Tensor, ...]) -> None:
    """Every method has the dense one's gradients."""
    expected = step("dense", operands)
    for method in METHODS:
        for name, got, exact in zip(("hidden", "weight", "bias"), step(method, operands), expected, strict=True):
            off = float((got - exact).norm() / exact.norm())
            assert off < 1e-3, f"{method}: the gradient of {name} is off by {off:.1e}"


def peak(method: str, operands: tuple[Tensor, ...]) -> int:
    with AllocationTracker() as tracker:
        step(method, operands)
        return tracker.peak


def measure(o: argparse.Namespace, vocabulary: int, documents: int, active: float) -> list[dict]:
    operands = problem(documents, o.length, o.hidden, vocabulary, active)
    fewer = problem(documents // 2, o.length, o.hidden, vocabulary, active)
    check(fewer)
    with torch.no_grad():
        share = float((logitless(*operands) > 0).float().mean())
    runs = {name: lambda name=name: step(name, operands) for name in METHODS} | {"bare": lambda: bare(*operands)}
    turns = in_turns(runs, o.rounds)
    seconds = {name: least(each) for name, each in turns.items()}
    rows = []
    for name in METHODS:
        most, less = peak(name, operands), peak(name, fewer)
        each = (most - less) / (documents - documents // 2)
        fits = int((MEMORY - (most - each * documents)) / each)
        rows.append({
            "vocabulary": vocabulary, "hidden": o.hidden, "documents": documents, "length": o.length,
            "active": round(share, 5), "method": name, "cpu_seconds": round(seconds[name], 3),
            "to_bare": round(seconds[name] / seconds["bare"], 2),
            "to_dense": round(seconds[name] / seconds["dense"], 3),
            "peak_mib": round(most / 2**20, 1), "mib_per_document": round(each / 2**20, 3), "documents_in_24_gib": fits,
            "others_busy": round(busiest(turns), 2),
        })  # fmt: skip
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=(30_522, 250_002))
    parser.add_argument("--documents", type=int, nargs="+", default=(8, 4), help="of each vocabulary, or of all")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--active", type=float, nargs="+", default=(0.005, 0.5))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    write = results(o.out)
    for vocabulary, documents in zip(o.vocabularies, cycle(o.documents)):
        for active in o.active:
            for row in measure(o, vocabulary, documents, active):
                write(row)
                print(*(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
