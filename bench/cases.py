"""What is measured: the work, its inputs, its plain-torch definition and the figures it should reach."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]

CLIP, ENTROPY_BONUS, KL_PENALTY = 0.2, 0.01, 0.05
LOGIT_STD = 2.0  # per-token entropy around 10 nats at V=131,072: neither uniform nor peaked


@dataclass(frozen=True)
class Shape:
    tokens: int
    hidden: int
    vocab: int


SHAPES = {"full": Shape(2048, 512, 131_072), "quick": Shape(512, 256, 8192), "tiny": Shape(48, 16, 301)}


@dataclass(frozen=True)
class Case:
    """One row of the table. `dense` gives the values; the gradients of `wrt` follow from them."""

    name: str
    title: str
    gemms: int  # matrix products of 2·N·H·V flop, the reference head's included
    dense: Callable[..., Tensors]
    takes: tuple[str, ...]  # names of the tensors that it reads
    wrt: tuple[str, ...]  # names of the tensors that get a gradient
    time_limit: float  # times the fastest bare GEMMs
    memory_limit: float  # MB above inputs and gradients
    dense_limit: float | None = None  # times plain torch

    def gradient_bytes(
        self, shape: Shape, dtype: torch.dtype = torch.float32, weight: torch.dtype | None = None
    ) -> int:
        """Of gradients that are handed over in the operands' dtype; weight: what the head's is in, where it differs."""
        rows = {"hidden": shape.tokens * dtype.itemsize, "weight": shape.vocab * (weight or dtype).itemsize}
        return shape.hidden * sum(rows[name] for name in self.wrt)


def dense_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
    return {"loss": F.cross_entropy(F.linear(hidden, weight), labels)}


def dense_logprob(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
    logp = torch.log_softmax(F.linear(hidden, weight), dim=-1)
    return {"logprob": logp.gather(-1, labels[:, None])[:, 0]}


def dense_logprob_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensors:
    logp = torch.log_softmax(F.linear(hidden, weight), dim=-1)
    return {"logprob": logp.gather(-1, labels[:, None])[:, 0], "entropy": -(logp.exp() * logp).sum(-1)}


def dense_stats(hidden: Tensor, weight: Tensor, labels: Tensor, ref_hidden: Tensor, ref_weight: Tensor) -> Tensors:
    logp = torch.log_softmax(F.linear(hidden, weight), dim=-1)
    logq = torch.log_softmax(F.linear(ref_hidden, ref_weight), dim=-1)
    p = logp.exp()
    return {
        "logprob": logp.gather(-1, labels[:, None])[:, 0],
        "entropy": -(p * logp).sum(-1),
        "self_certainty": -logp.mean(-1) - math.log(logp.shape[-1]),
        "kl": (p * (logp - logq)).sum(-1),
    }


def ppo_loss(logprob: Tensor, entropy: Tensor, kl: Tensor, advantages: Tensor, old_logprob: Tensor) -> Tensor:
    """PPO's clipped objective (arXiv 1707.06347) with an entropy bonus and an exact KL penalty; one per token."""
    ratio = torch.exp(logprob - old_logprob)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -surrogate - ENTROPY_BONUS * entropy + KL_PENALTY * kl


def dense_ppo(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    advantages: Tensor,
    old_logprob: Tensor,
) -> Tensors:
    logp = torch.log_softmax(F.linear(hidden, weight), dim=-1)
    with torch.no_grad():
        logq = torch.log_softmax(F.linear(ref_hidden, ref_weight), dim=-1)
    p = logp.exp()
    logprob, entropy = logp.gather(-1, labels[:, None])[:, 0], -(p * logp).sum(-1)
    kl = (p * (logp - logq)).sum(-1)
    return {"loss": ppo_loss(logprob, entropy, kl, advantages, old_logprob).mean()}


_HEAD = ("hidden", "weight", "labels")
_BOTH = (*_HEAD, "ref_hidden", "ref_weight")
CASES = {
    case.name: case
    for case in (
        Case("loss", "loss + gradients, trainable head", 3, dense_loss, _HEAD, ("hidden", "weight"), 1.06, 160, 0.80),
        Case("entropy", "log-prob + entropy, no gradient", 1, dense_logprob_entropy, _HEAD, (), 1.10, 96),
        Case("stats", "log-prob + entropy + self-certainty + KL, no gradient", 2, dense_stats, _BOTH, (), 1.15, 160),
        Case("frozen", "log-prob, any upstream gradient, frozen head", 2, dense_logprob, _HEAD, ("hidden",), 1.08, 128),
        Case(
            "ppo",
            "PPO clip + entropy bonus + KL, trainable head",
            4,
            dense_ppo,
            (*_BOTH, "advantages", "old_logprob"),
            ("hidden", "weight"),
            1.12,
            320,
        ),
    )
}  # fmt: skip


def make_tensors(case: Case, shape: Shape, dtype: torch.dtype = torch.float32) -> Tensors:
    """The same numbers in every process: drawn in float32, then cast."""
    g = torch.Generator().manual_seed(20)
    n, h, v = shape.tokens, shape.hidden, shape.vocab
    hidden = torch.randn(n, h, generator=g)
    weight = torch.randn(v, h, generator=g).mul_(LOGIT_STD / math.sqrt(h))
    labels = torch.randint(v, (n,), generator=g)
    out = {"hidden": hidden, "weight": weight, "labels": labels, "cotangent": torch.randn(n, generator=g)}
    if "advantages" in case.takes:
        # Gaussian logits: logsumexp is log V + var / 2, so ratios land on both sides of the clip.
        lse = math.log(v) + hidden.square().mean(-1) * LOGIT_STD**2 / 2
        label_logit = (hidden * weight[labels]).sum(-1)
        out["old_logprob"] = label_logit - lse + 0.15 * torch.randn(n, generator=g)
        out["advantages"] = torch.randn(n, generator=g)
    if "ref_hidden" in case.takes:
        out["ref_hidden"] = hidden + 0.2 * torch.randn(n, h, generator=g)
        noise = torch.randn(v, h, generator=g).mul_(0.2 * LOGIT_STD / math.sqrt(h))
        out["ref_weight"] = noise.add_(weight)
    return {k: t.to(dtype) if t.is_floating_point() else t for k, t in out.items()}


def step(case: Case, forward: Callable[..., Tensors], tensors: Tensors, share: float = 1.0) -> Tensors:
    """Values, and gradients of the mean loss (times `share`) or of log-prob under the random cotangent."""
    for name in case.wrt:
        tensors[name].requires_grad_(True).grad = None
    with torch.set_grad_enabled(bool(case.wrt)):
        values = forward(**{name: tensors[name] for name in case.takes})
        if "loss" in values:
            values = {"loss": values["loss"] * share}
            values["loss"].backward()
        elif case.wrt:
            values["logprob"].backward(tensors["cotangent"].to(values["logprob"].dtype))
    grads: Tensors = {}
    for name in case.wrt:
        grads[f"grad_{name}"], tensors[name].grad = tensors[name].grad, None
    return {name: value.detach() for name, value in values.items()} | grads
