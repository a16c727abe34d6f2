"""The backward pass over what counts of a chunk: which slices each token leaves out, and the others' rows gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....algebra.online_softmax import Totals
from ....algebra.stats import Coefficients
from ..base import Gradients
from ..chunk import Chunk, Tile
from ..gather import Take


def logits_grad_of_some(
    chunk: Chunk,
    totals: Totals,
    coefficients: Coefficients,
    grads: Gradients,
    add_slice: Callable[[Chunk, slice, Tile | None, Totals, Coefficients, Gradients], None],
) -> None:
    """`add_slice` for the tokens that each slice still has."""
    assert chunk.skip is not None
    slices = list(chunk.vocabulary())
    for i, (v, rows) in enumerate(zip(slices, chunk.skip.rows(slices, coefficients), strict=True)):
        tile = chunk.materialised[i] if chunk.materialised else None
        if rows is None:
            add_slice(chunk, v, tile, totals, coefficients, grads)
        elif rows.shape[0]:
            take = Take(chunk.scratch, rows)
            some = {basis: c[rows] for basis, c in coefficients.items()}
            numbers = Totals(**{name: x[rows] for name, x in totals.items()})
            own = replace(
                grads, hidden=take(grads.hidden, "own"), lora_hidden=take(grads.lora_hidden, "own lora_hidden")
            )
            add_slice(take.chunk(chunk), v, take.tile(tile), numbers, some, own)
            for whole, part in ((grads.hidden, own.hidden), (grads.lora_hidden, own.lora_hidden)):
                if whole is not None and part is not None:
                    whole.index_copy_(0, rows, part)
