"""Preference losses over whole responses: from hidden states to one number, as a peer's fused loss has it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import logitless as ll

from .outcomes import (
    Case,
    Operands,
    Outcome,
    Within,
    assert_held,
    assert_same,
    ignored_rows_poisoned,
    normals,
    outcome,
    seeded,
)

Pair = tuple[Tensor, Tensor, Tensor, Tensor]  # chosen and rejected, then the reference's


def _margin(x: Pair, beta: float) -> Tensor:
    return beta * (x[0] - x[2] - x[1] + x[3])


def _exo(x: Pair, c: Any) -> Tensor:
    q = torch.sigmoid(_margin(x, c.beta))
    return q * torch.log(q / (1 - c.label_smoothing)) + (1 - q) * torch.log((1 - q) / c.label_smoothing)


def _discopop(x: Pair, c: Any) -> Tensor:
    m = _margin(x, c.beta)
    gate = torch.sigmoid(m / 0.05)
    return -(1 - gate) * logsigmoid(m) + gate * torch.exp(-m)


def _orpo(x: Pair, c: Any) -> Tensor:
    odds = [torch.exp(p) / (1 - torch.exp(p)) for p in x[:2]]
    return -c.beta * logsigmoid(torch.log(odds[0] / odds[1]))


def _smoothed(m: Tensor, eps: float) -> Tensor:
    return -(1 - eps) * logsigmoid(m) - eps * logsigmoid(-m)


# From whole distributions, as the papers have them: (pair, case) to one loss per pair.
DENSE: dict[str, Callable[[Pair, Any], Tensor]] = {
    "sigmoid": lambda x, c: _smoothed(_margin(x, c.beta), c.label_smoothing),
    "robust": lambda x, c: (
        (
            -(1 - c.label_smoothing) * logsigmoid(_margin(x, c.beta))
            + c.label_smoothing * logsigmoid(-_margin(x, c.beta))
        )
        / (1 - 2 * c.label_smoothing)
    ),
    "hinge": lambda x, c: (1 - _margin(x, c.beta)).clamp_min(0),
    "exo_pair": _exo,
    "nca_pair": lambda x, c: (
        -logsigmoid(c.beta * (x[0] - x[2]))
        - 0.5 * (logsigmoid(-c.beta * (x[0] - x[2])) + logsigmoid(-c.beta * (x[1] - x[3])))
    ),
    "bco_pair": lambda x, c: -logsigmoid(c.beta * (x[0] - x[2])) - logsigmoid(-c.beta * (x[1] - x[3])),
    "sppo_hard": lambda x, c: (x[0] - x[2] - 0.5 / c.beta) ** 2 + (x[1] - x[3] + 0.5 / c.beta) ** 2,
    "apo_zero": lambda x, c: 1 - torch.sigmoid(c.beta * (x[0] - x[2])) + torch.sigmoid(c.beta * (x[1] - x[3])),
    "apo_down": lambda x, c: torch.sigmoid(c.beta * (x[0] - x[2])) + 1 - torch.sigmoid(_margin(x, c.beta)),
    "discopop": _discopop,
    "ipo": lambda x, c: (_margin(x, 1.0) - 0.5 / c.beta) ** 2,
    "cpo": lambda x, c: _smoothed(c.beta * (x[0] - x[1]), c.label_smoothing),
    "simpo": lambda x, c: _smoothed(c.beta * (x[0] - x[1]) - c.gamma, c.label_smoothing),
    "orpo": _orpo,
}
OURS: dict[str, Callable[[Pair, Any], Tensor]] = {
    "sigmoid": lambda x, c: ll.losses.dpo(*x, beta=c.beta, label_smoothing=c.label_smoothing),
    "robust": lambda x, c: ll.losses.robust_dpo(*x, beta=c.beta, label_smoothing=c.label_smoothing),
    "hinge": lambda x, c: ll.losses.hinge(*x, beta=c.beta),
    "exo_pair": lambda x, c: ll.losses.exo_pair(*x, beta=c.beta, label_smoothing=c.label_smoothing),
    "nca_pair": lambda x, c: ll.losses.nca_pair(*x, beta=c.beta),
    "bco_pair": lambda x, c: ll.losses.bco_pair(*x, beta=c.beta),
    "sppo_hard": lambda x, c: ll.losses.sppo_hard(*x, beta=c.beta),
    "apo_zero": lambda x, c: ll.losses.apo_zero(*x, beta=c.beta),
    "apo_down": lambda x, c: ll.losses.apo_down(*x, beta=c.beta),
    "discopop": lambda x, c: ll.losses.discopop(*x, beta=c.beta, tau=0.05),
    "ipo": lambda x, c: ll.losses.ipo(*x, tau=c.beta),
    # CPO is SimPO's form on sums, without a margin
    "cpo": lambda x, c: ll.losses.simpo(x[0], x[1], beta=c.beta, margin=0.0, label_smoothing=c.label_smoothing),
    "simpo": lambda x, c: ll.losses.simpo(x[0], x[1], beta=c.beta, margin=c.gamma, label_smoothing=c.label_smoothing),
    # without the likelihood of the chosen response, which peers average over tokens
    "orpo": lambda x, c: ll.losses.orpo(x[0], x[1], beta=c.beta) + x[0],
}
AVERAGED = ("simpo", "orpo", "ipo")  # losses of a token's mean log-prob


@dataclass(frozen=True)
class Preference(Case):
    """A case: pairs of responses, the loss and its options."""

    loss: str
    pairs: int
    length: int
    width: int
    vocab: int
    dtype: torch.dtype
    within: Within
    bias: bool = False
    ref_bias: bool = False
    nll: float = 0.0  # the weight of the chosen responses' likelihood
    ignore_index: int = -100
    beta: float = 0.1
    label_smoothing: float = 0.0
    gamma: float = 0.5  # SimPO's margin

    @property
    def cost(self) -> int:
        return 2 * self.pairs * self.length * self.width * self.vocab

    def operands(self) -> Operands:
        generator = seeded()
        rows = 2 * self.pairs

        normal = normals(generator, self.dtype)

        def head(bias: bool) -> tuple[Tensor, Tensor | None]:
            return normal(self.vocab, self.width, by=1 / self.width**0.5), normal(self.vocab) if bias else None

        labels = torch.randint(self.vocab, (rows, self.length), generator=generator)
        labels[0, : self.length // 2] = self.ignore_index  # prompts and paddings of unlike length
        labels[-1, -1] = self.ignore_index if self.length > 1 else labels[-1, -1]
        weight, bias = head(self.bias)
        ref_weight, ref_bias = head(self.ref_bias)
        hidden, ref_hidden = (normal(rows, self.length, self.width) for _ in range(2))
        return {
            "hidden": hidden,
            "weight": weight,
            "bias": bias,
            "labels": labels,
            "ref_hidden": ref_hidden,
            "ref_weight": ref_weight,
            "ref_bias": ref_bias,
        }

    def poisoned(self) -> Operands:
        operands = self.operands()
        ignored = operands["labels"] == self.ignore_index
        both = {name: ignored_rows_poisoned(operands[name], ignored) for name in ("hidden", "ref_hidden")}
        return {**operands, **both}

    def dense(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        mask = labels != self.ignore_index

        def tokens(hidden: Tensor, weight: Tensor, bias: Any) -> Tensor:
            logp = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1)
            return logp.gather(-1, labels.clamp(0, self.vocab - 1)[..., None])[..., 0] * mask

        def sequences(logp: Tensor) -> Tensor:
            return logp.sum(-1) / (mask.sum(-1) if self.loss in AVERAGED else 1)

        logp = tokens(hidden, weight, bias)
        reference = sequences(tokens(ref["ref_hidden"], ref["ref_weight"], ref["ref_bias"])).detach()
        each = DENSE[self.loss]((*sequences(logp).split(self.pairs), *reference.split(self.pairs)), self)
        return each.mean() - self.nll * logp[: self.pairs].sum() / mask[: self.pairs].sum()

    def ours(self, hidden: Tensor, weight: Tensor, bias: Any, labels: Tensor, **ref: Any) -> Tensor:
        options: dict[str, Any] = {"ignore_index": self.ignore_index, "memory_budget": 2**20}
        mask = labels != self.ignore_index
        likelihood = self.nll * self.pairs / mask[: self.pairs].sum()
        with torch.no_grad():
            head = ll.LMHead(ref["ref_weight"], ref["ref_bias"])
            ref_logp = ll.token_stats(ref["ref_hidden"], head, labels, **options).logprob

        def each(stats: Any, ref_logp: Tensor, mask: Tensor) -> Tensor:
            both = (ll.losses.sequence_logprob(x, mask, self.loss in AVERAGED) for x in (stats.logprob, ref_logp))
            loss = OURS[self.loss](tuple(x for pair in both for x in pair.unbind(1)), self)  # pyright: ignore
            return loss - likelihood * stats.logprob[:, 0].sum(-1)

        def paired(x: Tensor) -> Tensor:
            return x.unflatten(0, (2, self.pairs)).transpose(0, 1)

        return ll.token_loss(
            *(each, paired(hidden), ll.LMHead(weight, bias), paired(labels)),
            inputs=(paired(ref_logp), paired(mask)),
            per="sequence",
            **options,
        )

    def found(self) -> Outcome:
        return outcome(self.ours, self.poisoned(), ("hidden", "weight", "bias"))

    def check(self) -> None:
        exact = outcome(self.dense, self.operands(), ("hidden", "weight", "bias"), torch.float64)
        fine = 2e-4 if self.loss == "discopop" else 1e-4  # whose slope nearly vanishes: plain torch is 1.4e-4 off
        budget = fine if self.dtype == torch.float32 else None  # a sum of log-probs through an exponential
        assert_held(self.found(), exact, self.within, budget)

    def check_against(self, function: Any) -> None:
        theirs = outcome(function, self.operands(), ("hidden", "weight", "bias"))
        assert_same(self.found(), theirs, self.within)
