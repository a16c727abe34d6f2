"""Log-probs of continuations of texts: only their own tokens are scored, and what they share is computed once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import DataError
from .lm_head import adapter_configs, cache_name, causal_lm
from .scoring import token_scores

Request = tuple[Sequence[int], Sequence[int]]  # ids of a context and of its continuation
Answer = tuple[float, bool]  # the continuation's log-prob, and whether greedy decoding gives it
Tokens = dict[str, list[float]]  # what is known of each of a continuation's tokens, by name
WANT = ("logprob", "rank")
OF_CERTAINTY = ("entropy", "logsumexp")


@dataclass
class Row:
    """Tokens that are fed, and which of their positions are scored: (request, position, label)."""

    fed: tuple[int, ...]
    scored: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Tree:
    """A row that is fed first, and rows that each go on from its end."""

    stem: Row
    branches: list[Row] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Of the larger of its two passes."""
        return max(1, len(self.branches))


def continuation_scores(
    model: nn.Module,
    requests: Sequence[Request],
    *,
    longest: int,
    batch_size: int | Callable[[int, list[Tree]], int],
    share: bool = True,
    memory_budget: int | None = None,
    certainty: bool = False,
    answered: Callable[[int, Answer, Tokens], None] = lambda request, answer, tokens: None,
) -> list[Answer]:
    """The log-prob of each continuation, and whether each of its tokens is the best entry (or as good as it).

    Dense equivalent, of one request:

        ids = torch.cat([context, continuation])[-(longest + 1) :]
        logp = model(ids[None, :-1]).logits[0, -len(continuation) :].log_softmax(-1)
        logp.gather(-1, continuation[:, None]).sum(), (logp.argmax(-1) == continuation).all()

    longest: tokens that the model sees at most. batch_size: rows of a pass; or a function of the next tree's number
    and all trees. share: a context of several continuations is computed once, and each continuation goes on from its
    keys and values, where all of the model's layers keep all of them. answered: hears each answer with its batch, and
    of each of its tokens the logprob and rank; with certainty also the entropy before it and the confidence, the
    probability of the best entry.
    Raises DataError for a context or a continuation without a token, and for one that is longer than `longest`.
    Memory: the body's own, one logits slice, and with shared contexts the keys and values of a batch.
    """
    _check(requests, longest)
    found = planted(requests, longest, share and keeps_all(model))
    answers: list[Answer] = [(0.0, False)] * len(requests)
    for batch in _batches(found, batch_size):
        for request, answer, tokens in _answers(model, batch, memory_budget, certainty):
            answers[request] = answer
            answered(request, answer, tokens)
    return answers


def _check(requests: Sequence[Request], longest: int) -> None:
    for number, (context, continuation) in enumerate(requests, 1):
        if not len(context) or not len(continuation):
            missing = "continuation" if len(context) else "context"
            raise DataError(f"request {number} of {len(requests)}: its {missing} has no token, expected at least one")
        if len(continuation) > longest:
            raise DataError(
                f"request {number} of {len(requests)}: its continuation has {len(continuation):,} tokens, expected at "
                f"most the {longest:,} that the model sees"
            )


def planted(requests: Sequence[Request], longest: int, share: bool) -> list[Tree]:
    """The trees whose passes answer all requests, the longest stem first.

    Requests that differ in their last token alone are one row. A context is shared where it is longer than its
    continuations: of short ones a second pass costs more than it saves.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, (context, _) in enumerate(requests):
        groups.setdefault(tuple(context), []).append(number)
    found: list[Tree] = []
    whole: dict[tuple[int, ...], Row] = {}
    for context, members in groups.items():
        endings = {number: tuple(requests[number][1]) for number in members}
        most = max(map(len, endings.values()))
        if share and len(set(endings.values())) > 1 and most < len(context) <= longest + 1 - most:
            found.append(_tree(context, endings))
            continue
        for number, ending in endings.items():
            fed = (context + ending)[-(longest + 1) :][:-1]
            row = whole.setdefault(fed, Row(fed))
            first = len(fed) - len(ending)
            row.scored += [(number, first + i, label) for i, label in enumerate(ending)]
    found += map(Tree, whole.values())
    return sorted(found, key=lambda tree: -len(tree.stem.fed))


def _tree(context: tuple[int, ...], endings: dict[int, tuple[int, ...]]) -> Tree:
    stem = Row(context, [(number, len(context) - 1, ending[0]) for number, ending in endings.items()])
    branches: dict[tuple[int, ...], Row] = {}
    for number, ending in endings.items():
        if len(ending) > 1:
            row = branches.setdefault(ending[:-1], Row(ending[:-1]))
            row.scored += [(number, i, label) for i, label in enumerate(ending[1:])]
    return Tree(stem, list(branches.values()))


def keeps_all(model: nn.Module) -> bool:
    """Whether every layer of a model keeps the keys and values of all tokens, so that any text can go on from them."""
    inner = causal_lm(model)
    config = inner.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) and getattr(config, "layer_types", None) is None
    local = "local" in getattr(config, "attention_layers", ())  # GPT-Neo's window counts the stems' padding, too
    takes = inspect.signature(type(inner).forward).parameters
    stateful = getattr(inner, "_is_stateful", False)
    fits = {cache_name(model), "position_ids", "attention_mask"} <= takes.keys()
    anew = _reads_the_beginning(model) or config.model_type == "git"  # which takes an image to stand before any cache
    return fits and not windowed and not local and not stateful and not anew and set(kinds) == {"full_attention"}


def _reads_the_beginning(model: nn.Module) -> bool:
    """Whether PEFT expects the beginning of a text in every call: puts a prompt there, or looks for an invocation."""
    names = ("is_prompt_learning", "alora_invocation_tokens")
    return any(getattr(config, name, None) for config in adapter_configs(model) for name in names)


def _batches(trees: list[Tree], size: int | Callable[[int, list[Tree]], int]) -> Iterator[list[Tree]]:
    batch: list[Tree] = []
    for number, tree in enumerate(trees):
        batch.append(tree)
        most = size if isinstance(size, int) else size(number + 1 - len(batch), trees)
        if sum(t.rows for t in batch) >= most:
            yield batch
            batch = []
    if batch:
        yield batch


def _answers(
    model: nn.Module, batch: list[Tree], memory_budget: int | None, certainty: bool
) -> Iterator[tuple[int, Answer, Tokens]]:
    """One pass over the stems, and one over all branches from the stems' keys and values."""
    inner = causal_lm(model)
    stems, branches = [tree.stem for tree in batch], [row for tree in batch for row in tree.branches]
    inputs: dict[str, Any] = {"input_ids": _padded(stems, inner.device)}
    kept: dict[str, Any] = {}
    if branches:
        from transformers import DynamicCache

        kept = {cache_name(inner): DynamicCache(config=inner.config), "use_cache": True}
    options = {"memory_budget": memory_budget, "keep": int(certainty), "want": WANT + OF_CERTAINTY * certainty}
    found: dict[int, Tokens] = {}
    _score(model, stems, inputs | kept, options, found)
    if branches:
        cache = kept[cache_name(inner)]
        _score(model, branches, _going_on(batch, cache, inner.device) | kept, options, found)
    for request, tokens in found.items():
        yield request, (sum(tokens["logprob"]), all(rank == 1 for rank in tokens["rank"])), tokens


def _going_on(batch: list[Tree], cache: Any, device: torch.device) -> dict[str, Any]:
    """The inputs of all branches, which go on from their stems' keys and values; the stems' padding is masked."""
    rows = [(tree.stem, row, i) for i, tree in enumerate(batch) for row in tree.branches]
    cache.batch_select_indices(torch.tensor([i for *_, i in rows], device=device))
    before = torch.tensor([[len(stem.fed)] for stem, *_ in rows], device=device)
    own = torch.tensor([[len(row.fed)] for _, row, _ in rows], device=device)
    ids = _padded([row for _, row, _ in rows], device)
    past, here = (torch.arange(n, device=device) for n in (max(len(t.stem.fed) for t in batch), ids.shape[1]))
    return {
        "input_ids": ids,
        "attention_mask": torch.cat([past < before, here < own], 1).long(),
        "position_ids": before + torch.minimum(here, own - 1),
    }


def _padded(rows: Iterable[Row], device: torch.device) -> Tensor:
    ids = [torch.tensor(row.fed) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)


def _score(
    model: nn.Module, rows: list[Row], inputs: dict[str, Any], options: dict[str, Any], found: dict[int, Tokens]
) -> None:
    """Adds what a pass says of the tokens that it scores to what is `found` of their requests."""
    scored = [(b, *x) for b, row in enumerate(rows) for x in row.scored]
    row, request, position, label = torch.tensor(scored, device=inputs["input_ids"].device).unbind(1)
    stats, _ = token_scores(model, inputs, (row, position), label, **options)
    columns = {name: getattr(stats, name).tolist() for name in WANT}
    if options["keep"]:
        best = (stats.top_k_logits[:, 0] - stats.logsumexp).exp()
        columns |= {"entropy": stats.entropy.tolist(), "confidence": best.tolist()}
    for name, values in columns.items():
        for number, value in zip(request.tolist(), values, strict=True):
            found.setdefault(number, {}).setdefault(name, []).append(value)
