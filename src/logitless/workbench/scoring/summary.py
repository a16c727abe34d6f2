"""The end of a run: parts become one file, sums a summary for people and for machines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from ...errors import DataError, LogitlessError, NotFiniteError
from ...sample.teacher import write_head
from ...units import format_bytes, format_perplexity, perplexity, plural
from ...versions import versions
from ...vocab.face import LMHead
from ..common.files import remove_leftovers, strict_json, write_json, write_whole
from ..common.sealed import together
from ..common.tables import facts
from ..runs.ending import stoppable
from .block import NOT_FINITE, Scorer
from .config import ScoreConfig, TextOptions
from .parts import NO_SUMS, Parts

SCHEMA = 1
MOST_LISTED = 20  # skipped documents that a summary names


class Sums:
    """What the documents come to; writes the `numbers` of each as a line of JSON where there is a file for it."""

    def __init__(self, numbers: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.total: Counter[str] = Counter()
        self.documents, self.skipped, self.listed = 0, 0, []
        self.not_finite: set[str] = set()  # the options of the models whose scores are not, for some document
        self.numbers = numbers
        self.lines: Any = None

    def __call__(self, known: dict[str, Any]) -> None:
        self.documents += 1
        if "why" in known:
            if known["scored"]:  # of a document in pieces, some of which were passed over
                known = {**known, "why": f"in part: {known['why']}"}
            else:
                self.skipped += 1
            self.not_finite |= {model for model, why in NOT_FINITE.items() if why == known["why"]}
            if len(self.listed) < MOST_LISTED:
                self.listed.append({name: known[name] for name in ("document", "name", "why")})
        self.total.update({name: x for name, x in known.items() if name not in NO_SUMS})
        if self.lines is not None:
            values = {k: known[k] for k in NO_SUMS if k in known}
            self.lines.write(strict_json(values | self.numbers(known)) + "\n")


def conclude(config: ScoreConfig, scorer: Scorer, parts: Parts, count: int, measured: dict[str, Any]) -> dict[str, Any]:
    """Merges the parts, removes them, and returns the summary. DataError, NotFiniteError without a score."""
    head = _head(config, scorer) if config.store == "hidden" else {}
    try:
        summary = merged(config, scorer, parts, count, config.documents, numbers, head)
    except LogitlessError:
        if head:
            config.head_place.unlink()
        raise
    if head:
        summary |= {"head": str(config.head_place), "head_bytes": config.head_place.stat().st_size}
    return finished(config, parts, {"schema": SCHEMA, **summary, **measured, **circumstances(config, scorer)})


def finished(config: TextOptions, parts: Parts, summary: dict[str, Any]) -> dict[str, Any]:
    """The summary, once it is in the file of --json and the parts are removed: until then the same call goes on."""
    if config.json is not None and str(config.json) != "-":
        remove_leftovers(config.json)
        write_json(config.json, summary)
    with stoppable(lambda: f"the run has ended, and all of it is in {summary['out']}"):
        parts.remove()
    return summary


def _head(config: ScoreConfig, scorer: Scorer) -> dict[str, Any]:
    """Writes the head that the stored hidden states go through, once; what the record says of both."""
    head, about = LMHead.of(scorer.subject.model), {}
    remove_leftovers(config.head_place)
    write_whole(config.head_place, lambda path: about.update(write_head(path, head)))
    return {"hidden_size": head.hidden_size, "head": about}


def merged(
    config: TextOptions,
    scorer: Scorer,
    parts: Parts,
    count: int,
    documents: Path | None,
    numbers: Callable[[dict[str, Any]], dict[str, Any]],
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """One file of all parts, and of `documents` a line each; returns the options and what the documents come to.

    more: what the file's metadata say beside the options, the vocabulary, and hashes of the tokenizer and the text.
    The parts stay where they are, unless there is no document or no score in them: that is a DataError, or a
    NotFiniteError where the model is the reason.
    """
    before = [*scorer.opening] if len(scorer.opening) > 1 else next(iter(scorer.opening), None)
    options = config.deciding() | {"context_length": scorer.subject.context, "stride": scorer.stride, "bos": before}
    known = parts.manifest
    text = together(found for name, found in known.items() if name.startswith("the content of "))
    hashes = {"tokenizer": known["the tokenizer"], "text": text}
    metadata = {"schema": SCHEMA, "vocab_size": scorer.subject.source.vocab_size, **options, **hashes, **more}
    sums = Sums(numbers)
    if count == 0:
        parts.remove()
        raise DataError(f"--data {config.data}: no document in it; expected text, .jsonl or .parquet")

    def merge(lines: Path | None = None) -> None:
        with nullcontext() if lines is None else lines.open("w", encoding="utf-8") as sums.lines:
            parts.merge(count, metadata, sums)
        if not sums.total["scored"]:  # said here, so that the lines do not take the place of what lies there
            parts.remove()
            config.place.unlink()
            raise _without_scores(config, sums)

    if documents is None:
        merge()
    else:
        remove_leftovers(documents)
        write_whole(documents, merge)
    return {
        **options,
        "out": str(config.place),
        "vocab_size": scorer.subject.source.vocab_size,
        "documents": sums.documents,
        "skipped": sums.skipped,
        "skipped_documents": sums.listed,
        **numbers(sums.total),
    }


def circumstances(config: TextOptions, scorer: Scorer) -> dict[str, Any]:
    """What a summary says of where and with what it was made."""
    return {
        "device": str(scorer.subject.device),
        "dtype": str(scorer.subject.model.dtype).removeprefix("torch."),
        "out_bytes": config.place.stat().st_size,
        "versions": versions("torch", "transformers"),
    }


def _without_scores(config: TextOptions, sums: Sums) -> LogitlessError:
    """Why there is no score: the model's numbers, or the text."""
    if sums.not_finite:
        models = " and ".join(f"--{name} {getattr(config, name)}" for name in sorted(sums.not_finite, reverse=True))
        return NotFiniteError(f"{models}: the scores of {plural(sums.documents, 'document')} are not finite")
    why = "; a first token has nothing before it: give longer texts, or --bos yes"
    if sums.listed:
        why = f"; {sums.listed[0]['name']}: {sums.listed[0]['why']}"
    return DataError(f"--data {config.data}: no token to score in {plural(sums.documents, 'document')}{why}")


def numbers(known: Mapping[str, Any]) -> dict[str, Any]:
    """Sums as people read them; None where nothing was scored."""
    nats, scored, size = known["nats"], known["scored"], known["bytes"]
    return {
        "tokens": known["rows"],
        "scored_tokens": scored,
        "nats": nats,
        "nats_per_token": nats / scored if scored else None,
        "perplexity": perplexity(nats / scored) if scored else None,
        "bytes": size,
        "bits_per_byte": nats / math.log(2) / size if scored and size else None,
    }


def rows_of(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What every summary's table begins with."""
    bits, unscored = summary["bits_per_byte"], summary["tokens"] - summary["scored_tokens"]
    why = "or not the assistant's" if not summary["skipped_documents"] else "not the assistant's, or skipped"
    return [
        ("documents", f"{summary['documents']:,}, {summary['skipped']:,} of them skipped"),
        ("tokens", f"{summary['scored_tokens']:,} scored; {unscored:,} not: the first of a text, {why}"),
        ("perplexity", f"{format_perplexity(summary['perplexity'])} ({summary['nats_per_token']:.4f} nats per token)"),
        ("bits per byte", "no byte in the text" if bits is None else f"{bits:.4f}"),
    ]


def measured_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """How fast it was, and in how much memory."""
    what = "tokens" if "tokens_per_second" in summary else "requests"
    speed = summary[f"{what}_per_second"]
    return [
        ("speed", f"{speed:{',.0f' if speed >= 10 else '.2g'}} {what}/s, {summary['seconds']:.0f} s"),
        ("peak memory", format_bytes(summary["peak_memory_bytes"])),
    ]


def show(summary: dict[str, Any], console: Console) -> None:
    """The summary as a table."""
    written = ("written", f"{summary['out']}, {format_bytes(summary['out_bytes'])}")
    if "head" in summary:
        written = ("written", f"{written[1]}; its head {summary['head']}, {format_bytes(summary['head_bytes'])}")
    show_rows(console, [*rows_of(summary), *measured_rows(summary), written], summary["skipped_documents"])


def show_rows(console: Console, rows: list[tuple[str, str]], skipped_documents: list[dict[str, Any]]) -> None:
    """Names and values side by side, and below them the documents that were skipped."""
    console.print(facts(rows), highlight=False)
    for skipped in skipped_documents:
        console.print(f"skipped {skipped['name']}: {skipped['why']}", highlight=False, markup=False, soft_wrap=True)
