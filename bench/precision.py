"""How far the numbers are from float64: `python -m bench.precision [--out FILE]`.

Errors of the pass and of plain torch against float64 on the same operands: every statistic and gradient, sure
tokens (large margins), and KL from far to next to nothing. Plain torch is measured as people write it: whole logits
in the operands' dtype, then float32 log-softmax.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import results
from logitless import LMHead, token_stats
from logitless.algebra.stats import STATISTICS
from logitless.vocab.reference import dense_token_stats

Record = dict[str, Any]
TOKENS, HIDDEN, VOCAB = 64, 256, 131_072
LOGIT_STD = 3.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# rank is a count, and reverse_kl_shared is reverse_kl of heads that have the same entries
WANTED = tuple(name for name in STATISTICS if name not in ("rank", "reverse_kl_shared"))
CANDIDATES = 20  # the best entries, which tail_logprob leaves out
MARGINS = (5.0, 10.0, 15.0, 17.0, 20.0, 60.0)
DISTANCES = (1.0, 1e-1, 1e-2, 1e-3, 3e-4)  # of the reference's hidden states, relative


def operands(dtype: torch.dtype, distance: float = 0.3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels, reference hidden."""
    g = torch.Generator().manual_seed(7)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g)
    weight = torch.randn(VOCAB, HIDDEN, generator=g).mul_(LOGIT_STD / math.sqrt(HIDDEN))
    labels = torch.randint(VOCAB, (TOKENS,), generator=g)
    reference = hidden + distance * torch.randn(TOKENS, HIDDEN, generator=g)
    return hidden.to(dtype), weight.to(dtype), labels, reference.to(dtype)


def plain(z: Tensor, labels: Tensor, z_ref: Tensor, candidates: Tensor) -> dict[str, Tensor]:
    """The statistics as usually written, from logits that exist."""
    logp, logq = z.log_softmax(-1, dtype=torch.float32), z_ref.log_softmax(-1, dtype=torch.float32)
    z = z.float()
    p, q = logp.exp(), logq.exp()
    log_m = ((p + q) / 2).log()
    lse = z.logsumexp(-1)
    return {
        "logprob": logp.gather(-1, labels[:, None])[:, 0],
        "logsumexp": lse,
        "label_logit": z.gather(-1, labels[:, None])[:, 0],
        "entropy": -(p * logp).sum(-1),
        "self_certainty": lse - z.mean(-1) - math.log(z.shape[-1]),
        "mean_logit": z.mean(-1),
        "max_logit": z.amax(-1),
        "sum_sq_prob": (p * p).sum(-1),
        "el2n": (p - F.one_hot(labels, z.shape[-1])).norm(dim=-1),
        "kl": (p * (logp - logq)).sum(-1),
        "reverse_kl": (q * (logq - logp)).sum(-1),
        "jsd": 0.5 * (p * (logp - log_m)).sum(-1) + 0.5 * (q * (logq - log_m)).sum(-1),
        "kl_mixture": (p * (logp - log_m)).sum(-1),
        "reverse_kl_mixture": (q * (logq - log_m)).sum(-1),
        "acceptance": torch.minimum(p, q).sum(-1),
        "total_variation": (p - q).abs().sum(-1) / 2,
        "tail_logprob": torch.log(1 - p.gather(-1, candidates).sum(-1)),
    }


def largest(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest absolute error, and the largest relative to the largest exact value."""
    error = (got.double() - exact).abs().max()
    return error.item(), (error / exact.abs().max()).item()


def statistics_of(dtype: str) -> Iterator[Record]:
    """Every statistic, float32 or bfloat16 operands."""
    hidden, weight, labels, reference = operands(DTYPES[dtype])
    head = LMHead(weight)
    z, z_ref = F.linear(hidden, weight), F.linear(reference, weight)
    candidates = z.topk(CANDIDATES).indices
    asked: Any = {"want": WANTED, "reference": (reference, head), "candidates": candidates}
    exact = dense_token_stats(hidden, head, labels, **asked)
    ours = token_stats(hidden, head, labels, **asked)
    theirs = plain(z, labels, z_ref, candidates)
    for name in WANTED:
        record: Record = {"kind": "statistic", "name": name, "dtype": dtype}
        record["error"], record["relative"] = largest(getattr(ours, name), exact[name])
        record["plain_error"], record["plain_relative"] = largest(theirs[name], exact[name])
        yield record


def gradients_of(dtype: str) -> Iterator[Record]:
    """Gradients of log-prob plus entropy under a random cotangent: error's norm over the gradient's."""
    hidden, weight, labels, _ = operands(DTYPES[dtype])
    cotangent = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(8))
    want = ("logprob", "entropy")

    def gradient(stats: Callable[[Tensor, Tensor], list[Tensor]], dtype: torch.dtype) -> tuple[Tensor, ...]:
        h, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        parts = stats(h, w)
        return torch.autograd.grad(sum((x * c).sum() for x, c in zip(parts, cotangent, strict=True)), (h, w))

    def ours(h: Tensor, w: Tensor) -> list[Tensor]:
        stats = token_stats(h, LMHead(w), labels, want=want)
        return [stats.logprob, stats.entropy]

    def whole(h: Tensor, w: Tensor) -> list[Tensor]:
        z = F.linear(h, w)
        logp = z.log_softmax(-1, dtype=torch.float64 if z.dtype == torch.float64 else torch.float32)
        return [logp.gather(-1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)]

    exact = gradient(whole, torch.float64)
    found = gradient(ours, DTYPES[dtype]), gradient(whole, DTYPES[dtype])
    for name, true, mine, other in zip(("hidden", "weight"), exact, *found, strict=True):
        record: Record = {"kind": "gradient", "name": name, "dtype": dtype}
        record["relative"] = ((mine.double() - true).norm() / true.norm()).item()
        record["plain_relative"] = ((other.double() - true).norm() / true.norm()).item()
        yield record


def margins() -> Iterator[Record]:
    """A sure token: relative error of -logprob (its loss) and of 1 - p, as the gradient's size shows it."""
    for margin in MARGINS:
        weight = torch.zeros(VOCAB, 1)
        weight[0] = margin + math.log(VOCAB - 1)  # the label leads all others together by `margin` nats
        hidden, labels = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
        head = LMHead(weight)
        exact = dense_token_stats(hidden, head, labels)["logprob"]
        ours = token_stats(hidden, head, labels).logprob
        theirs = -F.cross_entropy(hidden @ weight.T, labels, reduction="none")
        yield {
            "kind": "margin",
            "margin": margin,
            "loss": -exact.item(),
            "relative": largest(ours, exact)[1],
            "plain_relative": largest(theirs, exact)[1],
        }


def divergences() -> Iterator[Record]:
    """KL of a policy ever nearer to its reference: largest relative error of a token."""
    for distance in DISTANCES:
        hidden, weight, labels, reference = operands(torch.float32, distance)
        head = LMHead(weight)
        exact = dense_token_stats(hidden, head, labels, want=("kl",), reference=(reference, head))["kl"]
        ours = token_stats(hidden, head, labels, want=("kl",), reference=(reference, head)).kl
        z, z_ref = F.linear(hidden, weight), F.linear(reference, weight)
        p = z.softmax(-1)
        moments = (p * z).sum(-1) - (p * z_ref).sum(-1) - z.logsumexp(-1) + z_ref.logsumexp(-1)
        logs = (p * (z.log_softmax(-1) - z_ref.log_softmax(-1))).sum(-1)
        methods = {"relative": ours, "plain_relative": logs, "moments_relative": moments}
        record: Record = {"kind": "kl", "kl": exact.median().item()}
        yield record | {name: ((x.double() - exact).abs() / exact).max().item() for name, x in methods.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=__doc__)
    parser.add_argument("--out", type=Path, help="write JSON lines here; must not exist")
    out = parser.parse_args(argv).out
    torch.set_num_threads(2)
    write = results(out, shape=(TOKENS, HIDDEN, VOCAB))
    by_dtype = (part(dtype) for dtype in DTYPES for part in (statistics_of, gradients_of))
    for record in chain(*by_dtype, margins(), divergences()):
        write(record)
        print(record, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
