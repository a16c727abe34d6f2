"""In which dtype a call's heads multiply, and what is converted for it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.call import Call
from ..head.quantised import Weight
from .compiled import few
from .logits import multiplies_tiles, operand_dtype


def cast_of(call: Call, weight: Weight) -> torch.dtype:
    """The dtype that a head's weight is rounded to: autocast's, or its own."""
    return call.options.autocast or weight.dtype


def multiplied_dtype(call: Call, weight: Weight) -> torch.dtype:
    """The dtype that it multiplies in."""
    return operand_dtype(call.inputs.hidden, cast_of(call, weight), call.compute)


def converts(call: Call, weight: Weight) -> bool:
    """Whether one of the two is not its own."""
    return weight.dtype != cast_of(call, weight) or weight.dtype != multiplied_dtype(call, weight)


def multiplies_few(call: Call) -> bool:
    """Whether the head's product with all tokens, which are few, is one by its rows of fp32 or bf16 as they lie.

    Not of a sharded head, whose ranks take the same chunks.
    """
    hidden, weight = call.inputs.hidden, call.head.weight
    if call.shard is not None or not isinstance(weight, Tensor) or weight.dtype != cast_of(call, weight):
        return False
    known = weight.dtype in (torch.float32, torch.bfloat16) and call.compute == torch.float32
    if not known or not few.takes(call.n_tokens, hidden.detach(), weight.detach()):
        return False
    return bytes_of_few(call) <= call.budget // 4


def bytes_of_few(call: Call) -> int:
    """What such a product takes beside its operands and logits."""
    weight = call.head.weight
    return few.nbytes(weight.shape[1], call.inputs.hidden.dtype == weight.dtype == torch.bfloat16)


def rounds_weights(call: Call) -> bool:
    """Whether what weighs the head's rows is rounded to 16 bits for its products: on a GPU, and in a CPU's tiles."""
    weight = call.head.weight
    narrow = multiplied_dtype(call, weight) != call.compute
    return narrow or multiplies_tiles(call.inputs.hidden, cast_of(call, weight), call.compute)
