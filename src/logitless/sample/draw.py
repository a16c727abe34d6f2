"""Drawing a token for each of a few whole rows of logits, and what is recorded of the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..algebra.online_softmax import MASK
from ..errors import NotFiniteError, OptionError, ShapeError
from ..vocab.face import (
    Accumulated,
    Chunk,
    Noise,
    Tile,
    VocabShard,
    at_a_time,
    best_of_all,
    check_logits,
    exp_,
    gather_rows,
    keep_topk,
    place,
    search_of,
    summed,
)
from .record import SampleRecord
from .rules import Rules

LOOKED_AT = 64  # bytes per entry of a row that the rules read whole: logits, shares in fp64, bins, noise

Change = Callable[[Tensor], Tensor]  # (C, V) logits -> those that tokens are drawn from; may write into its argument


class Drawn(NamedTuple):
    """What was drawn from each row, and of how many entries with which share."""

    token: Tensor  # (C,) int64
    n_kept: Tensor  # (C,) int64
    log_kept_mass: Tensor  # (C,)
    log_sum: Tensor  # (C,) log Σ e^((z-m)/T)


@dataclass
class Rows:
    """Whole rows of logits in slices, MASK for -inf, with their maximum and their best entries.

    Of a head that is sharded over ranks the slices are those of this rank's entries, and sums are over all ranks.
    """

    tiles: list[Tile]
    m: Tensor  # (C,)
    top_logits: Tensor  # (C, R) best first
    top_ids: Tensor  # (C, R)
    may_be_infinite: bool
    size: int  # entries, of all ranks
    shard: VocabShard | None = None

    @classmethod
    def of(cls, chunk: Chunk, found: Accumulated) -> Rows:
        """The rows of a chunk that the pass has left in the buffers."""
        if found.top_logits is None or found.top_ids is None:
            raise OptionError("Rows: expected an accumulation with its best entries, got none; pass top_k ≥ 1")
        head = chunk.policy.head
        return cls(
            chunk.materialised,
            found.totals.m,
            found.top_logits,
            found.top_ids,
            chunk.may_be_infinite,
            head.rows,
            head.shard,
        )

    def changed(self, change: Change) -> Rows:
        """Rows of what `change` makes of these."""
        z = self.whole(slice(None))
        z.masked_fill_(z <= MASK, -math.inf)
        shape = tuple(z.shape)
        z = change(z)
        if tuple(z.shape) != shape:
            raise ShapeError(f"logits processors: expected logits of shape {shape} back, got {tuple(z.shape)}")
        m = z.amax(1)
        if not bool(m.isfinite().all()):
            raise NotFiniteError("logits processors: expected finite logits, some of them in each row, got none or NaN")
        values = torch.full_like(self.top_logits, -math.inf)
        ids = torch.full_like(self.top_ids, -1)
        keep_topk(values, ids, z, 0)
        return Rows([Tile(slice(0, shape[1]), z.clamp_(min=MASK))], m, values, ids, True, self.size)

    def whole(self, rows: Tensor | slice) -> Tensor:
        """All logits of some rows, (n, V)."""
        parts = [tile.z[rows] for tile in self.tiles]
        if self.shard is None:
            return torch.cat(parts, 1)
        return gather_rows(torch.cat([self.m[rows][:, None][:, :0], *parts], 1), self.shard, self.size)

    def ids(self, tile: Tile) -> slice:
        """A slice's vocabulary ids."""
        first = 0 if self.shard is None else self.shard.offset
        return slice(first + tile.v.start, first + tile.v.stop)

    def added(self, of: Callable[[Tile], Tensor], like: Tensor) -> Tensor:
        """Σ of(slice) over the slices, which are `like` this."""
        parts = [of(tile) for tile in self.tiles]
        total = torch.stack(parts).sum(0) if parts else torch.zeros_like(like)
        return total if self.shard is None else summed(total, self.shard)

    def live(self) -> Tensor:
        """How many logits are finite."""
        live = torch.full_like(self.top_ids[:, 0], self.size)
        return live - self.added(lambda tile: (tile.z <= MASK).sum(1), live) if self.may_be_infinite else live

    def mean(self, live: Tensor) -> Tensor:
        """The mean logit."""
        total = self.added(lambda tile: tile.z.sum(1), self.m)
        if self.may_be_infinite:
            total = torch.where(live < self.size, -math.inf, total)
        return total / self.size

    def at(self, ids: Tensor) -> Tensor:
        """The logit of one entry of each row."""
        if len(self.tiles) == 1 and self.shard is None:
            return self.tiles[0].z.gather(1, ids[:, None])[:, 0]

        def found(tile: Tile) -> Tensor:
            columns, inside = place(ids, self.ids(tile).start, tile.z.shape[1])
            return torch.where(inside, tile.z.gather(1, columns[:, None])[:, 0], 0.0)

        return self.added(found, self.m)

    @property
    def here(self) -> slice:
        """The ids of all slices."""
        ends = [self.ids(tile) for tile in (*self.tiles[:1], *self.tiles[-1:])]
        return slice(ends[0].start, ends[-1].stop) if ends else slice(0, 0)

    def entries(self, rows: Tensor, ids: Tensor) -> Tensor:
        """The logits of some entries of the slices, (n,), by their rows and ids, (n,) each."""
        out = self.m[rows]
        for tile in self.tiles:
            columns, inside = place(ids, self.ids(tile).start, tile.z.shape[1])
            out = torch.where(inside, tile.z[rows, columns], out)
        return out

    def rank(self, logit: Tensor) -> Tensor:
        """1 + how many logits are higher."""
        rank = (self.top_logits > logit[:, None]).sum(1) + 1
        rows = (logit < self.top_logits[:, -1]).nonzero().squeeze(1)

        def above(tile: Tile) -> Tensor:
            counts = []
            for some in rows.split(rows_at_a_time(tile.z)):
                z = tile.z[some]  # a copy, in which counts are made as numbers: booleans are slower to add up
                counts.append(torch.gt(z, logit[some, None], out=z).sum(1).long())
            return torch.cat(counts)

        if rows.numel():
            rank[rows] = self.added(above, rows) + 1
        return rank


@dataclass
class Draw:
    """A token from each of some rows, by noise at a temperature; greedy where it is 0."""

    rows: Rows
    temperature: Tensor  # (C,)
    noise: Noise  # (C,)
    log_s: Tensor | None = None  # (C,) log Σ e^(z-m), where it is known

    def __post_init__(self) -> None:
        self.greedy = self.temperature == 0
        self.divisor = torch.where(self.greedy, 1.0, self.temperature)

    @cached_property
    def retained(self) -> Tensor:
        """The noise of the best entries, (C, R)."""
        return self.noise.gumbel(self.rows.top_ids)

    def under(self, rules: Rules, live: Tensor, budget: int) -> Drawn:
        """The token of each row; whole rows are read again within `budget` bytes where the best entries may not do."""
        zero = torch.zeros_like(self.divisor)
        best = Drawn(self.rows.top_ids[:, 0], torch.ones_like(live), zero, zero)
        if bool(self.greedy.all()):
            return best
        log_sum = self._log_sum()
        if rules.none:
            every = torch.arange(live.shape[0], device=live.device)
            drawn = Drawn(self._best(every), live, zero, log_sum)
        else:
            drawn = self._among(rules, log_sum, budget)
        return Drawn(*(torch.where(self.greedy, b, d) for b, d in zip(best, drawn, strict=True)))

    def _scaled(self, z: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """(z - m) / T of some rows."""
        return (z - self.rows.m[rows, None]).div_(self.divisor[rows, None])

    def _log_sum(self) -> Tensor:
        if self.log_s is not None and bool((self.divisor == 1).all()):
            return self.log_s

        def shares(tile: Tile) -> Tensor:
            some = torch.arange(tile.z.shape[0], device=tile.z.device).split(rows_at_a_time(tile.z))
            return torch.cat([exp_(self._scaled(tile.z[rows], rows)).sum(1) for rows in some])

        return self.rows.added(shares, self.rows.m).log_()

    def _best(self, rows: Tensor, kept: Tensor | None = None) -> Tensor:
        """The token of some rows (n,), of all entries or of those in `kept` (n, V): the best after noise.

        The retained entries get noise first, then what noise can still lift above them. Of equals the lowest id wins.
        """
        ids, logits, size = self.rows.top_ids[rows], self.rows.top_logits[rows], self.rows.size
        noisy = self._scaled(logits, rows).add_(self.retained[rows])
        if kept is not None:
            noisy = noisy.masked_fill_(~kept.gather(1, ids), -math.inf)
        most = noisy.amax(1)
        token = torch.where(noisy == most[:, None], ids, size).amin(1)
        if ids.shape[1] == size:
            return token
        here = self.rows.here
        least = most - self._scaled(logits[:, -1:], rows)[:, 0]  # no other logit is above these
        noise, among = self.noise.rows(rows), None if kept is None else kept[:, here]
        n, where = noise.reaching(here, least, among, search_of(noise.seeds))
        lifted = self._scaled(self.rows.entries(rows[n], where)[:, None], rows[n])
        lifted = lifted.add_(self.noise.rows(rows[n]).gumbel(where[:, None]))[:, 0]
        higher = most.scatter_reduce(0, n, lifted, "amax")
        token = torch.where(higher > most, size, token)
        first = torch.where(lifted == higher[n], where, size)
        token, most = token.scatter_reduce(0, n, first, "amin"), higher
        return token if self.rows.shard is None else best_of_all(token, most, self.rows.shard)

    def _among(self, rules: Rules, log_sum: Tensor, budget: int) -> Drawn:
        """Drawn under the rules."""
        token, n_kept, mass, decided = self._among_top(rules, log_sum)
        most = min(budget // (LOOKED_AT * self.rows.size), decided.shape[0])  # of any budget a number that torch holds
        for rows in (~decided).nonzero().squeeze(1).split(max(1, most)):
            if rows.numel():
                each = [rules.kept(x, total) for x, total in zip(self._whole(rows), log_sum[rows], strict=True)]
                kept, n_kept[rows], mass[rows] = (torch.stack(part) for part in zip(*each, strict=True))
                token[rows] = self._best(rows, kept)
        return Drawn(token, n_kept, mass.clamp_(max=0), log_sum)

    def _whole(self, rows: Tensor) -> Iterator[Tensor]:
        """Whole rows of scaled logits, (V,), one after the other; ranks gather all at once."""
        for some in rows.split(1 if self.rows.shard is None else rows.numel()):
            z = self.rows.whole(some)
            x = self._scaled(z, some)
            yield from x.masked_fill_(z <= MASK, -math.inf) if self.rows.may_be_infinite else x

    def _among_top(self, rules: Rules, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(token, n_kept, log_kept_mass) where the rules end among the best entries, and whether they do."""
        values, ids = self.rows.top_logits, self.rows.top_ids
        x = self._scaled(values).masked_fill_(values <= MASK, -math.inf)
        n_kept = rules.prefix(x, log_sum)
        decided = rules.decided(x, n_kept, self.rows.size, torch)
        most = int(n_kept.max())
        x, ids = x[:, :most], ids[:, :most]
        x = x.masked_fill(torch.arange(most, device=x.device) >= n_kept[:, None], -math.inf)
        where = (x + self.retained[:, :most]).argmax(1, keepdim=True)
        return ids.gather(1, where)[:, 0], n_kept, x.logsumexp(1) - log_sum, decided


def rows_at_a_time(z: Tensor) -> int:
    """How many rows of a slice (C, S) are worked on at a time: on a CPU what stays in its caches."""
    return max(1, at_a_time(z.device) // max(1, z.shape[1]))


def recorded(
    chunk: Chunk,
    found: Accumulated,
    temperature: Tensor,
    noise: Noise,
    *,
    rules: Rules,
    keep: int,
    budget: int,
    change: Change | None = None,
) -> SampleRecord:
    """A token for each row of an accumulated chunk, drawn from its logits or from what `change` makes of them."""
    totals = found.totals
    check_logits(totals.logsumexp)
    raw = Rows.of(chunk, found)
    rows = raw if change is None else raw.changed(change)
    draw = Draw(rows, temperature, noise, totals.log_s if change is None else None)
    live = raw.live()
    drawn = draw.under(rules, live if change is None else rows.live(), budget)
    logit = raw.at(drawn.token)
    log_sum = rows.m / draw.divisor + drawn.log_sum
    if change is not None:  # relative to the token's raw logit
        log_sum = log_sum - (rows.at(drawn.token) - logit) / draw.divisor
    return SampleRecord(
        token=drawn.token.int(),
        token_logit=logit,
        rank=raw.rank(logit).int(),
        topk_logits=raw.top_logits[:, :keep],
        topk_ids=raw.top_ids[:, :keep].int(),
        logsumexp=totals.logsumexp,
        mean_logit=raw.mean(live),
        entropy=totals.entropy,
        temperature=temperature,
        logsumexp_at_temperature=torch.where(draw.greedy, 0.0, log_sum),
        log_kept_mass=drawn.log_kept_mass,
        n_kept=drawn.n_kept.int(),
        vocab_size=raw.size,
        processed=change is not None,
    )
