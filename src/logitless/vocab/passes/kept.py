"""The drivers of a call over sampling masks: each token's own few entries, N·K·H work, no product with the vocabulary.

Sums over a token's entries are sums over its segment, by the backend's `over_sets`; the statistics and the gradient's
formula are those of the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ...algebra.costs import Price, Slices
from ...algebra.online_softmax import Totals, difference
from ...algebra.stats import STATISTICS, coefficients_of, looks_twice, second_look
from ..backends.base import Backend, put_second_sums
from ..backends.chunk import Chunk, Scratch
from ..backends.logits import Projection
from ..backends.sets import Entries, Logits
from ..call.call import Call, Needs
from ..call.sampling_mask import Places, SamplingMask
from ..ranks.collectives import Ranks
from .engine import Saved, backend_of, exact, outputs
from .gradient import GradientBuffers, scatter_one_hots, without_label
from .told import tell

GATHERED = 1 << 20  # elements of a chunk's gathered rows on a CPU, whose caches hold them
NUMBERS = 64  # of an entry on a GPU, whose kernels gather no rows, while its chunk is computed


def entries_at_a_time(call: Call) -> int:
    """The entries of a chunk, but for a token with more: by a CPU's caches, or by the budget of their numbers."""
    hidden, itemsize = call.inputs.hidden, call.compute.itemsize
    if hidden.device.type != "cpu":
        return max(1, call.budget // (NUMBERS * itemsize))
    elements = min(GATHERED, call.budget // (4 * itemsize))
    return max(1, elements // max(hidden.shape[1], 1))


def bytes_an_entry(call: Call, widths: int, ref_widths: int) -> int:
    """What an entry takes while its chunk is computed: three rows on a CPU, and the reference's, or some numbers."""
    on_cpu = call.inputs.hidden.device.type == "cpu"
    return (3 * widths + ref_widths if on_cpu else NUMBERS) * call.compute.itemsize


def rounds_once(call: Call, entries: int, backend: Backend) -> bool:
    """Whether the head's gradient is in its own dtype while it is summed: one chunk, and one scatter, are all of it."""
    return entries <= entries_at_a_time(call) and backend.scatters_once(call)


def chunks_of(offsets: list[int], step: int) -> list[tuple[int, int, int, int]]:
    """(first, end) of the tokens of each chunk, and of its entries: as many as have `step`, one token at least."""
    found, n, first = [], len(offsets) - 1, 0
    while first < n:
        end = first + 1
        while end < n and offsets[end + 1] - offsets[first] <= step:
            end += 1
        found.append((first, end, offsets[first], offsets[end]))
        first = end
    return found


def _less(x: Tensor, number: int) -> Tensor:
    """x less a number, itself where that is 0: no launch."""
    return x - number if number else x


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts in one, itself where there is but one: no launch."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class KeptPass:
    """A call over a sampling mask: its valid tokens in chunks, with their entries."""

    def __init__(self, call: Call, price: Price, mask: SamplingMask, places: Places) -> None:
        """mask, places: of the valid tokens."""
        self.call, self.backend, self.mask, self.places = call, backend_of(call), mask, places
        tell(call, price)
        self.step = entries_at_a_time(call)
        self.scratch = Scratch(call.compute, call.inputs.hidden.device)

    def chunks(self) -> Iterator[tuple[slice, Chunk, Entries]]:
        """(tokens, chunk, entries) of each chunk."""
        n, tokens, labels_at = self.mask.token_ids.shape[0], self.places.tokens, self.places.labels
        few = 0 < n <= self.step  # then all is one chunk, and the device is not asked for the others' ends
        bounds = [(0, len(self.mask), 0, n)] if few else chunks_of(self.mask.offsets.tolist(), self.step)
        # a label is one of the entries: the chunk need not compute its logit
        call = replace(self.call, inputs=self.call.inputs._replace(labels=None))
        for first, end, start, stop in bounds:
            rows, here = slice(first, end), slice(start, stop)
            slices = Slices(end - first, 1, 0)
            entries = Entries(
                self.mask.token_ids[here],
                _less(tokens[here], first),
                _less(self.mask.offsets[first : end + 1], start),
                start,
                None if labels_at is None else _less(labels_at[rows], start),
            )
            yield rows, Chunk.of(call, rows, slices, self.scratch, self.backend.few_rows), entries

    def logits(self, projection: Projection, entries: Entries) -> Tensor:  # (M,)
        """The logits of the entries, which ranks that share the head have a part of each."""
        out = projection.at(entries.ids, entries.tokens)
        ranks = Ranks.of(self.call.shard)
        return out if ranks is None else ranks.total([out])[0]


def checked(call: Call, price: Price) -> KeptPass:
    """The pass of the call's valid tokens, whose ids and sets can be.

    The host waits for the device once, and more often where tokens are ignored or sets are large.
    """
    mask, labels, rows, ignored = call.sampling_mask, call.inputs.labels, call.head.rows, call.options.ignore_index
    assert mask is not None
    look = backend_of(call).over_sets.look_at
    places = look(mask, rows, labels, ignored)
    if places is None:
        call = call.checked()
        if call.index is not None and labels is not None:
            mask, labels = valid_sets(call), labels[call.index]
            places = look(mask, rows, labels, ignored)
    return KeptPass(call, price, mask, places or mask.check_sets(rows, labels, call.index))


def valid_sets(call: Call) -> SamplingMask:
    """The sets of the valid tokens."""
    assert call.sampling_mask is not None
    return call.sampling_mask if call.index is None else call.sampling_mask[call.index]


@exact
def values(run: KeptPass, save: bool) -> tuple[dict[str, Tensor], Saved]:
    """The wanted statistics of all tokens over their sets (0 where ignored), and what backward needs."""
    call, hidden = run.call, run.call.inputs.hidden
    room = hidden.new_zeros if call.index is not None else hidden.new_empty  # where all tokens get something
    out = {name: room(hidden.shape[0], *shape, dtype=dtype) for name, (shape, dtype) in outputs(call).items()}
    kept: dict[str, list[Tensor]] = {}
    totals_kept: dict[str, list[Tensor]] = {}
    for rows, chunk, entries in run.chunks():
        z = run.logits(chunk.policy, entries)
        z_ref = None if chunk.reference is None else run.logits(chunk.reference, entries)
        totals = totals_of(run.backend, chunk, entries, z, z_ref)
        counts = entries.counts.to(z.dtype)
        for name in out:
            call.put(out[name], rows, STATISTICS[name].value(totals, counts))
        if save:
            for name, x in totals.items():
                totals_kept.setdefault(name, []).append(x)
            for name, x in (("z", z), ("z_ref", z_ref)):
                if x is not None:
                    kept.setdefault(name, []).append(x)
    extra = {name: _joined(parts) for name, parts in kept.items()}
    if run.places.labels is not None:
        extra["labels_at"] = run.places.labels
    return out, Saved({name: _joined(parts) for name, parts in totals_kept.items()}, extra, {})


def totals_of(backend: Backend, chunk: Chunk, entries: Entries, z: Tensor, z_ref: Tensor | None) -> Totals:
    """What each token's entries amount to, the label's kept apart as in the pass over whole rows."""
    if entries.labels_at is not None:
        at = entries.labels_at
        chunk.label_logit, chunk.label_ref = z[at], None if z_ref is None else z_ref[at]
    state, zsum = backend.over_sets.accumulate(chunk.sums, chunk.label_logit, entries, (z, z_ref))
    totals = backend.finish(state, chunk.label)
    if zsum is not None:
        totals.mean_logit = zsum / entries.counts
    if looks_twice(chunk.sums) and z_ref is not None:
        own = entries.tokens
        d = difference(z, z_ref, totals.shift[own], torch) + totals.log_ratio[own]
        p = torch.exp((z - totals.m[own]) - totals.log_s[own])
        q = torch.exp((z_ref - totals.m_ref[own]) - totals.log_s_ref[own])
        shares = second_look(chunk.sums, p, q, d, chunk.jsd_beta, torch)
        if entries.labels_at is not None:
            shares = {name: x.index_fill(0, entries.labels_at, 0.0) for name, x in shares.items()}
        put_second_sums(chunk, totals, {name: entries.sum(x) for name, x in shares.items()})
    return totals


@exact
def gradients(
    call: Call, price: Price, saved: Saved, stat_grads: dict[str, Tensor], needs: Needs
) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias, dlora_hidden, dlora_b) for upstream gradients of the statistics, (N,) each."""
    mask = valid_sets(call)
    run = KeptPass(call, price, mask, Places(mask.tokens, saved.extra.get("labels_at")))
    total = GradientBuffers(call, run.backend, needs, rounds_once(call, mask.token_ids.shape[0], run.backend))
    total.gradients.clear()
    for rows, chunk, entries in run.chunks():
        here = slice(entries.start, entries.start + entries.ids.shape[0])
        z, z_ref = (saved.extra[name][here] if name in saved.extra else None for name in ("z", "z_ref"))
        assert z is not None
        totals = Totals(**{name: x[rows] for name, x in saved.totals.items()})
        upstream = {name: call.rows(g, rows) for name, g in stat_grads.items()}
        dz = _entries_grad(run.backend, chunk, entries, (z, z_ref), totals, upstream)
        grads = total.chunk(chunk.n_tokens)
        scatter_one_hots(chunk, entries.ids[:, None], dz[:, None], grads, entries.tokens)
        total.put(rows, grads)
    return total.result()


def _entries_grad(
    backend: Backend,
    chunk: Chunk,
    entries: Entries,
    logits: Logits,
    totals: Totals,
    stat_grads: dict[str, Tensor],
) -> Tensor:
    """dL/d(hW) of every entry, (M,)."""
    policy, own, z = chunk.policy, entries.tokens, logits[0]
    c = coefficients_of(stat_grads, totals, entries.counts.to(z.dtype), chunk.jsd_beta, torch)
    at_label = None if entries.labels_at is None else backend.label_coefficient(chunk, totals, c)
    dz = backend.over_sets.logits_grad(chunk, entries, logits, totals, without_label(c), at_label)
    if "argmax" in c:
        best, ids = z == totals.m[own], entries.ids.to(torch.float64)
        lowest = -entries.max(torch.where(best, -ids, -math.inf), -math.inf)  # of equal ones the lowest id
        first = (best & (ids == lowest[own])).nonzero().squeeze(1)
        dz[first] += policy.chain(c["argmax"], totals.m)[own[first]]
    return dz
