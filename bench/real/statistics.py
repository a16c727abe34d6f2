"""How sure a pretrained model is of unseen text, how right, and how many entries hold the mass it samples from.

python -m bench.real.statistics [--model smollm2 --texts 8 --length 1024 --out FILE]

One pass for the statistics, one for each rule of sampling. Calibration: tokens by the probability of the best entry in
15 equal bins; the expected calibration error is the mean distance of a bin's probability and its share of hits.
"""

import argparse
import json
from pathlib import Path

import torch

import logitless as ll
from bench.harness import results
from bench.real.text import KINDS, Reading, read

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
RULES = {
    "top_p 0.9": {"top_p": 0.9}, "top_p 0.95": {"top_p": 0.95}, "top_p 0.99": {"top_p": 0.99},
    "min_p 0.05": {"min_p": 0.05}, "top_k 50, top_p 0.95": {"top_k": 50, "top_p": 0.95},
}  # fmt: skip
COVERED = (1, 16, 64, 256, 1024)
BINS = 15


def quantiles(x: torch.Tensor) -> dict[str, float]:
    values = x.double().quantile(torch.tensor(SHARES, dtype=torch.float64))
    return {f"{share:.0%}": round(float(v), 4) for share, v in zip(SHARES, values, strict=True)}


def calibration(sure: torch.Tensor, right: torch.Tensor) -> tuple[float, list[tuple[int, float, float]]]:
    """The expected calibration error, and (tokens, mean probability, share of hits) of each bin."""
    place = (sure * BINS).long().clamp_max(BINS - 1)
    rows, error = [], 0.0
    for b in range(BINS):
        there = place == b
        if there.any():
            said, hit = float(sure[there].mean()), float(right[there].double().mean())
            rows.append((int(there.sum()), round(said, 4), round(hit, 4)))
            error += int(there.sum()) / len(sure) * abs(said - hit)
    return error, rows


@torch.no_grad()
def measure(reading: Reading) -> list[dict]:
    """A record for each kind of text."""
    want = ("logprob", "logsumexp", "entropy", "self_certainty", "rank")
    stats = ll.token_stats(reading.hidden, reading.head, reading.labels, want=want, top_k=max(COVERED))
    best = (stats.top_k_logits - stats.logsumexp[:, None]).double().exp()
    nuclei = {
        name: ll.sample_tokens(reading.hidden, reading.head, keep=0, **rule, generator=torch.Generator().manual_seed(0))
        for name, rule in RULES.items()
    }
    found = []
    for kind in (*KINDS, "all"):
        here = torch.ones(len(best), dtype=torch.bool) if kind == "all" else reading.of(kind)
        right = stats.top_k_ids[here, 0] == reading.labels[here]
        error, bins = calibration(best[here, 0], right)
        sizes = {name: record.n_kept[here] for name, record in nuclei.items()}
        found.append({
            "kind": "statistics", "text": kind, "tokens": int(here.sum()),
            "loss": round(-float(stats.logprob[here].double().mean()), 4),
            "accuracy": round(float(right.double().mean()), 4),
            "accuracy of the best 5": round(float((stats.rank[here] <= 5).double().mean()), 4),
            "expected calibration error": round(error, 4), "bins": bins,
            "entropy": quantiles(stats.entropy[here]), "rank": quantiles(stats.rank[here]),
            "self_certainty": quantiles(stats.self_certainty[here]),
            "mass of the best": {k: quantiles(best[here, :k].sum(1)) for k in COVERED},
            "kept": {
                name: quantiles(n) | {"mean": round(float(n.double().mean()), 2),
                                      "one": round(float((n == 1).double().mean()), 4)}
                for name, n in sizes.items()
            },
        })  # fmt: skip
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=8, help="of each kind")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    o = parser.parse_args(arguments)
    write = results(o.out, model=o.model, texts=o.texts, length=o.length)
    for row in measure(read(o.model, o.texts, o.length)):
        print(json.dumps(row), flush=True)
        write(row)


if __name__ == "__main__":
    main()
