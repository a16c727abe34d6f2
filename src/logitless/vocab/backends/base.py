"""The written contract between the pass and its backends: `Backend`, and what it takes and gives.

A pass goes over the valid tokens of a call chunk by chunk. A backend sees one `Chunk`: the heads on its tokens, and
reused buffers. It accumulates the rows of the vocabulary that are here into an `Accumulation` (online softmax), and
turns coefficients, one number for each token and basis of the gradient formula, into gradients.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...algebra.costs import DEQUANTISED, Price, Slices, best_bytes, copied, slices_of, sparse_slices, tiles_of
from ...algebra.online_softmax import Accumulation, Totals, finish
from ...algebra.stats import (
    DENSE,
    Coefficients,
    bases_of,
    best_entries,
    label_coefficient,
    label_shares,
    put_second_look,
    sums_of,
)
from ..call.call import Call, Inputs, Needs
from ..call.sampling_mask import Places, SamplingMask
from ..head.lm_head import LMHead
from ..head.quantised import Weight
from ..head.sparse import BOUNDED, SparseBackward
from . import rows as plain_rows
from .compiled import few
from .logits import (
    FewRows,
    GivenLogits,
    LabelPlaces,
    Operands,
    Projection,
    cap_at,
    finite_,
    logits_grad_dtype,
    multiplies_tiles,
    operand_dtype,
)
from .sets import Entries, Logits

COPIES = ("cuda",)  # devices on which a head's copy in another dtype is worth its memory
FEW = 8  # tokens are few where a hidden state has this many times as many numbers
MOSTLY = 0.9  # of a chunk's tokens, from which on a slice takes all of them: gathering costs more


class OverSets(Protocol):
    """The pass over sampling masks, as every backend has it: see `eager.sets`."""

    def look_at(self, mask: SamplingMask, rows: int, labels: Tensor | None, ignore_index: int) -> Places | None: ...

    def accumulate(
        self, sums: frozenset[str], label: Tensor | None, entries: Entries, logits: Logits
    ) -> tuple[Accumulation, Tensor | None]: ...

    def logits_grad(
        self, chunk: Chunk, entries: Entries, logits: Logits, totals: Totals, c: Coefficients, at_label: Tensor | None
    ) -> Tensor: ...


class Backend(ABC):
    """One way to compute the pass on the rows of a head that are here.

    A backend has to give three functions: `accumulate_local`, `second_sums` and `logits_grad`. The others are right
    for any backend and may be replaced by faster ones. It may use `chunk.scratch` for anything, and keep in
    `chunk.materialised` the slices of logits that `keep` asks for, which is all that one function may leave for
    another. It never waits for the device unless the call's statistics cannot be had otherwise, never makes C·V
    elements but in those slices, and never reads what the chunk does not hold: ignored tokens, rows past
    `local_rows`, buffers that were not written (tests fill them with NaN).
    """

    @abstractmethod
    def accumulate_local(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Partial:
        """The accumulation of the rows here, the label's entry left out (it is kept apart, in `chunk.label`).

        bases: of `algebra.stats.DENSE`, those whose products Σ_v basis_v·W_v, (C, H + R), accumulate on the way.
        keep: "logits" or "weights" leaves every slice in `chunk.materialised`, as logits z or as weights e^(z-m);
        whoever asks for weights needs p alone. Reads every slice of the operands once.
        """

    @abstractmethod
    def second_sums(self, chunk: Chunk, totals: Totals) -> dict[str, Tensor]:
        """Those of `chunk.sums` that `algebra.stats.SECOND_LOOK` has, over the rows here, the label's left out, (C,).

        Reads the logits that `accumulate_local` left in `chunk.materialised`, which must stay as they are, and makes
        the slices again where none stayed.
        """

    @abstractmethod
    def logits_grad(self, chunk: Chunk, totals: Totals, coefficients: Coefficients, grads: Gradients) -> None:
        """Add the dense bases' share of every gradient to `grads`; 0 at the label but for the constant term.

        coefficients: (C,) each, of dL/dz, without the head's scale and temperature. Uses up `chunk.materialised`
        where it holds slices, and recomputes them where it does not. Nothing to do where `is_dense` says so.
        """

    few_rows: FewRows = plain_rows  # products with a few rows of a table for each token
    over_sets: OverSets  # the pass over sampling masks
    draws_on_device = False  # whether kernels of its own draw tokens from a chunk's rows: see `sample.triton_draw`
    sums_logits_anyway = False  # whether `zsum` costs it nothing

    def accumulate(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Accumulated:
        """`accumulate_local` of all rows, finished."""
        return self.finished(chunk, self.accumulate_local(chunk, bases, keep))

    def finished(self, chunk: Chunk, whole: Partial) -> Accumulated:
        """What an accumulation of all rows amounts to."""
        totals = self.finish(whole.state, chunk.label)
        if whole.zsum is not None:
            totals.mean_logit = whole.zsum / chunk.policy.head.rows
        out = Accumulated(totals, products=whole.normalised(totals))
        if whole.topk is not None:
            out.top_logits, out.top_ids = whole.topk
        return out

    def finish(self, state: Accumulation, label: tuple[Tensor, Tensor | None] | None) -> Totals:
        """The totals of an accumulation and of the label's logit, (C,) each."""
        return finish(state, label, torch)

    def label_coefficient(self, chunk: Chunk, totals: Totals, coefficients: Coefficients) -> Tensor:
        """dL/d(hW) at the label, (C,): what `logits_grad` leaves out."""
        total = self.at_label(coefficients, totals, chunk.jsd_beta)
        if chunk.policy.outer is not None and "one" in coefficients:
            total = total + coefficients["one"]
        return chunk.policy.chain(total, totals.label_logit)

    def at_label(self, coefficients: Coefficients, totals: Totals, beta: float) -> Tensor:
        """dL/dz at the label, (C,), the constant term aside."""
        return label_coefficient(coefficients, totals, beta, torch)

    def slices(
        self,
        call: Call,
        n_tokens: int,
        vocab_size: int,
        price: Price,
        *,
        wide: bool = False,
        together: int = 0,
        summed: bool = False,
    ) -> Slices:
        """The slice sizes of a call with `n_tokens` valid tokens and at most `vocab_size` rows on a rank, at a price.

        wide: whether few tokens are to see long slices; together: tokens that are to stay at once, where the budget has
        room for them; summed: whether nobody but `accumulate` will ever see a slice.
        """
        options, i, compute = call.options, call.inputs, call.compute
        demand, held = self.within(call, vocab_size, price.skips)
        unconverted = price.method == "values" and multiplies_few(call)
        if unconverted:
            held += few.nbytes(i.hidden.shape[1])
            demand["budget"] -= held
            demand["converted"] -= i.hidden.shape[1]
        found = slices_of(
            n_tokens,
            vocab_size,
            **demand,
            whole=price.materialised,
            device=i.hidden.device.type,
            tiles=tiles_of(options.want, softcap=bool(call.head.softcap), top_k=options.top_k),
            each=best_bytes(best_entries(sums_of(options.want), options.top_k), compute.itemsize),
            wide=wide,
            together=together,
        )
        found = replace(found, nbytes=found.nbytes + held, copied=0 if unconverted else held, unconverted=unconverted)
        if price.method == "values" and demand["converted"] and i.hidden.device.type == "cpu" and not found.at_once:
            found = replace(found, at_once=found.width)
        if not price.skips or options.sparse is None:
            return found
        return sparse_slices(found, options.sparse.width, vocab_size, i.width, compute.itemsize)

    def bytes_beside(self, call: Call, price: Price, needs: Needs, slices: Slices) -> int:
        """What forming the gradients, slice by slice, takes beside the slices and the gradients themselves."""
        return 0

    def within(self, call: Call, vocab_size: int, gradient: bool) -> tuple[dict[str, int], int]:
        """What slices of a call take, as `slices_of` is told it, and the bytes of the heads' copies, 0 where none stay.

        gradient: whether the slices' gradient is formed, whose products may take another dtype than the logits'.
        Copies stay on a GPU, where a weight that is converted whenever it is read is so for every chunk, twice. A
        budget of the call's own holds them; beside a default one they may take twice as much.
        """
        i, compute, asked = call.inputs, call.compute, bool(call.options.memory_budget)
        weights = [head.weight for head in (call.head, call.reference) if head is not None]
        made = [(w, multiplied_dtype(call, w)) for w in weights if converts(call, w)]
        wide = multiplied_dtype(call, call.head.weight)
        if gradient and logits_grad_dtype(wide, compute) != wide:
            made.append((call.head.weight, logits_grad_dtype(wide, compute)))
        converted = sum(w.shape[1] for w, _ in made)
        converted += sum(DEQUANTISED * w.shape[1] for w in weights if not isinstance(w, Tensor))
        converted += sum(b.shape[1] for b in (i.lora_b, i.ref_lora_b) if b is not None and b.dtype != compute)
        kept = [(w.shape[1], dtype) for w, dtype in made if isinstance(w, Tensor) and w.device.type in COPIES]
        copies = sum(vocab_size * width * dtype.itemsize for width, dtype in kept)
        held = copied(call.budget if asked else call.budget + copies, copies)
        return {
            "budget": call.budget - held * asked,
            "itemsize": compute.itemsize,
            "heads": len(weights) + (call.reference_rows is not None),
            "converted": converted - sum(width for width, _ in kept) * (held > 0),
        }, held

    def adds_up(self, call: Call, price: Price) -> bool:
        """Whether all that a call pays for is added up in registers, or made of what was, by one small library."""
        return False

    def prepared(self, chunk: Chunk) -> object:
        """What all steps of a chunk share, made before its labels are known to exist; the label's logit may change."""
        return None

    def sums_once(self, call: Call, slices: Slices) -> bool:
        """Whether one product in the head's own dtype is all of its gradient in a loss, but for the labels' part."""
        return False

    def scatters_once(self, call: Call) -> bool:
        """Whether rows scattered into a gradient in the head's own dtype are summed wide and rounded once."""
        return False

    def scaled(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """x times a scalar tensor: in place, or where `dtype` is another one, in one sweep into a new tensor."""
        if factor.device.type == "cpu" and factor.item() == 1:
            return x.to(dtype)
        return torch.mul(x, factor, out=x if x.dtype == dtype else torch.empty_like(x, dtype=dtype))


def multiplied_dtype(call: Call, weight: Weight) -> torch.dtype:
    """The dtype that a head's weight multiplies in."""
    return operand_dtype(call.inputs.hidden, call.options.autocast or weight.dtype, call.compute)


def converts(call: Call, weight: Weight) -> bool:
    """Whether that is not its own."""
    return weight.dtype != multiplied_dtype(call, weight) or call.options.autocast not in (None, weight.dtype)


def multiplies_few(call: Call) -> bool:
    """Whether the head's product with all tokens, which are few, is one of bf16 rows that nothing converts.

    Not of a sharded head, whose ranks take the same chunks.
    """
    hidden, weight = call.inputs.hidden, call.head.weight
    cast = call.options.autocast or weight.dtype
    if call.shard is not None or not isinstance(weight, Tensor) or weight.dtype != cast:
        return False
    if not multiplies_tiles(hidden, cast, call.compute) or not few.takes(
        call.n_tokens, hidden.detach(), weight.detach()
    ):
        return False
    return few.nbytes(weight.shape[1]) <= call.budget // 4


def rounds_weights(call: Call) -> bool:
    """Whether what weighs the head's rows is rounded to 16 bits for its products: on a GPU, and in a CPU's tiles."""
    hidden, weight = call.inputs.hidden, call.options.autocast or call.head.weight.dtype
    narrow = multiplied_dtype(call, call.head.weight) != call.compute
    return narrow or multiplies_tiles(hidden, weight, call.compute)


def p_alone(call: Call) -> bool:
    """Whether a loss of the call's statistics has a gradient of p and terms of single entries: weights suffice."""
    want = call.options.want
    return bases_of(want) <= {"p"} and "t" not in sums_of(want) and not call.head.softcap


def sums_logits(call: Call) -> bool:
    """Whether a mean logit is that of logits added up: where the head's summed rows do not give it, or cost more."""
    few = FEW * call.n_tokens <= call.inputs.hidden.shape[1]
    return few or bool(call.head.softcap) or call.shard is not None


def is_dense(chunk: Chunk, coefficients: Coefficients) -> bool:
    """Whether there is anything to do for `logits_grad`: bases with a number for every entry."""
    return any(basis in coefficients for basis in DENSE) or (chunk.policy.outer is not None and "one" in coefficients)


def lies_in_columns(x: Tensor) -> bool:
    """Whether each column of a matrix lies in one piece, and not each row."""
    return x.stride(0) == 1 and not x.is_contiguous()


class Scratch:
    """Named buffers that every slice and chunk of a call reuse."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.buffers: dict[str, Tensor] = {}
        self.copies: dict[tuple[str, torch.dtype], Tensor] = {}

    def once(self, name: str, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """What `make` gives, a copy of this dtype, of which it is asked once."""
        if (name, dtype) not in self.copies:
            self.copies[name, dtype] = make()
        return self.copies[name, dtype]

    def take(self, name: str, like: Tensor | tuple[int, int], columns: bool = False) -> Tensor:
        """A buffer (rows, width), with anything in it; columns: each column of it lies in one piece, not each row.

        Of a tensor's shape it lies as the tensor does.
        """
        rows, width = like.shape if isinstance(like, Tensor) else like
        columns = lies_in_columns(like) if isinstance(like, Tensor) else columns
        need = rows * width
        if name not in self.buffers or self.buffers[name].numel() < need:
            self.buffers[name] = torch.empty(need, dtype=self.dtype, device=self.device)
        room = self.buffers[name][:need]
        return room.view(width, rows).t() if columns else room.view(rows, width)


@dataclass
class Tile:
    """A slice of logits, (C, S), the policy's and the reference's; or weights relative to `m`, if need be `late`."""

    v: slice
    z: Tensor
    z_ref: Tensor | None = None
    m: Tensor | None = None  # where set, z holds e^(z-m)
    late: bool = False  # where true, logits still, of which `weigh_late` makes these
    raw: bool = False  # the slice holds the heads' bare products, without scale, bias, softcap and temperature


@dataclass(frozen=True)
class SliceMass:
    """A slice's part of each token's sums, (C,) each, w = e^(z-m)."""

    m: Tensor
    w: Tensor  # Σw
    t: Tensor | None  # Σw·(z-m), where entropy is wanted


@dataclass
class Chunk:
    """A chunk of valid tokens: the heads on them, buffers, and what is asked of them.

    materialised: the slices of logits that stay; stays: whether they do at the call's price, in backward too, which
    makes them again. slice_masses, skip: what a sparse backward is to know of each slice, and what it leaves out.
    """

    inputs: Inputs
    policy: Projection
    reference: Projection | None
    slices: Slices
    scratch: Scratch
    sums: frozenset[str]
    top_k: int
    jsd_beta: float
    sums_logits: bool
    materialised: list[Tile] = field(default_factory=list)
    stays: bool = False
    slice_masses: list[SliceMass] | None = None
    skip: Skip | None = None
    prepared: Any = None  # what its backend's `prepared` gave

    @classmethod
    def of(cls, call: Call, rows: slice, slices: Slices, scratch: Scratch, backend: Backend) -> Chunk:
        """The valid tokens `rows` of a call."""
        i, options = call.chunk(rows), call.options
        temperature = options.temperature if i.temperature is None else i.temperature

        def on(hidden: Tensor, head: LMHead, lora: tuple[Tensor | None, Tensor | None], name: str) -> Projection:
            return Projection(
                hidden,
                head,
                temperature,
                call.compute,
                backend.few_rows,
                autocast=options.autocast,
                lora=lora,
                buffer=partial(scratch.take, name),
                once=partial(scratch.once, name) if slices.copied else None,
            )

        policy = on(i.hidden, call.head, (i.lora_hidden, i.lora_b), "rows")
        reference = None
        if call.reference is not None and i.ref_hidden is not None:
            reference = on(i.ref_hidden, call.reference, (i.ref_lora_hidden, i.ref_lora_b), "ref_rows")
        elif call.reference_rows is not None:
            given = call.reference_rows, call.tokens(rows)
            reference = GivenLogits(*given, call.head, temperature, call.compute)
        # logits' weighted sum is never added up: it is a product with the head's rows, summed by their weights
        sums = sums_of(options.want) - (set() if i.class_weights is None else {"zsum"})
        top_k = best_entries(sums, options.top_k)
        # in a CPU's registers they cost nothing, while the sum of the head's rows reads these
        free = slices.in_products and i.hidden.device.type == "cpu"
        summed = "zsum" in sums and (free or sums_logits(call))
        return cls(i, policy, reference, slices, scratch, sums, top_k, options.jsd_beta, summed)

    @property
    def n_tokens(self) -> int:
        return self.inputs.hidden.shape[0]

    @cached_property
    def label_logit(self) -> Tensor | None:
        """The label's logit, (C,), by a dot product of its own; 0 for other ranks' labels until they are gathered.

        Not made before it is asked for: backward has it in its totals.
        """
        labels = self.inputs.labels
        return None if labels is None else self.policy.at(labels)

    @cached_property
    def label_ref(self) -> Tensor | None:
        """The reference's logit of the label, likewise; of logits that exist already from their slices, by `mask`."""
        labels, reference = self.inputs.labels, self.reference
        if labels is None or reference is None:
            return None
        if isinstance(reference, GivenLogits):
            return torch.zeros(labels.shape, dtype=reference.compute, device=labels.device)
        return reference.at(labels)

    @property
    def label(self) -> tuple[Tensor, Tensor | None] | None:
        """The label's logit and its reference logit, known once every slice was looked at."""
        return None if self.label_logit is None else (self.label_logit, self.label_ref)

    @cached_property
    def label_places(self) -> LabelPlaces | None:
        """Where in the vocabulary the tokens' labels lie, looked for once."""
        return None if self.inputs.labels is None else LabelPlaces(self.inputs.labels)

    @property
    def may_be_infinite(self) -> bool:
        """Whether a logit can be -inf."""
        return self.policy.may_be_infinite or (self.reference is not None and self.reference.may_be_infinite)

    def vocabulary(self) -> Iterator[slice]:
        """Slices of the rows here."""
        size, width = self.policy.head.local_rows, self.slices.width
        return (slice(v, min(v + width, size)) for v in range(0, size, width))

    def operand(self, v: slice) -> Operands | None:
        """The policy's operands of a slice; None where `put_logits` converts them in parts, or not at all."""
        return None if self.slices.at_once or self.slices.unconverted else self.policy.operand(v)

    def put_logits(self, v: slice, w: Operands | None, out: Tensor) -> Tensor:
        """The policy's logits of a slice, (C, S), into `out`; w: what `operand` gave."""
        if w is not None:
            return self.policy.logits(w, v, out)
        if self.slices.unconverted:
            return self.policy.logits_of_few(v, out)
        for start in range(v.start, v.stop, self.slices.at_once):
            some = slice(start, min(v.stop, start + self.slices.at_once))
            part = out[:, some.start - v.start : some.stop - v.start]
            self.policy.logits(self.policy.operand(some, passing=True), some, part)
        return out

    def logits(self, v: slice, w: Operands | None, name: str = "", columns: bool = False) -> Tile:
        """The slice's logits, in the buffers that `name` tells apart.

        w: as `put_logits`'; columns: as `Scratch.take`'s.
        """
        shape = self.n_tokens, v.stop - v.start
        tile = Tile(v, self.put_logits(v, w, self.scratch.take("z" + name, shape, columns)))
        if self.reference is not None:
            ref = self.reference
            tile.z_ref = ref.logits(ref.operand(v), v, self.scratch.take("z_ref" + name, shape, columns))
        return tile

    def mask(self, tile: Tile) -> None:
        """Take the label out of the slice; -inf becomes MASK, and numbers below that stay: a gap to them is one."""
        for z in (tile.z, tile.z_ref):
            if z is None:
                continue
            if self.label_places is not None:
                taken = self.label_ref if z is tile.z_ref and isinstance(self.reference, GivenLogits) else None
                self.label_places.mask(z, self.policy.head.vocab_start + tile.v.start, taken)
            if self.may_be_infinite:
                finite_(z)

    def cap_candidates(self, x: Tensor, v: slice, most: float) -> Tensor:
        """A slice's numbers, of which those of the candidates are `most` at most."""
        assert self.inputs.candidates is not None
        cap_at(x, self.inputs.candidates - (self.policy.head.vocab_start + v.start), most)
        return x

    def gap(self, tile: Tile) -> Tensor:
        """z_ref - z, which is -e but for d0, before masking or after; 0 where both are -inf."""
        assert tile.z_ref is not None
        gap = torch.sub(tile.z_ref, tile.z, out=self.scratch.take("gap", tile.z))
        if self.may_be_infinite:
            gap.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
        return gap


@dataclass
class Accumulated:
    """A chunk after its accumulation: totals, the best entries, and per basis Σ basis_v·W_v without the label."""

    totals: Totals
    top_ids: Tensor | None = None  # (C, k)
    top_logits: Tensor | None = None  # (C, k)
    products: dict[str, Tensor] = field(default_factory=dict)  # basis -> (C, H + R), of the rows here
    candidates: Tensor | None = None  # (C, K), their logits where the ranks had to ask for them


@dataclass
class Partial:
    """The accumulation of the rows here, the label's entry left out, before it is finished.

    normalised: the products, once the totals are known. zsum: (C,), the sum of the logits, the label's included.
    topk: (C, k) logits and rows, best first, -inf and -1 where there are less.
    """

    state: Accumulation
    normalised: Callable[[Totals], dict[str, Tensor]] = lambda _: {}
    zsum: Tensor | None = None
    topk: tuple[Tensor, Tensor] | None = None


@dataclass
class Moves:
    """What brings the products before a slice to the slice's maximum and d0, or all of them to probabilities."""

    grow: Tensor  # e^(m before - m)
    step: Tensor  # m before - m
    grow_ref: Tensor | None = None
    shift: Tensor | None = None  # d0 before - d0

    def apply(self, products: dict[str, Tensor], infinite: bool) -> None:
        """Σ basis·W of the entries so far, relative to the new maxima and d0."""
        if "pD" in products and self.shift is not None:
            products["pD"].addcmul_(products["p"], self.shift[:, None]).mul_(self.grow[:, None])
            if infinite:  # 0·inf = 0
                products["pD"].masked_fill_((self.grow == 0)[:, None], 0.0)
        if "plogp" in products:
            products["plogp"].addcmul_(products["p"], self.step[:, None]).mul_(self.grow[:, None])
        if "p2" in products:
            products["p2"].mul_((self.grow * self.grow)[:, None])
        if "q" in products and self.grow_ref is not None:
            products["q"].mul_(self.grow_ref[:, None])
        if "p" in products:
            products["p"].mul_(self.grow[:, None])


def normalised(products: dict[str, Tensor], state: Accumulation, totals: Totals) -> dict[str, Tensor]:
    """The products with probabilities in the weights' place, whichever rows the totals are of."""
    if products:
        offset = (state.m - totals.m) - totals.log_s  # log p = (z - state.m) + offset
        moves = Moves(torch.exp(offset), offset)
        if "pD" in products:
            moves.shift = totals.log_ratio + (state.shift - totals.shift)
        if "q" in products:
            moves.grow_ref = torch.exp((state.m_ref - totals.m_ref) - totals.log_s_ref)
        moves.apply(products, infinite=False)
    return products


def put_second_sums(chunk: Chunk, totals: Totals, sums: dict[str, Tensor]) -> None:
    """The second look's sums over all entries but the label into `totals`, with the label's."""
    label = None if chunk.label_logit is None else label_shares(totals, chunk.sums, chunk.jsd_beta, torch)
    put_second_look(totals, sums, label, chunk.jsd_beta, torch)


@dataclass
class Gradients:
    """Gradients being accumulated, in the compute dtype; None where not needed. Per token those of the chunk."""

    hidden: Tensor | None = None  # (C, H)
    weight: Tensor | None = None  # (V, H)
    bias: Tensor | None = None  # (V,)
    lora_hidden: Tensor | None = None  # (C, R)
    lora_b: Tensor | None = None  # (V, R)
    unwritten: list[Tensor] = field(default_factory=list)  # the weight's, while its rows that exist hold nothing yet

    def begins(self) -> bool:
        """Whether the weight's has nothing in it yet, so that its first part is written, not added; said once."""
        begins = bool(self.unwritten)
        self.unwritten.clear()
        return begins

    def clear(self) -> None:
        """Zero what has nothing in it yet."""
        while self.unwritten:
            self.unwritten.pop().zero_()

    @property
    def all(self) -> list[Tensor | None]:
        return [self.hidden, self.weight, self.bias, self.lora_hidden, self.lora_b]

    @property
    def pairs(self) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
        """(per token, per entry) for each of the head's factors."""
        return (self.hidden, self.weight), (self.lora_hidden, self.lora_b)


@dataclass
class Skip:
    """What a chunk's backward pass leaves out."""

    computed: Tensor  # (C, J), whether a token takes part in the products of a slice
    mass: Tensor  # (C,), what a token leaves out
    report: SparseBackward

    @classmethod
    def of(cls, slice_masses: list[SliceMass], totals: Totals, report: SparseBackward) -> Skip:
        """Of each token the slices of least mass, while their sum keeps to the bound."""
        mass = masses(slice_masses, totals)
        ordered, order = mass.sort(1)
        above = ~(ordered.cumsum(1) <= report.bound)  # NaN is computed
        computed = torch.zeros_like(above).scatter_(1, order, above)
        computed |= computed.sum(0) > MOSTLY * computed.shape[0]
        return cls(computed, mass.masked_fill_(computed, 0.0).sum(1), report)

    @classmethod
    def saved(cls, extra: dict[str, Tensor], report: SparseBackward | None) -> Skip | None:
        """From what `items` gave."""
        return None if report is None else cls(extra["computed_slices"], extra["skipped_mass"], report)

    def items(self) -> dict[str, Tensor]:
        """What has to wait for backward."""
        return {"computed_slices": self.computed, "skipped_mass": self.mass}

    def rows(self, chunk: Chunk, coefficients: Coefficients) -> list[Tensor | None]:
        """The tokens of each slice, None where they are all of the chunk's; and the report's part of this chunk."""
        weight = torch.stack([coefficients[basis].abs() for basis in sorted(BOUNDED & coefficients.keys())]).sum(0)
        computed = (self.computed & (weight != 0)[:, None]).t().contiguous()
        counts = computed.sum(1).tolist()  # the one wait for the device
        pairs = sum(count * (v.stop - v.start) for count, v in zip(counts, chunk.vocabulary(), strict=True))
        n = chunk.n_tokens
        self.report.add(self.mass, weight, pairs, n * chunk.policy.head.local_rows)
        rows = torch.nonzero_static(computed.view(-1), size=sum(counts)).squeeze(1).remainder_(n).split(counts)
        return [None if x.shape[0] == n else x for x in rows]


def masses(slice_masses: list[SliceMass], totals: Totals) -> Tensor:
    """Each token's mass in each slice, (C, J): Σp, or Σ p·|log p| where that is asked for and more."""
    offset = torch.stack([x.m for x in slice_masses], 1)
    offset.sub_(totals.m[:, None]).sub_(totals.log_s[:, None])  # log p = (z - m) + offset
    w = torch.stack([x.w for x in slice_masses], 1)
    sharp = [x.t for x in slice_masses if x.t is not None]
    if sharp:
        torch.maximum(w, torch.stack(sharp, 1).addcmul_(w, offset).neg_(), out=w)
    return w.mul_(offset.exp_())
