"""A bf16 head on a CPU that multiplies tiles of bf16 (AMX), with them and without: `python -m bench.cpu.bf16_tiles`.

Log-prob and entropy by compiled loops and a loss with its gradients by plain operations, in turn in one process with
what plain torch makes of the same operands: bf16 logits and their log-softmax. Wall time, ns of a processor a logit,
the least of the rounds, and each log-prob's largest error over float64. Behind docs/decisions/0049; preload jemalloc,
as docs/how-to/cpu.md says, for memory that is kept.
"""

import argparse
import math
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

import logitless as ll
from bench.harness import THREADS, environment, write_line
from logitless.vocab.backends import logits
from logitless.vocab.devices import has_bf16_tiles

SHAPES = "2048x512x32768,2048x2048x16384,256x512x65536,256x2048x32768,64x2048x32768,8x2048x32768,1024x4096x8192"
WAYS = {"tiles": has_bf16_tiles, "fp32": lambda x: False}


@contextmanager
def multiplying(way):
    with patch.object(logits, "has_bf16_tiles", WAYS[way]):
        yield


def measured(tokens, inner, vocab, rounds):
    """A record of one shape."""
    hidden, labels = torch.randn(tokens, inner).bfloat16(), torch.randint(vocab, (tokens,))
    weight = (3 * torch.randn(vocab, inner) / inner**0.5).bfloat16()
    trained = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    right = (hidden.double() @ weight.double().t()).log_softmax(1).gather(1, labels[:, None])[:, 0]

    def values():
        head = ll.LMHead(weight)
        return ll.token_stats(hidden, head, labels, want=("logprob", "entropy"), backend="compiled").logprob

    def loss():
        trained[0].grad = trained[1].grad = None
        ll.linear_cross_entropy(trained[0], ll.LMHead(trained[1]), labels, backend="eager").backward()

    def plain():
        return (hidden @ weight.t()).float().log_softmax(1).gather(1, labels[:, None])[:, 0]

    steps = {f"{step.__name__}, {way}": (step, way) for step in (values, loss) for way in WAYS} | {
        "plain": (plain, "fp32")
    }
    least, error = dict.fromkeys(steps, math.inf), {}
    for _ in range(rounds + 1):  # the first of which compiles
        for name, (step, way) in steps.items():
            with multiplying(way):
                start = time.perf_counter()
                found = step()
                least[name] = min(least[name], time.perf_counter() - start)
            if found is not None:
                error[name] = float((found.double() - right).abs().max())
    ns = {name: seconds / (tokens * vocab) * 1e9 * torch.get_num_threads() for name, seconds in least.items()}
    return {"kind": "bf16 tiles", "shape": [tokens, inner, vocab], "ns": ns, "error": error}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="tokens x hidden x vocabulary, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    env = environment() | {"tiles": has_bf16_tiles(torch.zeros(1))}
    for shape in o.shapes.split(","):
        found = measured(*map(int, shape.split("x")), o.rounds)
        times = ", ".join(f"{name} {ns:.1f}" for name, ns in found["ns"].items())
        errors = ", ".join(f"{name} {error:.0e}" for name, error in found["error"].items())
        print(f"{shape}: {times} ns; errors: {errors}", flush=True)
        if o.out:
            write_line(o.out, env | found)


if __name__ == "__main__":
    main()
