"""One call of the pass, checked and flat: the tensors, the options, and a chunk of tokens of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import LabelError
from ..head.lm_head import LMHead
from ..head.shard import VocabShard
from ..head.sparse import SparseBackward
from ..ranks.agreement import Call, meet


@dataclass(frozen=True)
class Spec:
    """The options of a call that are plain numbers and names; `key` and `parse` carry it through a custom op."""

    want: tuple[str, ...]
    temperature: float = 1.0  # ignored where the problem has a temperature tensor
    ignore_index: int = -100
    top_k: int = 0
    jsd_beta: float = 0.5
    budget: int = 0
    backend: str = "eager"
    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    vocab_size: int = 0  # 0: all rows
    ref_scale: float = 1.0
    ref_softcap: float = 0.0
    ref_vocab_size: int = 0
    operand: str = ""  # the dtype that autocast multiplies in, e.g. "bfloat16"
    shard: str = ""  # the head's `VocabShard.key` where its rows are split over ranks
    sparse: SparseBackward | None = None  # the head's; no part of `key`, so that custom ops do without it

    @property
    def key(self) -> str:
        """The spec as one string."""
        return (
            f"{'+'.join(self.want)}|{self.temperature}|{self.ignore_index}|{self.top_k}|{self.jsd_beta}|{self.budget}"
            f"|{self.backend}|{self.scale}|{self.softcap}|{self.vocab_size}"
            f"|{self.ref_scale}|{self.ref_softcap}|{self.ref_vocab_size}|{self.operand}|{self.shard}"
        )

    @classmethod
    def parse(cls, key: str) -> Spec:
        """The spec whose `key` this is."""
        want, t, ignore, k, beta, budget, backend, scale, cap, rows, rscale, rcap, rrows, *names = key.split("|")
        return cls(
            tuple(filter(None, want.split("+"))), float(t), int(ignore), int(k), float(beta), int(budget), backend,
            float(scale), float(cap), int(rows), float(rscale), float(rcap), int(rrows),
            operand=names[0], shard=names[1],
        )  # fmt: skip


class Inputs(NamedTuple):
    """The tensors of a call, tokens flattened; the first `DIFFERENTIATED` get gradients."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    low: Tensor | None = None  # (N, R), the adapters' products of hidden, in the compute dtype
    up: Tensor | None = None  # (V, R), the adapters' b
    labels: Tensor | None = None  # (N,)
    temperature: Tensor | None = None  # (N,)
    candidates: Tensor | None = None  # (N, K)
    ref_hidden: Tensor | None = None  # (N, H')
    ref_weight: Tensor | None = None  # (V, H')
    ref_bias: Tensor | None = None  # (V,)
    ref_low: Tensor | None = None  # (N, R')
    ref_up: Tensor | None = None  # (V, R')


DIFFERENTIATED = Inputs._fields.index("labels")


@dataclass
class Needs:
    """Which gradients a call must give, in the order of `Inputs`."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    low: bool = False
    up: bool = False

    @property
    def any(self) -> bool:
        return any(self.flags)

    @property
    def flags(self) -> list[bool]:
        return [self.hidden, self.weight, self.bias, self.low, self.up]


@dataclass(frozen=True)
class Problem:
    """Inputs and options; `index` names the tokens that count (None: all), other tokens are never computed."""

    spec: Spec
    inputs: Inputs
    index: Tensor | None = None

    @classmethod
    def of(cls, spec: Spec, inputs: Inputs) -> Problem:
        """The problem with ignored tokens left out."""
        labels, index = inputs.labels, None
        if labels is not None and not capturing(inputs.hidden):
            valid = labels != spec.ignore_index
            index = None if bool(valid.all()) else valid.nonzero().squeeze(1)
        return cls(spec, inputs, index)

    @classmethod
    def checked(cls, spec: Spec, inputs: Inputs) -> Problem:
        """The problem, once its ids are known to lie in the vocabulary; ranks that share the head have met.

        The host waits for the device once, and again where tokens are ignored. Raises LabelError.
        """
        problem = cls(spec, inputs)
        if capturing(inputs.hidden):
            return problem
        valid = None if inputs.labels is None else inputs.labels != spec.ignore_index
        ids = {
            name: x if valid is None else torch.where(valid if x.dim() == 1 else valid[:, None], x, 0)
            for name, x in (("labels", inputs.labels), ("candidates", inputs.candidates))
            if x is not None and x.numel()
        }
        asked = [bound for x in ids.values() for bound in torch.aminmax(x)]
        asked += [] if valid is None else [valid.all()]
        found = torch.stack(asked).tolist() if asked else []
        for name, low, high in zip(ids, found[::2], found[1::2], strict=False):
            problem.check_ids(name, low, high)
        return problem if valid is None or found[-1] else replace(problem, index=valid.nonzero().squeeze(1))

    @classmethod
    def met(cls, spec: Spec, inputs: Inputs) -> Problem:
        """`checked`, where ranks have not met: a compiled graph has no collectives but its operators'."""
        cls(spec, inputs).meet()
        return cls.checked(spec, inputs)

    def meet(self, more: str = "", *alike: Tensor) -> None:
        """Make sure that the ranks that share the head make this very call. Raises RankError, the same on all.

        more, alike: options and tensors of the call that are not the problem's own.
        """
        if self.shard is None:
            return
        i = self.inputs
        kinds = [None if x is None else (x.dtype, tuple(x.shape[1:]), x.requires_grad) for x in i]
        options = f"{replace(self.spec, shard='').key}|{kinds}|{more}"
        every = i.hidden.new_full((), i.hidden.shape[0], dtype=torch.int64)
        counted = every if i.labels is None else (i.labels != self.spec.ignore_index).sum()
        given = [x for x in (i.temperature, i.candidates, *alike) if x is not None]
        meet(Call(self.shard, i.weight.shape[0], self.head.rows, options, i.hidden, counted, i.labels, given))

    def check_ids(self, name: str, low: int, high: int) -> None:
        """Raise LabelError where the lowest or the highest of some ids is not in the vocabulary."""
        rows = self.head.rows
        if low < 0 or high >= rows:
            wrong = low if low < 0 else high
            hint = f" or ignore_index={self.spec.ignore_index}" if name == "labels" else ""
            raise LabelError(f"{name}: expected ids in 0..{rows - 1}{hint}, got {wrong}; fix the ids or vocab_size")

    @property
    def n_tokens(self) -> int:
        return self.inputs.hidden.shape[0] if self.index is None else self.index.shape[0]

    @property
    def compute(self) -> torch.dtype:
        return compute_dtype(self.inputs.hidden)

    @cached_property
    def shard(self) -> VocabShard | None:
        return VocabShard.parse(self.spec.shard) if self.spec.shard else None

    @cached_property
    def head(self) -> LMHead:
        i, s = self.inputs, self.spec
        weight = i.weight.detach()
        return LMHead(weight, i.bias, s.scale, s.softcap or None, s.vocab_size or None, shard=self.shard)

    @cached_property
    def reference(self) -> LMHead | None:
        i, s = self.inputs, self.spec
        if i.ref_weight is None:
            return None
        weight, rows = i.ref_weight.detach(), self.head.rows
        return LMHead(weight, i.ref_bias, s.ref_scale, s.ref_softcap or None, rows, shard=self.shard)

    def rows(self, x: Tensor, rows: slice) -> Tensor:
        """The rows of `x` (N, ...) that belong to the counted tokens `rows`."""
        return x[rows] if self.index is None else x[self.index[rows]]

    def take(self, x: Tensor | None, rows: slice) -> Tensor | None:
        """`rows` of what may be absent."""
        return None if x is None else self.rows(x, rows)

    def chunk(self, rows: slice) -> Inputs:
        """The inputs of some counted tokens."""
        i = self.inputs
        return replace_tokens(i, lambda x: self.take(x, rows))

    def put(self, x: Tensor, rows: slice, values: Tensor) -> None:
        """Write the counted tokens' `values` into `x` (N, ...)."""
        if self.index is None:
            x[rows] = values.to(x.dtype)
        else:
            x[self.index[rows]] = values.to(x.dtype)


def capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which nothing may wait for the device."""
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def settled(spec: Spec, inputs: Inputs) -> tuple[Inputs, Tensor | None]:
    """Where tokens cannot be left out, in a CUDA graph: ignored ones with a label that exists, and which tokens count.

    Everywhere else the inputs as they are, and None.
    """
    if inputs.labels is None or not capturing(inputs.hidden):
        return inputs, None
    counted = inputs.labels != spec.ignore_index
    return inputs._replace(labels=torch.where(counted, inputs.labels, 0)), counted


def hidden_where_ignored(out: dict[str, Tensor], counted: Tensor | None) -> dict[str, Tensor]:
    """The statistics with what ignored tokens get in their places; their upstream gradients then are 0."""
    if counted is None:
        return out
    blanks = {name: -1 if name == "top_k_ids" else 0 for name in out}
    return {
        name: torch.where(counted if x.dim() == 1 else counted[:, None], x, blanks[name]) for name, x in out.items()
    }


def full_precision(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off: operands already have the dtype that autocast wants, the rest stays fp32."""
    return torch.autocast(device_type, enabled=False) if has_autocast(device_type) else nullcontext()


def has_autocast(device_type: str) -> bool:
    """Whether autocast knows this kind of device; it does where a caller is compiled: torch 2.11 cannot ask there."""
    return torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype of statistics, losses and accumulated gradients: fp32, fp64 for fp64 inputs."""
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def replace_tokens(inputs: Inputs, take: Callable[[Any], Any]) -> Inputs:
    """The inputs with `take` applied to what has a row per token."""
    return inputs._replace(
        hidden=take(inputs.hidden),
        low=take(inputs.low),
        labels=take(inputs.labels),
        temperature=take(inputs.temperature),
        candidates=take(inputs.candidates),
        ref_hidden=take(inputs.ref_hidden),
        ref_low=take(inputs.ref_low),
    )
