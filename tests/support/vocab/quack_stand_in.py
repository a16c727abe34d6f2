"""What stands in for `quack.linear_cross_entropy` where no GPU is: the same function, its formula and its roundings.

Read from QuACK 0.6.4. A chunk's exponentials E are relative to a power of two for each row and tile of entries, in
bf16; what a row lacks, v, multiplies afterwards. Gradients of the weight add up in fp32.
"""

import math

import torch
from torch import Tensor

TILES = 192, 256, 128  # of entries, in the order in which it tries whether they divide the vocabulary
LOG2E = math.log2(math.e)


def scaled_exp_linear_cross_entropy_fwd(
    x: Tensor,  # (M, d)
    weight: Tensor,  # (V, d)
    target: Tensor,  # (M,)
    chunk_size: int,
    ignore_index: int = -100,
    *,
    need_dx: bool = True,
    need_dw: bool = True,
    grad_scale: Tensor | None = None,
    tile_n1: int | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, dx, dw) over the rows of x and those that fill the last chunk up to a multiple of 128."""
    (m, d), v = x.shape, weight.shape[0]
    tile = tile_n1 or next(n for n in TILES if v % n == 0)
    assert m > 0
    assert v % 128 == chunk_size % 128 == d % 8 == 0
    assert x.dtype == weight.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert grad_scale is None or (grad_scale.dtype == torch.float32 and grad_scale.numel() == 1)
    padding = -(m % chunk_size) % 128 if m > chunk_size else -m % 128
    x = torch.cat([x, x.new_zeros(padding, d)])
    target = torch.cat([target, target.new_full((padding,), ignore_index)])
    dw = torch.zeros(v, d) if need_dw else None
    found = []
    for rows in torch.arange(m + padding).split(chunk_size):
        loss, e, u, scale = _exponentials(x[rows], weight, target[rows], ignore_index, tile)
        if grad_scale is not None:
            scale = scale * grad_scale
        scaled = (e.view(*u.shape, tile) * u[..., None]).to(torch.bfloat16).flatten(1).float()
        if dw is not None:
            xs = (x[rows].float() * scale.to(torch.bfloat16).float()[:, None]).to(torch.bfloat16)
            dw += scaled.t() @ xs.float()
        found.append((loss, ((scaled @ weight.float()) * scale[:, None]).to(torch.bfloat16)))
    losses, dx = map(torch.cat, zip(*found, strict=True))
    return losses, dx if need_dx else None, dw


def _exponentials(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, E with the target's entry put right, u for each row and tile, v) of a chunk."""
    z = x.float() @ weight.float().t()
    k = (z.view(len(z), -1, tile).amax(-1) * LOG2E).round()  # to even
    e = torch.exp2(z.view(*k.shape, tile) * LOG2E - k[..., None])
    most = k.amax(1)
    u = torch.exp2(k - most[:, None])
    lse = most / LOG2E + (e.sum(-1) * u).sum(1).log()
    valid = target != ignore_index
    at = torch.where(valid, target, 0)[:, None]
    label = z.gather(1, at)[:, 0]
    offset = k.gather(1, at // tile)[:, 0]
    fix = torch.expm1(label - lse) * torch.exp(lse - offset / LOG2E)
    e = e.flatten(1).to(torch.bfloat16)
    e.scatter_(1, at, torch.where(valid, fix.to(torch.bfloat16), e.gather(1, at)[:, 0])[:, None])
    return torch.where(valid, lse - label, 0.0), e, u, torch.where(valid, torch.exp(most / LOG2E - lse), 0.0)
