"""Statistics without slices, and the weights of a gradient that needs p alone, by the kernel of the products.

That kernel has every logit in its registers: it adds up the rows and, where a gradient follows, writes e^(z - level) in
bf16, so that no slice of logits is ever written or read. What a token's weights are multiplied by then goes into small
tensors, as in QuACK's scaled exponentials (github.com/Dao-AILab/quack).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....algebra.online_softmax import MASK, Accumulation, Totals
from ...call.call import Inputs
from ...devices import moves_blocks, processors
from ...head.lm_head import LMHead
from ...head.quantised import plain
from ..base import Gradients, Partial
from ..chunk import Chunk, Tile
from ..eager.weights import scale_of
from ..logits import add_product, operand_dtype, product
from ..moves import normalised
from . import weights_kernels
from .parts import accumulation_of, merge
from .slices import buffer_of, heads_of
from .tuned import launch, table_for

weighing: Any = weights_kernels  # a launch turns plain numbers into what a kernel's signature says
NEAR = 60.0  # nats from a row's maximum within which weights relative to a level keep bf16's range, and sums fp32's
LOOKS = 4  # programs a processor of the second launch, which mostly look at levels and end
SUMS = 3  # of FIELDS: the first ones, m, rest and t
ALONE = {"WITH_R": False, "RANK": False, "WITH_SUM": False, "REF": False, "WITH_QE": False}


def sum_products(chunk: Chunk) -> Partial:
    """The accumulation of all rows here, with no slice of logits and nothing beside it."""
    return Partial(_summed(chunk, "sums"))


def weigh_products(chunk: Chunk, bases: tuple[str, ...] = ()) -> Partial:
    """The accumulation of all rows here, and the weights of the gradient in the chunk, with no slice of logits.

    Weights are relative to the label's logit, or to the maximum of a token whose label is too far from it. Only of such
    tokens are the products made twice, and no host waits to know: the second launch has else nothing to do.
    bases: ("p",) where their product with the head's rows is wanted in the place of the weights.
    """
    width, label, factor = chunk.policy.head.local_rows, chunk.label_logit, chunk.policy.factors[0]
    assert label is not None
    weights = buffer_of(chunk, "weights", width, torch.bfloat16)
    levels = label.clamp(min=MASK).repeat(2, 1)
    found = _summed(chunk, "weights", weights, levels)
    levels[0] = torch.where((found.m - levels[1]).abs() > NEAR, found.m, levels[1])
    second, redone = _summed(chunk, "weights", weights, levels, again=True), levels[0] != levels[1]
    found.rest = torch.where(redone, second.rest, found.rest)
    found.m = torch.where(redone, second.m, found.m)
    if not bases:
        chunk.materialised.append(Tile(slice(0, width), weights, m=levels[0]))
        return Partial(found)
    out = levels.new_empty(chunk.n_tokens, factor.tokens.shape[1])
    products = {bases[0]: product(weights, plain(factor.entries), out)}
    return Partial(found, partial(normalised, products, replace(found, m=levels[0])))


def _summed(
    chunk: Chunk, kind: str, weights: Tensor | None = None, levels: Tensor | None = None, again: bool = False
) -> Accumulation:
    """One launch of the kernel, and what it adds up; kind: of its sizes."""
    first, device, with_t = chunk.policy.factors[0], chunk.inputs.hidden.device, "t" in chunk.sums
    sizes, width = table_for(device)[kind], chunk.policy.head.local_rows
    n, block, rows = chunk.n_tokens, sizes["again" if again else "entries"], sizes["rows"]
    parts, heads, entries = triton.cdiv(width, block), heads_of(chunk), plain(first.entries)
    row_blocks = triton.cdiv(n, rows)
    tiles = parts * row_blocks
    at_once = processors(device) or tiles
    state = torch.empty(SUMS, parts, n, dtype=chunk.policy.compute, device=device)
    persistent = bool(sizes["persistent"]) and not again
    programs = min(tiles, at_once) if persistent else tiles
    if again:  # the same for each block of tokens, so that one look tells a program that it has nothing to do
        programs = row_blocks * min(parts, triton.cdiv(LOOKS * at_once, row_blocks))
    tokens = TensorDescriptor.from_tensor(first.rows.contiguous(), [rows, sizes["inner"]])
    weighing.weigh_products[(programs,)](
        tokens,
        TensorDescriptor.from_tensor(entries[:width], [block, sizes["inner"]]),
        tokens if weights is None else TensorDescriptor.from_tensor(weights, [rows, block]),
        state,
        heads.tensors["labels"],
        heads.tensors["row_scales"],
        heads.tensors["row_scales"] if levels is None else levels,
        n,
        width,
        entries.shape[1],
        parts,
        AGAIN=again,
        LABEL=heads.flags["LABEL"],
        WEIGHS=weights is not None,
        WITH_T=with_t,
        PERSISTENT=persistent,
        ROWS=rows,
        BLOCK=block,
        INNER=sizes["inner"],
        **launch(sizes),
    )
    flags = ALONE | {"WITH_T": with_t}
    return accumulation_of(merge(state, flags)[:, 0], flags)[0]


def state_bytes(sizes: dict[str, int], n_tokens: int, width: int) -> int:
    """What the sums of all blocks take until they are merged."""
    block = min(sizes["entries"], sizes.get("again", sizes["entries"]))
    return 4 * SUMS * -(-width // block) * n_tokens


def sums_products(inputs: Inputs, head: LMHead, reference: object, sums: frozenset[str], top_k: int) -> bool:
    """Whether statistics without a gradient are summed by the kernel of the products, if the table says so."""
    return _is_bare(inputs, head, reference, top_k) and sums <= {"t"} and _is_used(inputs, "sums")


def writes_weights(inputs: Inputs, head: LMHead, reference: object, sums: frozenset[str], top_k: int) -> bool:
    """Whether the weights of a gradient that needs p alone are written by the kernel of the products, likewise."""
    labelled = inputs.labels is not None
    return labelled and _is_bare(inputs, head, reference, top_k) and sums <= {"zsum"} and _is_used(inputs, "weights")


def _is_used(inputs: Inputs, kind: str) -> bool:
    return bool(table_for(inputs.hidden.device)[kind]["used"])


def _is_bare(inputs: Inputs, head: LMHead, reference: object, top_k: int) -> bool:
    """Whether logits are products in bf16, times a number for each token, whose operands the kernel can read."""
    weight, hidden = head.weight, inputs.hidden
    alone = reference is None and inputs.lora_b is None and not top_k
    bare = head.bias is None and not head.softcap and head.shard is None
    if not (alone and bare and isinstance(weight, Tensor) and weight.stride(1) == 1):
        return False
    half = operand_dtype(hidden, weight.dtype, torch.float32) == torch.bfloat16
    starts = (hidden.shape[1], weight.stride(0), weight.storage_offset(), hidden.storage_offset())
    wide = all(start % 8 == 0 for start in starts)  # what a descriptor wants: rows that begin at whole 16 bytes
    return half and wide and moves_blocks(weight)


def weights_grad(chunk: Chunk, totals: Totals, p: Tensor, grads: Gradients) -> None:
    """`Backend.logits_grad` from weights e^(z - level): what a token's p is multiplied by goes into small tensors."""
    (tile,), factor, (tokens, entries) = chunk.materialised, chunk.policy.factors[0], grads.pairs[0]
    assert tile.m is not None
    shares = scale_of(p, tile.m, totals)
    room = chunk.scratch.take("hidden", (chunk.n_tokens, factor.tokens.shape[1]))
    if tokens is not None:
        tokens.addcmul_(product(tile.z, plain(factor.entries)[tile.v], room), shares)
    if entries is not None:
        put = product if grads.begins() else add_product
        put(tile.z.t(), torch.mul(factor.tokens, shares, out=room).to(tile.z.dtype), entries[tile.v])
