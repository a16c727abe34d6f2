"""`SampleRecord`: what is kept of each token's distribution in the place of its logits, as a pytree."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...algebra.options import whole_from, whole_within
from ...algebra.record import Derived, sizes_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SampleRecord(Derived):
    """Tokens, and enough of the distributions that they come from: 40 + 8·k bytes a token.

    The fields of `logitless.SampleRecord`, by the same names and with the same meaning; a pytree, so that it can be
    part of a loop's state. Floating fields are fp32 (fp64 where the hidden states are), integers int32.
    """

    xp = jnp

    token: Array  # (...)
    token_logit: Array
    rank: Array  # 1 + how many logits are higher
    topk_logits: Array  # (..., k) the highest raw logits
    topk_ids: Array
    logsumexp: Array  # of all raw logits, as are
    mean_logit: Array
    entropy: Array
    temperature: Array
    logsumexp_at_temperature: Array
    log_kept_mass: Array  # log of the share that the rules kept
    n_kept: Array
    vocab_size: int = field(metadata={"static": True})

    @classmethod
    def empty(cls, shape: tuple[int, ...], *, keep: int, vocab_size: int, dtype: Any = jnp.float32) -> SampleRecord:
        """A record of `shape` for `write` to fill; tokens are -1 until then. Raises OptionError, ShapeError."""
        vocab_size = whole_from("vocab_size", vocab_size, 1)
        shape, keep = sizes_of("shape", shape), whole_within("keep", keep, 0, vocab_size)
        integers, floats = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, dtype)
        made = {name: integers if name in ("rank", "n_kept") else floats for name in names()}
        made["token"] = integers - 1
        made["topk_logits"] = jnp.zeros((*shape, keep), dtype)
        made["topk_ids"] = jnp.full((*shape, keep), -1, jnp.int32)
        return cls(**made, vocab_size=vocab_size)

    def write(self, index: Any, part: SampleRecord) -> SampleRecord:
        """The record with `part` at an index of (...), as in `record = record.write((slice(None), t), step)`.

        Raises OptionError, IndexError.
        """
        self.check_part(part)
        self._check_index(index)
        return jax.tree.map(lambda x, y: x.at[self.place(index, x)].set(y), self, part)

    def __getitem__(self, index: Any) -> SampleRecord:
        """Some of the tokens: an index of (...). Raises IndexError, unless a JAX array is in it, which JAX clamps."""
        self._check_index(index)
        return jax.tree.map(lambda x: x[self.place(index, x)], self)

    def _check_index(self, index: Any) -> None:
        """NumPy's IndexError past the end, where JAX takes the last token, so that an iteration would not end."""
        parts = index if isinstance(index, tuple) else (index,)
        if not any(isinstance(part, Array) for part in parts):  # whose values, of traced ones too, nobody asks for
            np.broadcast_to(False, self.shape)[index]

    def reshape(self, *lead: int | tuple[int, ...]) -> SampleRecord:
        """The same tokens in another shape (...), in numbers or a tuple; -1 is what is left. Raises ShapeError."""
        trailing, sizes = self.token.ndim, self.lead(*lead)
        return jax.tree.map(lambda x: x.reshape((*sizes, *x.shape[trailing:])), self)


def names() -> list[str]:
    """The arrays of a record."""
    return [f.name for f in fields(SampleRecord) if f.name != "vocab_size"]
