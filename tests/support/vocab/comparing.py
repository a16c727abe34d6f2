"""Holding the pass against the dense float64 oracle: values, and gradients under random cotangents."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import logitless as ll
from logitless.vocab.head.low_rank import LowRank
from logitless.vocab.reference import dense_token_stats

ALONE = (
    "logprob",
    "logsumexp",
    "label_logit",
    "entropy",
    "self_certainty",
    "mean_logit",
    "max_logit",
    "rank",
    "sum_sq_prob",
)
PAIRED = (
    "kl",
    "reverse_kl",
    "reverse_kl_shared",
    "jsd",
    "kl_mixture",
    "reverse_kl_mixture",
    "acceptance",
    "total_variation",
)
TAIL = ("tail_logprob",)  # with candidates, and on some backends
EVERYTHING = ALONE + PAIRED
INTEGERS = ("rank", "top_k_ids")
FIXED = ("el2n",)  # floating, without a gradient
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}


@dataclass
class Operands:
    """Hidden states, a head's parameters, labels and perhaps a reference's hidden states and head."""

    hidden: Tensor  # (..., H)
    weight: Tensor  # (V + padding, H)
    bias: Tensor | None
    labels: Tensor | None  # (...)
    transform: dict[str, Any] = field(default_factory=dict)  # scale, softcap, vocab_size
    ref: "Operands | None" = None
    adapters: tuple[LowRank, ...] = ()

    @property
    def head(self) -> ll.LMHead:
        return ll.LMHead(self.weight, self.bias, **self.transform, adapters=self.adapters)

    @property
    def reference(self) -> tuple[Tensor, ll.LMHead] | None:
        return None if self.ref is None else (self.ref.hidden, self.ref.head)

    @property
    def leaves(self) -> dict[str, Tensor]:
        named = {"hidden": self.hidden, "weight": self.weight, "bias": self.bias}
        named |= {f"{name}{i}": getattr(x, name) for i, x in enumerate(self.adapters) for name in "ab"}
        return {name: x for name, x in named.items() if x is not None and x.requires_grad}

    def to(self, dtype: torch.dtype) -> "Operands":
        """The same numbers as new leaves of another dtype."""

        def leaf(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad)

        ref = None if self.ref is None else self.ref.to(dtype)
        adapters = tuple(replace(x, a=leaf(x.a), b=leaf(x.b)) for x in self.adapters)
        named = {"hidden": leaf(self.hidden), "weight": leaf(self.weight), "bias": leaf(self.bias)}
        return replace(self, **named, ref=ref, adapters=adapters)

    def on(self, device: str) -> "Operands":
        """The same numbers as new leaves on a device; on a CPU the operands themselves."""
        if device == "cpu":
            return self

        def leaf(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().to(device).requires_grad_(x.requires_grad)

        adapters = tuple(replace(x, a=leaf(x.a), b=leaf(x.b)) for x in self.adapters)
        labels = None if self.labels is None else self.labels.to(device)
        ref = None if self.ref is None else self.ref.on(device)
        named = {"hidden": leaf(self.hidden), "weight": leaf(self.weight), "bias": leaf(self.bias)}
        return replace(self, **named, labels=labels, ref=ref, adapters=adapters)

    def training(self, *names: str) -> "Operands":
        """The same operands with exactly these requiring a gradient; "a" and "b" are every adapter's."""
        out = self.to(self.weight.dtype)
        for name in ("hidden", "weight", "bias"):
            if (x := getattr(out, name)) is not None:
                x.requires_grad_(name in names)
        for x in out.adapters:
            x.a.requires_grad_("a" in names)
            x.b.requires_grad_("b" in names)
        return out


def operands(
    lead: Sequence[int] = (7,),
    h: int = 5,
    v: int = 23,
    *,
    dtype: torch.dtype = torch.float64,
    bias: bool = True,
    spread: float = 3.0,
    reference: bool = False,
    ranks: Sequence[int] = (),
    **transform: Any,
) -> Operands:
    """Random operands whose logits have about this spread; labels reach both ends of the vocabulary.

    ranks: of the adapters, the reference's as well.
    """

    def adapters_of(width: int) -> tuple[LowRank, ...]:
        return tuple(
            LowRank(torch.randn(r, width).to(dtype) / width**0.5, torch.randn(v, r).to(dtype), 0.5 + i)
            for i, r in enumerate(ranks)
        )

    def head_of(width: int) -> tuple[Tensor, Tensor | None]:
        weight = (torch.randn(v, width, dtype=torch.float64) * spread / max(width, 1) ** 0.5).to(dtype)
        return weight, torch.randn(v, dtype=torch.float64).to(dtype) if bias else None

    rows = transform.get("vocab_size") or v
    labels = torch.randint(rows, tuple(lead))
    if labels.numel() > 1:
        labels.view(-1)[0], labels.view(-1)[-1] = 0, rows - 1
    ref = None
    if reference:  # of another width than the policy
        ref = Operands(torch.randn(*lead, h + 2, dtype=dtype), *head_of(h + 2), None, dict(transform))
        ref.adapters = adapters_of(h + 2)
    out = Operands(torch.randn(*lead, h, dtype=dtype), *head_of(h), labels, dict(transform), ref, adapters_of(h))
    return out.training("hidden", "weight", "bias", "a", "b")


def all_at_once(dtype: torch.dtype, budget: int | None) -> tuple[Operands, dict[str, Any]]:
    """A problem with every option: ignored labels, the same candidate twice, the label among the candidates."""
    ops = operands((13,), 7, 1031, dtype=dtype, reference=True)
    ops.labels[[2, 7]] = -100
    candidates = torch.randint(1031, (13, 4))
    candidates[:, 3] = candidates[:, 1]
    candidates[:, 2] = ops.labels.clamp_min(0)
    options = {"top_k": 5, "candidates": candidates, "jsd_beta": 0.3, "memory_budget": budget, "temperature": 0.8}
    return ops, options


def named_results(stats: Any, want: Sequence[str], options: dict[str, Any]) -> dict[str, Tensor]:
    """The results of a call by name, as the oracle names them."""
    names = [*want, *(("top_k_ids", "top_k_logits") if options.get("top_k") else ())]
    names += ["candidate_logits"] if options.get("candidates") is not None else []
    return {name: getattr(stats, name) for name in names}


def assert_near(got: Tensor, expected: Tensor, tolerance: float, name: str = "") -> None:
    """Elementwise |got - expected| ≤ tolerance·(1 + |expected|); infinities and NaN equal."""
    torch.testing.assert_close(
        *(got.double(), expected),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
        msg=lambda m: f"{name}: {m}",
    )


def assert_near_in_norm(got: Tensor, expected: Tensor, tolerance: float, name: str = "", floor: float = 1e-30) -> None:
    """|got - expected| ≤ tolerance·max|expected| everywhere: how rounding in a sum of products behaves."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        *(got.double(), expected), rtol=0, atol=tolerance * scale + floor, msg=lambda m: f"{name}: {m}"
    )


def cotangents_like(results: dict[str, Tensor]) -> dict[str, Tensor]:
    floats = {name: x for name, x in results.items() if name not in INTEGERS + FIXED}
    return {name: torch.randn(x.shape, dtype=torch.float64) for name, x in floats.items()}


def gradients(results: dict[str, Tensor], leaves: dict[str, Tensor], up: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient by leaf of Σ cotangent·result, keeping the graph for another backward."""
    outputs = [results[name] for name in up]
    upstream = [up[name].to(results[name]) for name in up]
    found = torch.autograd.grad(outputs, list(leaves.values()), upstream, retain_graph=True)
    return dict(zip(leaves, found, strict=True))


def compare(ops: Operands, want: Sequence[str] = ("logprob",), **options: Any) -> None:
    """token_stats equals the oracle on the same numbers: dtype, shape, values and gradients."""
    ours_only = {name: options.pop(name) for name in ("backend", "memory_budget") if name in options}
    tolerance = options.pop("tolerance", TOLERANCE.get(ops.weight.dtype, 2e-5))
    exact = ops.to(torch.float64)
    expected = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want, reference=exact.reference, **options)
    stats = ll.token_stats(ops.hidden, ops.head, ops.labels, want=want, reference=ops.reference, **options, **ours_only)
    got = named_results(stats, want, options)
    result_dtype = torch.float64 if ops.hidden.dtype == torch.float64 else torch.float32
    for name, value in got.items():
        assert value.shape == expected[name].shape, name
        assert value.dtype == (torch.int64 if name in INTEGERS else result_dtype), name
        if name in INTEGERS:
            assert torch.equal(value, expected[name]), name
        else:
            assert_near(value.detach(), expected[name].detach(), tolerance, name)
    up = cotangents_like(expected)
    if not (ops.leaves and up):
        return
    wanted = gradients(expected, exact.leaves, up)
    for name, grad in gradients(got, ops.leaves, up).items():
        assert grad.dtype == ops.leaves[name].dtype
        assert_near_in_norm(grad, wanted[name], 2 * tolerance, f"d {name}", floor=tolerance / 10)


def compare_loss(ops: Operands, want: Sequence[str], **options: Any) -> None:
    """token_loss of a random sum of statistics equals the oracle's on the same numbers: the value and gradients."""
    exact, tolerance = ops.to(torch.float64), TOLERANCE[ops.weight.dtype]
    names = [name for name in want if name not in INTEGERS]
    up = torch.randn(
        *ops.hidden.shape[:-1], len(names), generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )

    def loss_fn(stats: Any, up: Tensor) -> Tensor:
        return torch.stack([getattr(stats, name) for name in names], -1).mul(up).sum(-1)

    given = {"want": want, "reference": ops.reference, "inputs": (up.to(ops.weight.dtype),)}
    loss = ll.token_loss(loss_fn, ops.hidden, ops.head, ops.labels, **given, **options)
    found = dense_token_stats(exact.hidden, exact.head, ops.labels, want=want, reference=exact.reference)
    expected = torch.stack([found[name] for name in names], -1).mul(up).sum(-1).mean()
    assert_near(loss.detach(), expected.detach(), tolerance, "loss")
    wanted = torch.autograd.grad(expected, list(exact.leaves.values()))
    for (name, leaf), right in zip(ops.leaves.items(), wanted, strict=True):
        (grad,) = torch.autograd.grad(loss, [leaf], retain_graph=True)
        assert grad.dtype == leaf.dtype
        assert_near_in_norm(grad, right, 2 * tolerance, f"d {name}", floor=tolerance / 10)
