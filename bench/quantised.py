"""A quantised head beside the same numbers in bf16 and fp32: the bytes that are held, and seconds of processor time.

python -m bench.quantised [--shapes smollm2 gemma3-270m --formats Q8_0 Q4_0 --tokens 512 --rounds 3 --out FILE]

Heads of SmolLM2-135M's and Gemma 3 270M's shape with random weights in GGUF blocks; fp32 hold the dequantised numbers,
bf16 their rounded copy. fp32 hidden states, all methods in turn in every round of one run, minima of rounds. `score`:
log-probability and entropy of each token without gradients; `train`: cross-entropy with the gradients of hidden
states and of a LoRA of rank 8 on the head; `decode`: one token sampled for each of 8 sequences.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

import logitless as ll
from bench.harness import in_turns, least, results
from logitless.vocab.head.quantised import QuantisedWeight

SHAPES = {"smollm2": (49_152, 576), "gemma3-270m": (262_144, 640)}
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
SEQUENCES, RANK = 8, 8


def heads_of(shape: tuple[int, int], formats: list[str]) -> dict[str, ll.LMHead]:
    """fp32 and bf16 heads and one of each format; every one has adapters."""
    v, h = shape
    weight = torch.randn(v, h) / h**0.5
    adapters = (ll.LowRank(torch.randn(RANK, h) / h**0.5, torch.zeros(v, RANK)),)
    weights: dict[str, Any] = {}
    for name in formats:
        blocks = gguf.quants.quantize(weight.numpy().astype(np.float32), gguf.GGMLQuantizationType[name])
        weights[name] = QuantisedWeight.gguf(torch.from_numpy(blocks), name)
    exact = weights[formats[0]].dequantised()
    weights = {"fp32": exact, "bf16": exact.bfloat16(), **weights}
    return {name: ll.LMHead(x, adapters=adapters) for name, x in weights.items()}


def score(hidden: Tensor, head: ll.LMHead, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return ll.token_stats(hidden, head, labels, want=("logprob", "entropy")).logprob


def train(hidden: Tensor, head: ll.LMHead, labels: Tensor) -> Tensor:
    leaves = [x.detach().requires_grad_() for x in (hidden, head.adapters[0].a, head.adapters[0].b)]
    head = ll.LMHead(head.weight, adapters=(ll.LowRank(*leaves[1:]),))
    loss = ll.linear_cross_entropy(leaves[0], head, labels)
    return torch.autograd.grad(loss, leaves)[0]


def decode(hidden: Tensor, head: ll.LMHead, labels: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return ll.sample_tokens(hidden[:SEQUENCES], head, generator=generator).logsumexp


WORK: dict[str, Callable[[Tensor, ll.LMHead, Tensor], Tensor]] = {"score": score, "train": train, "decode": decode}


def measured(shape: str, formats: list[str], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A record for each head and kind of work of one shape."""
    v, h = SHAPES[shape]
    heads = heads_of((v, h), formats)
    hidden, labels = torch.randn(tokens, h), torch.randint(v, (tokens,))
    values: dict[tuple[str, str], Tensor] = {}

    def step(work: str, name: str) -> None:
        values[work, name] = WORK[work](hidden, heads[name], labels)

    turns = in_turns({key: partial(step, *key) for key in product(WORK, heads)}, rounds)
    seconds = {key: least(each) for key, each in turns.items()}
    records = []
    for (work, name), spent in seconds.items():
        exact = values[work, "fp32"].double()
        records.append(
            {
                "kind": "quantised", "shape": shape, "vocabulary": v, "hidden": h, "work": work, "head": name,
                "tokens": SEQUENCES if work == "decode" else tokens, "head_bytes": heads[name].weight.nbytes,
                "seconds": round(spent, 4), "ratio": round(spent / seconds[work, "fp32"], 3),
                "moved": float((values[work, name].double() - exact).norm() / exact.norm()),
            }
        )  # fmt: skip
    return records


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--formats", nargs="+", default=["Q8_0", "Q4_0"], choices=FORMATS)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    write = results(o.out)
    for shape in o.shapes:
        for record in measured(shape, o.formats, o.tokens, o.rounds):
            write(record)
            print(*(f"{key} {value}" for key, value in record.items() if key != "kind"), flush=True)


if __name__ == "__main__":
    main()
