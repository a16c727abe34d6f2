"""What a run keeps on each GPU: `components(setting, way)`, one row per thing, each with the phases it lives in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import OptionError
from ...models.shapes import ModelShape
from ...units import LARGEST, plural
from .activations import activations, merged_experts
from .algorithms import BACKWARD, BACKWARD_END, FORWARD, LOSS, LOSS_BACKWARD, ROLLOUT, SCORING, TRAINING
from .head import dense, logitless, soft_dense, soft_logitless
from .setting import HEAD_FORMATS, Setting, ceil_div
from .states import BF16, FP32, Row, critic_shape, last_layers, local, reward_shape, scorer, sharding, training

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
    parts = (
        _weights(setting),
        _made(training(setting)),
        _made(sharding(setting)),
        _body(setting, way),
        _experts(setting),
        _rollout(setting),
        _made(vocabulary(setting)),
    )
    rows = [row for part in parts for row in part]
    kept = []
    for row in rows:
        phases = tuple(p for p in setting.kind.phases if p in row.phases)
        if row.nbytes > LARGEST:
            raise OptionError(f"{row.name} would have {row.nbytes} bytes, more than 2^63-1: give smaller sizes")
        if row.nbytes and phases:
            kept.append(Component(row.name, row.shape, row.nbytes, phases, min(row.largest, row.nbytes)))
    return kept


def _made(rows: Iterator[Row]) -> Iterator[Component]:
    return (Component(*row) for row in rows)


def _weights(setting: Setting) -> Iterator[Component]:
    """The models themselves."""
    always = setting.kind.phases

    def model(name: str, shape: ModelShape, count: int) -> Component:
        mine = setting.divided(local(count, shape, setting), "parameters")
        embedding = ceil_div(shape.embedding, setting.tensor_parallel) * BF16
        return Component(name, f"{count:,} bf16", mine * BF16, always, min(embedding, mine * BF16))

    stored = setting.model.head if setting.quantised_head else 0
    yield model("parameters", setting.model, setting.model.parameters - stored)
    if stored:  # nothing divides it further: a sharded parameter is of one floating dtype
        mine = ceil_div(stored, setting.tensor_parallel)
        per, over = HEAD_FORMATS[setting.head_format]
        size = ceil_div(mine * per, over)
        yield Component("quantised head", f"{mine:,} {setting.head_format}", size, always, size)
    # with adapters, the base model is the reference
    if setting.keeps("reference") and not (setting.lora_rank and setting.reference == "auto"):
        yield model("reference model", setting.model, setting.model.parameters)
    if setting.keeps("critic"):
        yield model("critic", critic_shape(setting), scorer(critic_shape(setting)))
    if setting.keeps("reward_model"):
        yield model("reward model", reward_shape(setting), scorer(reward_shape(setting)))


def _body(setting: Setting, way: str) -> Iterator[Component]:
    """Activations of the layers, and what is at work inside one."""
    shape, n = setting.model, setting.tokens
    per = activations(shape, setting)
    saved = setting.micro_sequences * _soft_steps(setting) if setting.kind.soft_tokens and way == "dense" else n
    keep = per.held(setting.gradient_checkpointing)
    held = (FORWARD, LOSS, LOSS_BACKWARD, BACKWARD)
    if setting.offload_activations:  # one layer's, the others are on the host
        keep, held = BF16 * shape.hidden, (*held, BACKWARD_END)
    wide = per.widest * n
    what = "layers' inputs" if setting.gradient_checkpointing else "activations of the layers"
    yield Component(what, f"{shape.layers} × {plural(saved, 'token')}", keep * saved, held, wide)
    yield Component(
        "last norm and hidden states", f"({n:,}, {shape.hidden})", per.last * n, held[1:3], 4 * shape.hidden * n
    )
    if setting.gradient_checkpointing:
        if not setting.offload_activations:
            first = last_layers(setting) * BF16 * shape.hidden * n
            yield Component(
                "first layers' inputs",
                f"{last_layers(setting)} × {plural(n, 'token')}",
                first,
                (BACKWARD_END,),
                BF16 * shape.hidden * n,
            )
        yield Component("a layer at work", plural(n, "token"), per.forward * n, (FORWARD, SCORING), wide)
        yield Component("a layer, recomputed", plural(n, "token"), per.layer * n, (BACKWARD, BACKWARD_END), wide)
    else:
        yield Component("a layer at work", plural(n, "token"), per.forward * n, (SCORING,), wide)
        yield Component("scores at work", plural(n, "token"), per.scores * n, (FORWARD,), per.scores * n)
        first = last_layers(setting) * per.layer * n
        yield Component(
            "first layers kept", f"{last_layers(setting)} × {plural(n, 'token')}", first, (BACKWARD_END,), wide
        )
        beyond = max(0, per.last - BF16 * shape.hidden + per.norm - per.backward) * n  # its output is gone
        widest = min(beyond, FP32 * shape.hidden * n)
        yield Component("last norm's activation gradients", "beyond a layer's", beyond, (BACKWARD,), widest)
    ends = (BACKWARD, BACKWARD_END)
    yield Component("a layer's activation gradients", plural(n, "token"), per.backward * n, ends, wide)
    tables, while_there = per.tables * n, (FORWARD, LOSS, LOSS_BACKWARD, *ends)
    yield Component("rotary tables", f"(2, {n:,}, {shape.head_dim}) bf16", tables, while_there, tables // 2)
    if setting.kind.soft_tokens and setting.keeps("reward_model"):
        frozen = activations(reward_shape(setting), setting, frozen=True)
        size, widest = frozen.kept * n, frozen.widest * n
        yield Component("reward model's activations", plural(n, "token"), size, (LOSS, LOSS_BACKWARD), widest)


def _experts(setting: Setting) -> Iterator[Component]:
    """Experts with their adapters merged in, and the gradient of one layer's of them."""
    shape = setting.model
    layer, stack = merged_experts(shape, setting)
    most = 2 * stack // 3  # gate and up are one tensor
    text = f"{shape.experts} × 3 × ({shape.expert_mlp}, {shape.hidden}) bf16, and factors"
    if not setting.gradient_checkpointing:
        whole = shape.moe_layers * layer
        yield Component("experts with their adapters", f"{shape.moe_layers} × {text}", whole, TRAINING[:4], most)
    again = (FORWARD, BACKWARD) if setting.gradient_checkpointing else ()
    busy = (ROLLOUT, SCORING, *again, BACKWARD_END)
    yield Component("experts with their adapters, at work", text, layer, busy, most)
    yield Component("gradient of a layer's experts", text, stack, (BACKWARD, BACKWARD_END), most)


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
    per = activations(shape, setting)
    prompt = per.forward * tokens
    yield Component("prompts in a layer", plural(tokens, "token"), prompt, (ROLLOUT,), per.widest * tokens)
    vocab = ceil_div(shape.vocab, setting.tensor_parallel)
    next_logits = n * vocab * (BF16 + 3 * FP32)  # in fp32: the logits, their softmax, and what draws from it
    yield Component(
        "next token's logits", f"({n}, {vocab}) bf16, fp32 thrice", next_logits, (ROLLOUT,), n * vocab * FP32
    )
