"""One call of the pass, checked and flat: its options, its tokens and its heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..algebra.costs import DEFAULT_BUDGET
from ..algebra.stats import best_entries, looks_twice, sums_of
from .head import LMHead


@dataclass(frozen=True)
class Options:
    """The options of a call that are known before tracing."""

    want: tuple[str, ...]
    ignore_index: int = -100
    top_k: int = 0
    jsd_beta: float = 0.5
    memory_budget: int | None = None
    axis_name: str | None = None  # the mesh axis that the vocabulary is sharded over
    forbidden: tuple[int, ...] = ()  # ids whose logits are -inf

    @property
    def budget(self) -> int:
        """Bytes that slices may take."""
        return int(self.memory_budget or DEFAULT_BUDGET)

    @property
    def sums(self) -> frozenset[str]:
        """The running sums that the wanted statistics read."""
        return sums_of(self.want)

    @property
    def topk_size(self) -> int:
        """How many of the highest entries are accumulated: the argmax is one."""
        return best_entries(self.sums, self.top_k)

    @property
    def materialises(self) -> bool:
        """Whether the statistics look at all slices of a chunk's logits a second time."""
        return looks_twice(self.sums)


class Tokens(NamedTuple):
    """What a call has for each token."""

    hidden: Array  # (N, H)
    labels: Array | None = None  # (N,)
    temperature: Array | None = None  # (N,), 1 unless given
    candidates: Array | None = None  # (N, K)
    ref_hidden: Array | None = None  # (N, H')


def compute_dtype(hidden: Array) -> jnp.dtype:
    """fp32, fp64 for fp64 inputs."""
    return jnp.dtype(jnp.float64 if hidden.dtype == jnp.float64 else jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Call:
    """A checked call as a pytree: arrays are its leaves, the rest is static. The gradient of a call is a call."""

    options: Options = field(metadata={"static": True})
    vocab_size: int = field(metadata={"static": True})  # on all devices
    tokens: Tokens
    head: LMHead  # this device's rows
    reference: LMHead | None = None

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype of statistics, losses and accumulated gradients."""
        return compute_dtype(self.tokens.hidden)

    @property
    def local_rows(self) -> int:
        """The rows of W that this device visits: what lies past the vocabulary on the last devices is masked."""
        return self.vocab_size if self.options.axis_name is None else self.head.weight.shape[0]

    @property
    def vocab_start(self) -> Array | int:
        """The vocabulary id of this device's first row."""
        axis = self.options.axis_name
        return 0 if axis is None else lax.axis_index(axis) * self.head.weight.shape[0]
