"""Ranks that share a head's vocabulary: what each holds, and what they make sure of before a call."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from ...errors import LogitlessError, RankError, remote_error
from ..head.shard import Layout, VocabShard
from .collectives import Ranks

ROUNDING = 0.02  # of the hidden states' norm: what their sums may differ by on ranks that computed them alike
FIELDS = (  # whole numbers that a rank says of a call
    "logitless",
    "torch",
    "offset",
    "held",
    "total",
    "rows",
    "width",
    "options",
    "tokens",
    "valid",
    "refuses",  # that it cannot make it
    "labels",
    "given",
)
FACTS = len(FIELDS) + 3 * 3  # with the three sums of each of ALIKE
WORDS = 1024  # bytes of its reason
PRIME = 2**31 - 1  # bits of round numbers are multiples of high powers of two, whose sums overflow to 0
Value = TypeVar("Value")


def layout_of(shard: VocabShard, rows: int) -> Layout:
    """The layout that the ranks have agreed on, or before they meet the even one. rows: that exist in all."""
    if shard.layout is not None:
        return shard.layout
    each = -(-shard.total // Ranks(shard.process_group).size)
    offsets = tuple(range(0, max(1, shard.total), max(1, each)))
    return Layout(offsets, tuple(max(0, min(each, rows - offset)) for offset in offsets))


def gather_rows(z: Tensor, shard: VocabShard, rows: int) -> Tensor:
    """The logits (C, V) of all ranks from those of the existing rows here, (C, held)."""
    layout = layout_of(shard, rows)
    sent = z.new_zeros(z.shape[0], layout.widest)
    sent[:, : z.shape[1]] = z
    each = Ranks(shard.process_group).gather(sent)
    return torch.cat([each[rank, :, : layout.rows[rank]] for rank in layout.holding], 1)


@dataclass(frozen=True)
class RankFacts:
    """What must be the same on all ranks, or fit together."""

    shard: VocabShard
    weight_rows: int  # this rank's, padding included
    rows: int  # that exist on all ranks
    options: str  # anything that says which statistics are wanted, and how, a line each
    hidden: Tensor  # (N, H)
    ref_hidden: Tensor | None  # (N, H')
    factors: list[Tensor]  # (R, H), the adapters' a, of both heads
    valid: Tensor  # () how many tokens are not ignored
    labels: Tensor | None
    given: list[Tensor]  # temperatures, candidates, token_ids, noise

    def numbers(self) -> Tensor:  # (FACTS,)
        """FIELDS, and the sums of what ALIKE names, as their bits."""
        h = self.hidden.detach()
        own = sys.modules[__name__.partition(".")[0]].__version__
        whole = [_release(own), _release(torch.__version__), self.shard.offset, self.weight_rows]
        whole += [self.shard.total, self.rows, h.shape[1], zlib.crc32(self.options.encode()), h.shape[0]]
        labels, reference = ([] if x is None else [x] for x in (self.labels, self.ref_hidden))
        values = [_mark(labels, h.device), _mark(self.given, h.device)]
        real = [_sums(x, h.device) for x in ([h], reference, self.factors)]
        bits = torch.cat(real).view(torch.int64)
        return torch.cat([torch.tensor(whole, device=h.device), self.valid[None], bits.new_zeros(1), *values, bits])


def _sums(tensors: list[Tensor], device: torch.device) -> Tensor:  # (3,)
    """Of all numbers: their sum, that of the first half of each tensor's rows, and their norm."""
    found = torch.zeros(3, dtype=torch.float64, device=device)
    for x in tensors:
        x = x.detach()
        halves = x.sum(dtype=torch.float64), x[: 1 + x.shape[0] // 2].sum(dtype=torch.float64)
        norm = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double()
        found = torch.stack([found[0] + halves[0], found[1] + halves[1], torch.hypot(found[2], norm)])
    return found


def _mark(tensors: list[Tensor], device: torch.device) -> Tensor:  # (1,)
    """A number that other values, or the same in another order, have by rare chance alone; floats by their bits."""
    whole = [(x.double().view(torch.int64) if x.is_floating_point() else x.long()).flatten() for x in tensors]
    values = torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *(x.to(device) for x in whole)]) % PRIME
    return (values * (torch.arange(values.shape[0], device=device) % 1009 + 1)).sum()[None]


def on_all(head: Any, check: Callable[[], Value]) -> Value:
    """What `check` returns; an error in it is raised on all ranks that share the head and would wait for this one.

    This rank says so when they agree on their call, so that a call without an error sends nothing more.
    """
    shard = getattr(head, "shard", None)
    if shard is None or torch.compiler.is_compiling():
        return check()
    try:
        return check()
    except LogitlessError as error:
        if isinstance(error, RankError):
            raise
        ranks = Ranks(shard.process_group)
        refusal = torch.zeros(FACTS, dtype=torch.int64, device=head.weight.device)
        refusal[FIELDS.index("refuses")] = 1
        ranks.gather(refusal)
        _refuse(ranks, head.weight.device, error)


def _refuse(ranks: Ranks, device: torch.device, own: LogitlessError | None) -> NoReturn:
    """Raise the error of the first rank that has one, on all."""
    said = _told(ranks, device, "" if own is None else f"{type(own).__name__}|{own}")
    rank = next(r for r, x in enumerate(said) if x)
    kind, _, text = said[rank].partition("|")
    where = "" if len(set(said)) == 1 else f" (rank {rank} of the {ranks.size} that share the head)"
    raise remote_error(kind, text + where) from own


def _told(ranks: Ranks, device: torch.device, words: str) -> list[str]:
    """The words of every rank, or their first WORDS bytes."""
    sent = torch.tensor(list(words.encode()[:WORDS].ljust(WORDS)), dtype=torch.uint8, device=device)
    return [bytes(row).decode(errors="ignore").rstrip() for row in ranks.gather(sent).tolist()]


def _unlike(options: list[str]) -> list[str]:
    """The first line of each rank's that is not the same on all; some mark where that is past what they told."""
    for lines in zip(*(x.split("\n") for x in options), strict=False):
        if len(set(lines)) > 1:
            return list(lines)
    return [f"others ({rank})" for rank, _ in enumerate(options)]


def agree(facts: RankFacts) -> Layout:
    """Make sure that all ranks make the same call on shards that fit: one small collective, the same error on all."""
    ranks = Ranks(facts.shard.process_group)
    table = ranks.gather(facts.numbers())
    reals = table[:, len(FIELDS) :].contiguous().view(torch.float64).tolist()
    said = dict(zip(FIELDS, zip(*table[:, : len(FIELDS)].tolist(), strict=True), strict=True))
    if any(said["refuses"]):
        _refuse(ranks, table.device, None)
    same: list[tuple[str, Any, str]] = [
        ("version of logitless", [_named(x) for x in said["logitless"]], "install one version everywhere"),
        ("version of torch", [_named(x) for x in said["torch"]], "install one version everywhere"),
        ("number of rows in all (total)", said["total"], "give each rank's VocabShard the same total"),
        ("vocabulary", said["rows"], "set vocab_size alike"),
        ("hidden size", said["width"], "shard the head's rows, not its columns"),
        ("options", said["options"], "make the same call on every rank"),
        ("number of tokens", said["tokens"], SAME_TOKENS),
        ("number of tokens that count", said["valid"], SAME_TOKENS),
        ("labels", said["labels"], SAME_TOKENS),
        (f"values of {GIVEN}", said["given"], SAME_VALUES),
    ]
    for name, values, hint in same:
        if len(set(values)) > 1:
            if name == "options":
                values = _unlike(_told(ranks, table.device, facts.options))
            raise RankError(
                f"head: expected the same {name} on every rank of its group, got {_by_rank(values)}; {hint}"
            )
    _check_shards(said["offset"], said["held"], facts.shard.total)
    for at, (name, hint) in enumerate(ALIKE.items()):
        _check_alike(name, hint, [row[3 * at : 3 * at + 3] for row in reals])
    rows = [max(0, min(n, facts.rows - offset)) for offset, n in zip(said["offset"], said["held"], strict=True)]
    return Layout(tuple(said["offset"]), tuple(rows))


GIVEN = "temperature, candidates, token_ids, sampling_mask, class weights, noise and denominator"
SAME_VALUES = "make the same call on every rank, after the same torch.manual_seed where `generate` draws the seeds"
SAME_TOKENS = (
    "ranks that share a vocabulary compute the same tokens: gather them first, or, of a head that FSDP2 shards, call "
    "inside the head module's own forward"
)


def _check_shards(offsets: tuple[int, ...], rows: tuple[int, ...], total: int) -> None:
    spans = sorted((offset, offset + n, rank) for rank, (offset, n) in enumerate(zip(offsets, rows, strict=True)) if n)
    at, before = 0, -1
    for start, stop, rank in [*spans, (total, total, -1)]:
        if start < at:
            raise RankError(
                f"VocabShard: expected every row on one rank, got rows {start} to {min(at, stop) - 1} on ranks "
                f"{before} and {rank}; each offset is the sum of the rows of the ranks before"
            )
        if start > at:
            raise RankError(
                f"VocabShard: expected rows 0 to {total - 1} on the ranks of the group, got none that holds rows {at} "
                f"to {start - 1}; each offset is the sum of the rows of the ranks before"
            )
        at, before = stop, rank


ALIKE = {  # numbers that ranks compute alike but for rounding, and what to do where they have not
    "hidden states": SAME_TOKENS,
    "hidden states of the reference": SAME_TOKENS,
    "adapters' a": "draw them from one seed, or send one rank's to all: only b is split over the vocabulary",
}


def _check_alike(name: str, hint: str, sums: list[list[float]]) -> None:
    scale = max(norm for *_, norm in sums)  # of a diverged model, which has an error of its own, inf or nan: no bound
    for part in (0, 1):
        each = [row[part] for row in sums]
        if max(each) - min(each) > ROUNDING * scale:
            raise RankError(
                f"head: expected the same {name} on every rank of its group, got sums "
                f"{_by_rank([f'{x:.6g}' for x in each])}; {hint}"
            )


def _by_rank(values: Iterable[Any]) -> str:
    """Each value with the ranks that have it."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    some = [f"{value} on {_ranks(where)}" for value, where in list(ranks.items())[:4]]
    return ", ".join(some) + (", ..." if len(ranks) > 4 else "")


def _ranks(where: list[int]) -> str:
    if len(where) == 1:
        return f"rank {where[0]}"
    return f"ranks {', '.join(map(str, where[:4]))}" + (", ..." if len(where) > 4 else "")


def _release(version: str) -> int:
    """1.2.3 as 1002003."""
    parts = [int("".join(c for c in part if c.isdigit()) or 0) for part in version.split("+")[0].split(".")[:3]]
    return sum(n * 1000**i for i, n in enumerate(reversed([*parts, 0, 0][:3])))


def _named(release: int) -> str:
    return ".".join(str(release // 1000**i % 1000) for i in (2, 1, 0))
