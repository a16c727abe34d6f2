"""What backends take and give: some tokens of a problem with their buffers, the totals of a fold, the gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...algebra.costs import Slices
from ...algebra.fold import MASK, Fold, Totals, finish
from ...algebra.stats import Slope, mixture_shares, sums_of
from ..call.call import Inputs, Problem
from ..head.sparse import BOUNDED, SparseBackward
from .load import rows_of
from .logits import Operands, Projection, mask_labels


class Scratch:
    """Named buffers that every slice and chunk of a call reuse."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.buffers: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor | tuple[int, int]) -> Tensor:
        rows, width = like.shape if isinstance(like, Tensor) else like
        need = rows * width
        if name not in self.buffers or self.buffers[name].numel() < need:
            self.buffers[name] = torch.empty(need, dtype=self.dtype, device=self.device)
        return self.buffers[name][:need].view(rows, width)


@dataclass
class Tile:
    """A slice of logits, (C, S): the policy's, the reference's and their gap z_ref - z; or weights relative to `m`."""

    v: slice
    z: Tensor
    z_ref: Tensor | None = None
    m: Tensor | None = None  # where set, z holds e^(z-m)
    raw: bool = False  # the slice holds the heads' bare products, without scale, bias, softcap and temperature


@dataclass
class Chunk:
    """A chunk of tokens; `label` holds the label's logit and its reference logit, `kept` the slices of whole rows."""

    inputs: Inputs
    policy: Projection
    reference: Projection | None
    slices: Slices
    scratch: Scratch
    sums: frozenset[str]
    top_k: int
    jsd_beta: float
    label: tuple[Tensor, Tensor | None] | None
    kept: list[Tile] = field(default_factory=list)
    shares: list[Share] | None = None  # of each slice, where a sparse backward is to know them
    skip: Skip | None = None  # what it leaves out

    @classmethod
    def of(cls, problem: Problem, rows: slice, slices: Slices, scratch: Scratch) -> Chunk:
        i, compute = problem.chunk(rows), problem.compute
        temperature = problem.spec.temperature if i.temperature is None else i.temperature
        table = rows_of(problem.spec.backend)
        policy = Projection(i.hidden, problem.head, temperature, compute, problem.spec.operand, (i.low, i.up), table)
        reference = label = None
        if problem.reference is not None and i.ref_hidden is not None:
            reference = Projection(
                *(i.ref_hidden, problem.reference, temperature, compute, problem.spec.operand),
                *((i.ref_low, i.ref_up), table),
            )
        if i.labels is not None:
            label = policy.at(i.labels), None if reference is None else reference.at(i.labels)
        sums = sums_of(problem.spec.want)
        top_k = max(problem.spec.top_k, int("argmax" in sums))
        return cls(i, policy, reference, slices, scratch, sums, top_k, problem.spec.jsd_beta, label)

    @property
    def n_tokens(self) -> int:
        return self.inputs.hidden.shape[0]

    @property
    def sums_logits(self) -> bool:
        """Whether the fold adds the logits up: where the head's summed rows do not give their mean."""
        return "zsum" in self.sums and (self.policy.outer is not None or self.policy.head.shard is not None)

    @property
    def may_be_infinite(self) -> bool:
        """Whether a logit can be -inf: only a bias can make it so."""
        return self.policy.bias is not None or (self.reference is not None and self.reference.bias is not None)

    def vocabulary(self) -> Iterator[slice]:
        """Slices of the rows here."""
        size, width = self.policy.head.held, self.slices.width
        return (slice(v, min(v + width, size)) for v in range(0, size, width))

    def logits(self, v: slice, w: Operands, name: str = "") -> Tile:
        """The slice's logits, in the buffers that `name` tells apart."""
        shape = self.n_tokens, v.stop - v.start
        tile = Tile(v, self.policy.logits(w, v, self.scratch.take("z" + name, shape)))
        if self.reference is not None:
            ref = self.reference
            tile.z_ref = ref.logits(ref.operand(v), v, self.scratch.take("z_ref" + name, shape))
        return tile

    def mask(self, tile: Tile) -> None:
        """Take the label out of the slice; -inf becomes MASK."""
        for z in (tile.z, tile.z_ref):
            if z is None:
                continue
            if self.may_be_infinite:
                z.clamp_(min=MASK)
            if self.inputs.labels is not None:
                mask_labels(z, self.inputs.labels - (self.policy.head.first + tile.v.start))

    def gap(self, tile: Tile, shift: Tensor) -> Tensor:
        """-e = z_ref - z + d0, before masking or after; 0 where both are -inf."""
        assert tile.z_ref is not None
        gap = torch.sub(tile.z_ref, tile.z, out=self.scratch.take("gap", tile.z))
        if self.may_be_infinite:
            gap.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)
        return gap.add_(shift[:, None])


@dataclass
class Folded:
    """A chunk after its fold: totals, the best entries, and per basis Σ basis_v·W_v with the label left out."""

    totals: Totals
    top_ids: Tensor | None = None  # (C, k)
    top_logits: Tensor | None = None  # (C, k)
    products: dict[str, Tensor] = field(default_factory=dict)  # basis -> (C, H + R), of the rows here
    candidates: Tensor | None = None  # (C, K), their logits where the fold had to ask for them


@dataclass
class Part:
    """The fold of the rows here, the label's entry left out, before it is finished."""

    fold: Fold
    normalised: Callable[[Totals], dict[str, Tensor]]  # the products, once the totals are known
    zsum: Tensor | None = None  # (C,), the sum of the logits, the label's included
    best: tuple[Tensor, Tensor] | None = None  # (C, k) logits and rows, best first, -inf and -1 where there are less
    finish: Callable[[Fold, Any], Totals] = lambda fold, label: finish(fold, label, torch)  # with the chunk's label

    def folded(self, chunk: Chunk) -> Folded:
        """What a fold of all rows amounts to."""
        totals = self.finish(self.fold, chunk.label)
        if self.zsum is not None:
            totals.mean_logit = self.zsum / chunk.policy.head.rows
        out = Folded(totals, products=self.normalised(totals))
        if self.best is not None:
            out.top_logits, out.top_ids = self.best
        return out


def put_mixture(chunk: Chunk, totals: Totals, jsd: Tensor, kl_mixture: Tensor) -> None:
    """jsd and KL(p||M) into `totals`, from their sums over all entries but the label."""
    if chunk.label is not None:
        e = totals.label_logit - totals.label_ref - totals.shift
        d = torch.where(e.isnan(), 0.0, e) + totals.log_ratio
        q = torch.exp((totals.label_ref - totals.m_ref) - totals.log_s_ref)
        shares = mixture_shares(torch.exp(totals.logprob), q, d, chunk.jsd_beta, torch)
        jsd, kl_mixture = jsd + shares[0], kl_mixture + shares[1]
    totals.jsd, totals.kl_mixture = jsd.clamp(min=0), kl_mixture


@dataclass
class Grads:
    """Gradients being accumulated, in the compute dtype; None where not needed. Per token those of the chunk."""

    hidden: Tensor | None = None  # (C, H)
    weight: Tensor | None = None  # (V, H)
    bias: Tensor | None = None  # (V,)
    low: Tensor | None = None  # (C, R)
    up: Tensor | None = None  # (V, R)
    blank: list[Tensor] = field(default_factory=list)  # of these, those with nothing in them yet

    def begins(self, x: Tensor | None) -> bool:
        """Whether `x` has nothing in it yet, so that its first part is written, not added; said once."""
        found = [i for i, y in enumerate(self.blank) if y is x]
        return bool(found) and self.blank.pop(found[0]) is x

    def clear(self) -> None:
        """Zero what has nothing in it yet."""
        while self.blank:
            self.blank.pop().zero_()

    @property
    def all(self) -> list[Tensor | None]:
        return [self.hidden, self.weight, self.bias, self.low, self.up]

    @property
    def pairs(self) -> tuple[tuple[Tensor | None, Tensor | None], ...]:
        """(per token, per entry) for each of the head's factors."""
        return (self.hidden, self.weight), (self.low, self.up)


WHOLE = 0.9  # of a chunk's tokens, from which on a slice takes all of them: gathering costs more


class Share(NamedTuple):
    """A slice's part of each token's sums, (C,) each, w = e^(z-m)."""

    m: Tensor
    w: Tensor  # Σw
    t: Tensor | None  # Σw·(z-m), where entropy is wanted


@dataclass
class Skip:
    """What a chunk's backward pass leaves out."""

    kept: Tensor  # (C, J), whether a token takes part in the products of a slice
    mass: Tensor  # (C,), what a token leaves out
    report: SparseBackward

    @classmethod
    def of(cls, shares: list[Share], totals: Totals, report: SparseBackward) -> Skip:
        """Of each token the slices of least mass, while their sum keeps to the bound."""
        mass = masses(shares, totals)
        ordered, order = mass.sort(1)
        keeps = ~(ordered.cumsum(1) <= report.bound)  # NaN keeps
        kept = torch.zeros_like(keeps).scatter_(1, order, keeps)
        kept |= kept.sum(0) > WHOLE * kept.shape[0]
        return cls(kept, mass.masked_fill_(kept, 0.0).sum(1), report)

    @classmethod
    def saved(cls, extra: dict[str, Tensor], report: SparseBackward | None) -> Skip | None:
        """From what `items` gave."""
        return None if report is None else cls(extra["kept_slices"], extra["skipped_mass"], report)

    def items(self) -> dict[str, Tensor]:
        """What has to wait for backward."""
        return {"kept_slices": self.kept, "skipped_mass": self.mass}

    def rows(self, chunk: Chunk, slope: Slope) -> list[Tensor | None]:
        """The tokens of each slice, None where they are all of the chunk's; and the report's part of this chunk."""
        weight = torch.stack([slope[basis].abs() for basis in sorted(BOUNDED & slope.keys())]).sum(0)
        kept = (self.kept & (weight != 0)[:, None]).t().contiguous()
        counts = kept.sum(1).tolist()  # the one wait for the device
        computed = sum(count * (v.stop - v.start) for count, v in zip(counts, chunk.vocabulary(), strict=True))
        n = chunk.n_tokens
        self.report.add(self.mass, weight, computed, n * chunk.policy.head.held)
        rows = torch.nonzero_static(kept.view(-1), size=sum(counts)).squeeze(1).remainder_(n).split(counts)
        return [None if x.shape[0] == n else x for x in rows]


def masses(shares: list[Share], totals: Totals) -> Tensor:
    """Each token's mass in each slice, (C, J): Σp, or Σ p·|log p| where that is asked for and more."""
    offset = torch.stack([share.m for share in shares], 1)
    offset.sub_(totals.m[:, None]).sub_(totals.log_s[:, None])  # log p = (z - m) + offset
    w = torch.stack([share.w for share in shares], 1)
    sharp = [share.t for share in shares if share.t is not None]
    if sharp:
        torch.maximum(w, torch.stack(sharp, 1).addcmul_(w, offset).neg_(), out=w)
    return w.mul_(offset.exp_())
