"""Drawing a token for each of a few rows of logits, and what is recorded of the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ...algebra.online_softmax import MASK
from ...algebra.rules import Rules
from ...errors import OptionError
from ..mesh import varying
from ..passes.accumulate import Accumulated
from ..passes.chunk import Chunk
from ..passes.topk import TopEntries
from .noise import Keys
from .nucleus import kept
from .record import SampleRecord


class Drawn(NamedTuple):
    """A token of each row, and the entries that the rules kept."""

    token: Array
    logit: Array
    n_kept: Array
    log_mass: Array  # log of the kept entries' share


@dataclass(frozen=True)
class Draw:
    """A chunk's tokens after the accumulation, with the logits of all slices materialised."""

    chunk: Chunk
    accumulated: Accumulated
    temperature: Array  # (C,), 0 is greedy
    keys: Keys  # (C,)

    def record(self, rules: Rules | None, keep: int) -> SampleRecord:
        """A token for each row: the argmax without `rules`, or where the temperature is 0."""
        totals, call = self.accumulated.totals, self.chunk.call
        zero = jnp.zeros_like(totals.m)
        logit, token = (x[:, 0] for x in self.topk)  # of equal ones the lowest id
        one = jnp.ones_like(token)
        drawn, rank, log_sum = Drawn(token, logit, one, zero), one, zero
        if rules is not None:
            greedy = self.temperature == 0
            log_s, live, (noisy_token, noisy_logit) = self._scan(noisy=rules.none)
            sampled = Drawn(noisy_token, noisy_logit, live, zero) if rules.none else self._among(rules, log_s)
            drawn = Drawn(*(jnp.where(greedy, a, b) for a, b in zip(drawn, sampled, strict=True)))
            log_sum = jnp.where(greedy, 0.0, totals.m / self._divisor + log_s)
            rank = 1 + self._count_above(drawn)
        possible = jnp.isfinite(totals.m)  # a row without a possible entry, or of NaN, has no token
        return SampleRecord(
            token=jnp.where(possible, drawn.token, -1),
            token_logit=drawn.logit,
            rank=rank,
            topk_logits=self.topk[0][:, :keep],
            topk_ids=self.topk[1][:, :keep],
            logsumexp=totals.logsumexp,
            mean_logit=totals.mean_logit,
            entropy=totals.entropy,
            temperature=self.temperature,
            logsumexp_at_temperature=log_sum,
            log_kept_mass=drawn.log_mass,
            n_kept=jnp.where(possible, drawn.n_kept, 0),
            vocab_size=call.vocab_size,
        )

    @property
    def topk(self) -> TopEntries:
        """The top entries, of which there is at least one."""
        if self.accumulated.topk is None:
            raise OptionError("Draw: expected an accumulation with its top-k entries, got none; pass top_k ≥ 1")
        return self.accumulated.topk

    @property
    def _divisor(self) -> Array:
        """The temperature, 1 where greedy."""
        return jnp.where(self.temperature == 0, 1.0, self.temperature)

    def _scaled(self, z: Array) -> Array:
        """(z - m) / T."""
        return (z - self.accumulated.totals.m[:, None]) / self._divisor[:, None]

    def _scan(self, noisy: bool) -> tuple[Array, Array, tuple[Array, Array]]:
        """log Σ e^((z-m)/T), how many logits are finite, and where `noisy` (token, logit) drawn from all entries."""
        axis, no_count = self.chunk.options.axis_name, self._zero_counts()
        lowest = jnp.full_like(self.chunk.zeros(), -jnp.inf)

        def step(carry, each):
            """A slice added to the sums, and its noisiest entry compared with those before."""
            total, live, (most, token, logit) = carry
            part = self.chunk.slice_at(*each)
            x = jnp.where(part.fresh, self._scaled(part.z), -jnp.inf)
            total = total + jnp.exp(x).sum(1)
            live = live + (part.fresh & (part.z > MASK)).sum(1, dtype=jnp.int32)
            if noisy:
                first_id = part.start + self.chunk.vocab_start
                x = x + self.keys.gumbel_from(first_id, x.shape[1])
                where = x.argmax(1)[:, None].astype(jnp.int32)
                peak, z = (jnp.take_along_axis(y, where, 1)[:, 0] for y in (x, part.z))
                new = peak > most  # of equal ones the lowest id
                most = jnp.where(new, peak, most)
                token = jnp.where(new, where[:, 0] + first_id, token)
                logit = jnp.where(new, z, logit)
            return (total, live, (most, token, logit)), None

        start = self.chunk.zeros(), no_count, (lowest, no_count, lowest)
        (total, live, drawn), _ = lax.scan(step, start, (self.chunk.slices(), self.accumulated.slices))
        if axis is not None:
            total, live = lax.psum((total, live), axis)
            every = lax.all_gather(drawn, axis, to="invarying")
            device = every[0].argmax(0)[None]
            drawn = tuple(jnp.take_along_axis(x, device, 0)[0] for x in every)
        return jnp.log(total), live, (drawn[1], drawn[2])

    def _count_above(self, drawn: Drawn) -> Array:
        """How many logits are higher, never the token's own: XLA may compute it anew, and round it apart."""

        def step(count, each):
            """A slice's higher logits added."""
            part, ids = self.chunk.slice_at(*each), self.chunk.place(each[0])[1]
            above = part.fresh & (part.z > drawn.logit[:, None]) & (ids != drawn.token[:, None])
            return count + above.sum(1, dtype=jnp.int32), None

        count, _ = lax.scan(step, self._zero_counts(), (self.chunk.slices(), self.accumulated.slices))
        axis = self.chunk.options.axis_name
        return count if axis is None else lax.psum(count, axis)

    def _zero_counts(self) -> Array:
        return varying(jnp.zeros(self.temperature.shape, jnp.int32), self.chunk.axes)

    def _among(self, rules: Rules, log_s: Array) -> Drawn:
        """Drawn under the rules; all entries of a row are looked at, a row at a time, where the top ones may not do."""
        vocab_size, retained = self.chunk.call.vocab_size, self.topk[0].shape[1]
        x = self._scaled(self.topk[0])
        drawn = pick(rules, x, self.topk, self.keys, log_s)
        if rules.always_decided(retained, vocab_size):
            return drawn
        decided = rules.decided(x, drawn.n_kept, vocab_size, jnp)

        def from_top_entries(i: Array) -> Drawn:
            return jax.tree.map(lambda x: x[i], drawn)

        def from_all_entries(i: Array) -> Drawn:
            return self._from_row(rules, i, log_s[i])

        def each(i: Array) -> Drawn:
            return lax.cond(decided[i], from_top_entries, from_all_entries, i)

        return lax.map(each, jnp.arange(log_s.shape[0], dtype=jnp.int32))

    def _from_row(self, rules: Rules, i: Array, log_sum: Array) -> Drawn:
        """One row's token among all of its entries that the rules keep."""
        z, ids, noise = self._row(i)
        x = (z - self.accumulated.totals.m[i]) / self._divisor[i]
        keep = kept(rules, x, log_sum)
        where = jnp.where(keep, x + noise, -jnp.inf).argmax()
        log_mass = jnp.minimum(jax.nn.logsumexp(jnp.where(keep, x, -jnp.inf)) - log_sum, 0)
        return Drawn(ids[where], z[where], keep.sum(dtype=jnp.int32), log_mass)

    def _row(self, i: Array) -> tuple[Array, Array, Array]:
        """One row's logits, ids and noise, in the order of ids; -inf, too, for what is no entry."""
        axis, keys = self.chunk.options.axis_name, jax.tree.map(lambda x: x[i], self.keys)
        place, ids = jax.vmap(self.chunk.place)(self.chunk.slices())
        z = lax.dynamic_index_in_dim(self.accumulated.slices[0], i, 1, keepdims=False)
        z = jnp.where(place.fresh & (z > MASK), z, -jnp.inf)
        noise = lax.map(lambda first_id: keys.gumbel_from(first_id, ids.shape[1]), ids[:, 0])
        if axis is not None:
            z, ids, noise = (lax.all_gather(x, axis, to="invarying") for x in (z, ids, noise))
        return z.reshape(-1), ids.reshape(-1), noise.reshape(-1)


def pick(
    rules: Rules,
    x: Array,  # (n, R) scaled logits, highest first
    entries: TopEntries,  # (n, R) raw logits and ids
    keys: Keys,  # (n,)
    log_s: Array,  # (n,) of all entries
) -> Drawn:
    """A token of each row among those that the rules keep of these entries."""
    values, ids = entries
    n_kept = rules.kept_of(x, log_s, jnp).astype(jnp.int32)
    x = jnp.where(jnp.arange(x.shape[1], dtype=jnp.int32) < n_kept[:, None], x, -jnp.inf)
    where = (x + keys.gumbel(ids)).argmax(1)[:, None]
    log_mass = jnp.minimum(jax.nn.logsumexp(x, 1) - log_s, 0)
    token, logit = (jnp.take_along_axis(y, where, 1)[:, 0] for y in (ids, values))
    return Drawn(token, logit, n_kept, log_mass)
