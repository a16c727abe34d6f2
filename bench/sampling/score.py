"""The part `score`: every statistic of `logitless score`, against dense logits and the bare GEMM."""

from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import LOGIT_STD
from bench.sampling.parts import Part

KEEP = 20
BLOCK = 256  # tokens of a slice of the bare GEMM, and of the float64 reference
TOKENS, TILE = 2048, 512  # and entries, of a tile of the other
SHAPES = {"full": (4096, 512, 131_072), "quick": (512, 256, 16_384), "tiny": (64, 16, 301)}
WANT = ("logprob", "label_logit", "rank", "logsumexp", "mean_logit", "entropy", "self_certainty")
NAMES = ("logprob", "entropy", "rank", "self_certainty", "logsumexp", "topk_logits")


@dataclass
class Scoring:
    """Hidden states, a head and labels, the same in every process."""

    size: str

    def __post_init__(self) -> None:
        n, h, v = SHAPES[self.size]
        g = torch.Generator().manual_seed(20)
        self.hidden, self.labels = torch.randn(n, h, generator=g), torch.randint(v, (n,), generator=g)
        self.weight = torch.randn(v, h, generator=g).mul_(LOGIT_STD / h**0.5)

    @cached_property
    def reference(self) -> dict[str, Tensor]:
        """Some of the tokens, dense, in float64."""
        rows = slice(0, min(64, len(self.labels)))
        return statistics_of(self.hidden[rows].double() @ self.weight.double().T, self.labels[rows])

    def error(self) -> float:
        found = self.run()
        worst = 0.0
        for name, value in self.reference.items():
            error = float((found[name][: len(value)].double() - value).abs().max())
            worst = max(worst, 1e-5 * error if name == "rank" else error)  # rounding may swap neighbours
        return worst

    def run(self) -> dict[str, Tensor]:
        raise NotImplementedError


def statistics_of(z: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """All of them, from whole logits, as one would write it."""
    logp = torch.log_softmax(z, -1)
    label = logp.gather(-1, labels[:, None])
    return {
        "logprob": label[:, 0],
        "entropy": -(logp.exp() * logp).sum(-1),
        "rank": (logp > label).sum(-1) + 1,
        "self_certainty": -logp.mean(-1) - torch.log(torch.tensor(float(z.shape[1]))),
        "logsumexp": z.logsumexp(-1),
        "topk_logits": z.topk(KEEP).values,
    }


@dataclass
class Streamed(Scoring):
    """The pass by a backend, or as a call of this size has it unasked: compiled, where that works."""

    backend: str | None = None

    def run(self) -> dict[str, Tensor]:
        import logitless as ll

        with torch.no_grad():
            options = {"want": WANT, "top_k": KEEP, "backend": self.backend}
            stats = ll.token_stats(self.hidden, ll.LMHead(self.weight), self.labels, **options)
        return {"topk_logits": stats.top_k_logits, **{n: getattr(stats, n) for n in NAMES if n != "topk_logits"}}


class BareGemm(Scoring):
    """The product alone, some tokens at a time into one buffer."""

    def error(self) -> float:
        return 0.0

    def run(self) -> dict[str, Tensor]:
        out = torch.empty(BLOCK, self.weight.shape[0])
        for rows in self.hidden.split(BLOCK):
            torch.mm(rows, self.weight.T, out=out[: len(rows)])
        return {}


class TileGemm(BareGemm):
    """The product alone, all tokens with some of the vocabulary at a time: the order of the pass."""

    def run(self) -> dict[str, Tensor]:
        out = torch.empty(TOKENS * TILE)
        for some in self.hidden.split(TOKENS):
            for rows in self.weight.split(TILE):
                torch.mm(some, rows.T, out=out[: len(some) * len(rows)].view(len(some), len(rows)))
        return {}


class Dense(Scoring):
    """Whole logits, every statistic."""

    @torch.no_grad()
    def run(self) -> dict[str, Tensor]:
        return statistics_of(F.linear(self.hidden, self.weight), self.labels)


class DenseTopK(Scoring):
    """Whole logits, log_softmax and topk alone: what people write for sparse records."""

    def error(self) -> float:
        return 0.0

    @torch.no_grad()
    def run(self) -> dict[str, Tensor]:
        logp = torch.log_softmax(F.linear(self.hidden, self.weight), -1)
        best = logp.topk(KEEP)
        return {"logprob": logp.gather(-1, self.labels[:, None])[:, 0], "values": best.values, "ids": best.indices}


SCORE = Part(
    title=f"Scoring: log-prob, rank, entropy, self-certainty, top {KEEP}",
    ways={
        "logitless": Streamed,
        "logitless, eager": partial(Streamed, backend="eager"),
        "bare GEMM": BareGemm,
        "bare GEMM, vocabulary tiles": TileGemm,
        "dense log_softmax + topk": DenseTopK,
        "dense, all": Dense,
    },
    sizes={name: f"N={n:,}, H={h}, V={v:,}" for name, (n, h, v) in SHAPES.items()},
    unit="nat",
    error_limit=1e-4,
    limits={"bare GEMM": 1.10, "bare GEMM, vocabulary tiles": 1.10, "dense, all": 0.5},
    memory_limit_mb=128.0,
)
