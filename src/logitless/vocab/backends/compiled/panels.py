"""Products of weights with a head's rows, summed for each token and number of a row: in panels of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ....algebra.online_softmax import Accumulation
from ..chunk import Chunk
from ..logits import Projection
from ..moves import Moves
from .library import BASES, Products, in_pairs, library

TOGETHER = 512  # tokens of all parts of the vocabulary that have products of their own, unless one part has more


def rounded(n: int, block: int) -> int:
    return -(-n // block) * block


def rounds_weights(on: Projection, bases: tuple[str, ...]) -> bool:
    """Whether weights are rounded to bf16 for products with a head's rows: not of two bases, which are subtracted."""
    return bases == ("p",) and len(on.factors) == 1 and in_pairs(on.factors[0].is_bf16)


def parts_of(width: int) -> int:
    """How many parts of the vocabulary have products of their own, for so many tokens, lanes without one included.

    They do not depend on the threads, which add up numbers in the same order however many there are.
    """
    return min(library().parts(), 1 << max(1, TOGETHER // width).bit_length() - 1)


def product_bytes(numbers: int, bases: int, n_tokens: int, pairs: bool) -> tuple[int, int]:
    """Bytes for all tokens, and for each, of fp32 products with so many numbers of a row.

    In panels, once more in rows, and of all parts together; with what each thread has of the head, and of weights.
    pairs: whether these are rounded. n_tokens: at most.
    """
    found, threads = library(), torch.get_num_threads()
    row = 4 * rounded(numbers, found.rows(pairs))
    return row * 2 * bases * TOGETHER + 4 * threads * found.room(numbers, pairs, n_tokens), row * 3 * bases


def products_of(chunk: Chunk, bases: tuple[str, ...], width: int) -> tuple[dict[str, Tensor], Products]:
    """Where each basis' products will be, (panels of all parts, rows, lanes), and the same for the library."""
    found, numbers = library(), chunk.inputs.width
    pairs = rounds_weights(chunk.policy, bases)
    rows = rounded(numbers, found.rows(pairs))
    shape = parts_of(width) * width // found.lanes(), rows * found.lanes()
    out = {basis: chunk.scratch.take(f"products {basis}", shape).view(-1, rows, found.lanes()) for basis in bases}
    streamed = Products(p=out["p"].data_ptr(), width=numbers, pairs=pairs)
    for basis in out.keys() - {"p"}:
        streamed.second, streamed.basis = out[basis].data_ptr(), BASES.index(basis)
    return out, streamed


def moves_of(parts: Accumulation, whole: Accumulation) -> Moves:
    """What brings each part's products together; the fields are (parts, width), and (width,) of the whole."""
    step = (parts.m - whole.m).view(-1)
    if whole.shift is None:
        return Moves(torch.exp(step), step)
    grow_ref = torch.exp(parts.m_ref - whole.m_ref).view(-1)
    return Moves(torch.exp(step), step, grow_ref, (parts.shift - whole.shift).view(-1))


def of_tokens(products: dict[str, Tensor], width: int, chunk: Chunk, moves: Moves | None = None) -> dict[str, Tensor]:
    """The products of a chunk's tokens, (C, H + R), of those of all parts, which the moves bring together."""
    parts = parts_of(width)
    rows = {basis: x.transpose(1, 2).reshape(parts * width, -1) for basis, x in products.items()}
    if moves is not None:
        moves.apply(rows, chunk.may_be_infinite)
    numbers = chunk.inputs.width
    return {basis: x.view(parts, width, -1).sum(0)[: chunk.n_tokens, :numbers] for basis, x in rows.items()}
