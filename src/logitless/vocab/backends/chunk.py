"""`Chunk`: what a backend sees of a call at a time, the heads on some valid tokens and buffers that are used again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ...algebra.costs import Slices
from ...algebra.stats import best_entries, sums_of
from ..call.call import Call, Inputs
from ..head.lm_head import LMHead
from .logits import FewRows, GivenLogits, LabelPlaces, Operands, Projection, cap_at, finite_
from .skip import Skip, SliceMass

FEW = 8  # tokens are few where a hidden state has this many times as many numbers


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


def lies_in_columns(x: Tensor) -> bool:
    """Whether each column of a matrix lies in one piece, and not each row."""
    return x.stride(0) == 1 and not x.is_contiguous()


@dataclass
class Tile:
    """A slice of logits, (C, S), the policy's and the reference's; or weights relative to `m`, if need be `late`."""

    v: slice
    z: Tensor
    z_ref: Tensor | None = None
    m: Tensor | None = None  # where set, z holds e^(z-m)
    late: bool = False  # where true, logits still, of which `weigh_late` makes these
    raw: bool = False  # the slice holds the heads' bare products, without scale, bias, softcap and temperature


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
    def of(cls, call: Call, rows: slice, slices: Slices, scratch: Scratch, few_rows: FewRows) -> Chunk:
        """The valid tokens `rows` of a call; few_rows: its backend's."""
        i, options = call.chunk(rows), call.options
        temperature = options.temperature if i.temperature is None else i.temperature

        def on(hidden: Tensor, head: LMHead, lora: tuple[Tensor | None, Tensor | None], name: str) -> Projection:
            return Projection(
                hidden,
                head,
                temperature,
                call.compute,
                few_rows,
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
        return None if self.slices.at_once or self.slices.multiplies_few else self.policy.operand(v)

    def put_logits(self, v: slice, w: Operands | None, out: Tensor) -> Tensor:
        """The policy's logits of a slice, (C, S), into `out`; w: what `operand` gave."""
        if w is not None:
            return self.policy.logits(w, v, out)
        if self.slices.multiplies_few:
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


def sums_logits(call: Call) -> bool:
    """Whether a mean logit is that of logits added up: where the head's summed rows do not give it, or cost more."""
    few = FEW * call.n_tokens <= call.inputs.hidden.shape[1]
    return few or bool(call.head.softcap) or call.shard is not None
