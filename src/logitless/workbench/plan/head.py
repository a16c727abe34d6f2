"""The vocabulary's share, as dense code makes it and as logitless does; all bytes from `algebra/costs.py`."""

from __future__ import annotations

from collections.abc import Iterator

from ...algebra.costs import DEQUANTISED, dense_parts, logits_bytes, price_of, slices_of, weight_gradient_bytes
from .algorithms import BACKWARD, BACKWARD_END, EMBEDDING, FORWARD, LOSS, LOSS_BACKWARD, SCORING
from .setting import Setting, ceil_div
from .states import BF16, FP32, Row

NUMBERS = 8  # per token: running sums and the loss's coefficients
LIVES = {  # tensors of dense cross-entropy; Trainer drops the logits themselves before backward
    "logits": (SCORING, LOSS),
    "logits in fp32": (SCORING, LOSS),
    "log-softmax": (SCORING, LOSS, LOSS_BACKWARD),
    "gradient of the log-softmax": (LOSS_BACKWARD,),
    "gradient of the logits": (LOSS_BACKWARD,),
    "softcap's tanh": (LOSS, LOSS_BACKWARD),
}


def _vocab(setting: Setting) -> int:
    return ceil_div(setting.model.vocab, setting.tensor_parallel)


def dense(setting: Setting) -> Iterator[Row]:
    """Logits of every token, as transformers and verl make them, or of the response, as TRL's RL trainers do."""
    n = setting.tokens if setting.dense_logits == "all" else setting.response_tokens
    v = _vocab(setting)
    for name, size in dense_parts(n, v, BF16, setting.model.softcap).items():
        kind = "bf16" if size == logits_bytes(n, v, BF16) else "fp32"
        yield name, f"({n:,}, {v:,}) {kind}", size, LIVES[name], size
    yield from _head_gradient(setting, ())
    yield from _hidden_gradient(setting, (LOSS_BACKWARD,))


def logitless(setting: Setting) -> Iterator[Row]:
    """Slices of the logits, and gradients of what they were made from."""
    kind, n, shape = setting.kind, setting.response_tokens, setting.model
    price = price_of(
        kind.wants,
        hidden_grad=True,
        weight_grad=not setting.lora_rank,
        bias_grad=False,
        loss=kind.separable,
        softcap=shape.softcap,
    )
    formed = (LOSS,) if price.method == "in-forward" else ()
    again = (LOSS_BACKWARD,) if price.method == "recompute" else ()
    yield _slices(setting, (LOSS, *again), whole=price.materialised, name="slices of the logits")
    yield _slices(setting, (SCORING,), whole=False, name="slices of the logits, scoring")
    yield from _head_gradient(setting, (*formed, LOSS_BACKWARD))
    yield from _hidden_gradient(setting, (*formed, LOSS_BACKWARD))
    for basis in price.bases:
        size = n * shape.hidden * FP32
        yield f"basis {basis} · W", f"({n:,}, {shape.hidden}) fp32", size, (LOSS, LOSS_BACKWARD), size
    numbers = n * NUMBERS * FP32
    yield "per-token numbers", f"({NUMBERS}, {n:,}) fp32", numbers, (SCORING, LOSS, LOSS_BACKWARD), n * FP32


def soft_dense(setting: Setting) -> Iterator[Row]:
    """Soft tokens over the whole vocabulary: each step's distributions stay for backward."""
    n, v = setting.response_tokens, _vocab(setting)
    size = logits_bytes(n, v, FP32)
    held = (FORWARD, LOSS, LOSS_BACKWARD, BACKWARD)
    for name in ("soft tokens", "policy's probabilities", "policy's log-softmax", "reference's log-softmax"):
        yield name, f"({n:,}, {v:,}) fp32", size, held, size
    yield "gradient of the soft tokens", f"({n:,}, {v:,}) fp32", size, (LOSS_BACKWARD, BACKWARD), size
    yield from _soft_rows(setting, ())


def soft_logitless(setting: Setting) -> Iterator[Row]:
    """Soft tokens with k entries, their weights and ids; the KL from slices of both heads' logits.

    With all entries (k=0) no weights are kept, but the fp32 rows that they make of each table that is read.
    """
    n, k = setting.response_tokens, min(setting.top_k, setting.model.vocab)
    width = k or setting.model.hidden + _read_width(setting)
    what = "soft tokens" if k else "soft rows of all tables"
    held = (FORWARD, LOSS, LOSS_BACKWARD, BACKWARD)
    size = n * width * FP32
    yield what, f"({n:,}, {width}) fp32", size, held, size
    if k:
        yield "soft tokens' ids", f"({n:,}, {k}) int64", n * k * 8, held, n * k * 8
    yield f"gradient of the {what}", f"({n:,}, {width}) fp32", size, (LOSS_BACKWARD, BACKWARD), size
    yield _slices(setting, (FORWARD, LOSS_BACKWARD), whole=False, name="slices of both heads' logits", heads=2)
    yield from _soft_rows(setting, (LOSS_BACKWARD,))


def _read_width(setting: Setting) -> int:
    """Of the reward model's table, which reads the soft tokens beside the policy's."""
    if not setting.keeps("reward_model"):
        return 0
    return (setting.reward_shape or setting.model).hidden


def _soft_rows(setting: Setting, summed: tuple[str, ...]) -> Iterator[Row]:
    n, hidden = setting.response_tokens, setting.model.hidden
    size = n * hidden * BF16
    yield "soft embeddings", f"({n:,}, {hidden}) bf16", size, (FORWARD, LOSS, LOSS_BACKWARD, BACKWARD), size
    yield from _head_gradient(setting, summed)


def _slices(setting: Setting, phases: tuple[str, ...], *, whole: bool, name: str, heads: int = 1) -> Row:
    s = slices_of(
        setting.response_tokens,
        _vocab(setting),
        budget=setting.memory_budget,
        device="gpu",
        itemsize=FP32,
        heads=heads,
        converted=DEQUANTISED * setting.model.hidden if setting.quantised_head else 0,
        whole=whole,
    )
    wide = _vocab(setting) if whole else s.width
    return name, f"({s.tokens:,}, {wide:,}) fp32, and scratch", s.nbytes, phases, s.tokens * wide * FP32


def _head_gradient(setting: Setting, summed: tuple[str, ...]) -> Iterator[Row]:
    """The head's gradient in its own dtype, and its fp32 sum during the phases `summed`; none with adapters."""
    if setting.lora_rank:
        return
    v, hidden = _vocab(setting), setting.model.hidden
    wide, narrow = weight_gradient_bytes(v, hidden, BF16)
    if summed:
        yield "head's gradient, summed", f"({v:,}, {hidden}) fp32", wide, summed, wide
    yield "head's gradient", f"({v:,}, {hidden}) bf16", narrow, _head_lives(setting), narrow


def _head_lives(setting: Setting) -> tuple[str, ...]:
    """When the head's gradient of this pass is there, beside `gradients` or before them."""
    if setting.model.tied:  # autograd keeps it until it can add the embedding's
        return LOSS_BACKWARD, BACKWARD, BACKWARD_END, EMBEDDING
    # a sum takes it in at once; FSDP2 has as large an input of the reduce-scatter, until that of the last layer
    summed = setting.accumulation > 1 and setting.sharding != "fsdp2"
    return (LOSS_BACKWARD,) if summed else (LOSS_BACKWARD, BACKWARD)


def _hidden_gradient(setting: Setting, phases: tuple[str, ...]) -> Iterator[Row]:
    n, hidden = setting.tokens, setting.model.hidden
    size = n * hidden * BF16
    yield "gradient of the hidden states", f"({n:,}, {hidden}) bf16", size, phases, size
