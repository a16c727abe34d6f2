# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""Kernels for drawing a token from each row of logits, by the noise that `vocab/noise.py` defines, bit for bit.

Its float64 logarithms are sums, products and quotients: launch with enable_fp_fusion=False, for a fused multiply-add
rounds otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ... import noise
from .maths import MASK, expm1

ROOT_HALF = tl.constexpr(noise.ROOT_HALF)
LOG_2 = tl.constexpr(noise.LOG_2)
MOST = tl.constexpr(23.0)  # no noise is higher


@triton.jit
def words_of(seed, position, blocks):
    """The four 32-bit words of each block of noise, whose ids are 4·block and what follows."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = tl.zeros(blocks.shape, tl.uint32)
    return tl.philox(seed, blocks.to(tl.uint32), zero + low, zero + high, zero)


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
    width,
    n_parts,
    part_width,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each part of a row: Σ e^((z-m)/T), how many logits are finite, and the best one after noise with its id.

    Noise is made only in blocks whose best could still win, and in full only where a word is high enough for that.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    top = tl.load(tops + row)
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature == 0, 1.0, temperature)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row)
    most = top * 0.0 - float("inf")
    place = row * 0 + width
    total = top * 0.0
    live = part * 0
    begin = part * part_width
    stop = tl.minimum(begin + part_width, width)
    for column in range(begin, stop, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        z = tl.load(raw + row * raw_stride + columns, mask=columns < stop, other=MASK)
        x = tl.div_rn(z - top, divisor)
        total += tl.sum(tl.exp(x), 0)
        live += tl.sum((z > MASK).to(tl.int32), 0)
        if NOISE:
            peak = tl.max(x, 0)
            if (temperature != 0) & (peak + MOST >= most):  # a greedy row has its token already
                a, b, c, d = words_of(seed, position, column // 4 + tl.arange(0, BLOCK // 4))
                words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
                share = -expm1(-tl.exp(peak - most + 1e-3)) * 1.001  # of all words that reach most - peak
                below = (0xFFFFFFFF - words).to(tl.float32)
                if tl.min(below, 0) <= share * 4294967296.0 + 2.0:
                    lifted = tl.where(columns < stop, x + gumbel_of(words), -float("inf"))
                    highest = tl.max(lifted, 0)
                    first = tl.min(tl.where(lifted == highest, columns, width), 0)
                    place = tl.where(highest > most, first.to(tl.int64), place)
                    most = tl.maximum(most, highest)
    at = row * n_parts + part
    tl.store(sums + at, total)
    tl.store(lives + at, live)
    if NOISE:
        tl.store(noisy + at, most)
        tl.store(places + at, place)


@triton.jit
def among_the_best(best, ids, top, divisor, seed, position, kept, lane, inside):
    """(the token, the log of the kept entries' sum) of the first `kept` of a row's best, after noise."""
    keep = inside & (lane < kept) & (best > -float("inf"))
    x = tl.where(keep, tl.div_rn(best - top, divisor), -float("inf"))
    a, b, c, d = words_of(seed, position, ids >> 2)
    words = tl.where(ids & 2 == 0, tl.where(ids & 1 == 0, a, b), tl.where(ids & 1 == 0, c, d))
    lifted = tl.where(keep, x + gumbel_of(words), -float("inf"))
    first = tl.min(tl.where(lifted == tl.max(lifted, 0), lane, 0x7FFFFFFF), 0)
    token = tl.sum(tl.where(lane == first, ids, 0), 0)
    return token, tl.log(tl.sum(tl.exp(x), 0))


@triton.jit(do_not_specialize=["n_parts", "n"])
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
    best,
    best_ids,
    kept,
    width,
    n_parts,
    n_topk,
    n,
    whole,
    real,
    RULES: tl.constexpr,
    PARTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each row's token, and what is recorded of it.

    whole: (3, n) int32, token, rank, n_kept; real: (3, n), the token's logit, log Σ e^(z/T), log of the kept share.
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
    n_kept = tl.sum(tl.load(lives + at, mask=there, other=0), 0)
    lane = tl.arange(0, LANES)
    inside = lane < n_topk
    z = tl.load(best + row * n_topk + lane, mask=inside, other=-float("inf"))
    ids = tl.load(best_ids + row * n_topk + lane, mask=inside, other=0)
    share = log_sum * 0.0
    if RULES:
        n_kept = tl.load(kept + row).to(tl.int32)
        seed = tl.load(seeds + row)
        token, mass = among_the_best(z, ids, top, divisor, seed, tl.load(positions + row), n_kept, lane, inside)
        share = tl.minimum(mass - log_sum, 0.0)
    else:
        x = tl.load(noisy + at, mask=there, other=-float("inf"))
        where = tl.load(places + at, mask=there, other=0)
        token = tl.min(tl.where(there & (x == tl.max(x, 0)), where, width), 0)
    token = tl.minimum(tl.where(greedy, tl.load(best_ids + row * n_topk), token), width - 1)  # whatever NaN does
    n_kept = tl.where(greedy, 1, n_kept)
    logit = tl.load(raw + row * raw_stride + token)
    above = tl.sum((z > logit).to(tl.int32), 0)
    if logit < tl.min(tl.where(inside, z, float("inf")), 0):
        above = above * 0
        for column in range(0, width, BLOCK):
            columns = column + tl.arange(0, BLOCK)
            others = tl.load(raw + row * raw_stride + columns, mask=columns < width, other=MASK)
            above += tl.sum((others > logit).to(tl.int32), 0)
    tl.store(whole + row, token.to(tl.int32))
    tl.store(whole + n + row, above + 1)
    tl.store(whole + 2 * n + row, n_kept)
    tl.store(real + row, logit)
    tl.store(real + n + row, tl.where(greedy, 0.0, top / divisor + log_sum))
    tl.store(real + 2 * n + row, tl.where(greedy, 0.0, share))
