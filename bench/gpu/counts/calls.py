"""What is counted: the GPU benchmark's rows, and calls beside them in which a cost was found or is to be kept low."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import logitless as ll
from bench.cases import LOGIT_STD, Tensors
from bench.gpu.rows import (
    ENTRIES,
    LLAMA,
    QWEN,
    ROWS,
    Row,
    make_operands,
    mask_of,
    methods,
    ours,
    spread_ids,
    with_weights,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RIVALS = {"loss": 17.33e-3}  # seconds on an H200 of QuACK 0.6.1, as Liger 0.8.5 states beside its own 18.06


@dataclass(frozen=True)
class Call:
    """A step to be counted. build: the step, on the claimed device; bare: its products and nothing else, by kind."""

    name: str
    title: str
    shape: tuple[int, int, int]  # tokens, hidden size, vocabulary
    build: Callable[[], Callable[[], Any]]
    bare: dict[str, Callable[[], Callable[[], Any]]] = field(default_factory=dict)
    goal: float | None = None  # times the fastest kind of bare products that it may take
    rival: float | None = None  # seconds that it is to be faster than
    capture: bool = True  # whether a CUDA graph can have it
    with_rows: Callable[[int], Callable[[], Any]] | None = None  # the step of so many tokens, where these change
    known: dict[str, Any] = field(default_factory=dict)  # what the host hears, by what a wait says
    replayed: bool = False  # whether its goal is one of a CUDA graph: the benchmark replays one
    explained: Callable[[], str] | None = None  # what the library says of it before


def operands(row: Row) -> Tensors:
    """A row's operands, in bf16."""
    return make_operands(row, row.shape, "cuda", BF16)


def of_tokens(row: Row, n: int) -> Row:
    """The row with another number of tokens."""
    return replace(row, shape=replace(row.shape, tokens=n))


def heard_of_sets(n: int) -> dict[str, Any]:
    """What the host hears of sampling masks with ENTRIES entries a token: that nothing is wrong."""
    return {
        "tolist at vocab/call/sampling_mask.py, check_layout": [0, n * ENTRIES, 0],
        "__bool__ at vocab/backends/triton/sets.py, look_at": False,
    }


def of_row(row: Row) -> Call:
    """The row as the benchmark has it, with its goal and its floors."""
    shape = row.shape.tokens, row.shape.hidden, row.shape.vocab
    floors = {m.name: m.build for m in methods(row, None) if m.kind == "floor"}
    return Call(
        row.name,
        row.title,
        shape,
        lambda: ours(row, None)(row.case, operands(row)),
        {name: lambda build=build: build(row.case, operands(row)) for name, build in floors.items()},
        row.time_limit,
        RIVALS.get(row.name),
        capture="token_ids" not in row.case.takes,
        with_rows=(lambda n: ours(row, None)(row.case, operands(of_tokens(row, n)))) if row.name == "sample" else None,
        known=heard_of_sets(row.shape.tokens) if "token_ids" in row.case.takes else {},
        replayed=row.name == "sample",
    )


def _made(
    n: int, h: int, v: int, dtype: torch.dtype = BF16, head_dtype: torch.dtype | None = None, grad: str = "hw"
) -> tuple[Tensor, ll.LMHead, Tensor]:
    hidden = torch.randn(n, h, dtype=dtype, device="cuda")
    weight = torch.randn(v, h, dtype=head_dtype or dtype, device="cuda").mul_(LOGIT_STD / h**0.5)
    labels = torch.randint(v, (n,), device="cuda")
    return hidden.requires_grad_("h" in grad), ll.LMHead(weight.requires_grad_("w" in grad)), labels


def loss_of(
    shape: tuple[int, int, int],
    dtype: torch.dtype = BF16,
    budget: int | None = None,
    upstream: float | None = None,
    autocast: bool = False,
) -> Callable[[], Callable[[], Any]]:
    """Cross-entropy with the gradients of hidden and head."""

    def build() -> Callable[[], Any]:
        hidden, head, labels = _made(*shape, dtype)

        def step() -> None:
            with torch.autocast("cuda", dtype=BF16, enabled=autocast):
                loss = ll.linear_cross_entropy(hidden, head, labels, memory_budget=budget)
            torch.autograd.grad(loss if upstream is None else loss * upstream, [hidden, head.weight])

        return step

    return build


def sliced(build: Callable[[], Callable[[], Any]]) -> Callable[[], Callable[[], Any]]:
    """The step with slices of logits, as devices have it that nobody has tuned."""
    return lambda: with_weights(build(), 0)


def explained(shape: tuple[int, int, int], dtype: torch.dtype = BF16, autocast: bool = False) -> Callable[[], str]:
    """`ll.explain` of `loss_of`."""

    def said() -> str:
        with torch.autocast("cuda", dtype=BF16, enabled=autocast):
            return str(ll.explain(*_made(*shape, dtype), loss=True))

    return said


def stats_of(
    shape: tuple[int, int, int], want: tuple[str, ...], grad: str = "", sets: bool = False, **options: Any
) -> Callable[[], Callable[[], Any]]:
    """Statistics, over sets of entries or all of them, with the gradient of their sum."""

    def build() -> Callable[[], Any]:
        hidden, head, labels = _made(*shape, grad=grad)
        if sets:
            options["sampling_mask"] = mask_of(spread_ids(labels, shape[2], ENTRIES))
        if {"kl", "jsd"} & set(want):
            options["reference"] = _made(*shape, grad="")[:2]

        def step() -> None:
            with torch.set_grad_enabled(bool(grad)):
                stats = ll.token_stats(hidden, head, labels, want=want, **options)
                if grad:
                    sum(getattr(stats, name).sum() for name in want).backward()

        return step

    return build


LLAMA_SHAPE = LLAMA.tokens, LLAMA.hidden, LLAMA.vocab
QWEN_SHAPE = QWEN.tokens, QWEN.hidden, QWEN.vocab
GPT2 = 4096, 768, 50_257
GIB = 1 << 30
NOT_ROWS = (
    Call("loss-default", "loss + gradients, default budget", LLAMA_SHAPE, loss_of(LLAMA_SHAPE)),
    Call("loss-qwen-default", "loss + gradients, default budget", QWEN_SHAPE, loss_of(QWEN_SHAPE)),
    Call("autocast", "loss + gradients, fp32 weights under autocast", LLAMA_SHAPE,
         loss_of(LLAMA_SHAPE, FP32, autocast=True), explained=explained(LLAMA_SHAPE, FP32, autocast=True)),
    Call("fp16", "loss + gradients in fp16", LLAMA_SHAPE, loss_of(LLAMA_SHAPE, FP16),
         explained=explained(LLAMA_SHAPE, FP16)),
    Call("upstream", "loss + gradients, upstream 1/8", LLAMA_SHAPE, loss_of(LLAMA_SHAPE, budget=GIB, upstream=0.125)),
    Call("loss-slices", "loss + gradients, slices of logits", LLAMA_SHAPE, sliced(loss_of(LLAMA_SHAPE, budget=GIB))),
    Call("values-slices", "log-prob + entropy, slices of logits", LLAMA_SHAPE,
         sliced(stats_of(LLAMA_SHAPE, ("logprob", "entropy")))),
    Call("frozen-slices", "log-prob, frozen head, slices of logits", LLAMA_SHAPE,
         sliced(stats_of(LLAMA_SHAPE, ("logprob",), "h", memory_budget=GIB // 4))),
    Call("odd-loss-slices", "loss + gradients, V = 50,257, slices of logits", GPT2, sliced(loss_of(GPT2, budget=GIB))),
    Call("odd-loss", "loss + gradients, V = 50,257", GPT2, loss_of(GPT2, budget=GIB)),
    Call("odd-values", "log-prob + entropy, V = 50,257", GPT2, stats_of(GPT2, ("logprob", "entropy"))),
    Call("max-logit", "log-prob, max logit and rank", LLAMA_SHAPE,
         stats_of(LLAMA_SHAPE, ("logprob", "max_logit", "rank"))),
    Call("top-20", "log-prob + entropy + top-20", LLAMA_SHAPE,
         stats_of(LLAMA_SHAPE, ("logprob", "entropy"), top_k=20)),
    Call("frozen-entropy", "log-prob + entropy, frozen head", LLAMA_SHAPE,
         stats_of(LLAMA_SHAPE, ("logprob", "entropy"), "h")),
    Call("frozen-kl", "log-prob + KL, frozen head", LLAMA_SHAPE, stats_of(LLAMA_SHAPE, ("logprob", "kl"), "h")),
    Call("jsd", "Jensen-Shannon divergence to a reference", LLAMA_SHAPE, stats_of(LLAMA_SHAPE, ("jsd",))),
    Call("jsd-gradient", "the same, with gradients", LLAMA_SHAPE, stats_of(LLAMA_SHAPE, ("jsd",), "hw")),
    Call("sets-gradient", "log-prob + entropy over sampling masks, with gradients", LLAMA_SHAPE,
         stats_of(LLAMA_SHAPE, ("logprob", "entropy"), "hw", sets=True), capture=False,
         known=heard_of_sets(LLAMA.tokens)),
)  # fmt: skip
CALLS = {call.name: call for call in (*map(of_row, ROWS.values()), *NOT_ROWS)}
