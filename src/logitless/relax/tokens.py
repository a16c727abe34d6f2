"""`SoftTokens`: tokens as weighted sets of k vocabulary ids, and their embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, OptionError, ShapeError
from ..vocab.face import dtype_of
from .rows import rows_sum


@dataclass(frozen=True, eq=False)
class SoftTokens:
    """One soft token per position: `weights` over `ids`, which sum to 1; O(N·k) memory.

    Dense equivalent: `torch.zeros(*weights.shape[:-1], vocab_size).scatter(-1, ids, weights)`, which `dense()` makes.

    ids: (..., k) int64, best logit first; weights: (..., k) fp32, one-hot where they are straight-through; token: (...)
    int64, the id with the most noisy logit: a sample of the softmax over `ids`. outside: (...) fp32 without gradient,
    the probability mass at temperature 1 and without noise that is not among `ids`, to about 1e-6 (under autocast,
    of logits of rounded operands); coverage is 1 minus it. embedded: (..., H) for each of `tables`, which `gumbel_topk`
    was given. Of a whole vocabulary (k=0), ids and weights have no column and `embedded` is what there is.
    """

    ids: Tensor
    weights: Tensor
    token: Tensor
    outside: Tensor
    vocab_size: int
    padded_size: int  # rows of the head's weight, past vocab_size too
    embedded: tuple[Tensor, ...] = ()
    tables: tuple[Tensor, ...] = ()

    @property
    def coverage(self) -> Tensor:
        """The probability mass of `ids`, (...)."""
        return 1 - self.outside

    @classmethod
    def stack(cls, steps: Sequence[SoftTokens]) -> SoftTokens:
        """The soft tokens (...) of T steps, of the same tables, as (..., T). Raises OptionError."""
        sizes = {(s.vocab_size, s.padded_size, s.ids.shape) for s in steps}
        if len(sizes) != 1:
            raise OptionError(f"SoftTokens.stack: expected steps of one shape and vocabulary, got {sorted(sizes)}")
        return cls(
            torch.stack([s.ids for s in steps], -2),
            torch.stack([s.weights for s in steps], -2),
            torch.stack([s.token for s in steps], -1),
            torch.stack([s.outside for s in steps], -1),
            steps[0].vocab_size,
            steps[0].padded_size,
            tuple(torch.stack(rows, -2) for rows in zip(*(s.embedded for s in steps), strict=True)),
            steps[0].tables,
        )

    def dense(self) -> Tensor:
        """The weights over the whole vocabulary, (..., V): the tensor that everything else here avoids."""
        self.check_sparse("dense")
        whole = self.weights.new_zeros(*self.weights.shape[:-1], self.vocab_size)
        return whole.scatter(-1, self.ids, self.weights)

    def check_sparse(self, what: str) -> None:
        if self.ids.shape[-1] == 0:
            raise OptionError(
                f"{what}: these soft tokens are of the whole vocabulary (k=0) and have no weights; "
                "pass embeddings=(table,) to gumbel_topk and read .embedded"
            )


def soft_embedding(
    tokens: SoftTokens,  # (...)
    embedding: Tensor,  # (V, H)
) -> Tensor:  # (..., H)
    """The embedding of soft tokens: the weighted sum of k rows of a table.

    Dense equivalent: `tokens.dense() @ embedding[: tokens.vocab_size]`.

    embedding: (V, H) of any floating dtype, V the tokens' vocabulary or its padded size: a reward model's own table
    must be of the same vocabulary. Sums are fp32 (fp64 for fp64), the result has the table's dtype. Differentiable
    with respect to weights and table. 2·N·k·H flop each way. Raises ShapeError, DtypeError, DeviceError, OptionError.
    Memory: the result and blocks of 2 MiB, never (..., k, H) nor (..., V); dtable as the table.
    """
    tokens.check_sparse("soft_embedding")
    check_table(embedding, tokens.vocab_size, tokens.padded_size, tokens.ids.device)
    lead, k = tokens.ids.shape[:-1], tokens.ids.shape[-1]
    weights = tokens.weights.to(torch.promote_types(tokens.weights.dtype, embedding.dtype))
    n = math.prod(lead)
    out = rows_sum(weights.reshape(n, k), embedding, tokens.ids.reshape(n, k))
    return out.to(embedding.dtype).view(*lead, embedding.shape[1])


def rows_in(
    tokens: SoftTokens,  # (...)
    table: Tensor,  # (V, H)
) -> Tensor:  # (..., H)
    """`soft_embedding`, also of soft tokens of the whole vocabulary, for a table that `gumbel_topk` was given."""
    if tokens.ids.shape[-1]:
        return soft_embedding(tokens, table)
    for known, rows in zip(tokens.tables, tokens.embedded, strict=True):
        if same_table(known, table):
            return rows
    raise OptionError(
        f"these soft tokens are of the whole vocabulary (k=0), formed with {len(tokens.tables)} tables of which this "
        "is none: name it where they are made"
    )


def same_table(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same rows of the same memory."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def check_table(table: Tensor, vocab_size: int, padded_size: int, device: torch.device) -> None:
    """Raise unless `table` holds a row for each entry of the vocabulary, and no other."""
    if not isinstance(table, Tensor) or not table.is_floating_point():
        got = dtype_of(table)
        raise DtypeError(f"embedding: expected a floating-point tensor, got {got}; pass module.weight")
    if table.dim() != 2 or table.shape[0] not in (vocab_size, padded_size):
        sizes = f"{vocab_size}" if vocab_size == padded_size else f"{vocab_size} or {padded_size}"
        raise ShapeError(
            f"embedding: expected ({sizes}, width), a row for each entry of the head's vocabulary, got "
            f"{tuple(table.shape)}; of the same vocabulary with other padding, pass embedding[:{vocab_size}]"
        )
    if table.device != device:
        raise DeviceError(f"embedding is on {table.device}, the soft tokens on {device}; move one of them")
