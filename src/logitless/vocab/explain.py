"""`explain`: what a call pays, said before it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from ..algebra.costs import (
    Price,
    Slices,
    Traffic,
    dense_loss_bytes,
    gemm_flop,
    low_rank_flop,
    price_of,
    traffic_of,
    weight_gradient_bytes,
)
from .call.call import Inputs, Needs, Spec, capturing, compute_dtype
from .call.lora import stand_in
from .call.validate import Options, check, flatten
from .head.lm_head import LMHead
from .passes.autograd import grads_of, needs_of, stats_price
from .passes.engine import slices_for


@dataclass(frozen=True)
class Explanation:
    """What a call pays: price, backend, slices and bytes."""

    price: Price
    backend: str
    slices: Slices
    rank: int  # of the head's adapters together
    flop: int  # of all products with the vocabulary, of a sharded head with its rows here
    buffer_bytes: int  # slices, reused
    kept_bytes: int  # (N, H) products kept for backward, fp32; which slices a sparse backward leaves out
    gradient_bytes: int  # dhidden, dweight, dbias, and the adapters', while they accumulate
    dense_bytes: int  # what cross-entropy of whole logits takes
    traffic: Traffic | None = None  # among the ranks of a sharded head
    skipped_mass: float | None = None  # at most, of each token, by a sparse backward; `flop` counts what it may skip

    def __str__(self) -> str:
        mib = 1 << 20
        t = self.traffic
        told = f"{t.collectives} collectives, {(t.gathered + t.summed) / mib:.1f} MiB in them; " if t else ""
        bound = self.skipped_mass
        left_out = "" if bound is None else f"backward leaves out up to {bound:g} of each token's mass; "
        thin = f" and products of rank {self.rank}" if self.rank else ""
        return (
            f"{self.price.gemms} GEMMs ({self.price.method}){thin}, {self.flop / 1e12:.3g} TFLOP, "
            f"backend {self.backend}; slices of {self.slices.tokens} tokens x {self.slices.width} entries; "
            f"{self.buffer_bytes / mib:.1f} MiB of slices, {self.kept_bytes / mib:.1f} MiB kept for backward, "
            f"{self.gradient_bytes / mib:.1f} MiB of gradients; {told}{left_out}"
            f"cross-entropy of whole logits would take {self.dense_bytes / mib:.1f} MiB"
        )


def explain(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor | None = None,
    *,
    loss: bool = False,
    **options: Unpack[Options],
) -> Explanation:
    """Which price, backend and slices a call with these arguments gets, and the bytes it needs; computes nothing.

    `loss`: explain `token_loss` (or `linear_cross_entropy`) instead of `token_stats`; options: as `token_stats`.
    Returns an `Explanation`, whose `str` is one line. Raises what `token_stats` raises for its arguments.
    """
    spec, flat = flatten(hidden, head, labels, **options)
    flat = stand_in(flat, head)
    needs = needs_of(flat)
    price = price_of(spec.want, **grads_of(needs), loss=True) if loss else stats_price(spec, flat, needs)
    n, itemsize = flat.hidden.shape[0], compute_dtype(flat.hidden).itemsize
    skips = price.skips and spec.sparse is not None
    if skips:
        check(spec, flat.ref_weight is not None, capturing(flat.hidden))
    slices = slices_for(spec, flat, n, price.whole_rows, bases=len(price.bases), skips=skips)
    rank, ref_rank = (0 if x is None else x.shape[1] for x in (flat.up, flat.ref_up))
    flop = price.gemms * gemm_flop(n, head.hidden_size, head.held) + low_rank_flop(
        price, n, head.held, rank=rank, reference_rank=ref_rank, backward=needs.low + needs.up
    )
    return Explanation(
        price, spec.backend, slices, rank, flop, slices.nbytes,
        len(price.bases) * n * (head.hidden_size + rank) * itemsize + skips * n * -(-head.held // slices.width),
        _gradient_bytes(flat, needs, itemsize),
        dense_loss_bytes(n, head.rows, flat.hidden.itemsize),
        None if head.shard is None else _traffic(spec, flat, needs, slices),
        spec.sparse.bound if skips and spec.sparse is not None else None,
    )  # fmt: skip


def _traffic(spec: Spec, flat: Inputs, needs: Needs, slices: Slices) -> Traffic:
    n, up = flat.hidden.shape[0], flat.up
    widths = (flat.hidden.shape[1],) if needs.hidden else ()
    return traffic_of(
        spec.want,
        n,
        chunks=-(-n // slices.tokens),
        itemsize=compute_dtype(flat.hidden).itemsize,
        label=flat.labels is not None,
        numbers=0 if flat.candidates is None else flat.candidates.shape[1],
        best=spec.top_k,
        widths=(*widths, up.shape[1]) if needs.low and up is not None else widths,
    )


def _gradient_bytes(flat: Inputs, needs: Needs, itemsize: int) -> int:
    """Sums in the compute dtype, and their copies in the parameters' own dtypes where those are narrower."""
    total = needs.hidden * flat.hidden.numel() * flat.hidden.itemsize
    if flat.up is not None:
        total += needs.low * flat.hidden.shape[0] * flat.up.shape[1] * itemsize
    for x, wanted in ((flat.weight, needs.weight), (flat.bias, needs.bias), (flat.up, needs.up)):
        if wanted and x is not None:
            total += sum(weight_gradient_bytes(x.shape[0], x.shape[1:].numel(), x.itemsize))
    return total
