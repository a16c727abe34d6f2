"""A pretrained model's head in bf16 on a CPU that multiplies bf16: what that costs, and what it loses.

python -m bench.real.bf16 [--model smollm2 --texts 2 --length 1024 --out FILE]

Hidden states of unseen text and the head, both rounded to bf16: log-prob, entropy and rank, and a cross-entropy's
gradients, by products as the processor has them, by products in fp32, and of plain torch's bf16 logits. CPU seconds of
the values, the least of the rounds, and how far each is from float64 on the same operands: a log-prob at most in nats,
a gradient in its norm. Behind docs/decisions/0055.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import logitless as ll
from bench.cpu.bf16 import multiplying
from bench.harness import results
from bench.real.text import read


class Operands:
    """What is asked of a head on some tokens, in the dtype of both."""

    def __init__(self, hidden, weight, labels):
        self.hidden, self.weight = hidden.requires_grad_(), weight.requires_grad_()
        self.labels = labels

    def values(self):
        given = self.hidden.detach(), ll.LMHead(self.weight.detach()), self.labels
        return ll.token_stats(*given, want=("logprob", "entropy", "rank"), backend="compiled").logprob

    def loss(self):
        return ll.linear_cross_entropy(self.hidden, ll.LMHead(self.weight), self.labels, backend="compiled")

    def plain_values(self):
        return self.plain_logits().detach().log_softmax(1).gather(1, self.labels[:, None])[:, 0]

    def plain_loss(self):
        return F.cross_entropy(self.plain_logits(), self.labels)

    def plain_logits(self):
        z = self.hidden @ self.weight.t()
        return z.to(torch.promote_types(z.dtype, torch.float32))

    def gradients(self, loss):
        return [x.double() for x in torch.autograd.grad(loss(), [self.hidden, self.weight])]


def measure(hidden, weight, labels, rounds):
    """A record for each way to multiply."""
    right = Operands(hidden.double(), weight.double(), labels)
    logprob, gradients = right.plain_values(), right.gradients(right.plain_loss)
    x = Operands(hidden, weight, labels)
    ways = {way: (way, x.values, x.loss) for way in ("bf16", "fp32")}
    ways["plain"] = "bf16", x.plain_values, x.plain_loss
    least, found = dict.fromkeys(ways, math.inf), {}
    for _ in range(rounds + 1):  # the first of which compiles
        for name, (way, values, _) in ways.items():
            with multiplying(way):
                start = time.process_time()
                found[name] = values()
                least[name] = min(least[name], time.process_time() - start)
    for name, (way, _, loss) in ways.items():
        with multiplying(way):
            off = [float((a - b).norm() / b.norm()) for a, b in zip(x.gradients(loss), gradients, strict=True)]
        yield {
            "kind": "bf16", "way": name, "tokens": len(labels), "cpu_s": round(least[name], 3),
            "logprob": float((found[name].double() - logprob).abs().max()), "hidden": off[0], "weight": off[1],
        }  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    write = results(o.out, model=o.model, texts=o.texts, length=o.length)
    reading = read(o.model, o.texts, o.length, ("prose",))
    hidden, weight = reading.hidden.bfloat16(), reading.head.weight.detach().bfloat16()
    for row in measure(hidden, weight, reading.labels, o.rounds):
        print(json.dumps(row), flush=True)
        write(row)


if __name__ == "__main__":
    main()
