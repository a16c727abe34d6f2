"""What training adds on each GPU: gradients as backward makes them, optimizer state, and what sharding costs."""

from __future__ import annotations

from collections.abc import Iterator

from ...models.shapes import ModelShape
from .algorithms import (
    BACKWARD,
    BACKWARD_END,
    EMBEDDING,
    FORWARD,
    LOSS,
    LOSS_BACKWARD,
    OPTIMIZER,
    ROLLOUT,
    SCORING,
    TRAINING,
)
from .setting import OPTIMIZERS, SHARDINGS, Setting, ceil_div

Row = tuple[str, str, int, tuple[str, ...], int]  # a Component's fields
BF16, FP32 = 2, 4
BUCKET = 25 << 20  # of DDP


def local(count: int, shape: ModelShape, setting: Setting) -> int:
    """A model's parameters on each GPU before sharding: tensor parallelism divides its matrices."""
    vectors = min(shape.vectors, count)
    return vectors + ceil_div(count - vectors, setting.tensor_parallel)


def critic_shape(setting: Setting) -> ModelShape:
    """The critic's shape."""
    return setting.critic_shape or setting.model


def reward_shape(setting: Setting) -> ModelShape:
    """The reward model's shape."""
    return setting.reward_shape or setting.model


def scorer(shape: ModelShape) -> int:
    """Parameters of a model with one number per token or sequence in the place of its head."""
    return shape.embedding + shape.body + shape.hidden


def trained_parameters(setting: Setting) -> int:
    """Parameters with a gradient, on each GPU before sharding."""
    shape = setting.model
    return local(shape.lora(setting.lora_rank) if setting.lora_rank else shape.parameters, shape, setting)


def largest_layer(setting: Setting) -> int:
    """Parameters of the largest layer, on each GPU before sharding."""
    vectors = setting.model.layer_vectors
    return vectors + ceil_div(setting.model.largest_layer - vectors, setting.tensor_parallel)


def trained_layer(setting: Setting) -> int:
    """Those of the largest layer that have a gradient."""
    if setting.lora_rank:
        return ceil_div(trained_parameters(setting), setting.model.layers)
    return largest_layer(setting)


def last_layers(setting: Setting) -> int:
    """Layers that backward has still to come to, its own included, when it has the fewest activations at a peak.

    Under FSDP2 the first layer has nothing to gather ahead when the embedding is the head: the second one's is higher.
    """
    ahead = setting.sharding == "fsdp2" and setting.shards > 1 and setting.model.tied
    return min(2 if ahead else 1, setting.model.layers)


def trained_embedding(setting: Setting) -> int:
    """Those of the embedding, which is the head as well when tied."""
    return 0 if setting.lora_rank else ceil_div(setting.model.embedding, setting.tensor_parallel)


def training(setting: Setting) -> Iterator[Row]:
    """Adapters, gradients, optimizer state and master weights; the critic's too."""
    always, valued = setting.kind.phases, critic_shape(setting)
    trained = trained_parameters(setting)
    top = trained if setting.lora_rank else trained_embedding(setting)
    critic = local(scorer(valued), valued, setting) if setting.keeps("critic") else 0
    critic_top = min(critic, local(valued.embedding, valued, setting))
    per, over = OPTIMIZERS[setting.optimizer]
    if setting.lora_rank:
        yield _row(setting, "adapters", trained, top, FP32, always, "parameters")
    yield from _gradients(setting)
    for name, count, most in (("", trained, top), ("critic's ", critic, critic_top)):
        mine = setting.divided(count, "optimizer")
        size = ceil_div(mine * per, over)
        state = f"{mine:,} × {per} B" if over == 1 else f"{mine:,} × {per}/{over} B"
        yield f"{name}optimizer state", state, size, always, min(size, ceil_div(most * per, 2 * over))
        if setting.master_weights and setting.optimizer != "none" and (not setting.lora_rank or name):
            yield _row(setting, f"{name}master weights", count, most, FP32, always, "optimizer")


def _row(setting: Setting, name: str, count: int, most: int, item: int, phases: tuple[str, ...], what: str) -> Row:
    size = setting.divided(count, what) * item
    return name, f"{count:,} {'fp32' if item == FP32 else 'bf16'}", size, phases, min(size, most * item)


def _gradients(setting: Setting) -> Iterator[Row]:
    """As backward makes them: the head's in `vocabulary`, then layer by layer, the embedding's at last.

    PEFT keeps adapters in fp32. Where they accumulate, all of them are there from the first pass on.
    """
    item = FP32 if setting.lora_rank else BF16
    trained, layer, embedding = trained_parameters(setting), trained_layer(setting), trained_embedding(setting)
    top = trained if setting.lora_rank else embedding
    often = setting.accumulation > 1
    yield _row(setting, "gradients", trained, top, item, TRAINING if often else (OPTIMIZER,), "gradients")
    if not often:
        last = last_layers(setting) * layer
        before, ends = trained - embedding - last, (BACKWARD_END, EMBEDDING)
        yield _row(setting, "gradients so far", before, min(top, before), item, ends, "gradients")
        yield _row(setting, "the last layer's gradients", last, layer, item, (EMBEDDING,), "gradients")
    matrix = 0 if setting.lora_rank else ceil_div(setting.model.last_matrix, setting.tensor_parallel) * BF16
    yield "an MLP's first gradient", "of its last matrix", matrix, (BACKWARD, BACKWARD_END), matrix
    size = embedding * BF16
    yield "embedding's gradient", f"{embedding:,} bf16", size, (EMBEDDING,), size


def sharding(setting: Setting) -> Iterator[Row]:
    """What dividing costs: buckets, gathered weights, gradients before they are divided."""
    divided = SHARDINGS[setting.sharding]
    if setting.shards == 1:
        return
    item = FP32 if setting.lora_rank else BF16
    if not divided:
        trained = trained_parameters(setting)
        size = trained * item
        yield "DDP's gradient buckets", f"{trained:,}", size, setting.kind.phases, min(size, BUCKET)
    elif setting.sharding == "fsdp2":
        yield from _fsdp2(setting, item)
    else:
        layer = largest_layer(setting) * BF16
        if "gradients" in divided and not setting.lora_rank:
            yield "a layer's gradients", "before division", layer, (BACKWARD, BACKWARD_END), layer
        if "parameters" in divided:
            yield from _zero3(setting, layer)


def _zero3(setting: Setting, layer: int) -> Iterator[Row]:
    shape = setting.model
    ends = ceil_div(shape.embedding + shape.head, setting.tensor_parallel) * BF16
    busy = (SCORING, FORWARD, LOSS, LOSS_BACKWARD, BACKWARD, BACKWARD_END)
    yield "gathered layers", "one at work, one ahead", 2 * layer, (*busy, ROLLOUT), layer
    yield "gathered embedding and head", f"({shape.vocab}, {shape.hidden}) bf16", ends, busy, ends
    whole = local(shape.parameters, shape, setting) * BF16  # TRL gathers all of it to generate
    yield "gathered model", f"{shape.parameters:,} bf16", whole - 2 * layer, (ROLLOUT,), ends


def _fsdp2(setting: Setting, item: int) -> Iterator[Row]:
    """torch's `fully_shard` as accelerate applies it: each layer a unit, last norm and head one, the embedding one.

    A unit is gathered into one buffer and copied into its weights: forward, the buffer stays until the next unit has
    been gathered; backward, the next unit's buffer fills while one is at work. The head is gathered once a pass, and
    when tied stays from its first use to the end. The input of a reduce-scatter stays until the next one.
    """
    shape = setting.model
    layer = largest_layer(setting) * BF16
    layer += FP32 * trained_layer(setting) if setting.lora_rank else 0
    embedding = ceil_div(shape.embedding, setting.tensor_parallel) * BF16
    text = f"({shape.vocab}, {shape.hidden}) bf16"
    both = (LOSS, BACKWARD_END) if shape.tied else ()  # else another unit's buffer takes its place
    yield "gathered layer", "at work", layer, (ROLLOUT, SCORING, FORWARD, BACKWARD, BACKWARD_END), layer
    buffered = (ROLLOUT, SCORING, FORWARD, LOSS_BACKWARD, BACKWARD, *both)
    yield "gathered layer, its buffer", "its own or the next one's", layer, buffered, layer
    if shape.tied:
        held = (ROLLOUT, SCORING, FORWARD, LOSS, LOSS_BACKWARD, BACKWARD, BACKWARD_END, EMBEDDING)
        yield "gathered head", text, embedding, held, embedding
    else:
        yield "gathered head", text, embedding, (ROLLOUT, SCORING, LOSS, LOSS_BACKWARD), embedding
        yield "gathered head, its buffer", text, embedding, (SCORING, LOSS), embedding
        # checkpointed layers want a gradient of their input
        if setting.gradient_checkpointing or not setting.lora_rank:
            yield "gathered embedding", text, embedding, (BACKWARD_END, EMBEDDING), embedding
    reduced = trained_layer(setting) * item
    yield "a layer's reduce-scatter", "its input", reduced, (BACKWARD_END,), reduced
    share = setting.divided(0 if shape.tied else trained_embedding(setting), "gradients") * BF16
    if setting.accumulation == 1:
        yield "head's share of its gradient", "after the reduce-scatter", share, (BACKWARD,), share
    last = max(reduced, share)  # the layer's input, or then the embedding's output
    yield "the last reduce-scatter", "of a layer or the embedding", last, (EMBEDDING,), last
