# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""Kernels for drawing a token from each row of logits, by the noise that `vocab/noise.py` defines, bit for bit.

Its float64 logarithms are sums, products and quotients: launch with enable_fp_fusion=False, for a fused multiply-add
rounds otherwise.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from ... import noise
from .maths import MASK

ROOT_HALF = tl.constexpr(noise.ROOT_HALF)
LOG_2 = tl.constexpr(noise.LOG_2)
ROUNDS = tl.constexpr(noise.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = map(tl.constexpr, noise.MULTIPLIERS)
WEYL_0, WEYL_1 = map(tl.constexpr, noise.WEYL)
LOG2_E = tl.constexpr(math.log2(math.e))
WORDS = tl.constexpr(2.0**32)
SLACK = tl.constexpr(1.001)  # far more than what rounding does to a race in fp32


@triton.jit
def words_of(seed, position, blocks):
    """The four 32-bit words of each block of noise, whose ids are 4·block and what follows: `noise.philox`."""
    a = blocks.to(tl.uint32)
    b = a * 0 + (position & 0xFFFFFFFF).to(tl.uint32)
    c = a * 0 + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    d = a * 0
    first = (seed & 0xFFFFFFFF).to(tl.uint32)
    second = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        p = a.to(tl.uint64) * MULTIPLIER_0
        q = c.to(tl.uint64) * MULTIPLIER_1
        a, b = (q >> 32).to(tl.uint32) ^ b ^ first, q.to(tl.uint32)
        c, d = (p >> 32).to(tl.uint32) ^ d ^ second, p.to(tl.uint32)
        first = tl.add(first, WEYL_0, sanitize_overflow=False)
        second = tl.add(second, WEYL_1, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def exact_log(x):
    """`noise._log`."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits - ROOT_HALF) >> 52
    m = (bits - (exponent << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = t * (1.0 / 9)
    series = (series + 1.0 / 7) * t
    series = (series + 1.0 / 5) * t
    series = (series + 1.0 / 3) * t
    return (series + 1.0) * s * 2.0 + exponent.to(tl.float64) * LOG_2


@triton.jit
def gumbel_of(words):
    """`noise._gumbel_of`, rounded to fp32 as the noise is."""
    uniform = (words.to(tl.float64) + 0.5) * (1.0 / 4294967296)
    return (-exact_log(-exact_log(uniform))).to(tl.float32)


@triton.jit
def word_of(seed, position, ids):
    """The 32-bit word of each entry's noise."""
    a, b, c, d = words_of(seed, position, ids >> 2)
    return tl.where(ids & 2 == 0, tl.where(ids & 1 == 0, a, b), tl.where(ids & 1 == 0, c, d))


@triton.jit
def reach_of_the_best(best, ids, top, scale, seed, position, inside):
    """What bounds the words of an entry that beats a row's best ones: see `look_at_part`.

    Of their words 1/-log u is taken as √u/(1-u), which is less.
    """
    word = word_of(seed, position, ids)
    weight = tl.exp2((best - top) * scale) * tl.sqrt((word.to(tl.float32) + 0.5) / WORDS)
    below = (0xFFFFFFFF - word).to(tl.float32) + 0.5
    return tl.min(tl.where(inside, below / weight, float("inf")), 0) * SLACK


@triton.jit
def look_at_part(
    raw,
    begin,
    stop,
    top,
    divisor,
    scale,
    seed,
    position,
    reach,
    NOISE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(Σ e^((z-m)/T), how many logits are finite, the best one after noise, its id) of a part of a row.

    The best after noise has the highest e^x/-log u, x = (z-m)/T. 1 - u is below -log u, so that an entry can only win
    where its word lies within e^x·reach of the highest one. Noise itself is made for these, one by one: each that is
    better than those before lowers the reach.
    """
    total = tl.zeros((BLOCK,), tl.float32)
    live = tl.zeros((BLOCK,), tl.int32)
    most = top * 0.0 - float("inf")
    place = tl.cast(stop, tl.int32)
    for column in range(begin, stop, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        z = tl.load(raw + columns, mask=columns < stop, other=MASK)
        weight = tl.exp2((z - top) * scale)
        total += weight
        if MASKED:
            live += (z > MASK).to(tl.int32)
        if NOISE:
            a, b, c, d = words_of(seed, position, column // 4 + tl.arange(0, BLOCK // 4))
            words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
            below = (0xFFFFFFFF - words).to(tl.float32)
            hit = below < weight * reach
            while tl.max(hit.to(tl.int32), 0) > 0:
                at = tl.min(tl.where(hit, columns, 0x7FFFFFFF), 0)
                own = tl.max(tl.where(columns == at, z, -float("inf")), 0)
                lifted = tl.div_rn(own - top, divisor) + gumbel_of(word_of(seed, position, at))
                place = tl.where(lifted > most, at, place)
                most = tl.maximum(most, lifted)
                reach = tl.minimum(reach, tl.exp(-most) * (WORDS * SLACK))
                hit = hit & (columns > at) & (below < weight * reach)
    return tl.sum(total, 0), tl.sum(live, 0), most, place


@triton.jit(do_not_specialize=["n_parts"])
def look_for_tokens(
    raw,
    raw_stride,
    tops,
    temperatures,
    seeds,
    positions,
    noisy,
    places,
    sums,
    lives,
    best,
    best_ids,
    n_topk,
    width,
    n_parts,
    part_width,
    NOISE: tl.constexpr,
    MASKED: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each part of a row what `look_at_part` finds; rows at temperature 0 have their token already."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    top = tl.load(tops + row)
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature == 0, 1.0, temperature)
    scale = tl.minimum(tl.fdiv(LOG2_E, divisor), 3e38)  # so that 0 stays 0
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    begin = part * part_width
    stop = tl.minimum(begin + part_width, width)
    at = row * n_parts + part
    raw += row * raw_stride
    if NOISE & (temperature != 0):
        lane = tl.arange(0, LANES)
        inside = lane < n_topk
        z = tl.load(best + row * n_topk + lane, mask=inside, other=0.0)
        ids = tl.load(best_ids + row * n_topk + lane, mask=inside, other=0)
        reach = reach_of_the_best(z, ids, top, scale, seed, position, inside)
        total, live, most, place = look_at_part(
            raw, begin, stop, top, divisor, scale, seed, position, reach, True, MASKED, BLOCK
        )
        tl.store(noisy + at, most)
        tl.store(places + at, place)
    else:
        total, live, most, place = look_at_part(
            raw, begin, stop, top, divisor, scale, seed, position, 0.0, False, MASKED, BLOCK
        )
    tl.store(sums + at, total)
    tl.store(lives + at, live)


@triton.jit
def among_the_best(best, ids, top, divisor, seed, position, kept, lane, inside):
    """(the token, the log of the kept entries' sum) of the first `kept` of a row's best, after noise."""
    keep = inside & (lane < kept) & (best > -float("inf"))
    x = tl.where(keep, tl.div_rn(best - top, divisor), -float("inf"))
    lifted = tl.where(keep, x + gumbel_of(word_of(seed, position, ids)), -float("inf"))
    first = tl.min(tl.where(lifted == tl.max(lifted, 0), lane, 0x7FFFFFFF), 0)
    token = tl.sum(tl.where(lane == first, ids, 0), 0)
    return token, tl.log(tl.sum(tl.exp(x), 0))


@triton.jit
def best_of_parts(noisy, places, row, n_parts, width, PARTS: tl.constexpr):
    """The best after noise of all parts of a row, of equals the first."""
    part = tl.arange(0, PARTS)
    there = part < n_parts
    x = tl.load(noisy + row * n_parts + part, mask=there, other=-float("inf"))
    where = tl.load(places + row * n_parts + part, mask=there, other=0)
    return tl.min(tl.where(there & (x == tl.max(x, 0)), where, width), 0)


@triton.jit
def or_greedy(token, temperature, best_ids, row, n_topk, width):
    """The token; at temperature 0 the best one."""
    token = tl.where(temperature == 0, tl.load(best_ids + row * n_topk), token)
    return tl.minimum(token, width - 1)  # whatever NaN does


@triton.jit(do_not_specialize=["n_parts"])
def count_above(
    raw,
    raw_stride,
    temperatures,
    noisy,
    places,
    best,
    best_ids,
    aboves,
    width,
    n_parts,
    part_width,
    n_topk,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many logits of each part of a row are higher than its token's; 0 where the token is among the row's best."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    raw += row * raw_stride
    token = best_of_parts(noisy, places, row, n_parts, width, PARTS)
    logit = tl.load(raw + or_greedy(token, tl.load(temperatures + row), best_ids, row, n_topk, width))
    begin = part * part_width
    stop = tl.minimum(begin + part_width, width)
    above = tl.zeros((BLOCK,), tl.int32)
    if logit < tl.load(best + row * n_topk + n_topk - 1):
        for column in range(begin, stop, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            above += (tl.load(raw + columns, mask=columns < stop, other=MASK) > logit).to(tl.int32)
    tl.store(aboves + row * n_parts + part, tl.sum(above, 0))


@triton.jit(do_not_specialize=["n_parts", "n", "keep"])
def draw_tokens(
    raw,
    raw_stride,
    tops,
    temperatures,
    seeds,
    positions,
    noisy,
    places,
    sums,
    lives,
    aboves,
    best,
    best_ids,
    kept,
    width,
    n_parts,
    n_topk,
    n,
    keep,
    whole,
    real,
    shown,
    RULES: tl.constexpr,
    MASKED: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Each row's token, and what is recorded of it.

    whole: (3, n) int32, token, rank, n_kept; real: (3, n), the token's logit, log Σ e^(z/T), log of the kept share.
    shown: (n, keep) int32, the ids of the best entries.
    RULES: from the first `kept` of the best entries; else the best after noise of all parts.
    """
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(tops + row)
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0
    divisor = tl.where(greedy, 1.0, temperature)
    part = tl.arange(0, PARTS)
    there = part < n_parts
    at = row * n_parts + part
    log_sum = tl.log(tl.sum(tl.load(sums + at, mask=there, other=0.0), 0))
    lane = tl.arange(0, LANES)
    inside = lane < n_topk
    z = tl.load(best + row * n_topk + lane, mask=inside, other=-float("inf"))
    ids = tl.load(best_ids + row * n_topk + lane, mask=inside, other=0)
    tl.store(shown + row * keep + lane, ids.to(tl.int32), mask=lane < keep)
    share = log_sum * 0.0
    if RULES:
        n_kept = tl.load(kept + row).to(tl.int32)
        seed = tl.load(seeds + row)
        token, mass = among_the_best(z, ids, top, divisor, seed, tl.load(positions + row), n_kept, lane, inside)
        share = tl.minimum(mass - log_sum, 0.0)
    else:
        n_kept = tl.cast(width, tl.int32)
        if MASKED:
            n_kept = tl.sum(tl.load(lives + at, mask=there, other=0), 0)
        token = best_of_parts(noisy, places, row, n_parts, width, PARTS)
    token = or_greedy(token, temperature, best_ids, row, n_topk, width)
    logit = tl.load(raw + row * raw_stride + token)
    above = tl.sum((z > logit).to(tl.int32), 0)
    if not RULES:
        above = tl.maximum(above, tl.sum(tl.load(aboves + at, mask=there, other=0), 0))
    tl.store(whole + row, token.to(tl.int32))
    tl.store(whole + n + row, above + 1)
    tl.store(whole + 2 * n + row, tl.where(greedy, 1, n_kept))
    tl.store(real + row, logit)
    tl.store(real + n + row, tl.where(greedy, 0.0, top / divisor + log_sum))
    tl.store(real + 2 * n + row, tl.where(greedy, 0.0, share))
