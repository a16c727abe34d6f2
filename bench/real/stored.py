"""What storing a teacher loses: its distribution from stored hidden states or best entries against the exact one.

python -m bench.real.stored [--model smollm2 --texts 2 --length 512 --out FILE]

Hidden states of unseen text in fp32 against what `logitless score --store hidden` keeps of them: KL(exact‖stored) in
nats a token, the best entry's change, bytes. Of best entries: the mass that a record leaves to its bucket.
"""

import argparse
import json
from pathlib import Path

import torch

import logitless as ll
from bench.harness import results
from bench.real.text import read
from logitless.sample.columns import STORED, packed_hidden, unpacked_hidden

KEPT = (10, 20, 50)


@torch.no_grad()
def measure(reading) -> list[dict]:
    """A record for each way of storing."""
    found, n = [], len(reading.labels)
    exact = ll.token_stats(reading.hidden, reading.head, want=("logsumexp",), top_k=max(KEPT))
    for stored in STORED:
        packed = packed_hidden(reading.hidden, stored)
        again = unpacked_hidden(packed, stored).to(reading.hidden.dtype)
        stats = ll.token_stats(
            again, reading.head, want=("kl", "reverse_kl"), top_k=1, reference=(reading.hidden, reading.head)
        )
        found.append({
            "kind": "stored", "stored": stored, "tokens": n,
            "bytes": sum(x.nbytes for x in packed.values()) // n,
            "kl": summary(stats.reverse_kl), "reverse_kl": summary(stats.kl),
            "other best entry": round(float((stats.top_k_ids[:, 0] != exact.top_k_ids[:, 0]).double().mean()), 5),
        })  # fmt: skip
    weights = (exact.top_k_logits - exact.logsumexp[:, None]).double().exp()
    for k in KEPT:
        left = 1 - weights[:, :k].sum(1)
        found.append({"kind": "stored", "stored": f"best {k}", "tokens": n, "bytes": 8 * k, "left": summary(left)})
    return found


def summary(x: torch.Tensor) -> dict[str, float]:
    return {"mean": float(f"{x.double().mean():.3g}"), "largest": float(f"{x.max():.3g}")}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=2, help="of each kind")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    write = results(o.out, model=o.model, texts=o.texts, length=o.length)
    for row in measure(read(o.model, o.texts, o.length)):
        print(json.dumps(row), flush=True)
        write(row)


if __name__ == "__main__":
    main()
