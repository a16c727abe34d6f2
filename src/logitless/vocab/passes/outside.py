"""What a draft's head lacks of its reference's vocabulary: one pass for the log-sum-exp of these entries."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...algebra.costs import Price
from ..call.call import Call, Inputs
from ..call.lora import lora_b_of
from ..head.lm_head import LMHead
from .engine import checked, values


def with_outside(call: Call) -> Call:
    """The call with its reference's log-sum-exp over the entries that the head lacks, where it lacks some."""
    i, outside = call.inputs, call.outside
    return call if outside is None or i.ref_hidden is None else _looked_at(call, outside, i.ref_hidden)


@torch.no_grad()
def _looked_at(call: Call, outside: LMHead, ref_hidden: Tensor) -> Call:
    i = call.inputs
    inputs = Inputs(
        hidden=ref_hidden.double() if call.compute == torch.float64 else ref_hidden,
        bias=outside.bias,
        lora_hidden=i.ref_lora_hidden,
        lora_b=lora_b_of(outside),
        temperature=i.temperature,
    )
    options = replace(call.options, want=("logsumexp",), top_k=0, sparse=None)
    alone = Call(options, outside, inputs, index=call.valid_alone().index)
    found, _ = values(checked(alone, Price("values", 1)), save=False)
    return replace(call, inputs=i._replace(ref_outside=found["logsumexp"].to(call.compute)))
