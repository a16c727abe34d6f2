"""`Call`: one call of the pass, checked and flat: the head or heads, the options and the tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...errors import LabelError
from ..devices import capturing, default_budget, processors
from ..dtypes import compute_dtype
from ..head.lm_head import LMHead
from ..head.quantised import Weight
from ..head.shard import VocabShard
from ..ranks.agreement import RankFacts, agree
from ..sizing import current_sizing
from .options import CallOptions
from .rows_of_reference import RowsOfReference
from .sampling_mask import SamplingMask

T = TypeVar("T")
ENDS = ("least", "most")
GUESSING = ("cuda",)  # devices that a host waits for


class Inputs(NamedTuple):
    """The tensors of a call, tokens flattened; the first `DIFFERENTIATED` get gradients."""

    hidden: Tensor  # (N, H)
    weight: Tensor | None = None  # (V, H); a quantised one, a constant, stays with the head, as the reference's
    bias: Tensor | None = None  # (V,)
    lora_hidden: Tensor | None = None  # (N, R), the adapters' products of hidden with their a, in the compute dtype
    lora_b: Tensor | None = None  # (V, R), the adapters' b
    labels: Tensor | None = None  # (N,)
    temperature: Tensor | None = None  # (N,)
    candidates: Tensor | None = None  # (N, K)
    ref_hidden: Tensor | None = None  # (N, H')
    ref_weight: Tensor | None = None  # (V, H')
    ref_bias: Tensor | None = None  # (V,)
    ref_lora_hidden: Tensor | None = None  # (N, R')
    ref_lora_b: Tensor | None = None  # (V, R')
    ref_outside: Tensor | None = None  # (N,), the reference's log-sum-exp over the entries that a draft lacks
    class_weights: Tensor | None = None  # (V,), of all ranks: the mean logit is then Σ_v weight_v·z_v / V

    @property
    def width(self) -> int:
        """Of a token's hidden state and its adapters' products together, H + R."""
        return self.hidden.shape[1] + (0 if self.lora_b is None else self.lora_b.shape[1])


DIFFERENTIATED = Inputs._fields.index("labels")
PER_TOKEN = (
    "hidden",
    "lora_hidden",
    "labels",
    "temperature",
    "candidates",
    "ref_hidden",
    "ref_lora_hidden",
    "ref_outside",
)


def storable(x: Tensor | None) -> Tensor | None:
    """The tensor; of one made in inference mode, which autograd keeps for no backward, the same memory by another."""
    if x is None or not x.is_inference() or torch.is_inference_mode_enabled():
        return x
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


class Needs(NamedTuple):
    """Which gradients a call must give, in the order of `Inputs`."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_hidden: bool = False
    lora_b: bool = False

    @property
    def any(self) -> bool:
        return any(self)

    @classmethod
    def of(cls, inputs: Inputs) -> Needs:
        """Which gradients autograd will ask for, read outside of any Function."""
        if not torch.is_grad_enabled():
            return cls()
        return cls(*(x is not None and x.requires_grad for x in inputs[:DIFFERENTIATED]))


@dataclass(frozen=True)
class Call:
    """One call of the pass, as `validate.flatten` makes it.

    head, reference: checked; their adapters stand in `inputs` as factors. index: the tokens that are valid, not
    ignored, where some are not (None: all are); the others are never computed. sampling_mask: where statistics are over
    each token's set of entries alone. reference_rows: in the place of a reference head, what it gave.
    outside: the reference over the entries that the head, of a draft vocabulary, lacks.
    alike: options of the caller beside the call's own, which ranks that share the head compare.
    """

    options: CallOptions
    head: LMHead
    inputs: Inputs
    reference: LMHead | None = None
    index: Tensor | None = None
    sampling_mask: SamplingMask | None = None
    reference_rows: RowsOfReference | None = None
    outside: LMHead | None = None
    alike: str = ""

    @property
    def budget(self) -> int:
        """Bytes of slices: the call's own, or what its device has room for."""
        return self.options.memory_budget or default_budget(self.inputs.hidden.device)

    def held(self) -> list[tuple[str, Tensor]]:
        """The tensors that backward reads beside `inputs`, by the arguments that they came in."""
        found: list[tuple[str, Tensor]] = []
        if self.sampling_mask is not None:
            found += [("sampling_mask", x) for x in (self.sampling_mask.token_ids, self.sampling_mask.offsets)]
        if self.reference_rows is not None and isinstance(self.reference_rows.source, Tensor):
            found.append(("reference", self.reference_rows.source))
        for name, head in (("head", self.head), ("reference", self.reference)):
            if head is not None and not isinstance(head.weight, Tensor):
                found += [(name, x) for x in _stored(head.weight)]
        return found

    def without_tensors(self) -> Call:
        """What backward keeps of the call: the inputs are autograd's to keep."""
        nothing: Any = None
        return replace(self, inputs=nothing)

    def with_tensors(self, inputs: Inputs) -> Call:
        """The same call on tensors that autograd or an operator hands on."""
        reference = self.reference
        if reference is not None:
            reference = reference.with_tensors(inputs.ref_weight, inputs.ref_bias)
        head = self.head.with_tensors(inputs.weight, inputs.bias)
        return replace(self, head=head, inputs=inputs, reference=reference)

    def valid_alone(self) -> Call:
        """The call with its ignored tokens left out; the host waits for the device."""
        labels = self.inputs.labels
        if labels is None or capturing(labels):
            return self
        if current_sizing() is not None:
            return self._sized()
        valid = labels != self.options.ignore_index
        return self if bool(valid.all()) else replace(self, index=valid.nonzero().squeeze(1))

    def checked(self) -> Call:
        """`valid_alone`, with ids that are known to lie in the vocabulary.

        The host waits for the device once, and again where tokens are ignored. Raises LabelError.
        """
        if capturing(self.inputs.hidden):
            return self
        return self._sized() if current_sizing() is not None else self._answered(self._ask())

    def checked_while(self, begin: Callable[[Call], T]) -> T:
        """What `begin` makes of the `checked` call.

        A GPU has nothing to do while the host, which has waited for it, prepares the first launch. So `begin`, which
        only prepares, is called while the device looks at the ids, with a call that guesses that no token is ignored,
        and again where some are.
        """
        labels = self.inputs.labels
        if labels is None or labels.device.type not in GUESSING or capturing(labels) or current_sizing() is not None:
            return begin(self.checked())
        asked = self._ask()
        same = labels.clamp(0, self.head.rows - 1)  # should the guess be right; else they can be read, at least
        begun = begin(replace(self, inputs=self.inputs._replace(labels=same)))
        call = self._answered(asked)
        if call is self:
            return begun
        del begun  # and its memory, before it is made again
        return begin(call)

    def _ask(self) -> dict[str, Tensor]:
        """By name, the lowest and the highest of the ids, and as `valid` whether no token is ignored."""
        labels, candidates = self.inputs.labels, self.inputs.candidates
        valid = None if labels is None else labels != self.options.ignore_index
        ids = {
            name: x if valid is None else torch.where(valid if x.dim() == 1 else valid[:, None], x, 0)
            for name, x in (("labels", labels), ("candidates", candidates))
            if x is not None and x.numel()
        }
        asked = {f"{end} {name}": x for name, y in ids.items() for end, x in zip(ENDS, torch.aminmax(y), strict=True)}
        return asked if valid is None else asked | {"valid": valid.all()}

    def _answered(self, asked: dict[str, Tensor]) -> Call:
        """The call once the device has said what `_ask` asks."""
        found = dict(zip(asked, torch.stack([*asked.values()]).tolist() if asked else (), strict=True))
        for name in ("labels", "candidates"):
            if f"least {name}" in found:
                self._check_ids(name, *(int(found[f"{end} {name}"]) for end in ENDS))
        if self.inputs.labels is None or found["valid"]:
            return self
        valid = self.inputs.labels != self.options.ignore_index
        return replace(self, index=valid.nonzero().squeeze(1))

    def _sized(self) -> Call:
        """The call with as many valid tokens as the sizing mode says."""
        mode, n = current_sizing(), self.inputs.hidden.shape[0]
        if mode is None or not mode.ignored or self.inputs.labels is None:
            return self
        return replace(self, index=self.inputs.labels.new_empty(n - mode.ignored))

    def _check_ids(self, name: str, least: int, most: int) -> None:
        """Raise LabelError where the lowest or the highest of some ids is not in the vocabulary."""
        rows = self.head.rows
        if least < 0 or most >= rows:
            wrong = least if least < 0 else most
            hint = f" or ignore_index={self.options.ignore_index}" if name == "labels" else ""
            remedy = "fix the ids or vocab_size"
            if name == "labels" and wrong < 0:
                remedy = f"pass ignore_index={wrong} if such tokens do not count, else fix the ids"
            raise LabelError(f"{name}: expected ids in 0..{rows - 1}{hint}, got {wrong}; {remedy}")

    def agree(self, *given: Tensor) -> Call:
        """The call, once the ranks that share the head have made sure that all make it. Raises RankError on all.

        given: tensors of the caller that are not the call's own.
        """
        if self.shard is None:
            return self
        i, options = self.inputs, self.options
        graph = torch.is_grad_enabled()  # a rank without one has other chunks, and no backward to meet in
        kinds = [None if x is None else (x.dtype, tuple(x.shape[1:]), graph and x.requires_grad) for x in i]
        heads = [x for x in (self.head, self.reference) if x is not None]
        adapters = [x for head in heads for x in head.adapters]
        products = [x for x in (i.lora_hidden, i.ref_lora_hidden) if x is not None]  # all that a graph has of adapters
        plain = replace(options, memory_budget=self.budget, named=False)  # one may ask for what another chooses
        named = [*vars(plain).items(), *zip(i._fields, kinds, strict=True)]
        named.append(("scale, softcap, vocab_size", [(x.scale, x.softcap, x.vocab_size) for x in heads]))
        named.append(("scaling and dropout of adapters", [(x.scaling, x.dropout) for x in adapters]))
        named.append(("processors", processors(i.hidden.device)))  # which kernels' chunks are made for
        named.append(("rows of a reference", self.reference_rows is not None))
        named.append(("token_ids", self.head.token_ids is not None))
        mask = self.sampling_mask
        sets = () if mask is None else (mask.token_ids, mask.offsets)
        constants = i.temperature, i.candidates, i.class_weights, self.head.token_ids
        every = i.hidden.new_full((), i.hidden.shape[0], dtype=torch.int64)
        facts = RankFacts(
            shard=self.shard,
            weight_rows=self.head.weight.shape[0],
            rows=self.head.rows,
            options="\n".join((*(f"{name}={x}" for name, x in named), self.alike)),
            hidden=i.hidden,
            ref_hidden=i.ref_hidden,
            factors=[x.a for x in adapters] or products,
            valid=every if i.labels is None else (i.labels != options.ignore_index).sum(),
            labels=i.labels,
            given=[x for x in (*constants, *sets, *given) if x is not None],
        )
        return replace(self, head=self.head.with_shard(self.shard.agreed(agree(facts))))

    @property
    def shard(self) -> VocabShard | None:
        return self.head.shard

    @property
    def n_tokens(self) -> int:
        """How many tokens are valid."""
        return self.inputs.hidden.shape[0] if self.index is None else self.index.shape[0]

    @property
    def compute(self) -> torch.dtype:
        return compute_dtype(self.inputs.hidden)

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """The rows of `x` (N, ...) that belong to the valid tokens `rows`."""
        return x[self.tokens(rows)]

    def tokens(self, rows: slice) -> slice | Tensor:
        """Which of the N tokens the valid tokens `rows` are."""
        return rows if self.index is None else self.index[rows]

    def chunk(self, rows: slice) -> Inputs:
        """The inputs of some valid tokens."""
        there = {name: x for name in PER_TOKEN if (x := getattr(self.inputs, name)) is not None}
        return self.inputs._replace(**{name: self.rows(x, rows) for name, x in there.items()})

    def put(self, x: Tensor, rows: slice, values: Tensor) -> None:
        """Write the valid tokens' `values` into `x` (N, ...)."""
        x[self.tokens(rows)] = values.to(x.dtype)


def _stored(weight: Weight) -> list[Tensor]:
    """The tensors that hold a weight, and that of which it is some rows, beside a draft's head."""
    if isinstance(weight, Tensor):
        return [weight]
    whole = getattr(weight.format, "weight", None)
    return [*weight.parts, *([] if whole is None else _stored(whole))]


def computing_all(call: Call) -> tuple[Call, Tensor | None]:
    """Where tokens cannot be left out, in a CUDA graph: ignored ones with a label that exists, and which are valid.

    Everywhere else the call as it is, and None.
    """
    labels = call.inputs.labels
    if labels is None or not capturing(labels):
        return call, None
    valid = labels != call.options.ignore_index
    return replace(call, inputs=call.inputs._replace(labels=torch.where(valid, labels, 0))), valid


def blank_of(name: str) -> int:
    """What ignored tokens get of a statistic."""
    return -1 if name == "top_k_ids" else 0


def blank_ignored(out: dict[str, Tensor], valid: Tensor | None) -> dict[str, Tensor]:
    """The statistics with what ignored tokens get in their places; their upstream gradients then are 0."""
    if valid is None:
        return out
    return {name: torch.where(valid if x.dim() == 1 else valid[:, None], x, blank_of(name)) for name, x in out.items()}
