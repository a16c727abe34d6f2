"""The written contract between the pass and its backends: `Backend`, and what it takes and gives.

A pass goes over the valid tokens of a call chunk by chunk. A backend sees one `Chunk`: the heads on its tokens, and
reused buffers. It accumulates the rows of the vocabulary that are here into an `Accumulation` (online softmax), and
turns coefficients, one number for each token and basis of the gradient formula, into gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

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
from ..call.call import Call, Needs
from ..call.sampling_mask import Places, SamplingMask
from . import rows as plain_rows
from .chunk import Chunk
from .conversions import bytes_of_few, converts, multiplied_dtype, multiplies_few
from .logits import FewRows, logits_grad_dtype
from .sets import Entries, Logits

COPIES = ("cuda",)  # devices on which a head's copy in another dtype is worth its memory


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
        few = price.method == "values" and multiplies_few(call)
        if few:
            held += bytes_of_few(call)
            demand["budget"] -= held
            if converts(call, call.head.weight):
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
        found = replace(found, nbytes=found.nbytes + held, copied=0 if few else held, multiplies_few=few)
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


def p_alone(call: Call) -> bool:
    """Whether a loss of the call's statistics has a gradient of p and terms of single entries: weights suffice."""
    want = call.options.want
    return bases_of(want) <= {"p"} and "t" not in sums_of(want) and not call.head.softcap


def is_dense(chunk: Chunk, coefficients: Coefficients) -> bool:
    """Whether there is anything to do for `logits_grad`: bases with a number for every entry."""
    return any(basis in coefficients for basis in DENSE) or (chunk.policy.outer is not None and "one" in coefficients)


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
