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
    traffic_of,
    traffic_over_sets,
    weight_gradient_bytes,
)
from ..algebra.stats import looks_twice, sums_of
from ..units import plural
from .backends.load import load
from .call import quack_support
from .call.call import Call, Inputs, Needs
from .call.lora import stand_in
from .call.options import Options
from .call.sampling_mask import SamplingMask
from .call.validate import check_loss, flatten, flatten_whole_loss
from .head.lm_head import LMHead
from .passes import quack
from .passes.kept import bytes_an_entry, chunks_of, entries_at_a_time, rounds_once, valid_sets
from .passes.price import by_registers, loss_price, planned, sparse_of, stats_price
from .passes.told import passed_over_by


@dataclass(frozen=True)
class Explanation:
    """What a call pays: price, backend, slices and bytes."""

    price: Price
    backend: str
    slices: Slices
    rank: int  # of the head's adapters together
    flop: int  # of all products with the vocabulary, of a sharded head with its rows here; or with a mask's entries
    buffer_bytes: int  # slices, reused, and `copied_bytes`
    saved_bytes: int  # (N, H) products saved for backward, fp32; which slices a sparse backward leaves out
    head_bytes: int  # its weight as it is stored, of a sharded head the rows here
    gradient_bytes: int  # dhidden, dweight, dbias, and the adapters', while they accumulate: threads' own sums, too
    dense_bytes: int  # what dense cross-entropy takes in its forward pass
    quantised: str | None = None  # the format of a weight whose slices are dequantised
    traffic: Traffic | None = None  # among the ranks of a sharded head
    skipped_mass: float | None = None  # at most, of each token, by a sparse backward; `flop` counts what it may skip
    entries: int | None = None  # of the sampling mask, where statistics are over it
    copied_bytes: int = 0  # of the heads in the dtype that they multiply in, converted once
    outside: int = 0  # entries of the reference that a draft's head lacks: one product more, over these
    looks_twice: bool = False  # whether statistics need both log-sum-exps before they are summed
    passed_over: str = ""  # the backends that are preferred where they run and fit, and why this call gets another

    def __str__(self) -> str:
        mib = 1 << 20
        t = self.traffic
        told = f"{plural(t.collectives, 'collective')}, {(t.gathered + t.summed) / mib:.1f} MiB in them; " if t else ""
        bound = self.skipped_mass
        left_out = "" if bound is None else f"backward leaves out up to {bound:g} of each token's mass; "
        once = f"{self.copied_bytes / mib:.1f} MiB of these a converted copy of the head, " if self.copied_bytes else ""
        held = self.head_bytes / mib
        head = f"a head of {held:.1f} MiB in {self.quantised}, dequantised slice by slice; " if self.quantised else ""
        why = f" ({self.passed_over})" if self.passed_over else ""
        thin = f" and products of rank {self.rank}" if self.rank else ""
        beyond = f" and 1 over the {self.outside:,} entries that the draft lacks" if self.outside else ""
        tokens = plural(self.slices.tokens, "token")
        parts, buffers = f"slices of {tokens} x {self.slices.width:,} entries", "slices"
        if self.slices.in_products and not self.slices.stored:
            parts, buffers = f"chunks of {tokens}, whose logits no memory holds", "buffers"
        if self.entries is not None:
            parts = f"{self.entries:,} entries of {tokens}"
        return (
            f"{plural(self.price.gemms, 'GEMM')} ({self.price.method}){thin}{beyond}, {self.flop / 1e12:.3g} TFLOP, "
            f"backend {self.backend}{why}; {parts}{self._second_look()}; "
            f"{self.buffer_bytes / mib:.1f} MiB of {buffers}, {once}"
            f"{self.saved_bytes / mib:.1f} MiB saved for backward, {self.gradient_bytes / mib:.1f} MiB of gradients; "
            f"{told}{left_out}{head}"
            f"dense cross-entropy would take {self.dense_bytes / mib:.1f} MiB in the place of the {buffers}"
        )

    def _second_look(self) -> str:
        if not self.looks_twice:
            return ""
        return ", a second look at them by products of its own" if self.price.looks_again else ", looked at twice"


def explain(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor | None = None,
    *,
    loss: bool = False,
    per: str = "token",
    **options: Unpack[Options],
) -> Explanation:
    """Which price, backend and slices a call with these arguments gets, and the bytes it needs; computes nothing.

    loss: explain `token_loss` (or `linear_cross_entropy`); per: as `token_loss`, of sequences without ignored tokens;
    options: as `token_stats`, which raises the same. Returns an `Explanation`, whose `str` is one line.
    """
    check_loss("mean", per, hidden)
    by_quack = loss and options.get("backend") == quack_support.NAME
    call = stand_in((flatten_whole_loss if by_quack else flatten)(hidden, head, labels, **options))
    needs, i, n = Needs.of(call.inputs), call.inputs, call.inputs.hidden.shape[0]
    call = by_registers(call, needs, loss and per == "token")
    price = loss_price(call, needs) if loss else stats_price(call, needs)
    sparse = sparse_of(call, price)
    if call.sampling_mask is not None:
        return _over_sets(call, price, needs, call.sampling_mask)
    together = hidden.shape[1:-1].numel() if loss and per == "sequence" else 0
    price, slices = (price, quack.slices_for(call)) if by_quack else _planned(call, price, needs, together)
    rank, ref_rank = (0 if x is None else x.shape[1] for x in (i.lora_b, i.ref_lora_b))
    rows, itemsize = head.local_rows, call.compute.itemsize
    products = len(price.bases) * (price.method == "basis") * n * (head.hidden_size + rank) * itemsize
    return Explanation(
        price=price,
        backend=call.options.backend,
        slices=slices,
        rank=rank,
        flop=_flop(call, price, rows)
        + (0 if call.outside is None else gemm_flop(n, call.outside.hidden_size + ref_rank, call.outside.rows))
        + low_rank_flop(price, n, rows, rank=rank, reference_rank=ref_rank, backward=needs.lora_hidden + needs.lora_b),
        buffer_bytes=slices.nbytes,
        copied_bytes=slices.copied,
        saved_bytes=products + (0 if sparse is None else n * -(-rows // slices.width)),
        head_bytes=head.weight.nbytes,
        gradient_bytes=_gradient_bytes(call, price, needs, slices),
        dense_bytes=dense_loss_bytes(n, head.rows, i.hidden.itemsize),
        traffic=None if head.shard is None else _traffic(call, needs, slices),
        skipped_mass=None if sparse is None else sparse.bound,
        outside=0 if call.outside is None else call.outside.rows,
        looks_twice=looks_twice(sums_of(call.options.want)),
        quantised=None if isinstance(head.weight, Tensor) else head.weight.format.name,
        passed_over=passed_over_by(call),
    )


def _flop(call: Call, price: Price, rows: int) -> int:
    """Of the wide products: the head's, and a reference's, whose hidden states may be wider."""
    reference, (n, width) = call.inputs.ref_hidden, call.inputs.hidden.shape
    if reference is None:
        return price.gemms * gemm_flop(n, width, rows)
    own = (price.gemms - price.looks) * gemm_flop(n, width, rows)
    return own + price.looks * gemm_flop(n, reference.shape[1], rows)


def _planned(call: Call, price: Price, needs: Needs, together: int) -> tuple[Price, Slices]:
    """`planned`, or what tokens that a loss sees together pay where they are more than a chunk."""
    price, slices = planned(call, price, together=together)
    return planned(call, stats_price(call, needs)) if together > slices.tokens else (price, slices)


def _over_sets(call: Call, price: Price, needs: Needs, mask: SamplingMask) -> Explanation:
    """Of a call over a sampling mask: dot products with each token's own entries."""
    i, entries, itemsize = call.inputs, mask.token_ids.shape[0], call.compute.itemsize
    weight = call.head.weight
    widths = [weight.shape[1], *(x.shape[1] for x in (i.lora_b,) if x is not None)]
    ref_widths = [x.shape[1] for x in (i.ref_hidden, i.ref_lora_b) if x is not None]
    gathered = min(entries, entries_at_a_time(call)) * bytes_an_entry(call, sum(widths), sum(ref_widths))
    return Explanation(
        price=price,
        backend=call.options.backend,
        slices=Slices(len(mask), 1, gathered),
        rank=sum(widths[1:]),
        flop=2 * entries * (sum(widths) * (1 + needs.hidden + needs.weight) + sum(ref_widths)),
        buffer_bytes=gathered,
        saved_bytes=entries * itemsize * (1 + bool(ref_widths)),
        head_bytes=weight.nbytes,
        gradient_bytes=_gradient_bytes(call, price, needs, Slices(len(mask), 1, gathered)),
        dense_bytes=dense_loss_bytes(i.hidden.shape[0], call.head.rows, i.hidden.itemsize),
        traffic=None if call.shard is None else _traffic_over_sets(call, needs),
        quantised=None if isinstance(weight, Tensor) else weight.format.name,
        entries=entries,
    )


def _traffic_over_sets(call: Call, needs: Needs) -> Traffic:
    """Of the tokens that count, whose entries alone travel."""
    i, sets = call.inputs, valid_sets(call.valid_alone())
    return traffic_over_sets(
        sets.token_ids.shape[0],
        i.hidden.shape[0],
        chunks=len(chunks_of(sets.offsets.tolist(), entries_at_a_time(call))),
        heads=1 + (i.ref_hidden is not None),
        itemsize=call.compute.itemsize,
        widths=_gradient_widths(i, needs),
    )


def _gradient_widths(i: Inputs, needs: Needs) -> tuple[int, ...]:
    """Of the gradients per token that ranks add up: the hidden size where it needs one, and the adapters' rank."""
    widths = (i.hidden.shape[1],) if needs.hidden else ()
    return (*widths, i.lora_b.shape[1]) if needs.lora_hidden and i.lora_b is not None else widths


def _traffic(call: Call, needs: Needs, slices: Slices) -> Traffic:
    i = call.inputs
    n = i.hidden.shape[0]
    return traffic_of(
        call.options.want,
        n,
        chunks=-(-n // slices.tokens),
        itemsize=call.compute.itemsize,
        label=i.labels is not None,
        numbers=0 if i.candidates is None else i.candidates.shape[1],
        top_k=call.options.top_k,
        widths=_gradient_widths(i, needs),
    )


def _gradient_bytes(call: Call, price: Price, needs: Needs, slices: Slices) -> int:
    """Sums in the compute dtype, and their copies in the parameters' own dtypes where those are narrower.

    Of a weight without the first where one product, or one scatter, is all of its gradient; with what forming them,
    slice by slice, takes beside.
    """
    i, itemsize = call.inputs, call.compute.itemsize
    by_slices = price.skips and call.options.backend != quack_support.NAME
    backend = load(call.options.backend) if by_slices else None
    once = backend is not None and price.method == "in-forward" and backend.sums_once(call, slices)
    if call.sampling_mask is not None:
        once = rounds_once(call, call.sampling_mask.token_ids.shape[0], load(call.options.backend))
    total = needs.hidden * i.hidden.nbytes
    if i.lora_b is not None:
        total += needs.lora_hidden * i.hidden.shape[0] * i.lora_b.shape[1] * itemsize
    for x, wanted in ((i.weight, needs.weight), (i.bias, needs.bias), (i.lora_b, needs.lora_b)):
        if wanted and x is not None:
            parts = weight_gradient_bytes(x.shape[0], x.shape[1:].numel(), x.itemsize)
            total += x.nbytes if once and x is i.weight else sum(parts)
    return total + (0 if backend is None else backend.bytes_beside(call, price, needs, slices))
