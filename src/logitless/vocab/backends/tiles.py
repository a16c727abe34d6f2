"""Slices of logits: one head's product with a block of tokens, written into a reused buffer."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...algebra.fold import MASK
from ..head import LMHead


@cache
def has_out_dtype(device_type: str) -> bool:
    """Whether `torch.mm(..., out_dtype=torch.float32)` takes bf16 operands on this kind of device."""
    if device_type != "cuda":
        return False
    x = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
    try:
        torch.mm(x, x, out_dtype=torch.float32)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


def operand_dtype(hidden: Tensor, weight: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The dtype that the GEMM's operands have: their own where products come out in fp32, else the compute dtype."""
    low = hidden.dtype == weight and hidden.dtype in (torch.bfloat16, torch.float16)
    return hidden.dtype if low and has_out_dtype(hidden.device.type) else compute


class Projection:
    """One head applied to a block of tokens: z = outer·tanh(inner·(hW + b)) or inner·(hW + b)."""

    def __init__(
        self,
        hidden: Tensor,
        head: LMHead,
        temperature: float | Tensor,
        compute: torch.dtype,
        operand: str = "",
    ) -> None:
        self.head = head
        self.cast = getattr(torch, operand) if operand else head.weight.dtype
        self.compute = compute
        self.weight = head.weight.detach()[: head.rows]
        self.bias = None if head.bias is None else head.bias.detach()[: head.rows].to(compute)
        self.dtype = operand_dtype(hidden, self.cast, compute)
        column = temperature.to(compute)[:, None] if isinstance(temperature, Tensor) else temperature
        # factors are numbers, or (C, 1) where the temperature is per token
        self.inner = head.scale / (head.softcap if head.softcap else column)
        self.outer = head.softcap / column if head.softcap else None
        self.slope = head.scale / column  # dz/d(hW) where the softcap is flat
        self.hidden = hidden.detach().to(self.dtype)
        self.scaled = self.dtype == compute and not (isinstance(self.inner, float) and self.inner == 1.0)
        self.rows = self.hidden * self.inner if self.scaled else self.hidden

    def operand(self, v: slice) -> Tensor:
        """The slice's rows of W in the operands' dtype."""
        return self.weight[v].to(self.cast).to(self.dtype)

    def logits(self, w: Tensor, v: slice, out: Tensor) -> Tensor:
        """z of one slice, (C, S), into `out`; -inf becomes MASK where a bias can hold it."""
        product(self.rows, w.t(), out)
        if not self.scaled and not (isinstance(self.inner, float) and self.inner == 1.0):
            out.mul_(self.inner)
        if self.bias is not None:
            bias = self.bias[v]
            out.addcmul_(bias, self.inner) if isinstance(self.inner, Tensor) else out.add_(bias, alpha=self.inner)
        if self.outer is not None:
            out.tanh_().mul_(self.outer)
        return out

    def at(self, ids: Tensor) -> Tensor:
        """z at given entries: ids (C,) or (C, K) -> same shape; a dot product per entry."""
        columns = ids if ids.dim() == 2 else ids[:, None]
        z = torch.empty(columns.shape, dtype=self.compute, device=ids.device)
        rows = self.rows.to(self.compute)
        inner = 1.0 if self.scaled else self.inner
        for k, column in enumerate(columns.unbind(1)):
            z[:, k] = torch.linalg.vecdot(rows, self.weight[column].to(self.cast).to(self.compute))
        z = z * inner
        if self.bias is not None:
            z = z + self.bias[columns] * self.inner
        if self.outer is not None:
            z = torch.tanh(z) * self.outer
        return z.view(ids.shape)

    def mean(self, weight_sum: Tensor) -> Tensor:
        """The mean logit per token from the head's summed rows; only without a softcap."""
        total = torch.mv(self.rows.to(self.compute), weight_sum) * (1.0 if self.scaled else _flat(self.inner))
        if self.bias is not None:
            total = total + self.bias.sum() * _flat(self.inner)
        return total / self.head.rows

    def chain(self, slope: Tensor, z: Tensor | None = None) -> Tensor:
        """dL/d(hW) per token from dL/dz: the row factor, and the softcap's derivative where `z` is given."""
        slope = slope * _flat(self.slope)
        if z is None or self.outer is None:
            return slope
        return slope * (1 - (z / (_flat(self.outer) if z.dim() == 1 else self.outer)).square())

    def flatness(self, z: Tensor) -> Tensor:
        """The softcap's derivative 1 - tanh² from z; 0 at masked entries."""
        assert self.outer is not None
        return (z / self.outer).clamp_(min=-1.0).square_().neg_().add_(1.0)


def _flat(x: float | Tensor) -> float | Tensor:
    return x.squeeze(1) if isinstance(x, Tensor) else x


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """a @ b into `out`, with `out`'s precision."""
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """out += a @ b, accumulated in `out`'s precision."""
    if a.dtype == out.dtype:
        return out.addmm_(a, b)
    return torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


def weight_sum(head: LMHead, compute: torch.dtype, operand: str = "") -> Tensor:
    """Σ_v W_v, (H,), of the rows as the products see them; in slices where they must be converted."""
    weight = head.weight.detach()[: head.rows]
    if weight.dtype == compute and not operand:
        return weight.sum(0)
    cast = getattr(torch, operand) if operand else weight.dtype
    total = torch.zeros(head.hidden_size, dtype=compute, device=weight.device)
    for part in weight.split(4096):
        total += part.to(cast).to(compute).sum(0)
    return total


def mask_labels(z: Tensor, columns: Tensor) -> None:
    """z[row, columns[row]] = MASK for the rows whose column lies in this slice; no synchronisation."""
    width = z.shape[1]
    inside = (columns >= 0) & (columns < width)
    index = columns.clamp(0, width - 1)[:, None]
    z.scatter_(1, index, torch.where(inside[:, None], MASK, z.gather(1, index)))
