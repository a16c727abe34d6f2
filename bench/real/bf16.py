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
from functools import partial
from pathlib import Path

from bench.cpu.bf16 import Operands, multiplying
from bench.harness import results
from bench.real.text import read


def measure(hidden, weight, labels, rounds):
    """A record for each way to multiply."""
    right = Operands(hidden.double(), weight.double(), labels)
    logprob, gradients = right.plain_values(), _gradients(right, right.plain_loss)
    x = Operands(hidden, weight, labels)
    ways = {way: (way, partial(x.values, "rank"), x.loss) for way in ("bf16", "fp32")}
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
            off = [float((a - b).norm() / b.norm()) for a, b in zip(_gradients(x, loss), gradients, strict=True)]
        yield {
            "kind": "bf16", "way": name, "tokens": len(labels), "cpu_s": round(least[name], 3),
            "logprob": float((found[name].double() - logprob).abs().max()), "hidden": off[0], "weight": off[1],
        }  # fmt: skip


def _gradients(x, loss):
    """Of hidden states and weight, in float64."""
    x.hidden.grad = x.weight.grad = None
    loss()
    return [x.hidden.grad.double(), x.weight.grad.double()]


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
