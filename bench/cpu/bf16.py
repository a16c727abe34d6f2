"""A bf16 head on a CPU that multiplies bf16, in tiles (AMX) or pairs (AVX512-BF16): `python -m bench.cpu.bf16`.

Log-prob and entropy, a log-prob with its gradient through a frozen head, and a loss with both gradients, by the backend
`compiled` as the processor has it and by products in fp32; in turn in one process with what plain torch makes of the
same operands, bf16 logits and their log-softmax, and with the bare products in bf16 into a slice that is used again.
Wall time, ns of a processor a logit, the least of the rounds, and each log-prob's largest error over float64 on the
same operands. Behind docs/decisions/0055, and 0049, whose table is of fewer ways; preload jemalloc, as
docs/how-to/cpu.md says, for memory that is kept.
"""

import argparse
import math
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F

import logitless as ll
from bench.harness import THREADS, environment, write_line
from logitless.vocab.backends import logits
from logitless.vocab.backends.compiled.library import library
from logitless.vocab.devices import has_bf16_pairs, has_bf16_tiles

SHAPES = "2048x512x32768,2048x2048x16384,256x512x65536,256x2048x32768,64x2048x32768,1024x4096x8192,2048x512x131072"
WIDTH = 2048  # entries of a slice of bare products


@contextmanager
def multiplying(way):
    """Products as the processor has them, or in fp32."""
    if way == "bf16" or library() is None:
        yield
        return
    with (
        patch.object(logits, "has_bf16_tiles", lambda x: False),
        patch.object(library(), "multiplies_pairs", lambda: 0),
    ):
        yield


class Operands:
    """Hidden states and a head, each of which may be trained."""

    def __init__(self, hidden, weight, labels):
        self.hidden, self.weight, self.labels = hidden.requires_grad_(), weight.requires_grad_(), labels
        self.fixed = hidden.detach(), weight.detach()
        self.tile = torch.empty(len(hidden), WIDTH, dtype=hidden.dtype)

    def values(self, *more):
        hidden, weight = self.fixed
        want = ("logprob", "entropy", *more)
        return ll.token_stats(hidden, ll.LMHead(weight), self.labels, want=want, backend="compiled").logprob

    def frozen(self):
        head = ll.LMHead(self.fixed[1])
        ll.token_stats(self.hidden, head, self.labels, want=("logprob",), backend="compiled").logprob.mean().backward()

    def loss(self):
        ll.linear_cross_entropy(self.hidden, ll.LMHead(self.weight), self.labels, backend="compiled").backward()

    def plain_values(self):
        return _plain_logits(*self.fixed).log_softmax(1).gather(1, self.labels[:, None])[:, 0]

    def plain_frozen(self):
        F.cross_entropy(_plain_logits(self.hidden, self.fixed[1]), self.labels).backward()

    def plain_loss(self):
        F.cross_entropy(_plain_logits(self.hidden, self.weight), self.labels).backward()

    def bare(self, products):
        """As many of the logits, the tokens' and the entries' products."""
        hidden, weight = self.fixed
        for rows in weight.split(WIDTH):
            z = torch.mm(hidden, rows.t(), out=self.tile[:, : len(rows)])
            if products > 1:
                torch.mm(z, rows)
            if products > 2:
                torch.mm(z.t(), hidden)


def _plain_logits(hidden, weight):
    """Of the operands' dtype; their log-softmax is in fp32 or theirs, which may be float64."""
    z = hidden @ weight.t()
    return z.to(torch.promote_types(z.dtype, torch.float32))


def measured(tokens, inner, vocab, rounds):
    """A record of one shape."""
    labels, hidden = torch.randint(vocab, (tokens,)), torch.randn(tokens, inner)
    weight = 3 * torch.randn(vocab, inner) / inner**0.5
    x = Operands(hidden.bfloat16(), weight.bfloat16(), labels)
    right = torch.cat(
        [_logprob(h, x.fixed[1], of) for h, of in zip(x.fixed[0].split(64), x.labels.split(64), strict=True)]
    )
    ways = {
        f"{name}, {way}": (getattr(x, name), way) for name in ("values", "frozen", "loss") for way in ("bf16", "fp32")
    }
    ways |= {
        name.replace("_", " "): (getattr(x, name), "bf16") for name in ("plain_values", "plain_frozen", "plain_loss")
    }
    ways |= {f"bare, {n}": (lambda n=n: x.bare(n), "bf16") for n in (1, 2, 3)}
    least, error = dict.fromkeys(ways, math.inf), {}
    for _ in range(rounds + 1):  # the first of which compiles
        for name, (step, way) in ways.items():
            x.hidden.grad = x.weight.grad = None
            with multiplying(way):
                start = time.perf_counter()
                found = step()
                least[name] = min(least[name], time.perf_counter() - start)
            if found is not None:
                error[name] = float((found.double() - right).abs().max())
    ns = {name: seconds / (tokens * vocab) * 1e9 * torch.get_num_threads() for name, seconds in least.items()}
    return {"kind": "bf16", "shape": [tokens, inner, vocab], "ns": ns, "error": error}


def _logprob(hidden, weight, labels):
    """In float64."""
    return (hidden.double() @ weight.double().t()).log_softmax(1).gather(1, labels[:, None])[:, 0]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="tokens x hidden x vocabulary, comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    o = parser.parse_args(arguments)
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    env = environment() | {"tiles": has_bf16_tiles("cpu"), "pairs": has_bf16_pairs()}
    for shape in o.shapes.split(","):
        found = measured(*map(int, shape.split("x")), o.rounds)
        times = ", ".join(f"{name} {ns:.1f}" for name, ns in found["ns"].items())
        errors = ", ".join(f"{name} {error:.0e}" for name, error in found["error"].items())
        print(f"{shape}: {times} ns; errors: {errors}", flush=True)
        if o.out:
            write_line(o.out, env | found)


if __name__ == "__main__":
    main()
