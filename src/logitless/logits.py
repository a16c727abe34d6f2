"""Log-probs of given ids, and self-certainty, from logits that exist already.

If the logits do not exist yet, `token_stats` gives the same numbers without ever building them.
"""

import math
from collections.abc import Iterator
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .algebra.online_softmax import Accumulation, merge
from .algebra.options import whole_from
from .errors import DeviceError, DtypeError, LabelError, OptionError, ShapeError
from .upstream import check_upstream

Method = Literal["auto", "dense", "loop", "chunked", "recompute"]

# Up to this size of log-softmax, "auto" takes the dense method, and it is the default size of a chunk.
SMALL_BYTES = 32 * 2**20
# Scratch memory of "recompute": on a CPU what stays in its caches, elsewhere what keeps the device busy.
TILE_BYTES = {"cpu": 4 * 2**20}
TILE_BYTES_ELSEWHERE = 64 * 2**20
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def per_token_logps(
    logits: Tensor,  # (..., V) bf16, fp16, fp32 or fp64
    input_ids: Tensor,  # (...) int64
    *,
    method: Method = "auto",
    chunk_size: int | None = None,
) -> Tensor:  # (...)
    """Log-prob of each id under its row of logits.

        logps = logits.log_softmax(-1, dtype=torch.float32).gather(-1, input_ids[..., None])[..., 0]

    Returns fp32 (fp64 for fp64 logits), differentiable with respect to the logits. No shifting, no ignored
    id. All methods agree. Beside the logits and their gradient, they hold this much of the log-softmax:

        method       without gradient   with gradient
        "dense"      all                all
        "loop"       one row            all: autograd saves each row's log-softmax
        "chunked"    chunk_size rows    all, for the same reason
        "recompute"  one small tile     one small tile; the backward pass recomputes tile by tile
        "auto"       "dense" up to 32 MiB of log-softmax, "recompute" above

    A row is `logits[i]`, one sequence of (B, L, V) logits; `chunk_size` is a number of rows, by default what
    fits 32 MiB. Raises ShapeError, DtypeError, DeviceError, LabelError (an id outside the vocabulary),
    OptionError.
    """
    _check(logits, input_ids, method, chunk_size)
    chunk_size = None if chunk_size is None else whole_from("chunk_size", chunk_size, 1)
    needed = logits.numel() * _stat_dtype(logits).itemsize
    if input_ids.numel() == 0 or (method == "auto" and needed <= SMALL_BYTES):
        method = "dense"
    if logits.ndim == 1:
        return per_token_logps(logits[None], input_ids[None], method=method, chunk_size=chunk_size)[0]
    if method == "dense":
        return _dense(logits, input_ids)
    if method == "loop":
        return torch.stack([_dense(row, ids) for row, ids in zip(logits, input_ids, strict=True)])
    if method == "chunked":
        rows = chunk_size or max(1, SMALL_BYTES * len(logits) // needed)
        chunks = zip(logits.split(rows), input_ids.split(rows), strict=True)
        return torch.cat([_dense(chunk, ids) for chunk, ids in chunks])
    return _Recompute.apply(logits, input_ids)  # pyright: ignore[reportReturnType]


def _dense(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=_stat_dtype(logits)).gather(-1, ids[..., None]).squeeze(-1)


class _Recompute(torch.autograd.Function):
    """Keeps the logits, which exist anyway, and O(N): the softmax is formed again in the backward pass."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor) -> Tensor:
        logp = torch.empty(ids.shape, dtype=_stat_dtype(logits), device=logits.device)
        top, log_sum = torch.empty_like(logp), torch.empty_like(logp)
        for at in _tiles(logits):
            logp[at], top[at], log_sum[at] = _tile_forward(logits[at], ids[at][:, None], logp.dtype)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, ids, logp, top, log_sum)
        return logp

    @staticmethod
    def backward(ctx, grad_logp: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        check_upstream(
            (grad_logp,), "per_token_logps has no second derivative here: use method='dense' with create_graph"
        )
        logits, ids, logp, top, log_sum = ctx.saved_tensors
        grad = torch.empty_like(logits)
        same = grad.dtype == logp.dtype
        for at in _tiles(logits):
            # A gradient as wide as the arithmetic is its own scratch; a narrower one needs a tile beside it.
            into = grad[at] if same else torch.empty(grad[at].shape, dtype=logp.dtype, device=logp.device)
            g = grad_logp[at][:, None]
            torch.sub(logits[at], top[at][:, None], out=into).sub_(log_sum[at][:, None]).exp_().mul_(-g)
            # 1 - p of the label from its log-prob, which keeps its digits where p is near 1.
            into.scatter_(-1, ids[at][:, None], -g * torch.expm1(logp[at][:, None]))
            if not same:
                grad[at] = into
        return grad, None


def _tile_forward(
    tile: Tensor,  # (n, V)
    ids: Tensor,  # (n, 1)
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # (n,), (n,), (n,)
    """Log-prob of the ids, the maximum m, and log Σe^(z-m): an id is apart, so that a sure one keeps its digits.

    The maximum stays apart from the sum's logarithm, whose digits it would take where the logits share an offset.
    """
    work = tile.to(dtype, copy=True)
    label = work.gather(-1, ids)
    top = work.amax(-1, keepdim=True)
    others = work.sub_(top).exp_().scatter_(-1, ids, 0.0).sum(-1, keepdim=True).log_()
    label -= top
    return logsigmoid(label - others)[:, 0], top[:, 0], torch.logaddexp(label, others)[:, 0]


def chunked_self_certainty(
    logits: Tensor,  # (..., V) bf16, fp16, fp32 or fp64
    chunk_size: int | None = None,
) -> Tensor:  # (...)
    """Self-certainty of each row, KL(uniform || softmax), from `chunk_size` vocabulary entries at a time.

        certainty = logits.logsumexp(-1) - logits.mean(-1) - math.log(logits.shape[-1])

    Returns fp32 (fp64 for fp64 logits) in nats, 0 for a uniform row, differentiable with respect to the logits.
    Exact whatever the chunks: their log-sum-exps are merged, log Σ_k e^(lse_k). Averaging them instead, as a widely
    copied report does, is too small by log K and by a gap that depends on the row, so it reorders rows.
    chunk_size: by default what fits 32 MiB. Memory beside the logits and their gradient: two chunks of each row,
    and one small tile in backward. Raises ShapeError, DtypeError, OptionError, GradientError for a second derivative.
    Self-certainty: Kang et al., arXiv 2502.18581; as a reward: Zhao et al., arXiv 2505.19590.
    """
    _check_tensor("logits", logits, *FLOATING)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ShapeError(f"logits must be (..., V) with at least one entry, got shape {tuple(logits.shape)}")
    if chunk_size is None:
        rows = logits.numel() // logits.shape[-1]
        chunk_size = max(1, SMALL_BYTES // (2 * _stat_dtype(logits).itemsize * max(1, rows)))
    chunk_size = whole_from("chunk_size", chunk_size, 1)
    if logits.ndim == 1:
        return _SelfCertainty.apply(logits[None], chunk_size)[0]  # pyright: ignore[reportOptionalSubscript]
    return _SelfCertainty.apply(logits, chunk_size)  # pyright: ignore[reportReturnType]


class _SelfCertainty(torch.autograd.Function):
    """Keeps the logits, which exist anyway, and the log-sum-exps: the gradient softmax - 1/V is formed in backward."""

    @staticmethod
    def forward(ctx, logits: Tensor, chunk_size: int) -> Tensor:
        dtype = _stat_dtype(logits)
        state, total = None, torch.zeros(logits.shape[:-1], dtype=dtype, device=logits.device)
        for chunk in logits.split(chunk_size, -1):
            work = chunk.to(dtype, copy=True)
            total += work.sum(-1)
            top = work.amax(-1).clamp_min(torch.finfo(dtype).min)  # a chunk of -inf alone has weight 0, not nan
            part = Accumulation(top, work.sub_(top[..., None]).exp_().sum(-1) - 1)
            state = part if state is None else merge(state, part, torch)
        assert state is not None
        log_sum = state.rest.log1p()
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(logits, state.m, log_sum)
        certainty = (state.m - total / logits.shape[-1]) + (log_sum - math.log(logits.shape[-1]))
        return certainty.clamp_min_(0)  # a KL, which rounding may not make negative

    @staticmethod
    def backward(ctx, grad_certainty: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        check_upstream(
            (grad_certainty,), "chunked_self_certainty has no second derivative: write the dense formula with autograd"
        )
        logits, top, log_sum = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for at in _tiles(logits):
            dz = torch.sub(logits[at], top[at][:, None]).sub_(log_sum[at][:, None]).exp_().sub_(1 / logits.shape[-1])
            grad[at] = dz.mul_(grad_certainty[at][:, None])
        return grad, None


def _tiles(logits: Tensor) -> Iterator[tuple]:
    """Indices of (n, V) pieces that cover (..., V) logits, as views whatever the strides."""
    limit = TILE_BYTES.get(logits.device.type, TILE_BYTES_ELSEWHERE)
    tokens = max(1, limit // max(1, logits.shape[-1] * _stat_dtype(logits).itemsize))
    for row in product(*map(range, logits.shape[:-2])):
        for start in range(0, logits.shape[-2], tokens):
            yield (*row, slice(start, start + tokens))


def _stat_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _check(logits: Tensor, ids: Tensor, method: str, chunk_size: int | None) -> None:
    if method not in ("auto", "dense", "loop", "chunked", "recompute"):
        raise OptionError(f"method must be auto, dense, loop, chunked or recompute, got {method!r}")
    if chunk_size is not None and method != "chunked":
        raise OptionError(f"chunk_size: expected none beside method={method!r}, got {chunk_size!r}; leave it out")
    _check_tensor("logits", logits, *FLOATING)
    _check_tensor("input_ids", ids, torch.int64)
    if logits.ndim == 0 or ids.shape != logits.shape[:-1]:
        raise ShapeError(
            f"input_ids must have the logits' shape without the vocabulary, {tuple(logits.shape[:-1])}, "
            f"got {tuple(ids.shape)}: shift or slice so that every id has its row of logits"
        )
    if ids.device != logits.device:
        raise DeviceError(f"input_ids must be on the logits' device {logits.device}, got {ids.device}")
    if ids.numel():
        low, high = (int(end) for end in torch.aminmax(ids))
        if low < 0 or high >= logits.shape[-1]:
            raise LabelError(
                f"input_ids must be in [0, {logits.shape[-1]}), got {low if low < 0 else high}: "
                "replace padding such as -100 by any id, and mask its result"
            )


def _check_tensor(name: str, x: object, *dtypes: torch.dtype) -> None:
    """Raise DtypeError where x is no tensor of one of these dtypes."""
    got = x.dtype if isinstance(x, Tensor) else type(x).__name__
    if got not in dtypes:
        expected, way = " or ".join(map(str, dtypes)), f"`torch.as_tensor({name}, dtype={dtypes[0]})`"
        raise DtypeError(f"{name} must be a tensor of {expected}, got {got}: convert with {way}")
