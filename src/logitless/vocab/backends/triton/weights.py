"""A loss that needs p alone, with the weights of its gradient written by the kernel of the products.

The products' kernel has every logit in its registers: it writes e^(z - level) in bf16 and adds up the rows, so that no
slice of logits is ever written or read. What a token's weights are multiplied by then goes into small tensors, as in
QuACK's scaled exponentials (github.com/Dao-AILab/quack).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....algebra.online_softmax import MASK, Accumulation, Totals
from ...call.call import Inputs
from ...devices import moves_blocks
from ...head.lm_head import LMHead
from ...head.quantised import plain
from ..base import Chunk, Gradients, Partial, Tile
from ..logits import add_product, operand_dtype, product
from . import accumulate_kernels, weights_kernels
from .device import processors
from .parts import merge
from .slices import Heads, buffer_of
from .tuned import launch, table_for

weighing: Any = weights_kernels  # a launch turns plain numbers into what a kernel's signature says
NEAR = 60.0  # nats from a row's maximum within which weights relative to a level keep bf16's range, and sums fp32's
LOOKS = 4  # programs a processor of the second launch, which mostly look at levels and end
ALONE = {"WITH_T": False, "WITH_R": False, "RANK": False, "WITH_SUM": False, "REF": False, "WITH_QE": False}


def weigh_products(chunk: Chunk) -> Partial:
    """The accumulation of all rows here, and the weights of the gradient in the chunk, with no slice of logits.

    Weights are relative to the label's logit, or to the maximum of a token whose label is too far from it. Only of such
    tokens are the products made twice, and no host waits to know: the second launch has else nothing to do.
    """
    width, label = chunk.policy.head.local_rows, chunk.label
    assert label is not None
    weights = buffer_of(chunk, "weights", width, torch.bfloat16)
    levels = label[0].clamp(min=MASK).repeat(2, 1)
    found = _weighed(chunk, weights, levels, again=False)
    levels[0] = torch.where((found.m - levels[1]).abs() > NEAR, found.m, levels[1])
    second, redone = _weighed(chunk, weights, levels, again=True), levels[0] != levels[1]
    found.rest = torch.where(redone, second.rest, found.rest)
    found.m = torch.where(redone, second.m, found.m)
    chunk.materialised.append(Tile(slice(0, width), weights, m=levels[0]))
    return Partial(found, lambda _: {})


def _weighed(chunk: Chunk, weights: Tensor, levels: Tensor, again: bool) -> Accumulation:
    """One launch of the kernel, and what it adds up."""
    first, sizes, device = chunk.policy.factors[0], table_for(levels.device)["weights"], levels.device
    (n, width), block, rows = weights.shape, sizes["again" if again else "entries"], sizes["rows"]
    parts, heads, entries = triton.cdiv(width, block), Heads(chunk), plain(first.entries)
    row_blocks = triton.cdiv(n, rows)
    tiles = parts * row_blocks
    at_once = processors(device) or tiles
    state = torch.empty(accumulate_kernels.ALONE, parts, n, dtype=levels.dtype, device=device)
    persistent = bool(sizes["persistent"]) and not again
    programs = min(tiles, at_once) if persistent else tiles
    if again:  # the same for each block of tokens, so that one look tells a program that it has nothing to do
        programs = row_blocks * min(parts, triton.cdiv(LOOKS * at_once, row_blocks))
    weighing.weigh_products[(programs,)](
        TensorDescriptor.from_tensor(first.rows.contiguous(), [rows, sizes["inner"]]),
        TensorDescriptor.from_tensor(entries[:width], [block, sizes["inner"]]),
        TensorDescriptor.from_tensor(weights, [rows, block]),
        state,
        heads.tensors["labels"],
        heads.tensors["row_scales"],
        levels,
        n,
        width,
        entries.shape[1],
        parts,
        AGAIN=again,
        PERSISTENT=persistent,
        ROWS=rows,
        BLOCK=block,
        INNER=sizes["inner"],
        **launch(sizes),
    )
    found = dict(zip(accumulate_kernels.FIELDS, merge(state, ALONE)[:, 0], strict=False))
    return Accumulation(found["m"], found["rest"])


def writes_weights(inputs: Inputs, head: LMHead, reference: object, sums: frozenset[str], top_k: int) -> bool:
    """Whether a loss that needs p alone has its weights written by the kernel of the products, if the table says so."""
    weight, hidden = head.weight, inputs.hidden
    alone = reference is None and inputs.lora_b is None and not top_k and sums <= {"zsum"}
    bare = head.bias is None and not head.softcap and head.shard is None and inputs.labels is not None
    if not (alone and bare and isinstance(weight, Tensor) and weight.stride(1) == 1):
        return False
    half = operand_dtype(hidden, weight.dtype, torch.float32) == torch.bfloat16
    starts = (hidden.shape[1], weight.stride(0), weight.storage_offset(), hidden.storage_offset())
    wide = all(start % 8 == 0 for start in starts)  # what a descriptor wants: rows that begin at whole 16 bytes
    return half and wide and moves_blocks(weight) and bool(table_for(weight.device)["weights"]["used"])


def weights_grad(chunk: Chunk, totals: Totals, p: Tensor, grads: Gradients) -> None:
    """`Backend.logits_grad` from weights e^(z - level): what a token's p is multiplied by goes into small tensors."""
    (tile,), factor, (tokens, entries) = chunk.materialised, chunk.policy.factors[0], grads.pairs[0]
    assert tile.m is not None
    shares = (p * torch.exp((tile.m - totals.m) - totals.log_s))[:, None]
    room = chunk.scratch.take("hidden", (chunk.n_tokens, factor.tokens.shape[1]))
    if tokens is not None:
        tokens.addcmul_(product(tile.z, plain(factor.entries)[tile.v], room), shares)
    if entries is not None:
        put = product if grads.begins(entries) else add_product
        put(tile.z.t(), torch.mul(factor.tokens, shares, out=room).to(tile.z.dtype), entries[tile.v])
        entries[tile.v.stop :].zero_()
