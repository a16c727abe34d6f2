"""Drawing a token for each of a few whole rows of logits, and what is recorded of the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..algebra.fold import MASK
from ..errors import OptionError
from ..vocab.backends.chunk import Chunk, Folded
from ..vocab.checks import check_logits
from ..vocab.noise import Noise
from .record import SampleRecord
from .rules import Rules

SORTED = 64  # bytes per entry of a row that is sorted: logits, ids, shares in fp64, noise


@dataclass
class Draw:
    """A chunk's tokens after the fold, their logits still in `chunk.kept`."""

    chunk: Chunk
    folded: Folded
    heat: Tensor  # (C,)
    noise: Noise  # (C,)

    def __post_init__(self) -> None:
        self.totals = self.folded.totals
        if self.folded.top_logits is None or self.folded.top_ids is None:
            raise OptionError("Draw: expected a fold with its best entries, got none; pass top_k ≥ 1")
        self.top_logits, self.top_ids = self.folded.top_logits, self.folded.top_ids  # (C, R)
        self.warm = torch.where(self.heat == 0, 1.0, self.heat)

    @property
    def size(self) -> int:
        return self.chunk.policy.head.rows

    def record(self, rules: Rules, keep: int, budget: int) -> SampleRecord:
        """A token for each row."""
        check_logits(self.totals.logsumexp)
        mean, live = self._mean()
        log_s = self._log_sum()  # of e^((z-m)/T)
        best = self.top_ids[:, 0], self.top_logits[:, 0], torch.ones_like(live), torch.zeros_like(mean)
        greedy = self.heat == 0
        if bool(greedy.all()):
            drawn = best
        elif rules.none:
            drawn = *self._any(), live, torch.zeros_like(mean)
        else:
            drawn = self._among(rules, log_s, budget)
        token, logit, n_kept, mass = (torch.where(greedy, b, d) for b, d in zip(best, drawn, strict=True))
        return SampleRecord(
            token=token,
            token_logit=logit,
            rank=self._rank(logit),
            topk_logits=self.top_logits[:, :keep],
            topk_ids=self.top_ids[:, :keep],
            logsumexp=self.totals.logsumexp,
            mean_logit=mean,
            entropy=self.totals.entropy,
            temperature=self.heat,
            logsumexp_at_temperature=torch.where(greedy, 0.0, self.totals.m / self.warm + log_s),
            log_kept_mass=mass,
            n_kept=n_kept,
            vocab_size=self.size,
        )

    def _mean(self) -> tuple[Tensor, Tensor]:
        """The mean logit, and how many logits are finite."""
        total = torch.stack([tile.z.sum(1) for tile in self.chunk.kept]).sum(0)
        live = torch.full_like(self.top_ids[:, 0], self.size)
        if self.chunk.may_be_infinite:
            live -= torch.stack([(tile.z <= MASK).sum(1) for tile in self.chunk.kept]).sum(0)
            total = torch.where(live < self.size, -math.inf, total)
        return total / self.size, live

    def _scaled(self, z: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """(z - m) / T of some rows."""
        return (z - self.totals.m[rows, None]).div_(self.warm[rows, None])

    def _log_sum(self) -> Tensor:
        if bool((self.warm == 1).all()):
            return self.totals.log_s
        return torch.stack([self._scaled(tile.z).exp_().sum(1) for tile in self.chunk.kept]).sum(0).log_()

    def _any(self) -> tuple[Tensor, Tensor]:
        """(token, logit) drawn from all entries; of equal noisy ones the lowest id."""
        most = torch.full_like(self.totals.m, -math.inf)
        token, logit = torch.zeros_like(self.top_ids[:, 0]), torch.zeros_like(most)
        for tile in self.chunk.kept:
            peak, where = self._scaled(tile.z).add_(self.noise.gumbel(tile.v)).max(1)
            better = peak > most
            token = torch.where(better, where + tile.v.start, token)
            logit = torch.where(better, tile.z.gather(1, where[:, None])[:, 0], logit)
            most = torch.maximum(most, peak)
        return token, logit

    def _among(self, rules: Rules, log_s: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(token, logit, n_kept, log_kept_mass) under the rules; whole rows are sorted where the best may not do."""
        every = torch.arange(log_s.shape[0], device=log_s.device)
        drawn = self._pick(rules, every, self.top_logits, self.top_ids, log_s)
        settled = rules.settled(drawn[2], self.top_ids.shape[1], self.size)
        block = max(1, budget // (SORTED * self.size))
        for rows in (~settled).nonzero().squeeze(1).split(block):
            if rows.numel():
                z = torch.cat([tile.z[rows] for tile in self.chunk.kept], 1)
                values, ids = z.sort(dim=1, descending=True, stable=True)
                for into, part in zip(drawn, self._pick(rules, rows, values, ids, log_s[rows]), strict=True):
                    into[rows] = part
        return drawn

    def _pick(
        self,
        rules: Rules,
        rows: Tensor,  # (n,)
        values: Tensor,  # (n, R) sorted
        ids: Tensor,  # (n, R)
        log_s: Tensor,  # (n,)
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = self._scaled(values.clamp(min=MASK), rows)
        x = x.masked_fill_(values <= MASK, -math.inf)
        n_kept = rules.prefix(x, log_s)
        most = int(n_kept.max())
        x, ids = x[:, :most], ids[:, :most]
        x = x.masked_fill(torch.arange(most, device=x.device) >= n_kept[:, None], -math.inf)
        noise = Noise(self.noise.seeds[rows], self.noise.positions[rows]).gumbel(ids)
        where = (x + noise).argmax(1, keepdim=True)
        mass = (x.logsumexp(1) - log_s).clamp(max=0)
        return ids.gather(1, where)[:, 0], values.gather(1, where)[:, 0], n_kept, mass

    def _rank(self, logit: Tensor) -> Tensor:
        """1 + how many logits are higher than the token's."""
        rank = (self.top_logits > logit[:, None]).sum(1) + 1
        rows = (logit < self.top_logits[:, -1]).nonzero().squeeze(1)
        if rows.numel():
            above = [(tile.z[rows] > logit[rows, None]).sum(1) for tile in self.chunk.kept]
            rank[rows] = torch.stack(above).sum(0) + 1
        return rank
