"""What a layer keeps for its backward pass, in bytes per token: bf16, as transformers' layers under autograd do.

A norm keeps its input in fp32 and the normalised tensor; a matrix its input; flash attention q, k, v, its output and
a log-sum-exp; a gated MLP four tensors of its width, in tiles only its input. A frozen weight keeps no input; PEFT's
adapters keep their own copy of it, in fp32. Tests hold these numbers against what real layers save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...models.shapes import BLOCK, SELECTED, STRIDE, ModelShape
from .setting import Setting, ceil_div


@dataclass(frozen=True)
class Activations:
    """Bytes per token of one model's body."""

    kept: int  # all layers, without checkpointing
    layer: int  # the largest layer
    inputs: int  # the layers' inputs, all that checkpointing keeps
    last: int  # the last norm and its output
    tables: int  # rotary: one for all layers
    forward: int  # at work in a layer, forward
    backward: int  # gradients at work in a layer, backward, beyond what the layer keeps
    norm: int  # gradients at work in the last norm, beyond what it keeps
    scores: int  # eager attention's scores beyond what it keeps
    widest: int  # the largest tensor at work in a layer

    def held(self, checkpointing: bool) -> int:
        return self.inputs if checkpointing else self.kept


def activations(shape: ModelShape, setting: Setting, frozen: bool = False) -> Activations:
    """`frozen`: gradient flows through the model but none of its weights is trained, nor adapters.

    Where a trace says what the layers take, all but scores is in proportion to it.
    """
    traced = shape.traced
    if not traced.kept:
        return _of_sizes(shape, setting, frozen)
    eager = replace(setting, attention="eager")
    fused = _of_sizes(shape, replace(setting, attention="flash"), frozen)
    same = _of_sizes(shape, Setting(shape, lora_rank=traced.rank))
    planned = _of_sizes(shape, eager if traced.kept_scores else setting, frozen)

    def of(rate: int, scores: int, known: int, flat: int, alike: int) -> int:
        whole = ceil_div(scores * setting.length, setting.tensor_parallel) or known - flat
        return ceil_div(flat * rate, alike) + whole

    layer = of(traced.layer, traced.layer_scores, planned.layer, fused.layer, same.layer)
    work = of(traced.work, traced.work_scores, planned.backward, fused.backward, same.backward)
    if traced.work_scores:  # of a short sequence they are not what is most at work
        work = max(work, fused.backward)
    return replace(
        planned,
        kept=of(traced.kept, traced.kept_scores, planned.kept, fused.kept, same.kept),
        layer=layer,
        forward=min(planned.forward, layer + work),
        backward=work,
        scores=min(planned.scores, work),
    )


def _of_sizes(shape: ModelShape, setting: Setting, frozen: bool = False) -> Activations:
    """As a Llama's layers of these sizes, or a Mixtral's where they route."""
    rank = 0 if frozen else setting.lora_rank
    trained = not frozen and not rank
    attention = _attention(shape, setting, trained, rank)
    dense = attention + _mlp(shape, setting.tensor_parallel, trained, 0 if shape.adapted_experts else rank)
    routed = attention + _experts(shape, setting.tensor_parallel, trained, rank)
    tiles = setting.mlp_tiles
    hidden, width = shape.hidden, ceil_div(ceil_div(_width(shape), setting.tensor_parallel), tiles)
    adapters, again = bool(rank), setting.gradient_checkpointing or tiles > 1
    mlp = (dense if shape.moe_layers < shape.layers else routed) - attention
    beside = ((12 if again else 4) if adapters else 2) * hidden  # adapters: fp32 products, most while computed again
    work = 4 * width + beside
    if tiles > 1:  # an MLP keeps its input; one piece is computed again at a time, whose gradient waits for the others
        work = 4 * width + ceil_div(mlp + beside, tiles) + 4 * hidden
        mlp = 2 * hidden
        dense = attention + mlp
    norm = _norm(hidden, shape, trained=trained)
    # a norm's five tensors in fp32 (four in a frozen last one); what it multiplied with its weight is gone by then
    inner, outer = (18, 18) if trained else (20, 16)
    scores = ceil_div(shape.heads, setting.tensor_parallel) * setting.length if setting.attention == "eager" else 0
    return Activations(
        kept=(shape.layers - shape.moe_layers) * dense + shape.moe_layers * routed,
        layer=max(dense if shape.moe_layers < shape.layers else 0, routed if shape.moe_layers else 0),
        inputs=shape.layers * 2 * hidden,
        last=norm + 2 * hidden,
        tables=4 * shape.head_dim,
        forward=max(
            10 * width + 11 * hidden if adapters else 6 * width + 5 * hidden,
            10 * scores + 5 * hidden,
        ),
        backward=max(work, 6 * scores + 2 * hidden, (inner + 2) * hidden - mlp),
        norm=outer * hidden,
        scores=4 * scores,
        widest=max(_widest(shape, setting, adapters), 4 * scores),
    )


def _norm(width: int, shape: ModelShape, trained: bool, rows: int = 1) -> int:
    """The input in fp32, its scale, and what the norm's own weight multiplies."""
    product = (4 if shape.fp32_norm else 2) * width if trained else 0
    return 4 * width + 4 * rows + product


def _attention(shape: ModelShape, setting: Setting, trained: bool, rank: int) -> int:
    parts = setting.tensor_parallel
    hidden, query, key = shape.hidden, ceil_div(shape.query, parts), ceil_div(shape.key, min(parts, shape.kv_heads))
    heads, kv_heads = ceil_div(shape.heads, parts), ceil_div(shape.kv_heads, parts)
    total = shape.norms * _norm(hidden, shape, trained)
    if shape.qk_norm:
        total += _norm(query, shape, trained, heads) + _norm(key, shape, trained, kv_heads)
    gathered = setting.context_parallel
    if shape.sparse:
        total += _sparse(shape, gathered, trained, rank)
    elif gathered > 1:  # keys and values of the whole sequence, and where documents begin
        total += 4 * query + 4 * key * gathered + 8
    elif setting.attention == "flash":
        total += 4 * query + 4 * key + 4 * heads
    else:  # keys and values repeated for every head; scores, their fp32 softmax, and the softcap's tanh
        total += (8 if trained else 6) * query + heads * setting.length * (8 if shape.attention_softcap else 6)
    if trained:
        total += 2 * hidden  # what q, k and v multiply
    if rank:
        total += 12 * hidden + 4 * query + 16 * rank
    return total


def _sparse(shape: ModelShape, gathered: int, trained: bool, rank: int) -> int:
    """Native sparse attention: q, the selected branch in bf16 and fp32, k and v with their blocks, gates; o's input."""
    key, heads = shape.key * gathered, shape.heads
    total = 8 * shape.query + 4 * key + ceil_div(4 * key, STRIDE) + 10 * heads + 4 * SELECTED * shape.kv_heads
    blocks = ceil_div(4 * key * BLOCK, STRIDE)  # end to end, each key in several
    if rank:
        return total + 2 * blocks + 4 * shape.hidden + 4 * rank
    return total + (2 * shape.query + blocks if trained else 0)


def _mlp(shape: ModelShape, parts: int, trained: bool, rank: int) -> int:
    width = ceil_div(shape.mlp, parts)
    total = 6 * width + (2 * width + 2 * shape.hidden if trained else 0)
    return total + (8 * shape.hidden + 4 * width + 12 * rank if rank else 0)


def _experts(shape: ModelShape, parts: int, trained: bool, rank: int) -> int:
    """Each token visits `active_experts`, which get a copy of it, and gives its output a weight."""
    width, shared, hidden = ceil_div(shape.expert_mlp, parts), ceil_div(shape.shared_mlp, parts), shape.hidden
    inputs = trained or (rank > 0 and shape.adapted_experts)  # of the experts' matrices and of the router
    gathered = shape.active_experts * (2 * hidden + 6 * width + (2 * hidden + 2 * width if inputs else 0))
    router = 12 * shape.experts + (2 * hidden if inputs else 0)
    if not shared:
        return gathered + router
    adapters = 4 * shared + 12 * hidden + 16 * rank if rank else 0
    return gathered + router + 6 * shared + 2 * hidden + (2 * shared if trained else 0) + adapters


def merged_experts(shape: ModelShape, setting: Setting) -> tuple[int, int]:
    """(bytes of a layer's experts with their adapters merged in and of its factors in bf16, of the experts alone).

    PEFT adds an adapter to the whole stack of experts, in a copy that lives as long as an activation.
    """
    if not (setting.lora_rank and shape.adapted_experts and shape.moe_layers):
        return 0, 0
    matrix = shape.experts * shape.hidden * shape.expert_mlp
    total = 3 * matrix + shape.experts * shape.hidden + shape.expert_factors(setting.lora_rank)
    return ceil_div(2 * total, setting.tensor_parallel), ceil_div(6 * matrix, setting.tensor_parallel)


def _width(shape: ModelShape) -> int:
    """Elements per token of the widest tensor inside a layer."""
    routed = shape.active_experts * shape.expert_mlp + shape.shared_mlp if shape.moe_layers else 0
    return max(shape.mlp if shape.moe_layers < shape.layers else 0, routed)


def _widest(shape: ModelShape, setting: Setting, adapters: bool) -> int:
    """Bytes per token of a layer's largest tensor but for scores: a norm's input in fp32, an MLP's, or its experts'.

    Adapters multiply in fp32. Of experts it is the copies of the tokens that visit them, or gate and up in one.
    """
    parts, plain = setting.tensor_parallel, shape.mlp if shape.moe_layers < shape.layers else 0
    mlp = ceil_div(ceil_div(max(plain, shape.shared_mlp), parts), setting.mlp_tiles)
    visits = max(shape.hidden, 2 * ceil_div(shape.expert_mlp, parts)) * shape.active_experts
    return max((4 if adapters else 2) * mlp, 2 * visits, 4 * shape.hidden)
