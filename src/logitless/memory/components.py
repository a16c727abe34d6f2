"""What a run keeps on each GPU: `components(setting, way)`, one row per thing, each with the phases it lives in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import OptionError
from .activations import activations
from .algorithms import (
    BACKWARD,
    BACKWARD_END,
    FORWARD,
    LOSS,
    LOSS_BACKWARD,
    OPTIMIZER,
    ROLLOUT,
    SCORING,
    TRAINING,
)
from .setting import LARGEST, OPTIMIZERS, SHARDINGS, Setting, ceil_div
from .vocabulary import dense, logitless, soft_dense, soft_logitless

BF16, FP32 = 2, 4
WAYS = {"dense": (dense, soft_dense), "logitless": (logitless, soft_logitless)}


@dataclass(frozen=True)
class Component:
    """Something that takes memory on each GPU during some phases of a step."""

    name: str
    shape: str
    nbytes: int
    phases: tuple[str, ...]
    largest: int  # bytes of its largest single tensor


def components(setting: Setting, way: str) -> list[Component]:
    """All that lives on a GPU when the loss is computed the `dense` or the `logitless` way.

    Raises OptionError where something has more bytes than anything can count.
    """
    vocabulary = WAYS[way][setting.kind.soft_tokens]
    parts = (_weights(setting), _training(setting), _sharding(setting), _body(setting, way), _rollout(setting))
    rows = [row for part in (*parts, (Component(*row) for row in vocabulary(setting))) for row in part]
    kept = []
    for row in rows:
        phases = tuple(p for p in setting.kind.phases if p in row.phases)
        if row.nbytes > LARGEST:
            raise OptionError(f"{row.name} would have {row.nbytes} bytes, more than 2^63-1: give smaller sizes")
        if row.nbytes and phases:
            kept.append(Component(row.name, row.shape, row.nbytes, phases, row.largest))
    return kept


def _local(count: int, setting: Setting) -> int:
    """A model's parameters on each GPU before sharding: tensor parallelism divides its matrices."""
    vectors = min(setting.model.vectors, count)
    return vectors + ceil_div(count - vectors, setting.tensor_parallel)


def trained_parameters(setting: Setting) -> int:
    """Parameters with a gradient, on each GPU before sharding."""
    shape = setting.model
    return _local(shape.lora(setting.lora_rank) if setting.lora_rank else shape.parameters, setting)


def _weights(setting: Setting) -> Iterator[Component]:
    """The models themselves."""
    shape, always = setting.model, setting.kind.phases
    embedding = ceil_div(shape.embedding, setting.tensor_parallel) * BF16
    backbone = shape.embedding + shape.body

    def model(name: str, count: int) -> Component:
        mine = setting.divided(_local(count, setting), "parameters")
        return Component(name, f"{count:,} bf16", mine * BF16, always, min(embedding, mine * BF16))

    yield model("parameters", shape.parameters)
    if setting.keeps("reference") and not (setting.lora_rank and setting.reference == "auto"):
        yield model("reference model", shape.parameters)  # with adapters, the base model is the reference
    if setting.keeps("critic"):
        yield model("critic", backbone + shape.hidden)
    if setting.keeps("reward_model"):
        yield model("reward model", backbone + shape.hidden)


def _training(setting: Setting) -> Iterator[Component]:
    """Gradients, optimizer state and master weights; the critic's too."""
    shape, always = setting.model, setting.kind.phases
    trained = trained_parameters(setting)
    itemsize = FP32 if setting.lora_rank else BF16  # PEFT keeps adapters in fp32
    top = trained if setting.lora_rank else ceil_div(shape.embedding, setting.tensor_parallel)
    critic = _local(shape.embedding + shape.body + shape.hidden, setting) if setting.keeps("critic") else 0
    per, over = OPTIMIZERS[setting.optimizer]

    def row(name: str, count: int, item: int, phases: tuple[str, ...], what: str) -> Component:
        size = setting.divided(count, what) * item
        kind = "fp32" if item == FP32 else "bf16"
        return Component(name, f"{count:,} {kind}", size, phases, min(size, top * item))

    if setting.lora_rank:
        yield row("adapters", trained, FP32, always, "parameters")
    held = TRAINING if setting.accumulation > 1 else (BACKWARD_END, OPTIMIZER)
    yield row("gradients", trained, itemsize, held, "gradients")
    for name, count in (("", trained), ("critic's ", critic)):
        mine = setting.divided(count, "optimizer")
        size = ceil_div(mine * per, over)
        state = f"{mine:,} × {per / over:g} B"
        yield Component(f"{name}optimizer state", state, size, always, min(size, ceil_div(top * per, 2 * over)))
        if setting.master_weights and setting.optimizer != "none" and (not setting.lora_rank or name):
            yield row(f"{name}master weights", count, FP32, always, "optimizer")


def _sharding(setting: Setting) -> Iterator[Component]:
    """What dividing costs: buckets, gathered layers, gradients before they are divided."""
    shape, divided = setting.model, SHARDINGS[setting.sharding]
    if setting.shards == 1:
        return
    layer = _local(shape.largest_layer, setting) * BF16
    ends = ceil_div(shape.embedding + shape.head, setting.tensor_parallel) * BF16
    trained = trained_parameters(setting)
    if not divided:
        size = trained * (FP32 if setting.lora_rank else BF16)
        yield Component("DDP's gradient buckets", f"{trained:,}", size, setting.kind.phases, min(size, 25 << 20))
    if "gradients" in divided and not setting.lora_rank:
        yield Component("a layer's gradients", "before division", layer, (BACKWARD, BACKWARD_END), layer)
    if "parameters" in divided:
        busy = (SCORING, FORWARD, LOSS, LOSS_BACKWARD, BACKWARD, BACKWARD_END)
        yield Component("gathered layers", "one at work, one ahead", 2 * layer, (*busy, ROLLOUT), layer)
        yield Component("gathered embedding and head", f"({shape.vocab}, {shape.hidden}) bf16", ends, busy, ends)
        whole = _local(shape.parameters, setting) * BF16
        if setting.sharding == "zero3":  # TRL gathers all of it to generate
            yield Component("gathered model", f"{shape.parameters:,} bf16", whole - 2 * layer, (ROLLOUT,), ends)
        else:
            yield Component(
                "gathered embedding, rollout", f"({shape.vocab}, {shape.hidden}) bf16", ends, (ROLLOUT,), ends
            )


def _body(setting: Setting, way: str) -> Iterator[Component]:
    """Activations of the layers, and what is at work inside one."""
    shape, n = setting.model, setting.tokens
    per = activations(shape, setting)
    saved = setting.micro_sequences * _soft_steps(setting) if setting.kind.soft_tokens and way == "dense" else n
    keep = per.held(setting.gradient_checkpointing)
    wide = _widest(setting, n)
    what = "layers' inputs" if setting.gradient_checkpointing else "activations of the layers"
    held = (FORWARD, LOSS, LOSS_BACKWARD, BACKWARD)
    yield Component(what, f"{shape.layers} × {saved:,} tokens", keep * saved, held, min(wide, keep * saved))
    yield Component(
        "last norm and hidden states", f"({n:,}, {shape.hidden})", per.last * n, held[1:3], 4 * shape.hidden * n
    )
    if setting.gradient_checkpointing:
        yield Component("a layer at work", f"{n:,} tokens", per.forward * n, (FORWARD, SCORING), wide)
        yield Component("a layer, recomputed", f"{n:,} tokens", per.layer * n, (BACKWARD, BACKWARD_END), wide)
    else:
        yield Component("a layer at work", f"{n:,} tokens", per.forward * n, (SCORING,), wide)
        yield Component("scores at work", f"{n:,} tokens", per.scores * n, (FORWARD,), per.scores * n)
        yield Component("the last layer kept", f"{n:,} tokens", per.layer * n, (BACKWARD_END,), wide)
    ends = (BACKWARD, BACKWARD_END)
    yield Component("a layer's activation gradients", f"{n:,} tokens", per.backward * n, ends, wide)
    if setting.kind.soft_tokens and setting.keeps("reward_model"):
        frozen = activations(shape, setting, frozen=True).kept * n
        yield Component("reward model's activations", f"{n:,} tokens", frozen, (LOSS, LOSS_BACKWARD), wide)


def _widest(setting: Setting, tokens: int) -> int:
    """Bytes of a layer's largest tensor: of the MLP's width, or a norm's fp32 input."""
    return tokens * max(BF16 * ceil_div(setting.model.mlp, setting.tensor_parallel), FP32 * setting.model.hidden)


def _soft_steps(setting: Setting) -> int:
    """Tokens that the steps of a generation under gradient pass through the layers when there is no cache."""
    steps = setting.response_length
    return steps * setting.prompt_length + steps * (steps + 1) // 2


def _rollout(setting: Setting) -> Iterator[Component]:
    """Generation: the cache, the prompt's pass through a layer, the next token's logits."""
    shape, n, length = setting.model, setting.rollout_sequences, setting.rollout_length
    key = ceil_div(shape.key, min(setting.tensor_parallel, shape.kv_heads))
    cache = 2 * BF16 * key * shape.kv_tokens(length) * n
    text = f"(2, {shape.layers}, {n}, {length}, {key}) bf16"
    yield Component("key-value cache", text, cache, (ROLLOUT,), BF16 * key * length * n)
    tokens = setting.prompt_length * n
    prompt = activations(shape, setting).forward * tokens
    yield Component("prompts in a layer", f"{tokens:,} tokens", prompt, (ROLLOUT,), _widest(setting, tokens))
    vocab = ceil_div(shape.vocab, setting.tensor_parallel)
    next_logits = n * vocab * (BF16 + 2 * FP32)
    yield Component(
        "next token's logits", f"({n}, {vocab}) bf16, fp32 twice", next_logits, (ROLLOUT,), n * vocab * FP32
    )
