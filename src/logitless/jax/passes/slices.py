"""How many tokens and vocabulary entries of a call are computed at a time."""

from __future__ import annotations

from dataclasses import replace

import jax

from ...algebra.costs import Slices, slices_of, tiles_of
from ..call import Call
from .projection import logits_grad_dtype, operand_dtype
from .windows import windows

COPY_COST = 3  # a copy of W's slices takes as long as passing over the logits of H / 3 tokens


def slices_for(call: Call, *, materialise: bool, gradient: bool = False) -> Slices:
    """The sizes that keep to the call's budget; `materialise`: all slices of a chunk's logits are there at once."""
    options, hidden, rows = call.options, call.tokens.hidden, call.local_rows
    weights = [head.weight for head in (call.head, call.reference) if head is not None]
    n, itemsize = hidden.shape[0], call.compute_dtype.itemsize
    tiles = tiles_of(options.want, softcap=bool(call.head.softcap), top_k=options.top_k)
    used = [operand_dtype(hidden, weight) for weight in weights]
    if gradient:
        used = [logits_grad_dtype(dtype, call.compute_dtype) for dtype in used]
    as_it_is = all(w.shape[0] == rows and w.dtype == dtype for w, dtype in zip(weights, used, strict=True))
    if as_it_is and n <= hidden.shape[1] // COPY_COST:
        size = itemsize * n * rows * (len(weights) + tiles)
        if size <= options.budget:
            return Slices(n, rows, size)
    found = slices_of(
        n,
        rows,
        budget=options.budget,
        device="cpu" if jax.default_backend() == "cpu" else "gpu",
        itemsize=itemsize,
        heads=len(weights),
        tiles=tiles,
        converted=sum(w.shape[1] for w in weights),  # XLA copies a slice of W before it multiplies
        whole=materialise,
    )
    even = -(-rows // windows(found.width, rows))  # the last slice is moved back: what it shares is computed twice
    return replace(found, width=even)
