"""`LMHead`: what turns a hidden state into logits, as a pytree."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
from jax import Array

from ..algebra.options import is_in_float32, whole
from ..errors import ConfigError, OptionError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LMHead:
    """A language-model head: z = softcap(scale · (h · Wᵀ + b)) over the first `vocab_size` rows of W.

    Dense equivalent:

        z = scale * (hidden @ weight[:vocab_size].T + bias[:vocab_size])
        z = softcap * jnp.tanh(z / softcap) if softcap else z

    weight: (V, H), any floating dtype. bias: (V,) or None. Rows of W past `vocab_size` (padding) do not exist:
    they get no probability and no gradient. A pytree: weight and bias are its leaves, the rest is static, so the
    gradient of a function of a head is a head. In `jax.shard_map` with the vocabulary sharded, weight and bias are
    this device's rows, and vocab_size counts the rows of all devices. token_ids, torch's draft vocabulary, is refused.
    Raises OptionError, ConfigError.
    """

    weight: Array  # (V, H)
    bias: Array | None = None  # (V,)
    scale: float = field(default=1.0, metadata={"static": True})
    softcap: float | None = field(default=None, metadata={"static": True})
    vocab_size: int | None = field(default=None, metadata={"static": True})
    token_ids: None = field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        # Only what is static: jax rebuilds a head around placeholders, which have neither shape nor dtype.
        if self.token_ids is not None:
            raise ConfigError(
                "LMHead: expected no token_ids, a draft vocabulary is of torch's LMHead alone; leave it out and give a "
                "reference over the draft's own rows, LMHead(target.weight[token_ids])"
            )
        given, size = self.vocab_size, whole(self.vocab_size)
        if given is not None and (size is None or size < 1):
            raise OptionError(f"LMHead: vocab_size must be a positive whole number or None, got {given!r}")
        object.__setattr__(self, "vocab_size", size)
        scale, cap = self.scale, self.softcap
        if not is_in_float32(scale):
            raise OptionError(
                f"LMHead: scale must be a finite number, in float32 too, known before tracing, got {scale!r}"
            )
        if cap is not None and not (is_in_float32(cap) and cap > 0):
            raise OptionError(f"LMHead: softcap must be a positive number or None, and finite in float32, got {cap!r}")
