"""The pass whose result is a maximum over each document's tokens: a product forward, a few rows for each entry back.

A maximum's gradient goes to one token. So backward takes, for each (document, entry) pair with an upstream gradient,
the entry's row of the head and the token's hidden state, and never looks at the logits again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...algebra.costs import Price, Slices
from ...upstream import check_upstream
from ..backends.chunk import Chunk, Scratch
from ..backends.rows import add_at
from ..call.call import DIFFERENTIATED, Call, Inputs, Needs, storable
from ..ranks.agreement import gather_rows
from .autograd import NO_SECOND_DERIVATIVE, NOT_DIFFERENTIATED
from .engine import backend_of, exact
from .gradient import GradientBuffers
from .price import slices_for

NO_TOKEN = -1
LEAST_WIDTH = 64  # entries of a slice, whatever the budget
MAXIMUM = 20  # bytes for each (document, entry) pair of a chunk while some of its maxima are chosen
PAIR = 64  # and of a slice, while their gradients are added up


@dataclass(frozen=True, eq=False)
class Documents:
    """Which of the call's N tokens are each document's.

    rows: (M,), document by document; counts: how many each of the B documents has; first: (B,), the token from which
    the places of a document's tokens are counted.
    """

    rows: Tensor
    counts: list[int]
    first: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    def chunks(self, tokens: int, most: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(documents (D,), their tokens (D, L)) of about one length, a shorter one's last token again at its end.

        tokens: of a chunk, unless one document has more; most: of its documents. Those without tokens are left out.
        """
        device, counts = self.rows.device, torch.tensor(self.counts, dtype=torch.int64, device="cpu")
        starts = counts.cumsum(0) - counts
        order = counts.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
        at = 0
        while at < order.shape[0]:
            longest = int(counts[order[at]])
            some = order[at : at + max(1, min(most, tokens // longest))]
            each = torch.arange(longest, device="cpu")[None, :]
            places = torch.minimum(each, counts[some, None] - 1) + starts[some, None]
            yield some.to(device), self.rows[places.to(device)]
            at += some.shape[0]


class Pooled(NamedTuple):
    """The maxima of a chunk's documents, (D, V) each: buffers that the next chunk writes to."""

    documents: Tensor  # (D,)
    values: Tensor
    places: Tensor  # int32, of the first token that has it


@exact
def pool(call: Call, documents: Documents, take: Callable[[Pooled], None]) -> None:
    """Every document's maxima, of all ranks' entries, handed to `take` chunk by chunk: one product."""
    backend, scratch = backend_of(call), Scratch(call.compute, call.inputs.hidden.device)
    size, (slices, most) = call.head.local_rows, _sizes(call, documents)
    for some, rows in documents.chunks(slices.tokens, most):
        d, longest = rows.shape
        width = max(1, min(slices.width, slices.width * slices.tokens // longest))
        here = replace(call, index=rows.reshape(-1))
        chunk = Chunk.of(here, slice(0, d * longest), replace(slices, width=width), scratch, backend.few_rows)
        values = scratch.take("maxima", (d, size))
        places = torch.empty(d, size, dtype=torch.int32, device=values.device)
        for v in chunk.vocabulary():
            z = chunk.logits(v, chunk.operand(v)).z
            values[:, v], at = z.view(d, longest, -1).max(1)
            places[:, v] = rows.gather(1, at).sub_(documents.first[some, None])
        if call.shard is not None:
            values, places = (gather_rows(x, call.shard, call.head.rows) for x in (values, places))
        take(Pooled(some, values, places))


def _sizes(call: Call, documents: Documents) -> tuple[Slices, int]:
    """The slices of a chunk, and its most documents: half of the budget for each."""
    budget = call.budget // 2
    halved = replace(call, options=replace(call.options, memory_budget=max(1, budget)))
    slices = slices_for(halved, max(1, sum(documents.counts)), Price("values", 1))
    return slices, max(1, budget // (MAXIMUM * call.head.rows))


class Dense:
    """The maxima of all documents, (B, V) each; -inf and NO_TOKEN where there is no token."""

    def __init__(self, call: Call, documents: Documents) -> None:
        shape, device = (len(documents), call.head.rows), call.inputs.hidden.device
        self.values = torch.full(shape, -math.inf, dtype=call.compute, device=device)
        self.places = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=device)

    def take(self, found: Pooled) -> None:
        self.values[found.documents] = found.values
        self.places[found.documents] = found.places


class Kept(NamedTuple):
    """The pairs that were kept, document by document and by ascending id, (M,) each."""

    values: Tensor
    places: Tensor
    documents: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Keep:
    """Which entries of a document are kept: those above a number, the best `top_k` of them; None: no such bound."""

    above: float | None
    top_k: int | None
    parts: list[Kept] = field(default_factory=list)

    def take(self, found: Pooled) -> None:
        values = found.values
        rank = values.masked_fill(values.isnan(), math.inf)  # or a document of NaN would pass for an empty one
        keep = torch.ones_like(rank, dtype=torch.bool) if self.above is None else rank > self.above
        if self.top_k is not None:
            keep &= _best(rank, self.top_k)
        row, ids = keep.nonzero(as_tuple=True)
        self.parts.append(Kept(values[row, ids], found.places[row, ids], found.documents[row], ids))

    def result(self, call: Call, documents: Documents) -> Kept:
        none = documents.rows[:0]
        parts = [*self.parts, Kept(none.to(call.compute), none.int(), none, none)]
        all_of = Kept(*(torch.cat(x) for x in zip(*parts, strict=True)))
        order = all_of.documents.argsort(stable=True)
        return Kept(*(x[order] for x in all_of))


def _best(values: Tensor, k: int) -> Tensor:
    """Which entries are the k best of their row, of equal ones those with the lowest ids: (D, V)."""
    least = values.topk(k, dim=1).values[:, -1:]
    above = values > least
    tied = values == least
    return above | (tied & (tied.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)))


class Pairs(NamedTuple):
    """(document, entry) pairs of a slice with an upstream gradient, (M,) each, by ascending entry."""

    entries: Tensor  # from the slice's first on
    tokens: Tensor  # of the call
    grads: Tensor
    logits: Tensor | None  # where there is a softcap


PairsOf = Callable[[slice], Pairs]


def _pairs_of_dense(documents: Documents, grads: Tensor, values: Tensor | None, places: Tensor) -> PairsOf:
    def pairs(v: slice) -> Pairs:
        live = (grads[:, v] != 0) & (places[:, v] != NO_TOKEN)
        entries, document = live.t().nonzero(as_tuple=True)
        at = document, entries + v.start
        tokens = documents.first[document] + places[at]
        return Pairs(entries, tokens, grads[at], None if values is None else values[at])

    return pairs


def _pairs_of_kept(
    documents: Documents, grads: Tensor, values: Tensor | None, places: Tensor, of_documents: Tensor, ids: Tensor
) -> PairsOf:
    live = (grads != 0).nonzero().squeeze(1)
    live = live[ids[live].argsort(stable=True)]
    ids, grads, logits = ids[live], grads[live], None if values is None else values[live]
    tokens = documents.first[of_documents[live]] + places[live]

    def pairs(v: slice) -> Pairs:
        ends = torch.tensor([v.start, v.stop], device=ids.device)
        start, stop = torch.searchsorted(ids, ends).tolist()
        some = slice(start, stop)
        return Pairs(ids[some] - v.start, tokens[some], grads[some], None if logits is None else logits[some])

    return pairs


@exact
def pooled_gradients(call: Call, documents: Documents, needs: Needs, pairs_of: PairsOf) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias, dlora_hidden, dlora_b), sums of rows, one for each pair: no product."""
    backend, n = backend_of(call), call.inputs.hidden.shape[0]
    scratch = Scratch(call.compute, call.inputs.hidden.device)
    total = GradientBuffers(call, backend, needs)
    total.gradients.clear()
    grads = total.chunk(n)
    chunk = Chunk.of(call, slice(0, n), Slices(n, _backward_width(call, documents), 0), scratch, backend.few_rows)
    tables = [factor.tokens.to(call.compute) for factor in chunk.policy.factors]
    first = call.head.vocab_start
    for v in chunk.vocabulary():
        entries, tokens, upstream, logits = pairs_of(slice(first + v.start, first + v.stop))
        c = chunk.policy.chain(upstream, logits)
        by_token = tokens.argsort(stable=True)
        for factor, table, (of_tokens, of_entries) in zip(chunk.policy.factors, tables, grads.pairs, strict=False):
            if of_entries is not None:
                _add_rows(of_entries[v], entries, c, table, tokens)
            if of_tokens is not None:
                rows = factor.operand(v).to(call.compute)
                _add_rows(of_tokens, tokens[by_token], c[by_token], rows, entries[by_token])
        if grads.bias is not None:
            add_at(grads.bias[v], entries, c)
    total.put(slice(0, n), grads)
    return total.result()


def _backward_width(call: Call, documents: Documents) -> int:
    """Entries of a slice whose pairs, converted rows and sums of rows keep to the budget."""
    each = len(documents) * PAIR + 2 * call.compute.itemsize * call.inputs.width
    return max(LEAST_WIDTH, call.budget // each)


def _add_rows(into: Tensor, at: Tensor, weights: Tensor, table: Tensor, ids: Tensor) -> None:
    """into[at] += weights·table[ids], at (M,) ascending with repeats, whose rows are summed first, in their order."""
    if at.shape[0] == 0:
        return
    rows, counts = at.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    into.index_add_(0, rows, F.embedding_bag(ids, table, ends - counts, per_sample_weights=weights, mode="sum"))


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, documents: Documents, keep: Keep | None, *tensors: Any) -> Any:
        if keep is None:
            dense = Dense(call, documents)
            pool(call, documents, dense.take)
            out = dense.values, dense.places
        else:
            pool(call, documents, keep.take)
            out = keep.result(call, documents)
        ctx.call, ctx.documents, ctx.dense = call.without_tensors(), documents, keep is None
        ctx.save_for_backward(*map(storable, tensors), out[0] if call.head.softcap else None, *out[1:])
        ctx.mark_non_differentiable(*out[1:])
        ctx.set_materialize_grads(False)
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_upstream(grads, NO_SECOND_DERIVATIVE)
        count, saved = len(Inputs._fields), ctx.saved_tensors  # read once, as a checkpoint asks
        inputs, kept = Inputs(*saved[:count]), saved[count:]
        call, documents, upstream = ctx.call.with_tensors(inputs), ctx.documents, grads[0]
        if upstream is None:
            return (None,) * (3 + count)
        needs = Needs(*ctx.needs_input_grad[3 : 3 + DIFFERENTIATED])
        pairs = (_pairs_of_dense if ctx.dense else _pairs_of_kept)(documents, upstream, *kept)
        return None, None, None, *pooled_gradients(call, documents, needs, pairs), *NOT_DIFFERENTIATED


def max_pool(call: Call, documents: Documents) -> tuple[Tensor, Tensor]:
    """The maxima of each document's logits over its tokens and the places of these tokens, (B, V) each."""
    return _MaxPool.apply(call, documents, None, *call.inputs)  # pyright: ignore[reportReturnType]


def max_pool_kept(call: Call, documents: Documents, above: float | None, top_k: int | None) -> Kept:
    """Those of the maxima that are kept; never (B, V)."""
    return Kept(*_MaxPool.apply(call, documents, Keep(above, top_k), *call.inputs))  # pyright: ignore
