"""`LMHead`: what turns a hidden state into logits, without doing it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...algebra.options import is_in_float32, whole_within
from ...errors import ConfigError, DeviceError, DtypeError, OptionError, ShapeError
from ..dtypes import dtype_of
from .from_model import parts_of_model
from .low_rank import LowRank, in_shapes
from .packed import quantised
from .quantised import Weight
from .shard import VocabShard, check_plain, is_dtensor, local_part, localised
from .sparse import SparseBackward


@dataclass(frozen=True, eq=False)
class LMHead:
    """A language-model head: z = softcap(scale · (h · Wᵀ + b + adapters)) over the first `vocab_size` rows of W.

    Dense equivalent:

        z = F.linear(hidden, weight[:vocab_size], bias[:vocab_size])
        for x in adapters:
            z = z + x.scaling * F.dropout(hidden, x.dropout) @ x.a.T @ x.b[:vocab_size].T
        z = scale * z
        z = softcap * torch.tanh(z / softcap) if softcap else z

    weight: (V, H), any floating dtype, or quantised and frozen: a `QuantisedWeight`, or a weight-only int8 or fp8
    tensor of torchao or a 4-bit one of bitsandbytes, whose slices are dequantised as they are used. bias: (V,) or None.
    adapters: `LowRank` additions, which stay factors: no (V, H) product of them is formed. Rows of W past `vocab_size`
    (padding) do not exist: they get no probability and no gradient. Holds references, copies nothing.
    shard: where the vocabulary is split over ranks, which rows weight, bias and the adapters' b are; vocab_size counts
    those of all ranks. A weight that is a DTensor with Shard(0) over a mesh of one dimension says so itself (and its
    bias with it): the head then holds its local rows. Every rank gives the same tokens and gets the same results.
    sparse: leaves out of backward what its bound allows, and says what; None: nothing.
    token_ids: (V,), where the rows are those of a draft vocabulary, their ids in the vocabulary of the target, which a
    `reference` without token_ids then is over: every other entry has probability 0 here, and its own there. Labels,
    candidates and top-k ids stay numbers of rows.
    Raises ShapeError, DtypeError, DeviceError, OptionError, and ConfigError for a weight that is sharded otherwise, or
    quantised in another way or while it requires grad.
    """

    weight: Weight  # (V, H)
    bias: Tensor | None = None  # (V,)
    scale: float = 1.0
    softcap: float | None = None
    vocab_size: int | None = None
    adapters: tuple[LowRank, ...] = ()
    shard: VocabShard | None = None
    sparse: SparseBackward | None = None
    token_ids: Tensor | None = None  # (V,) int64

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", quantised(self.weight))
        self._localise()
        for name, kind in (("shard", VocabShard), ("sparse", SparseBackward)):
            if not isinstance(x := getattr(self, name), kind | None):
                raise OptionError(f"LMHead: {name} must be a {kind.__name__} or None, got {type(x).__name__}")
        _check_weight(self.weight, self.shard)
        _check_bias(self.bias, self.weight)
        _check_adapters(self.adapters, self.weight)
        if self.vocab_size is not None:
            size = whole_within("LMHead: vocab_size", self.vocab_size, 1, self.padded_rows, "weight's rows")
            object.__setattr__(self, "vocab_size", size)
        scale, cap = self.scale, self.softcap
        if not is_in_float32(scale):
            raise OptionError(f"LMHead: scale must be a finite number, in float32 too, got {scale}")
        if cap is not None and not (is_in_float32(cap) and cap > 0):
            raise OptionError(f"LMHead: softcap must be positive or None, and finite in float32, got {cap}")
        object.__setattr__(self, "scale", float(self.scale))
        object.__setattr__(self, "softcap", None if self.softcap is None else float(self.softcap))
        _check_token_ids(self.token_ids, self.rows, self.weight)

    def __repr__(self) -> str:
        return in_shapes(self)

    @property
    def rows(self) -> int:
        """The number of vocabulary entries that exist, on all ranks."""
        return self.vocab_size if self.vocab_size is not None else self.padded_rows

    @property
    def padded_rows(self) -> int:
        """The rows of the weight, on all ranks, whether they exist or not."""
        return self.weight.shape[0] if self.shard is None else self.shard.total

    @property
    def vocab_start(self) -> int:
        """The vocabulary id of the weight's first row here."""
        return 0 if self.shard is None else self.shard.offset

    @property
    def local_rows(self) -> int:
        """How many of the weight's rows here exist."""
        return min(self.weight.shape[0], max(0, self.rows - self.vocab_start))

    @property
    def weight_tensor(self) -> Tensor | None:
        """The weight where it is a tensor, which autograd may differentiate; None where it is quantised."""
        return self.weight if isinstance(self.weight, Tensor) else None

    def with_tensors(self, weight: Tensor | None, bias: Tensor | None) -> LMHead:
        """The head on tensors that autograd saved, of the same shapes: nothing is checked again.

        weight: None where it is quantised, which stays as it is.
        """
        other = copy(self)
        if weight is not None:
            object.__setattr__(other, "weight", weight)
        object.__setattr__(other, "bias", bias)
        return other

    def with_shard(self, shard: VocabShard) -> LMHead:
        """The head with what the ranks have agreed on."""
        other = copy(self)
        object.__setattr__(other, "shard", shard)
        return other

    def _localise(self) -> None:
        """Put a DTensor's local rows in its place."""
        if not is_dtensor(self.weight) or self.shard is not None:
            return
        weight, shard = localised("LMHead: weight", self.weight)
        if self.bias is not None:
            if not is_dtensor(self.bias):
                raise ConfigError("LMHead: bias must be a DTensor with Shard(0), as weight is, got a plain tensor")
            object.__setattr__(self, "bias", localised("LMHead: bias", self.bias)[0])
        object.__setattr__(self, "weight", weight)
        object.__setattr__(self, "shard", shard)
        if isinstance(self.adapters, tuple):
            object.__setattr__(self, "adapters", tuple(map(_localised_adapter, self.adapters)))

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    @classmethod
    def of(cls, module: nn.Module, *, sparse: SparseBackward | None = None) -> LMHead:
        """The head of a model or of its head layer: weight, bias, tied embedding, softcap, scale, LoRA factors.

        Dense equivalent: `z` of the returned head equals `module(hidden)` or `model(...).logits`, padded rows
        included where the model itself gives them logits; with LoRA dropout where the layer is training.
        hidden is what the model calls its head with, as `logitless.hidden_states` returns it: mostly the body's
        last_hidden_state (MiniCPM3 and Inkling divide that first, BERT transforms it).
        module: an `nn.Linear`, a transformers model, a PEFT model or layer (active, merged or disabled LoRA, a
        `modules_to_save` copy), bare or under DDP or torch.compile. sparse: as the head's own. Look it up anew for
        every call: wrappers replace parameters. Raises ConfigError for a module without an output head, and for heads
        it does not know (DoRA, other adapters, trained quantised, sharded, with hooks or a replaced forward),
        which it never ignores. A weight that a hook makes (weight_norm, spectral_norm, prune) is made anew, as by
        a call of the layer: while it trains, spectral_norm's moves with each.
        """
        return cls(**parts_of_model(module), sparse=sparse)


def place(ids: Tensor, vocab_start: int, local_rows: int) -> tuple[Tensor, Tensor]:
    """(rows here, whether these are the entries) for vocabulary ids, of `local_rows` rows from id `vocab_start` on."""
    rows = ids - vocab_start
    return rows.clamp(0, max(0, local_rows - 1)), (rows >= 0) & (rows < local_rows)


def _localised_adapter(x: LowRank) -> LowRank:
    """The adapter of a head that is a DTensor: a whole on every rank, and of b the rows that are here."""
    a, b = x.a, x.b
    if is_dtensor(a):
        placements: Any = a.placements  # pyright: ignore[reportAttributeAccessIssue]
        if any(type(each).__name__ != "Replicate" for each in placements):
            raise ConfigError(f"LowRank: a is sharded as {tuple(placements)}, expected Replicate(); redistribute it")
        a = local_part(a)
    return replace(x, a=a, b=localised("LowRank: b", b)[0] if is_dtensor(b) else b)


def _check_weight(weight: Weight, shard: VocabShard | None) -> None:
    if isinstance(weight, Tensor):
        check_plain("LMHead: weight", weight)
    if not isinstance(weight, Weight) or len(weight.shape) != 2:
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        hint = "; use LMHead.of(module)" if isinstance(weight, torch.nn.Module) else ""
        raise ShapeError(f"LMHead: weight must be a (vocab, hidden) tensor, got {got}{hint}")
    if not weight.dtype.is_floating_point:
        raise DtypeError(f"LMHead: weight must be floating point, got {weight.dtype}; dequantise it first")
    if shard is None and weight.shape[0] == 0:
        raise ShapeError("LMHead: weight has no rows; a vocabulary needs at least one entry")
    if shard is not None and shard.offset + weight.shape[0] > shard.total:
        raise ShapeError(
            f"LMHead: weight has {weight.shape[0]} rows from row {shard.offset} on, expected at most {shard.total} on "
            "all ranks; give VocabShard the offset of this rank's first row and the total"
        )


def _check_bias(bias: Tensor | None, weight: Weight) -> None:
    if bias is None:
        return
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        got = dtype_of(bias)
        raise DtypeError(f"LMHead: bias must be a floating point tensor or None, got {got}")
    check_plain("LMHead: bias", bias, matrix=False)
    rows = weight.shape[0]
    if tuple(bias.shape) != (rows,):
        raise ShapeError(f"LMHead: bias must have shape ({rows},), one per row, got {tuple(bias.shape)}")
    if bias.device != weight.device:
        raise DeviceError(f"LMHead: bias is on {bias.device}, weight on {weight.device}; move one")


def _check_token_ids(ids: Tensor | None, rows: int, weight: Weight) -> None:
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = dtype_of(ids)
        raise DtypeError(f"LMHead: token_ids must be an int64 tensor or None, got {got}; a mask has .nonzero()[:, 0]")
    if tuple(ids.shape) != (rows,):
        raise ShapeError(f"LMHead: token_ids must have shape ({rows},), one id per row, got {tuple(ids.shape)}")
    if ids.device != weight.device:
        raise DeviceError(f"LMHead: token_ids are on {ids.device}, weight on {weight.device}; move one")


def _check_adapters(adapters: tuple[LowRank, ...], weight: Weight) -> None:
    if not isinstance(adapters, tuple) or not all(isinstance(x, LowRank) for x in adapters):
        got = "something else in it" if isinstance(adapters, tuple) else type(adapters).__name__
        raise DtypeError(f"LMHead: adapters must be a tuple of LowRank, got {got}; pass adapters=(LowRank(a, b),)")
    rows, width = weight.shape
    for x in adapters:
        check_plain("LowRank: a", x.a)
        check_plain("LowRank: b", x.b)
        if x.b.shape[0] != rows or x.a.shape[1] != width:
            raise ShapeError(
                f"LMHead: an adapter of a weight {(rows, width)} needs a (rank, {width}) and b ({rows}, rank), "
                f"got {tuple(x.a.shape)} and {tuple(x.b.shape)}"
            )
        if x.a.device != weight.device:
            raise DeviceError(f"LMHead: an adapter is on {x.a.device}, weight on {weight.device}; move one")
