"""A pass whose logits are added up while they are in registers, and stored for backward alone.

docs/decisions/0051 to 0054
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....algebra.costs import STREAM_TOKENS, Slices, even_blocks, waiting_entries
from ....algebra.online_softmax import SECOND_LOOK, Accumulation, merge
from ....algebra.stats import best_entries, sums_of
from ...call.call import Call
from ...devices import is_intel
from ...head.lm_head import LMHead
from ...head.quantised import plain
from ..base import Partial
from ..chunk import Chunk, Tile
from ..conversions import cast_of
from ..logits import Projection, multiplies_tiles
from ..moves import normalised
from . import measured
from .backward import bytes_beside
from .library import REFERENCE_SUMS, Best, Factor, Head, Products, Streamed, Sums, in_pairs, is_plain, library, run
from .panels import moves_of, of_tokens, parts_of, product_bytes, products_of, rounded

FOUND = frozenset({"t", "r", "above", "zsum", "ref", "qe", "argmax"})  # of the sums that statistics read
AFTERWARDS = frozenset(SECOND_LOOK)  # those of logits that stay
FEW = 32  # tokens, of fewer a product in slices takes as long
BESIDE = 5  # numbers a token: its label's logit, and both heads' inner and outer factors


def takes(call: Call, kept: bool = False) -> bool:
    """Whether it computes a call's values, of heads whose rows are fp32 or bf16.

    kept: whether logits stay, for a second look, too.
    Of a bf16 head where the processor has tiles for it (AMX), by these. Else on a processor of Intel, whose own library
    torch multiplies by, only where it was measured to be faster.
    """
    sums = sums_of(call.options.want)
    if call.shard is not None:  # ranks are to take the same chunks, whatever their processors
        return False
    if call.n_tokens < FEW or call.compute != torch.float32 or not sums <= (FOUND | AFTERWARDS if kept else FOUND):
        return False
    heads = _heads(call)
    if not all(_multiplies(call, *given) for given in heads) or (found := library()) is None:
        return False
    cast = call.options.autocast
    tiles = {multiplies_tiles(hidden, cast or head.weight.dtype, call.compute) for head, hidden, _ in heads}
    if True in tiles and not found.multiplies_tiles():  # its compiler knows none: torch has some
        return False
    return tiles == {True} or not is_intel() or measured.is_faster(kept)


def _heads(call: Call) -> list[tuple[LMHead, Tensor, Tensor | None]]:
    """The head, and a reference's, with its hidden states and its adapters' b."""
    i = call.inputs
    found = [(call.head, i.hidden, i.lora_b)]
    if call.reference is not None and i.ref_hidden is not None:
        found.append((call.reference, i.ref_hidden, i.ref_lora_b))
    return found


def _multiplies(call: Call, head: LMHead, hidden: Tensor, lora_b: Tensor | None) -> bool:
    """Whether it has a head's products with these hidden states."""
    tables = [head.weight] + ([] if lora_b is None else [lora_b])
    if not all(isinstance(x, Tensor) and is_plain(x.detach()) and x.stride(1) == 1 for x in tables):
        return False
    wide = all(x.dtype in (torch.float32, torch.bfloat16) for x in tables)
    return wide and cast_of(call, head.weight) == head.weight.dtype and is_plain(hidden)


def slices(call: Call, n_tokens: int, bases: tuple[str, ...] = ()) -> Slices | None:
    """The chunks of a call that it takes; None of others, and where the budget has no room for a few tokens.

    bases: of the gradient, whose products with a frozen head accumulate.
    """
    if not takes(call):
        return None
    own, each, lanes = _demand(call, len(bases))
    most = min(STREAM_TOKENS["cpu"], (call.budget - own) // each // lanes * lanes)
    if most < lanes:
        return None
    tokens = even_blocks(n_tokens, most, lanes)
    return Slices(tokens, call.head.rows, own + rounded(tokens, lanes) * each, in_products=True)


def slices_kept(
    call: Call, n_tokens: int, slices_in: Callable[[Call], Slices], formed: bool, together: int = 0
) -> Slices | None:
    """The same of a call whose logits stay in slices, as `slices_in` gives them for the budget of a call.

    formed: whether they stay for the products of backward; together: tokens that are to stay at once, if they may.
    """
    if not takes(call, kept=True):
        return None
    own, each, lanes = _demand(call)
    if formed:
        more, more_each = bytes_beside(call.inputs.width, call.n_tokens, _rounds_weights(call))
        own, each = own + more, each + more_each
    tokens = slices_in(call).tokens
    beside = own + rounded(tokens, lanes) * each
    if tokens < lanes or beside >= call.budget:
        return None
    found = slices_in(replace(call, options=replace(call.options, memory_budget=call.budget - beside)))
    tokens = found.tokens
    if tokens < n_tokens:
        tokens = max(_whole_panels(tokens, lanes), min(tokens, together))
    return replace(found, tokens=tokens, nbytes=found.nbytes + beside, in_products=True, stored=True)


def _whole_panels(tokens: int, lanes: int) -> int:
    """As many tokens, or fewer where over a sixteenth of the lanes that they take would be empty."""
    return tokens // lanes * lanes if 16 * (rounded(tokens, lanes) - tokens) > tokens > lanes else tokens


def _demand(call: Call, bases: int = 0) -> tuple[int, int, int]:
    """Bytes of all threads, and of a token, beside logits that stay; and how many tokens are computed together.

    bases: how many have products.
    """
    found, i, threads, number = library(), call.inputs, torch.get_num_threads(), call.compute.itemsize
    sizes = [_row(*given) for given in _heads(call)]
    sums = sums_of(call.options.want)
    top_k, fields = best_entries(sums, call.options.top_k), len(_fields(sums))
    own = number * threads * found.entries() * (sum(sizes) + 2 * found.lanes())
    each = number * (sum(sizes) + fields * found.parts() + BESIDE) + _best_bytes(top_k, threads)
    pairs = bases == 1 and _rounds_weights(call)
    more, more_each = product_bytes(i.width, bases, call.n_tokens, pairs) if bases else (0, 0)
    return own + more, each + more_each, found.lanes()


def _row(head: LMHead, hidden: Tensor, lora_b: Tensor | None) -> int:
    """Numbers of a token's packed row: of its hidden state, its adapter's product and a bias."""
    size = hidden.shape[1]
    packed = library().pairs_of(size) if _in_pairs(head, hidden) else size
    return packed + (0 if lora_b is None else lora_b.shape[1]) + 1


def _in_pairs(head: LMHead, hidden: Tensor) -> bool:
    return in_pairs(hidden.dtype == head.weight.dtype == torch.bfloat16)


def _rounds_weights(call: Call) -> bool:
    """`rounds_weights` of a call with products of one basis."""
    return call.inputs.lora_b is None and _in_pairs(call.head, call.inputs.hidden)


def _fields(sums: frozenset[str]) -> list[str]:
    """What is added up of each token and part of the vocabulary."""
    ref = [name for name in REFERENCE_SUMS if name != "a_ref" or "qe" in sums] if "ref" in sums else []
    return ["m", "rest", "peaks", *sorted(sums & {"t", "r", "above", "zsum"}), *ref]


def _best_bytes(top_k: int, threads: int) -> int:
    """Of a token's best entries: those that each thread found, what they have to beat, and those of all threads."""
    return threads * (8 * (top_k + waiting_entries(top_k)) + 8) + 12 * top_k if top_k else 0


def accumulate(chunk: Chunk, bases: tuple[str, ...] = (), keep: str | None = None) -> Partial:
    """`Backend.accumulate_local` of a chunk with slices of this module; weights that are to stay are late."""
    found, n_tokens, take = library(), chunk.n_tokens, chunk.scratch.take
    assert found is not None
    width = rounded(n_tokens, found.lanes())
    parts = parts_of(width) if bases else found.parts()
    labels = None if chunk.inputs.labels is None else chunk.inputs.labels.contiguous()
    names, held = _fields(chunk.sums), _Held()
    sums = dict(zip(names, take("sums", (len(names) * parts, width)).view(len(names), parts, width), strict=True))
    streamed = Streamed(n_tokens=n_tokens, vocab=chunk.policy.head.rows, parts=parts, labels=held.address(labels))
    streamed.sums = Sums(**{name: x.data_ptr() for name, x in sums.items()})
    streamed.head = _head(chunk.policy, "tokens", chunk, width, held)
    if chunk.reference is not None and "ref" in chunk.sums:
        streamed.ref = _head(chunk.reference, "ref_tokens", chunk, width, held)
    if "above" in chunk.sums:
        assert chunk.label_logit is not None
        streamed.label = held.address(_of_lanes(chunk.label_logit, take("label", (1, width))))
    products, streamed.products = products_of(chunk, bases, width) if bases else ({}, Products())
    if keep:
        streamed.kept, streamed.ref_kept = _keep(chunk)
    topk = _find_best(streamed, chunk, width, held) if chunk.top_k else None
    run(found.accumulate, streamed)
    of_parts = Accumulation(**{name: x for name, x in sums.items() if name not in ("peaks", "zsum")})
    whole = _merged(of_parts)
    state = Accumulation(**{name: x[:n_tokens] for name, x in whole.items()})
    for tile in chunk.materialised if keep == "weights" else []:
        tile.m, tile.late = state.m, True
    zsum = sums["zsum"][:, :n_tokens].sum(0) if "zsum" in sums else None
    moves = moves_of(of_parts, whole) if products else None
    return Partial(state, partial(normalised, of_tokens(products, width, chunk, moves), state), zsum, topk)


class _Held(list[object]):
    """What has to live as long as the addresses that a call is given."""

    def address(self, x: Tensor | None) -> int | None:
        self.append(x)
        return None if x is None else x.data_ptr()


def _head(on: Projection, name: str, chunk: Chunk, width: int, held: _Held) -> Head:
    """A head on the chunk's tokens: its bias is a factor of one number a token and entry."""
    first, *others = on.factors
    pairs = in_pairs(first.is_bf16)
    products = [(first.tokens if pairs else first.rows, plain(first.entries))]
    products += [(f.rows, plain(f.entries)) for f in others]
    if on.bias is not None:
        products.append((_column(on.inner, chunk), on.bias[:, None]))
    factors = (Factor * len(products))()
    for factor, (rows, entries) in zip(factors, products, strict=True):
        tokens = rows.contiguous()
        factor.tokens, factor.tokens_stride = held.address(tokens), tokens.stride(0)
        factor.entries, factor.entries_stride = held.address(entries), entries.stride(0)
        factor.size, factor.half = tokens.shape[1], entries.dtype == torch.bfloat16
    factors[0].pairs = pairs
    held.append(factors)
    size = sum(factor.length for factor in factors)
    head = Head(factors, len(products), packed=chunk.scratch.take(name, (size, width)).data_ptr())
    lacks = pairs and (first.scaled or first.late is not None)  # the factor, which no bf16 number is multiplied by
    for kind, x in (("inner", on.inner if lacks else None), ("outer", on.outer)):
        if x is not None:
            room = chunk.scratch.take(f"{name} {kind}", (1, width))
            setattr(head, kind, held.address(_of_lanes(_column(x, chunk)[:, 0], room)))
    return head


def _column(x: float | Tensor, chunk: Chunk) -> Tensor:
    """A number for all tokens, or one each, as (C, 1)."""
    return x if isinstance(x, Tensor) else chunk.policy.factors[0].rows.new_full((chunk.n_tokens, 1), x)


def _of_lanes(x: Tensor, room: Tensor) -> Tensor:
    """A number each of the tokens and of the lanes that hold none."""
    room.zero_()[0, : len(x)] = x
    return room


def _find_best(streamed: Streamed, chunk: Chunk, width: int, held: _Held) -> tuple[Tensor, Tensor]:
    """Where the best entries' logits and ids, (C, k), will be."""
    k, threads, take = chunk.top_k, torch.get_num_threads(), chunk.scratch.take
    room = k + waiting_entries(k)
    streamed.best = Best(
        keys=take("keys", (threads * width, 2 * room)).data_ptr(),  # of 8 bytes
        least=take("least", (threads, width)).data_ptr(),
        waiting=take("waiting", (threads, width)).data_ptr(),
        k=k,
        room=room,
    )
    logits = chunk.policy.factors[0].rows.new_empty(chunk.n_tokens, k)
    ids = torch.empty_like(logits, dtype=torch.int64)
    streamed.best_logits, streamed.best_entries = held.address(logits), held.address(ids)
    return logits, ids


def _keep(chunk: Chunk) -> tuple[int, int | None]:
    """Where the logits of both heads will be: in columns, of which the chunk has its slices."""
    shape = chunk.n_tokens, chunk.policy.head.rows
    z = chunk.scratch.take("all z", shape, columns=True)
    z_ref = None if chunk.reference is None else chunk.scratch.take("all z_ref", shape, columns=True)
    for v in chunk.vocabulary():
        chunk.materialised.append(Tile(v, z[:, v], None if z_ref is None else z_ref[:, v]))
    return z.data_ptr(), None if z_ref is None else z_ref.data_ptr()


def _merged(parts: Accumulation) -> Accumulation:
    """What the parts of the vocabulary, (parts, width) each, amount to."""
    named = dict(parts.items())
    if "above" in named:
        named["above"] = named["above"].long()
    while len(named["m"]) > 1:
        half = len(named["m"]) // 2
        first, second = ({name: x[some] for name, x in named.items()} for some in (slice(half), slice(half, None)))
        named = dict(merge(Accumulation(**first), Accumulation(**second), torch).items())
    return Accumulation(**{name: x[0] for name, x in named.items()})
