"""The drivers: a whole call, chunk by chunk, for each of the prices. Backends know chunks, the engine calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...algebra.costs import Price
from ...algebra.online_softmax import Totals, put_tail_label, widen
from ...algebra.stats import STATISTICS, looks_twice, sums_of
from ..backends.base import Accumulated, Backend, p_alone, put_second_sums
from ..backends.chunk import Chunk, Scratch
from ..backends.load import load
from ..backends.logits import weight_sum
from ..backends.sharded import ShardedBackend
from ..backends.skip import Skip
from ..call.call import Call, Needs, blank_of
from ..devices import full_precision
from ..sizing import current_sizing
from .gradient import GradientBuffers, add_gradient, one_hots
from .price import loss_price, planned, sparse_of
from .told import tell


def backend_of(call: Call) -> Backend:
    """The backend that serves a call, over all ranks where these share the head."""
    backend = load(call.options.backend)
    return backend if call.shard is None else ShardedBackend(backend, call.shard, call.head.rows)


class Pass:
    """A call with its slices, buffers and the head's summed rows."""

    def __init__(self, call: Call, price: Price, wide: bool = False, together: int = 0) -> None:
        self.call = call
        self.sparse = sparse_of(call, price)
        self.backend = backend_of(call)
        self.price, self.slices = planned(call, price, wide, together)
        tell(call, self.price)
        self.scratch = Scratch(call.compute, call.inputs.hidden.device)
        self._sums: list[Tensor] | None = None
        self._first: tuple[slice, Chunk] | None = None

    def begin(self) -> Pass:
        """Itself, with its first chunk made."""
        self._first = next(self.chunks(), None)
        if self._first is not None:
            chunk = self._first[1]
            chunk.prepared = self.backend.prepared(chunk)
            _ = chunk.label  # a launch of its own, while a device has nothing else to do
        return self

    def release(self) -> None:
        """Let go of buffers and of what was begun: the budget has no room for them beside another pass's."""
        self.scratch, self._first = Scratch(self.call.compute, self.call.inputs.hidden.device), None

    def chunks(self, within: slice | None = None) -> Iterator[tuple[slice, Chunk]]:
        """(rows, chunk) over the valid tokens, or over some of them."""
        first, stop = (0, self.call.n_tokens) if within is None else (within.start, within.stop)
        step, mode = self.slices.tokens, current_sizing()
        for start in islice(range(first, stop, step), None if mode is None else mode.most_chunks):
            yield self.chunk(slice(start, min(start + step, stop)))

    def chunk(self, rows: slice) -> tuple[slice, Chunk]:
        """The chunk of these valid tokens, with them."""
        first, self._first = self._first, None
        if first is not None and first[0] == rows:
            return first
        chunk = Chunk.of(self.call, rows, self.slices, self.scratch, self.backend.few_rows)
        chunk.stays = self.price.materialised
        return rows, chunk

    def sums(self) -> list[Tensor]:
        """The sum over the vocabulary of each of the head's factors."""
        if self._sums is None:
            call, rows = self.call, self.call.head.local_rows
            weights = call.inputs.class_weights
            weight, lora_b, sizes = call.head.weight[:rows], call.inputs.lora_b, (call.compute, call.budget)
            self._sums = [weight_sum(weight, *sizes, call.options.autocast, weights)]
            if lora_b is not None:
                self._sums.append(weight_sum(lora_b[:rows], *sizes, None, weights))
        return self._sums

    def accumulate(self, chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Accumulated:
        """The backend's accumulation, completed by what comes after it: the mean logit, and a second look."""
        chunk.slice_masses = None if self.sparse is None else []
        twice = looks_twice(chunk.sums)
        found = self.backend.accumulate(chunk, bases, "logits" if twice and self.price.materialised else keep)
        if self.sparse is not None and chunk.slice_masses:
            chunk.skip = Skip.of(chunk.slice_masses, found.totals, self.sparse)
            chunk.slice_masses = None
        if "zsum" in sums_of(self.call.options.want) and found.totals.mean_logit is None:
            found.totals.mean_logit = chunk.policy.mean(self.sums(), self.call.inputs.class_weights)
        shared = found.totals.log_s_ref
        if chunk.inputs.ref_outside is not None:
            more = widen(found.totals, chunk.inputs.ref_outside, torch)
            if "pD" in found.products:
                found.products["pD"].addcmul_(found.products["p"], more[:, None])
        if twice:
            put_second_sums(chunk, found.totals, self.backend.second_sums(chunk, found.totals))
        found.totals.log_s_ref = shared  # the gradient's q are shares of what the reference gives to these entries
        put_tail_label(found.totals, chunk.inputs.labels, chunk.inputs.candidates, torch)
        return found

    def put(self, into: dict[str, Tensor], rows: slice, part: dict[str, Tensor]) -> None:
        """Write a chunk's numbers into `into`, (N, ...) each, made here with what ignored tokens get."""
        for name, x in part.items():
            if name not in into:
                into[name] = self.blank(name, x.shape[1:], x.dtype)
            self.call.put(into[name], rows, x)

    def blank(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """What ignored tokens get, for every token."""
        hidden = self.call.inputs.hidden
        return torch.full((hidden.shape[0], *shape), blank_of(name), dtype=dtype, device=hidden.device)


def read(call: Call, chunk: Chunk, found: Accumulated) -> dict[str, Tensor]:
    """The wanted statistics of an accumulated chunk."""
    options = call.options
    out = {name: STATISTICS[name].value(found.totals, call.head.rows) for name in options.want}
    if options.top_k:
        assert found.top_ids is not None
        assert found.top_logits is not None
        out["top_k_ids"] = found.top_ids[:, : options.top_k]
        out["top_k_logits"] = found.top_logits[:, : options.top_k]
    if chunk.inputs.candidates is not None:
        known = found.candidates
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


def exact(driver: F) -> F:
    """`driver`, of a call or of its pass, in full precision."""

    @wraps(driver)
    def run(of: Any, *args: Any, **kwargs: Any) -> Any:
        call: Call = of if isinstance(of, Call) else of.call
        with full_precision(call.inputs.hidden.device.type):
            return driver(of, *args, **kwargs)

    return run  # pyright: ignore[reportReturnType]


@exact
def checked(call: Call, price: Price) -> Pass:
    """The pass of a call that is then known to have ids of the vocabulary alone, begun meanwhile."""
    return call.checked_while(lambda call: Pass(call, price).begin())


@exact
def values(run: Pass, save: bool) -> tuple[dict[str, Tensor], Saved]:
    """The wanted statistics of all tokens (0 where ignored, ids -1), and what backward needs."""
    out: dict[str, Tensor] = {}
    saved = Saved({}, {}, {})
    _read_all(run, out, saved if save else None)
    for name, (shape, dtype) in outputs(run.call).items():
        if name not in out:
            out[name] = run.blank(name, shape, dtype)
    return out, saved


def _read_all(run: Pass, out: dict[str, Tensor], saved: Saved | None, within: slice | None = None) -> None:
    """Write the wanted statistics into `out`, and what backward needs into `saved`; within: of these valid tokens."""
    for rows, chunk in run.chunks(within):
        found = run.accumulate(chunk, run.price.bases)
        part = read(run.call, chunk, found)
        run.put(out, rows, part)
        if saved is not None:
            run.put(saved.totals, rows, dict(found.totals.items()))
            run.put(saved.products, rows, found.products)
            skipped = {} if chunk.skip is None else chunk.skip.items()
            run.put(saved.extra, rows, one_hots(run.call, found, part) | skipped)


def outputs(call: Call) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The trailing shape and dtype of every output."""
    options, candidates = call.options, call.inputs.candidates
    out: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in options.want:
        out[name] = (), torch.int64 if name == "rank" else call.compute
    if options.top_k:
        out |= {"top_k_ids": ((options.top_k,), torch.int64), "top_k_logits": ((options.top_k,), call.compute)}
    if candidates is not None:
        out["candidate_logits"] = (candidates.shape[1],), call.compute
    return out


@exact
def gradients(
    call: Call, price: Price, saved: Saved, stat_grads: dict[str, Tensor], needs: Needs
) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias, dlora_hidden, dlora_b) for upstream gradients of the statistics, (N, ...) each."""
    # the forward pass's slices: other shapes of a GEMM round differently
    run = Pass(call, price)
    total = _begun(run, needs)
    _add_all(run, saved, stat_grads, total)
    return total.result()


def _add_all(
    run: Pass, saved: Saved, stat_grads: dict[str, Tensor], total: GradientBuffers, within: slice | None = None
) -> None:
    """Add to `total` what the statistics' gradients give; within: of these valid tokens."""
    for rows, chunk in run.chunks(within):
        grads = total.chunk(chunk.n_tokens)

        def some(part: dict[str, Tensor], rows: slice = rows) -> dict[str, Tensor]:
            return {name: run.call.rows(x, rows) for name, x in part.items()}

        products = some(saved.products) if run.price.method == "basis" else None
        extra = some(saved.extra)
        chunk.skip = Skip.saved(extra, run.sparse)
        totals, upstream = Totals(**some(saved.totals)), some(stat_grads)
        add_gradient(run.backend, chunk, totals, extra, upstream, grads, run.sums, products)
        total.put(rows, grads)


def _begun(run: Pass, needs: Needs, once: bool = False) -> GradientBuffers:
    """Gradients with nothing in them, and nothing left out of them; once: as `GradientBuffers` takes it."""
    if run.sparse is not None:
        run.sparse.begin()
    return GradientBuffers(run.call, run.backend, needs, once)


Evaluate = Callable[[slice, dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class Together:
    """Valid tokens that `evaluate` sees at once, and the price of those that are more than a chunk has room for."""

    rows: list[slice]  # one after another, all valid tokens together
    price: Price

    @property
    def most(self) -> int:
        return max((x.stop - x.start for x in self.rows), default=0)

    def apart(self, tokens: int) -> tuple[list[slice], list[slice]]:
        """(chunks of as many as `tokens` have room for, those of more tokens)."""
        chunks: list[slice] = []
        longer: list[slice] = []
        for rows in self.rows:
            if rows.stop - rows.start > tokens:
                longer.append(rows)
            elif chunks and chunks[-1].stop == rows.start and rows.stop - chunks[-1].start <= tokens:
                chunks[-1] = slice(chunks[-1].start, rows.stop)
            else:
                chunks.append(rows)
        return chunks, longer


class LossPass:
    """A loss's pass, of whose gradients there is nothing yet.

    together: of the tokens that are evaluated at once; rounds: whether the head's gradient may be in the dtype that it
    is handed over in where one product is all of it.
    """

    def __init__(self, call: Call, needs: Needs, together: Together | None = None, rounds: bool = False) -> None:
        self.needs, self.together = needs, together
        self.run = Pass(call, loss_price(call, needs), together=0 if together is None else together.most)
        self.once = rounds and self.run.backend.sums_once(call, self.run.slices)

    @property
    def call(self) -> Call:
        return self.run.call


@exact
def loss_gradients(loss: LossPass, evaluate: Evaluate) -> tuple[GradientBuffers, dict[str, Tensor]]:
    """One pass with the gradient formed at once: `evaluate(rows, stats)` returns dL/dstats of a chunk.

    Returns the accumulated gradients, and what a second backward needs: the statistics' gradients.
    """
    run, together = loss.run, loss.together
    total = _begun(run, loss.needs, loss.once)
    stat_grads: dict[str, Tensor] = {}
    if together is None:
        _evaluate_chunks(run, run.chunks(), evaluate, total, stat_grads)
        return total, stat_grads
    chunks, longer = together.apart(run.slices.tokens)
    _evaluate_chunks(run, map(run.chunk, chunks), evaluate, total, stat_grads)
    if longer:
        run.release()
        _evaluate_longer(Pass(run.call, together.price), longer, evaluate, total, stat_grads)
    return total, stat_grads


def _evaluate_chunks(
    run: Pass,
    chunks: Iterable[tuple[slice, Chunk]],
    evaluate: Evaluate,
    total: GradientBuffers,
    stat_grads: dict[str, Tensor],
) -> None:
    """`loss_gradients` of chunks, whose whole rows stay until their gradient is formed, where one is."""
    keep = None if not run.price.materialised else "weights" if p_alone(run.call) else "logits"
    for rows, chunk in chunks:
        found = run.accumulate(chunk, run.price.bases, keep)
        part = read(run.call, chunk, found)
        g = evaluate(rows, part)
        if run.price.method == "in-forward":
            grads = total.chunk(chunk.n_tokens)
            products = found.products if run.price.bases else None
            extra = one_hots(run.call, found, part)
            add_gradient(run.backend, chunk, found.totals, extra, g, grads, run.sums, products)
            total.put(rows, grads)
        run.put(stat_grads, rows, g)


def _evaluate_longer(
    run: Pass, longer: list[slice], evaluate: Evaluate, total: GradientBuffers, stat_grads: dict[str, Tensor]
) -> None:
    """`loss_gradients` of tokens that are more than a chunk has room for: first their numbers, then their gradient."""
    out: dict[str, Tensor] = {}
    saved = Saved({}, {}, {})
    for rows in longer:
        _read_all(run, out, saved, rows)
        g = evaluate(rows, {name: run.call.rows(x, rows) for name, x in out.items()})
        run.put(stat_grads, rows, g)
        if run.price.method != "values":
            _add_all(run, saved, stat_grads, total, rows)
