# type: ignore  # Triton's language: its tensors have no types that a checker knows
"""What the kernels share: functions with their digits kept, logits from products, sortable keys.

Written for CUDA and for Triton's interpreter alike: no function of a device library.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....algebra import online_softmax as algebra

MASK = tl.constexpr(algebra.MASK)
EMPTY = tl.constexpr(algebra.EMPTY)
FAR = tl.constexpr(algebra.FAR)
IMPOSSIBLE = tl.constexpr(algebra.IMPOSSIBLE)
LEAST = tl.constexpr(-3.4028234663852886e38)
TAKEN = tl.constexpr(-(2**63) + 1)  # below the key of every entry, and of every empty place


@triton.jit
def expm1(x):
    """e^x - 1, its digits kept near 0."""
    TERMS: tl.constexpr = 14 if x.dtype == tl.float64 else 7
    small = tl.full(x.shape, 1.0, x.dtype)
    for i in tl.static_range(TERMS - 1):
        small = 1.0 + small * x * (1.0 / (TERMS - i))
    return tl.where(tl.abs(x) < 0.35, small * x, tl.exp(x) - 1.0)


@triton.jit
def log1p(x):
    """log(1 + x), its digits kept near 0: 2·artanh(x / (2 + x))."""
    TERMS: tl.constexpr = 11 if x.dtype == tl.float64 else 5
    s = x / (2.0 + x)
    series = tl.zeros(x.shape, x.dtype)
    for i in tl.static_range(TERMS):
        series = series * s * s + 1.0 / (2 * (TERMS - i) - 1)
    return tl.where(tl.abs(x) < 0.3, 2.0 * s * series, tl.log(1.0 + x))


@triton.jit
def logaddexp(x, y):
    """log(e^x + e^y)."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL) + log1p(tl.exp(-tl.abs(x - y)))


@triton.jit
def tanh(x):
    e = expm1(-2.0 * tl.abs(x))
    y = -e / (e + 2.0)
    return tl.where(x < 0, -y, y)


@triton.jit
def load_rows(x, field, n, rows, live):
    """Row `field` of a (fields, n) array at some tokens."""
    return tl.load(x + field * n + rows, mask=live, other=0.0)


@triton.jit
def logits(raw, row_scales, bias, n, rows, live, ids, inside, BIAS: tl.constexpr, CAP: tl.constexpr, RAW: tl.constexpr):
    """z from the head's products: outer·tanh(late·raw + inner·bias), or without the tanh; as it is unless RAW."""
    z = raw
    if RAW:
        z = z * load_rows(row_scales, 0, n, rows, live)[:, None]
        if BIAS:
            b = tl.load(bias + ids, mask=inside, other=0.0)
            z += b[None, :] * load_rows(row_scales, 1, n, rows, live)[:, None]
        if CAP:
            z = tanh(z) * load_rows(row_scales, 2, n, rows, live)[:, None]
    return z


@triton.jit
def minus_e(z, z_ref, shift, seen):
    """z_ref - z + d0, 0 where both are -inf or nothing is to be seen."""
    gap = z_ref - z
    same = (z_ref == z) | (seen == 0)
    return tl.where(same & ((gap != 0) | (seen == 0)), 0.0, gap + shift[:, None])


@triton.jit
def finite(z):
    """z with float32's least number in the place of -inf. NaN stays: a model that has diverged is seen."""
    return tl.maximum(z, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def without_label(x, ids, label, first, BLOCK: tl.constexpr):
    """A block's logits, entries from `first` on, with MASK at the label, which few blocks hold."""
    here = (label >= first) & (label < first + BLOCK)
    if tl.max(here.to(tl.int32), 0) > 0:
        x = tl.where(ids[None, :] == label[:, None], MASK, x)
    return x


@triton.jit
def times(weight, x):
    """weight·x with 0·(±inf) = 0."""
    return tl.where(weight == 0, 0.0, weight * x)


@triton.jit
def ordered(z):
    """Whole numbers of 32 bits in the order of the logits."""
    bits = (z + 0.0).to(tl.float32).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(number):
    """The logit that `ordered` made this number of."""
    return (number ^ ((number >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def keys_of(z, ids):
    """Whole numbers in the order of the logits, the lower id first among equal ones."""
    return (ordered(z).to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))[None, :]


@triton.jit
def signed(x):
    """1, 0 or -1."""
    return tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0)


@triton.jit
def sides(d):
    """Which of two probabilities is the larger: 1 and 0, 0 and 1, or a half each."""
    half = 0.5 * signed(d)
    return 0.5 + half, 0.5 - half


@triton.jit
def excess(d, beta):
    """(p - q)/M of M = (1-β)p + βq from d = log p - log q."""
    a = -expm1(-tl.abs(d))
    return signed(d) * a / (1.0 - tl.where(d >= 0, beta * a, (1.0 - beta) * a))


@triton.jit
def mixture_logs(d, beta):
    """log(p/M) and log(q/M) of M = (1-β)p + βq from d = log p - log q."""
    a = expm1(-tl.abs(d))
    lower = log1p((1.0 - beta) * a)
    log_p = tl.where(d >= 0, -log1p(beta * a), tl.minimum(d, 0.0) - lower)
    return log_p, tl.where(d >= 0, log_p - tl.maximum(d, 0.0), -lower)
