"""The drivers: a whole problem, chunk by chunk, for each of the prices. Backends know chunks, the engine calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...algebra.costs import Price, Slices, fused_slices_of, slices_of, sparse_slices, tiles_of
from ...algebra.fold import Totals
from ...algebra.stats import STATISTICS, bases_of, sums_of
from ..backends.base import Chunk, Folded, Grads, Scratch, Skip
from ..backends.load import load
from ..backends.logits import operand_dtype, weight_sum
from ..backends.sharded import Parallel
from ..backends.triton.tuned import table_for
from ..call.call import Inputs, Needs, Problem, Spec, capturing, compute_dtype, full_precision
from ..call.validate import check
from ..head.shard import VocabShard
from ..ranks.agreement import layout_of
from .gradient import Accumulator, one_hots, unfold


def slices_for(
    spec: Spec, inputs: Inputs, n_tokens: int, whole: bool, wide: bool = False, bases: int = 0, skips: bool = False
) -> Slices:
    """The slice sizes that a call gets; bases: how many products accumulate during the fold; skips: as `Pass`."""
    compute, reference = compute_dtype(inputs.hidden), inputs.ref_weight is not None
    converted = sum(
        w.shape[1]
        for w in (inputs.weight, inputs.ref_weight)
        if w is not None and (w.dtype != operand_dtype(inputs.hidden, w.dtype, compute) or spec.operand)
    )
    converted += sum(x.shape[1] for x in (inputs.up, inputs.ref_up) if x is not None and x.dtype != compute)
    size, same = (
        (n_tokens, _widest(spec, inputs)),
        {
            "budget": spec.budget,
            "itemsize": compute.itemsize,
            "heads": 1 + reference,
            "converted": converted,
            "whole": whole,
        },
    )
    if spec.backend == "triton":
        table = table_for(inputs.hidden.device)
        if table["overlap"] and not (whole or bases):  # two slices live at once
            same["heads"] *= 2
        return fused_slices_of(*size, **same, bases=bases, streamed=table["streamed_bytes"])
    tiles = tiles_of(spec.want, softcap=bool(spec.softcap), top_k=spec.top_k)
    found = slices_of(*size, **same, device=inputs.hidden.device.type, tiles=tiles, wide=wide)
    if not skips or spec.sparse is None:
        return found
    rank = 0 if inputs.up is None else inputs.up.shape[1]
    return sparse_slices(found, spec.sparse.width, size[1], inputs.hidden.shape[1] + rank, compute.itemsize)


def _widest(spec: Spec, inputs: Inputs) -> int:
    """The rows of the rank that has most: all ranks take the same chunks of tokens."""
    if not spec.shard:
        return spec.vocab_size or inputs.weight.shape[0]
    shard = VocabShard.parse(spec.shard)
    return layout_of(shard, spec.vocab_size or shard.total).widest


class Pass:
    """A problem with its slices, buffers and the head's summed rows."""

    def __init__(self, problem: Problem, whole: bool, wide: bool = False, bases: int = 0, skips: bool = False) -> None:
        self.problem = problem
        self.sparse = problem.spec.sparse if skips else None  # skips: whether a backward could do without some of p
        if self.sparse is not None:
            check(problem.spec, problem.reference is not None, capturing(problem.inputs.hidden))
        self.backend = load(problem.spec.backend)
        if problem.shard is not None:
            self.backend = Parallel(self.backend, problem.shard, problem.head.rows)
        i = problem.inputs
        self.slices = slices_for(problem.spec, i, problem.n_tokens, whole, wide, bases, skips)
        self.scratch = Scratch(problem.compute, i.hidden.device)
        self._sums: list[Tensor] | None = None

    def chunks(self):
        """(rows, chunk) over the counted tokens."""
        n, step = self.problem.n_tokens, self.slices.tokens
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            yield rows, Chunk.of(self.problem, rows, self.slices, self.scratch)

    def sums(self) -> list[Tensor]:
        """The sum over the vocabulary of each of the head's factors."""
        if self._sums is None:
            p = self.problem
            self._sums = [weight_sum(p.head.weight[: p.head.held], p.compute, p.spec.operand)]
            if p.inputs.up is not None:
                self._sums.append(weight_sum(p.inputs.up[: p.head.held], p.compute))
        return self._sums

    def fold(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Folded:
        """The backend's fold, completed by what needs no slice: the mean logit, and jsd's second look."""
        chunk.shares = None if self.sparse is None else []
        folded = self.backend.fold(chunk, bases, "logits" if "jsd" in chunk.sums else keep)
        if self.sparse is not None and chunk.shares:
            chunk.skip = Skip.of(chunk.shares, folded.totals, self.sparse)
            chunk.shares = None
        if "zsum" in chunk.sums and folded.totals.mean_logit is None:
            folded.totals.mean_logit = chunk.policy.mean(self.sums())
        if "jsd" in chunk.sums:
            self.backend.second_look(chunk, folded.totals)
        return folded

    def unfold(self, chunk: Chunk, totals: Totals, extra, stat_grads, grads: Grads, products=None) -> None:
        """`gradient.unfold` with this pass's backend and summed rows."""
        unfold(self.backend, self.problem, chunk, totals, extra, stat_grads, grads, self.sums, products)

    def put(self, into: dict[str, Tensor], rows: slice, part: dict[str, Tensor]) -> None:
        """Write a chunk's numbers into `into`, (N, ...) each, made here with what ignored tokens get."""
        for name, x in part.items():
            if name not in into:
                into[name] = self.blank(name, x.shape[1:], x.dtype)
            self.problem.put(into[name], rows, x)

    def blank(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        i = self.problem.inputs
        fill = -1 if name == "top_k_ids" else 0
        return torch.full((i.hidden.shape[0], *shape), fill, dtype=dtype, device=i.hidden.device)


def read(problem: Problem, chunk: Chunk, folded: Folded) -> dict[str, Tensor]:
    """The wanted statistics of a folded chunk."""
    spec = problem.spec
    out = {name: STATISTICS[name].value(folded.totals, problem.head.rows) for name in spec.want}
    if spec.top_k:
        assert folded.top_ids is not None
        assert folded.top_logits is not None
        out["top_k_ids"] = folded.top_ids[:, : spec.top_k]
        out["top_k_logits"] = folded.top_logits[:, : spec.top_k]
    if chunk.inputs.candidates is not None:
        known = folded.candidates
        out["candidate_logits"] = chunk.policy.at(chunk.inputs.candidates) if known is None else known
    return out


@dataclass
class Saved:
    """What backward needs beside the inputs, all tokens, O(N): totals, best entries, candidates' logits, products."""

    totals: dict[str, Tensor]
    extra: dict[str, Tensor]
    products: dict[str, Tensor]

    def flat(self) -> tuple[list[str], list[Tensor]]:
        names = [f"{kind}.{k}" for kind, part in vars(self).items() for k in part]
        return names, [t for part in vars(self).values() for t in part.values()]

    @classmethod
    def of(cls, names: list[str], tensors: list[Tensor]) -> Saved:
        out = cls({}, {}, {})
        for name, tensor in zip(names, tensors, strict=True):
            kind, key = name.split(".")
            getattr(out, kind)[key] = tensor
        return out


F = TypeVar("F", bound=Callable[..., Any])


def _exact(driver: F) -> F:
    """`driver` in full precision."""

    @wraps(driver)
    def run(problem: Problem, *args: Any, **kwargs: Any) -> Any:
        with full_precision(problem.inputs.hidden.device.type):
            return driver(problem, *args, **kwargs)

    return run  # pyright: ignore[reportReturnType]


@_exact
def values(problem: Problem, price: Price, save: bool) -> tuple[dict[str, Tensor], Saved]:
    """The wanted statistics of all tokens (0 where ignored, ids -1), and what backward needs."""
    run = Pass(problem, price.whole_rows, bases=len(price.bases), skips=price.skips)
    out: dict[str, Tensor] = {}
    saved = Saved({}, {}, {})

    for rows, chunk in run.chunks():
        folded = run.fold(chunk, price.bases)
        part = read(problem, chunk, folded)
        run.put(out, rows, part)
        if save:
            run.put(saved.totals, rows, dict(folded.totals.items()))
            run.put(saved.products, rows, folded.products)
            run.put(saved.extra, rows, one_hots(problem, folded, part) | _skipped(chunk))
    for name, (shape, dtype) in outputs(problem.spec, problem.inputs).items():
        if name not in out:
            out[name] = run.blank(name, shape, dtype)
    return out, saved


def outputs(spec: Spec, inputs: Inputs) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The trailing shape and dtype of every output."""
    real = compute_dtype(inputs.hidden)
    out: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in spec.want:
        out[name] = (), torch.int64 if name == "rank" else real
    if spec.top_k:
        out |= {"top_k_ids": ((spec.top_k,), torch.int64), "top_k_logits": ((spec.top_k,), real)}
    if inputs.candidates is not None:
        out["candidate_logits"] = (inputs.candidates.shape[1],), real
    return out


@_exact
def gradients(
    problem: Problem, price: Price, saved: Saved, stat_grads: dict[str, Tensor], needs: Needs
) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias, dlow, dup) for upstream gradients of the statistics, (N, ...) each."""
    # the fold's slices: other shapes of a GEMM round differently
    run = Pass(problem, price.whole_rows, bases=len(price.bases), skips=price.skips)
    total = _begun(run, needs)
    for rows, chunk in run.chunks():
        grads = total.chunk(chunk.n_tokens)

        def some(part: dict[str, Tensor], rows: slice = rows) -> dict[str, Tensor]:
            return {name: problem.rows(x, rows) for name, x in part.items()}

        products = some(saved.products) if price.method == "fold-basis" else None
        extra = some(saved.extra)
        chunk.skip = Skip.saved(extra, run.sparse)
        run.unfold(chunk, Totals(**some(saved.totals)), extra, some(stat_grads), grads, products)
        total.put(rows, grads)
    return total.result()


def _begun(run: Pass, needs: Needs) -> Accumulator:
    """Gradients with nothing in them, and nothing left out of them."""
    if run.sparse is not None:
        run.sparse.begin()
    return Accumulator(run.problem, needs)


def _skipped(chunk: Chunk) -> dict[str, Tensor]:
    return {} if chunk.skip is None else chunk.skip.items()


Evaluate = Callable[[slice, dict[str, Tensor]], dict[str, Tensor]]


@_exact
def loss_gradients(problem: Problem, needs: Needs, evaluate: Evaluate) -> tuple[Accumulator, Saved, dict[str, Tensor]]:
    """One pass with the gradient formed at once: `evaluate(rows, stats)` returns dL/dstats of a chunk.

    Returns the accumulated gradients, and what a second backward needs: totals and the statistics' gradients.
    """
    run = Pass(problem, whole=True, skips=needs.any)
    total = _begun(run, needs)
    saved, stat_grads = Saved({}, {}, {}), {}

    spec = problem.spec
    simple = bases_of(spec.want) <= {"p"} and "t" not in sums_of(spec.want) and not spec.softcap
    for rows, chunk in run.chunks():
        folded = run.fold(chunk, keep="weights" if simple else "logits")
        part = read(problem, chunk, folded)
        extra = one_hots(problem, folded, part) | _skipped(chunk)
        g = evaluate(rows, part)
        if needs.any:
            grads = total.chunk(chunk.n_tokens)
            run.unfold(chunk, folded.totals, extra, g, grads)
            total.put(rows, grads)
        run.put(saved.totals, rows, dict(folded.totals.items()))
        run.put(saved.extra, rows, extra)
        run.put(stat_grads, rows, g)
    return total, saved, stat_grads
