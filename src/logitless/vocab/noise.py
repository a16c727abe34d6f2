"""Gumbel noise as a function of a sequence's own seed, a position and a vocabulary id, and of nothing else.

The same number comes out whatever the slices, the batch's order, the number of ranks or the device: integers are
Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), and the logarithms are made of
additions, products and quotients in float64, which IEEE 754 rounds in one way only (a library's log is not).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import DeviceError, DtypeError, OptionError, ShapeError
from .dtypes import dtype_of, of_integers

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
BLOCK = {"cpu": 1 << 16}  # ids at a time: what stays in a CPU's caches
BLOCK_ELSEWHERE = 1 << 22
SCRATCH = 72  # bytes per id while a block is made

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class Noise(NamedTuple):
    """Which Gumbel noise a draw takes: a sequence's own seed and a token's position, of shapes that broadcast to (...).

        noise = Noise(seeds, positions)  # token t of a sequence with seed s: always the same draw
        ll.sample_tokens(hidden, head, noise=noise)

    For each vocabulary id v the noise is -log(-log(u(seed, position, v))) with u uniform in (0, 1) by Philox-4x32-10:
    the same number for every slice, batch order, number of ranks and device. seeds, positions: (...) integer tensors
    of hidden's device. `sample_tokens` raises DtypeError, ShapeError or DeviceError for others.
    """

    seeds: Tensor  # (...) integer
    positions: Tensor  # (...) integer

    @classmethod
    def draw(cls, lead: tuple[int, ...], device: torch.device, generator: torch.Generator | None = None) -> Noise:
        """Noise with a seed of its own for each token, from torch's generator."""
        where = device if generator is None else generator.device
        seeds = torch.randint(2**63 - 1, lead, generator=generator, device=where).to(device)
        return cls(seeds, torch.zeros_like(seeds))

    @classmethod
    def of(
        cls, lead: tuple[int, ...], device: torch.device, noise: Noise | None, generator: torch.Generator | None
    ) -> Noise:
        """A call's noise for each of its tokens: as given, or drawn."""
        if not isinstance(generator, torch.Generator | None):
            raise OptionError(f"generator: expected a torch.Generator or None, got {generator!r}; pass noise for seeds")
        if noise is None:
            return cls.draw(lead, device, generator)
        if generator is not None:
            raise OptionError("noise: expected noise or a generator, got both; pass one of them")
        if not isinstance(noise, Noise):
            raise OptionError(f"noise: expected Noise(seeds, positions), got {type(noise).__name__}")
        noise = noise.expand(lead)
        if any(x.device != device for x in noise):
            raise DeviceError(f"noise is on {noise.seeds.device}, hidden on {device}; move one of them")
        return noise

    def rows(self, rows: slice | Tensor) -> Noise:
        """The noise of some of the tokens, (n,)."""
        return Noise(self.seeds[rows], self.positions[rows])

    def expand(self, lead: tuple[int, ...]) -> Noise:
        """The noise with an int64 seed and position for each of the tokens, or an error that says what is wrong."""
        for name, x in zip(self._fields, self, strict=True):
            if not of_integers(x):
                got = dtype_of(x)
                raise DtypeError(f"noise: expected {name} as an integer tensor, got {got}")
            if x.dim() > len(lead) or any(a not in (1, b) for a, b in zip(x.shape[::-1], lead[::-1], strict=False)):
                raise ShapeError(f"noise: expected {name} that broadcast to {lead}, got {tuple(x.shape)}")
        return Noise(self.seeds.long().expand(lead), self.positions.long().expand(lead))

    def gumbel(self, ids: Tensor | slice) -> Tensor:
        """`gumbel` of these seeds and positions."""
        return gumbel(self.seeds, self.positions, ids)

    def reaching(
        self, ids: slice, least: Tensor, among: Tensor | None = None, search: Search | None = None
    ) -> tuple[Tensor, Tensor]:
        """`reaching` of these seeds and positions, (C,) each."""
        return reaching(self.seeds, self.positions, ids, least, among, search)


def gumbel(
    seeds: Tensor,  # (...) integer
    positions: Tensor,  # (...) integer
    ids: Tensor | slice,  # (..., k), or (V,) or a slice for all tokens
) -> Tensor:  # (..., k) or (..., V) fp32
    """Standard Gumbel noise of each (seed, position, vocabulary id).

    Dense equivalent, up to which random numbers come:

        -(-torch.rand(*seeds.shape, V).log()).log()

    ids: 0 ≤ id < 2³⁴; a slice with both ends costs a quarter of the same ids in a tensor, for one Philox block serves
    four neighbours. Uniforms are (w + 1/2)·2⁻³² of a 32-bit word, strictly inside (0, 1); the noise is right to 5e-9 or
    fp32's rounding, at both tails, and lies in (-3.2, 22.9). Any integers are seeds; positions count from 0.
    Raises DtypeError, ShapeError, OptionError. Memory: the result, and 72 bytes for each id of a block of 65,536.
    """
    lead = _lead(seeds, positions, ids)
    seeds, positions = (x.flatten() for x in Noise(seeds, positions).expand(lead))
    if isinstance(ids, slice):
        width = ids.stop - ids.start
    else:
        width = ids.shape[-1]
        ids = ids.long() if ids.dim() == 1 else ids.long().expand(*lead, width).reshape(-1, width)
    out = torch.empty(seeds.shape[0], width, dtype=torch.float32, device=seeds.device)
    for rows, columns in _parts(seeds.shape[0], width, at_a_time(seeds.device)):
        words = _words(seeds[rows, None], positions[rows, None], _part(ids, rows, columns))
        out[rows, columns] = _gumbel_of(words)
    return out.view(*lead, width)


def blocks_reaching(seeds: Tensor, positions: Tensor, blocks: Tensor, words: Tensor) -> Tensor:
    """Whether one of the four words of a block is at least the token's, (C, B) bool.

    seeds, positions, words: (C,) int64; blocks: (B,) int64.
    """
    a, b, c, d = words_of(seeds[:, None], positions[:, None], blocks)
    return torch.maximum(torch.maximum(a, b), torch.maximum(c, d)) >= words[:, None]


class Search(NamedTuple):
    """How blocks of four are looked through."""

    blocks: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # as `blocks_reaching`
    at_a_time: int = 0  # ids, of as many blocks in one call; 0 for what suits plain operations on the device


PLAIN = Search(blocks_reaching)


def reaching(
    seeds: Tensor,  # (C,) int64
    positions: Tensor,  # (C,) int64
    ids: slice,
    least: Tensor,  # (C,) floating
    among: Tensor | None = None,  # (C, width of ids) bool
    search: Search | None = None,
) -> tuple[Tensor, Tensor]:  # (n,) int64 each
    """(tokens, ids) of noise of at least `least`, and of little below it, of all or `among` some; it is not computed.

    Dense equivalent, but for a few more:

        tokens, columns = ((gumbel(seeds, positions, ids) >= least[:, None]) & among).nonzero().unbind(1)

    For whoever wants the best of logits plus noise: a third of the noise's price, and four neighbours none of which is
    among them cost nothing. search: how blocks of four are looked through. Memory: as `gumbel`, and some 200 bytes for
    each that is found.
    """
    # g >= t where the uniform is at least e^(-e^-t); a thousandth is far more than rounding
    words = torch.exp(-torch.exp(1e-3 - least.double())).mul_(2.0**32).sub_(1).floor_().clamp_(max=2.0**32).long()
    search = search or PLAIN
    at_once = search.at_a_time or at_a_time(seeds.device)
    first, asked = ids.start >> 2, _asked(ids, seeds, among)
    near = [(seeds.new_empty(0), seeds.new_empty(0))]  # blocks of four, a few of all
    for rows, blocks in _blocks_of(asked, among is None, at_once):
        reached = search.blocks(seeds[rows], positions[rows], blocks + first, words[rows])
        token, block = reached.nonzero().unbind(1)
        near.append((token + rows.start, blocks[block]))
    token, block = (torch.cat(x) for x in zip(*near, strict=True))
    of_four = torch.stack(words_of(seeds[token], positions[token], first + block), -1)
    hit, lane = ((of_four >= words[token, None]) & asked[token, block]).nonzero().unbind(1)
    return token[hit], 4 * (first + block[hit]) + lane


def _asked(ids: slice, seeds: Tensor, among: Tensor | None) -> Tensor:
    """Which entries of the blocks of four that `ids` lie in are asked for, (C, blocks, 4)."""
    lead, count = ids.start & 3, ((ids.stop + 3) >> 2) - (ids.start >> 2)
    rows = 1 if among is None else among.shape[0]
    asked = torch.zeros(rows, 4 * count, dtype=torch.bool, device=seeds.device)
    asked[:, lead : lead + ids.stop - ids.start] = True if among is None else among
    return asked.view(rows, count, 4).expand(seeds.shape[0], -1, -1)


def _blocks_of(asked: Tensor, every: bool, most: int) -> Iterator[tuple[slice, Tensor]]:
    """(rows, blocks of four) that are computed at a time: every block, or those with an entry that is asked for."""
    rows, count, device = asked.shape[0], asked.shape[1], asked.device
    if every:
        for some, blocks in _parts(rows, count, most // 4):
            yield some, torch.arange(blocks.start, blocks.stop, device=device)
        return
    for n in range(rows):
        blocks = asked[n].view(torch.int32).nonzero()[:, 0]  # four booleans at once
        parts = -(-2 * blocks.numel() // most)  # mostly one: calls cost more than what leaves the caches
        for part in blocks.tensor_split(max(1, parts)):
            yield slice(n, n + 1), part


def at_a_time(device: torch.device) -> int:
    """How many ids are computed at a time."""
    return BLOCK.get(device.type, BLOCK_ELSEWHERE)


def _parts(tokens: int, width: int, most: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) of blocks that are computed at a time."""
    step = max(1, min(width, most))
    rows = max(1, most // step)
    for n in range(0, tokens, rows):
        for v in range(0, width, step):
            yield slice(n, min(n + rows, tokens)), slice(v, min(v + step, width))


def _lead(seeds: Tensor, positions: Tensor, ids: Tensor | slice) -> tuple[int, ...]:
    """The tokens' shape."""
    shapes = [seeds.shape, positions.shape]
    if not isinstance(ids, slice):
        shapes += [ids.shape[:-1]]
    elif ids.stop is None or ids.start is None or ids.step not in (None, 1) or not 0 <= ids.start <= ids.stop:
        raise OptionError(f"ids: expected slice(start, stop) with 0 <= start <= stop, got {ids}")
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        given = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ShapeError(f"gumbel: expected seeds, positions and ids of one leading shape, got {given}") from None


def _part(ids: Tensor | slice, rows: slice, columns: slice) -> Tensor | slice:
    if isinstance(ids, slice):
        return slice(ids.start + columns.start, ids.start + columns.stop)
    return ids[columns] if ids.dim() == 1 else ids[rows, columns]


def _words(seeds: Tensor, positions: Tensor, ids: Tensor | slice) -> Tensor:
    """The 32-bit word of each (seed, position, id), seeds and positions (C, 1): word id % 4 of block id // 4."""
    if isinstance(ids, slice):
        first = ids.start >> 2
        blocks = torch.arange(first, (ids.stop + 3) >> 2, device=seeds.device)
        words = torch.stack(words_of(seeds, positions, blocks), -1).flatten(-2)
        return words[:, ids.start - 4 * first : ids.stop - 4 * first]
    a, b, c, d = words_of(seeds, positions, ids >> 2)
    low, high = ids & 1 == 0, ids & 2 == 0
    return torch.where(high, torch.where(low, a, b), torch.where(low, c, d))


def words_of(seeds: Tensor, positions: Tensor, blocks: Tensor) -> Words:
    """The four words of blocks, whose shape broadcasts with those of seeds and positions."""
    low, high = positions & WORD, (positions >> 32) & WORD
    return philox((blocks, low, high, torch.zeros_like(low)), (seeds & WORD, (seeds >> 32) & WORD))


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox-4x32-10 of 32-bit words held in int64, shapes broadcast.

    A product of two words wraps modulo 2⁶⁴, which leaves its bits, high and low half, as they should be. The low half
    is masked where it is next multiplied only.
    """
    a, b, c, d = counter
    steps = torch.arange(ROUNDS, device=a.device)
    keys = [(k[..., None] + steps * w).bitwise_and_(WORD).unbind(-1) for k, w in zip(key, WEYL, strict=True)]
    for first, second in zip(*keys, strict=True):
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = ((q >> 32) ^ b).bitwise_xor_(first).bitwise_and_(WORD), q
        c, d = ((p >> 32) ^ d).bitwise_xor_(second).bitwise_and_(WORD), p
    return a, b & WORD, c, d & WORD


def _gumbel_of(words: Tensor) -> Tensor:
    uniform = words.double().add_(0.5).mul_(2.0**-32)
    return _log(_log(uniform).neg_()).neg_()


ROOT_HALF = struct.unpack("<q", struct.pack("<d", math.sqrt(0.5)))[0]
LOG_2 = math.log(2)


def _log(x: Tensor) -> Tensor:
    """log of positive float64 to 2e-9 relative, next to 1 too, in operations that round alike everywhere.

    x = 2ᵉ·m with m in [√½, √2); log m = 2·artanh((m - 1)/(m + 1)) by its series.
    """
    bits = x.view(torch.int64)
    exponent = (bits - ROOT_HALF) >> 52
    m = (bits - (exponent << 52)).view(torch.float64)
    s = (m - 1).div_(m.add_(1))
    t = s * s
    series = t * (1 / 9)
    for c in (1 / 7, 1 / 5, 1 / 3):
        series.add_(c).mul_(t)
    return series.add_(1).mul_(s).mul_(2).add_(exponent.double().mul_(LOG_2))
