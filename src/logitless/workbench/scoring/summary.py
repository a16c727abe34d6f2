"""The end of a run: parts become one file, sums a summary for people and for machines."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...errors import DataError
from ...units import format_bytes, plural
from ...versions import versions
from ..common.files import write_whole
from .block import Scorer
from .config import ScoreConfig
from .parts import SUMS, Parts

SCHEMA = 1
MOST_LISTED = 20  # skipped documents that a summary names


class Sums:
    """What the documents come to; writes each as a line of JSON where there is a file for it."""

    def __init__(self, lines: Any = None) -> None:
        self.total: dict[str, Any] = dict.fromkeys(SUMS, 0)
        self.documents, self.skipped, self.listed = 0, 0, []
        self.lines = lines

    def __call__(self, known: dict[str, Any]) -> None:
        self.documents += 1
        if "why" in known:
            self.skipped += 1
            if len(self.listed) < MOST_LISTED:
                self.listed.append({name: known[name] for name in ("document", "name", "why")})
        for name in SUMS:
            self.total[name] += known[name]
        if self.lines is not None:
            values = {k: known[k] for k in ("document", "name", "why") if k in known}
            self.lines.write(json.dumps(values | _numbers(known)) + "\n")


def conclude(
    config: ScoreConfig, scorer: Scorer, vocab_size: int, parts: Parts, count: int, measured: dict[str, Any]
) -> dict[str, Any]:
    """Merges the parts, removes them, and returns the summary. Raises DataError where there is no score in them."""
    options = config.deciding() | {"context_length": scorer.context, "stride": scorer.stride, "bos": scorer.bos}
    metadata = {"schema": SCHEMA, "vocab_size": vocab_size, **options}
    sums = Sums()
    if count == 0:
        parts.remove()
        raise DataError(f"--data {config.data}: no document in it; expected text, .jsonl or .parquet")
    if config.documents is None:
        parts.merge(count, metadata, sums)
    else:
        write_whole(config.documents, lambda path: _merge_with_lines(path, parts, count, metadata, sums))
    parts.remove()
    if not sums.total["scored"]:
        config.place.unlink()
        first = f"; {sums.listed[0]['name']}: {sums.listed[0]['why']}" if sums.listed else ""
        raise DataError(f"--data {config.data}: no token to score in {plural(sums.documents, 'document')}{first}")
    return {
        "schema": SCHEMA,
        **options,
        "out": str(config.place),
        "vocab_size": vocab_size,
        "documents": sums.documents,
        "skipped": sums.skipped,
        "skipped_documents": sums.listed,
        **_numbers(sums.total),
        **measured,
        "device": str(scorer.device),
        "dtype": str(scorer.model.dtype).removeprefix("torch."),
        "out_bytes": config.place.stat().st_size,
        "versions": versions("torch", "transformers"),
    }


def _merge_with_lines(path: Path, parts: Parts, count: int, metadata: dict[str, Any], sums: Sums) -> None:
    with path.open("w", encoding="utf-8") as sums.lines:
        parts.merge(count, metadata, sums)


def _numbers(known: dict[str, Any]) -> dict[str, Any]:
    """Sums as people read them; None where nothing was scored."""
    nats, scored, size = known["nats"], known["scored"], known["bytes"]
    return {
        "tokens": known["rows"],
        "scored_tokens": scored,
        "nats": nats,
        "nats_per_token": nats / scored if scored else None,
        "perplexity": math.exp(min(nats / scored, 700.0)) if scored else None,
        "bytes": size,
        "bits_per_byte": nats / math.log(2) / size if scored and size else None,
    }


def show(summary: dict[str, Any], console: Console) -> None:
    """The summary as a table."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    bits, unscored = summary["bits_per_byte"], summary["tokens"] - summary["scored_tokens"]
    rows = [
        ("documents", f"{summary['documents']:,}, {summary['skipped']:,} of them skipped"),
        ("tokens", f"{summary['scored_tokens']:,} scored; {unscored:,} have nothing before them, and no score"),
        ("perplexity", f"{summary['perplexity']:,.2f} ({summary['nats_per_token']:.4f} nats per token)"),
        ("bits per byte", "no byte in the text" if bits is None else f"{bits:.4f}"),
        ("speed", f"{summary['tokens_per_second']:,.0f} tokens/s, {summary['seconds']:.0f} s"),
        ("peak memory", format_bytes(summary["peak_memory_bytes"])),
        ("written", f"{summary['out']}, {format_bytes(summary['out_bytes'])}"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)
    for skipped in summary["skipped_documents"]:
        console.print(f"skipped {skipped['name']}: {skipped['why']}", highlight=False, markup=False, soft_wrap=True)
