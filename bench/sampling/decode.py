"""The parts `decode`: a step of 8 or 64 sequences from hidden states to tokens with a record, peaked rows and flat."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.cases import LOGIT_STD
from bench.sampling.parts import Part
from logitless.vocab.backends.compiled import library, search

KEEP, TEMPERATURE, TOP_P, STEPS = 20, 0.8, 0.95, 8
PEAKED = 7.0  # standard deviation of logits: 1 to 2 nats of entropy, as of a language model that knows its text
SHAPES = {
    8: {"full": (8, 512, 131_072), "quick": (8, 256, 16_384), "tiny": (4, 16, 301)},
    64: {"full": (64, 512, 151_936), "quick": (64, 256, 16_384), "tiny": (16, 16, 301)},
}  # by sequences


@dataclass
class Decoding:
    """Hidden states of some steps and a head, the same in every process."""

    size: str
    spread: float
    top_p: float
    sequences: int

    def __post_init__(self) -> None:
        n, h, v = SHAPES[self.sequences][self.size]
        g = torch.Generator().manual_seed(21)
        self.steps = torch.randn(STEPS, n, h, generator=g)
        self.weight = torch.randn(v, h, generator=g).mul_(self.spread / h**0.5)

    def step(self, hidden: Tensor) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def run(self) -> None:
        for hidden in self.steps:
            self.step(hidden)

    def error(self) -> float:
        return 0.0  # a floor, or what people write: it is no record


class Ours(Decoding):
    """`sample_tokens` with everything that a record holds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        library.library()  # made before a step is timed, as by any process before this one

    def step(self, hidden: Tensor) -> Any:
        import logitless as ll

        return ll.sample_tokens(hidden, ll.LMHead(self.weight), temperature=TEMPERATURE, top_p=self.top_p, keep=KEEP)

    def error(self) -> float:
        """The record against float64; infinite for a token that top-p leaves out."""
        record = self.step(self.steps[0])
        z = self.steps[0].double() @ self.weight.double().T
        x = (z / TEMPERATURE).log_softmax(-1)
        order = x.sort(-1, descending=True)
        kept = (order.values.exp().cumsum(-1) - order.values.exp() < self.top_p).sum(-1)
        place = (order.indices == record.token.long()[:, None]).int().argmax(-1)
        mass = torch.stack([order.values[i, :k].logsumexp(0) for i, k in enumerate(kept.tolist())])
        behaviour = x.gather(1, record.token.long()[:, None])[:, 0] - mass
        found = {
            "logsumexp": (record.logsumexp, z.logsumexp(-1)),
            "entropy": (record.entropy, -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)),
            "best": (record.topk_logits, z.topk(KEEP).values),
            "behaviour": (record.behaviour_logprob, behaviour),
        }
        worst = max(float((a.double() - b).abs().max()) for a, b in found.values())
        return worst if bool((place < kept).all()) else math.inf


class PlainSearch(Ours):
    """The search for noise by plain operations, as where there is no library in C++."""

    def step(self, hidden: Tensor) -> Any:
        with patch.object(search, "_pays", lambda device: False):
            return super().step(hidden)


class BareGemm(Decoding):
    """The product alone."""

    def step(self, hidden: Tensor) -> Any:
        return F.linear(hidden, self.weight)


class BareGemmInColumns(Decoding):
    """The product alone, transposed: of few rows MKL computes it faster."""

    def step(self, hidden: Tensor) -> Any:
        return torch.mm(self.weight, hidden.T)


class Dense(Decoding):
    """softmax, topk and multinomial over whole rows: no top-p, no log-sum-exp, no entropy."""

    def step(self, hidden: Tensor) -> Any:
        z = F.linear(hidden, self.weight)
        return z.topk(KEEP), torch.multinomial((z / TEMPERATURE).softmax(-1), 1)


class DenseTopP(Decoding):
    """The same with top-p, by a sort, as transformers does it."""

    def step(self, hidden: Tensor) -> Any:
        z = F.linear(hidden, self.weight)
        x, order = (z / TEMPERATURE).sort(-1, descending=True)
        p = x.softmax(-1)
        p = p.masked_fill_(p.cumsum(-1) - p >= TOP_P, 0.0)
        return z.topk(KEEP), order.gather(-1, torch.multinomial(p, 1))


def part(sequences: int, spread: float, title: str, limits: dict[str, float]) -> Part:
    def made(way: type[Decoding], top_p: float = TOP_P) -> Callable[[str], Decoding]:
        return lambda size: way(size, spread, top_p, sequences)

    ways = {
        "logitless": made(Ours),
        "logitless, top_p=1": made(Ours, 1.0),
        "logitless, plain search": made(PlainSearch),
        "logitless, plain search, top_p=1": made(PlainSearch, 1.0),
        "bare GEMM": made(BareGemm),
        "bare GEMM, in columns": made(BareGemmInColumns),
        "dense softmax + topk + multinomial": made(Dense),
        "dense with top-p": made(DenseTopP),
    }
    return Part(
        title=f"{STEPS} decode steps, {title}: temperature {TEMPERATURE}, top_p {TOP_P}, keep {KEEP}",
        ways=ways,
        sizes={name: f"B={n}, H={h}, V={v:,}" for name, (n, h, v) in SHAPES[sequences].items()},
        unit="nat",
        error_limit=1e-4,
        limits=limits,
    )


LIMITS = {"dense softmax + topk + multinomial": 1.0, "dense with top-p": 1.0}
FLAT = "flat ones, nuclei of thousands"
PARTS = {
    "decode": part(8, PEAKED, "peaked distributions", LIMITS),
    "decode-flat": part(8, LOGIT_STD, FLAT, LIMITS),
    "decode-64": part(64, PEAKED, "peaked distributions", LIMITS),
    "decode-64-flat": part(64, LOGIT_STD, FLAT, LIMITS),
}
