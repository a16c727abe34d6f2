"""Drawing a token for each of a few whole rows of logits, and what is recorded of the rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..algebra.fold import MASK
from ..algebra.rules import Rules
from ..errors import OptionError
from .chunk import Chunk
from .fold import Folded
from .mesh import varying
from .noise import Keys
from .nucleus import kept
from .record import SampleRecord
from .topk import Best

Drawn = tuple[Array, Array, Array, Array]  # token, its logit, how many entries are kept, the log of their share


@dataclass(frozen=True)
class Draw:
    """A chunk's tokens after the fold, the logits of all slices in `folded.kept`."""

    chunk: Chunk
    folded: Folded
    heat: Array  # (C,)
    keys: Keys  # (C,)

    def record(self, rules: Rules | None, keep: int) -> SampleRecord:
        """A token for each row: the best one without `rules`, or where the temperature is 0."""
        totals, zero = self.folded.totals, jnp.zeros_like(self.folded.totals.m)
        logit, token = (x[:, 0] for x in self.best)  # of equal ones the lowest id
        rank = n_kept = jnp.ones_like(token)
        log_sum = mass = zero
        if rules is not None:
            greedy = self.heat == 0
            log_s, live, noisy = self._look(rules.none)
            drawn = (*noisy, live, zero) if rules.none else self._among(rules, log_s)
            pairs = zip((token, logit, n_kept, mass), drawn, strict=True)
            token, logit, n_kept, mass = (jnp.where(greedy, b, d) for b, d in pairs)
            log_sum = jnp.where(greedy, 0.0, totals.m / self._warm + log_s)
            rank = 1 + self._above(logit)
        return SampleRecord(
            token=token,
            token_logit=logit,
            rank=rank,
            topk_logits=self.best[0][:, :keep],
            topk_ids=self.best[1][:, :keep],
            logsumexp=totals.logsumexp,
            mean_logit=jnp.full_like(zero, -jnp.inf) if self.chunk.spec.forbidden else totals.mean_logit,
            entropy=totals.entropy,
            temperature=self.heat,
            logsumexp_at_temperature=log_sum,
            log_kept_mass=mass,
            n_kept=n_kept,
            vocab_size=self.chunk.spec.rows,
        )

    @property
    def best(self) -> Best:
        if self.folded.best is None:
            raise OptionError("Draw: expected a fold with its best entries, got none; pass top_k ≥ 1")
        return self.folded.best

    @property
    def _warm(self) -> Array:
        return jnp.where(self.heat == 0, 1.0, self.heat)

    def _scaled(self, z: Array) -> Array:
        """(z - m) / T."""
        return (z - self.folded.totals.m[:, None]) / self._warm[:, None]

    def _look(self, noisy: bool) -> tuple[Array, Array, tuple[Array, Array]]:
        """log Σ e^((z-m)/T), how many logits are finite, and where `noisy` (token, logit) drawn from all entries."""
        axis, none = self.chunk.spec.axis, self._count()
        low = jnp.full_like(self.chunk.zeros(), -jnp.inf)

        def step(carry, each):
            total, live, (most, token, logit) = carry
            tile = self.chunk.tile(*each)
            x = jnp.where(tile.fresh, self._scaled(tile.z), -jnp.inf)
            total, live = total + jnp.exp(x).sum(1), live + (tile.fresh & (tile.z > MASK)).sum(1, dtype=jnp.int32)
            if noisy:
                first = tile.start + self.chunk.first
                x = x + self.keys.gumbel_from(first, x.shape[1])
                where = x.argmax(1)[:, None].astype(jnp.int32)
                peak, z = (jnp.take_along_axis(y, where, 1)[:, 0] for y in (x, tile.z))
                new = peak > most  # of equal ones the lowest id
                pairs = (peak, most), (where[:, 0] + first, token), (z, logit)
                most, token, logit = (jnp.where(new, a, b) for a, b in pairs)
            return (total, live, (most, token, logit)), None

        start = self.chunk.zeros(), none, (low, none, low)
        (total, live, drawn), _ = lax.scan(step, start, (self.chunk.slices(), self.folded.kept))
        if axis is not None:
            total, live = lax.psum((total, live), axis)
            every = lax.all_gather(drawn, axis, to="invarying")
            first = every[0].argmax(0)[None]
            drawn = tuple(jnp.take_along_axis(x, first, 0)[0] for x in every)
        return jnp.log(total), live, (drawn[1], drawn[2])

    def _above(self, logit: Array) -> Array:
        """How many logits are higher."""

        def step(count, each):
            tile = self.chunk.tile(*each)
            return count + (tile.fresh & (tile.z > logit[:, None])).sum(1, dtype=jnp.int32), None

        count, _ = lax.scan(step, self._count(), (self.chunk.slices(), self.folded.kept))
        return count if self.chunk.spec.axis is None else lax.psum(count, self.chunk.spec.axis)

    def _count(self) -> Array:
        return varying(jnp.zeros(self.heat.shape, jnp.int32), self.chunk.axes)

    def _among(self, rules: Rules, log_s: Array) -> Drawn:
        """Drawn under the rules; whole rows are looked at, one at a time, where the best entries may not do."""
        rows, retained = self.chunk.spec.rows, self.best[0].shape[1]
        x = self._scaled(self.best[0])
        drawn = pick(rules, x, *self.best, self.keys, log_s)
        settled = rules.settled(drawn[2], retained, rows)
        if retained >= min(rules.top_k or rows, rows):
            return drawn

        def whole(i: Array) -> Drawn:
            (z, ids, noise), m, warm, log_sum = self._row(i), self.folded.totals.m[i], self._warm[i], log_s[i]
            x = (z - m) / warm
            keep = kept(rules, x, log_sum)
            where = jnp.where(keep, x + noise, -jnp.inf).argmax()
            mass = jnp.minimum(jax.nn.logsumexp(jnp.where(keep, x, -jnp.inf)) - log_sum, 0)
            return ids[where], z[where], keep.sum(dtype=jnp.int32), mass

        def each(i: Array) -> Drawn:
            return lax.cond(settled[i], lambda i: jax.tree.map(lambda x: x[i], drawn), whole, i)

        return lax.map(each, jnp.arange(log_s.shape[0], dtype=jnp.int32))

    def _row(self, i: Array) -> tuple[Array, Array, Array]:
        """One row's logits, ids and noise, in the order of ids; -inf, too, for what is no entry."""
        axis, keys = self.chunk.spec.axis, jax.tree.map(lambda x: x[i], self.keys)
        place, ids = jax.vmap(self.chunk.place)(self.chunk.slices())
        z = lax.dynamic_index_in_dim(self.folded.kept[0], i, 1, keepdims=False)
        z = jnp.where(place.fresh & (z > MASK), z, -jnp.inf)
        noise = lax.map(lambda first: keys.gumbel_from(first, ids.shape[1]), ids[:, 0])
        if axis is not None:
            z, ids, noise = (lax.all_gather(x, axis, to="invarying") for x in (z, ids, noise))
        return z.reshape(-1), ids.reshape(-1), noise.reshape(-1)


def pick(
    rules: Rules,
    x: Array,  # (n, R) scaled logits, best first
    values: Array,  # (n, R) raw
    ids: Array,  # (n, R)
    keys: Keys,  # (n,)
    log_s: Array,  # (n,) of whole rows
) -> Drawn:
    """A token of each row among those that the rules keep of these entries."""
    n_kept = rules.kept_of(x, log_s, jnp, x.dtype).astype(jnp.int32)
    x = jnp.where(jnp.arange(x.shape[1], dtype=jnp.int32) < n_kept[:, None], x, -jnp.inf)
    where = (x + keys.gumbel(ids)).argmax(1)[:, None]
    mass = jnp.minimum(jax.nn.logsumexp(x, 1) - log_s, 0)
    token, logit = (jnp.take_along_axis(y, where, 1)[:, 0] for y in (ids, values))
    return token, logit, n_kept, mass
