"""`logitless verify`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import tyro

from ..units import format_bytes, one_unit
from ..workbench.common.files import check_outputs
from ..workbench.common.options import MOST, Device, JsonFile, budget_bytes, require
from . import options
from .output import deliver

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = """Check the logitless loss against the dense one, and show where each is used.

Exit status 1 when value or gradient differ by more than rounding."""
LENGTHS = 512, 4_096, 40_000, 131_072  # without --sequence-lengths


@dataclass(frozen=True)
class VerifyConfig:
    """Options of `logitless verify`."""

    sequence_lengths: tyro.conf.UseAppendAction[tuple[tuple[int, ...], ...]] = ()
    """Tokens per sequence. Default: 512 4096 40000 131072."""
    vocab_size: int = 151_936
    """Entries of the vocabulary; the check runs with all of them."""
    loss_threshold: str | None = None
    """Logits above this get the logitless loss. Default: the --memory-budget of `logitless train` on this device."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the logits whose size is shown."""
    device: Device = "auto"
    seed: int = 0
    """Of the check's random numbers."""
    json: JsonFile = None


def main(arguments: Sequence[str]) -> int:
    """Prints the methods and the comparison; 1 when the comparison fails."""
    config = options.parse(VerifyConfig, prog="logitless verify", description=DESCRIPTION, arguments=arguments)
    check_outputs({"json": config.json})
    given = None if config.loss_threshold is None else budget_bytes(config.loss_threshold, "--loss-threshold")
    lengths = tuple(chain.from_iterable(config.sequence_lengths)) or LENGTHS
    for name, value in (("vocab_size", config.vocab_size), *(("sequence_lengths", n) for n in lengths)):
        require(2 <= value < MOST, name, "at least 2 and less than 2^31", value)
    require(0 <= config.seed < 2**63, "seed", "in 0..2^63-1", config.seed)
    import torch  # below, so that --help needs no torch

    from ..workbench.common.device import budget_on, device_of
    from ..workbench.runs.progress import working
    from ..workbench.sft import verify
    from .screen import Screen

    threshold = budget_on(config.device) if given is None else given
    chosen = verify.choices(lengths, config.vocab_size, threshold, getattr(torch, config.dtype))
    with working(Screen(stderr=True)) as tell:
        checks = verify.checks(config.vocab_size, device_of(config.device), config.seed, tell)
    passed = all(check.holds for check in checks)
    size = verify.check_size(config.vocab_size)
    report = _as_json(config, threshold, chosen, checks, passed)
    deliver(report, config.json, lambda console: _show(config, threshold, chosen, checks, size, console))
    return 0 if passed else 1


def _as_json(
    config: VerifyConfig, threshold: int, chosen: Sequence[Any], checks: Sequence[Any], passed: bool
) -> dict[str, Any]:
    return {
        "schema": 1,
        "vocab_size": config.vocab_size,
        "threshold_bytes": threshold,
        "choices": [asdict(choice) for choice in chosen],
        "checks": [{**asdict(check), "holds": check.holds} for check in checks],
        "passed": passed,
    }


def _show(
    config: VerifyConfig, threshold: int, chosen: Sequence[Any], checks: Sequence[Any], tokens: int, console: Console
) -> None:
    size = one_unit(c.logits_bytes for c in chosen)
    rows = [(f"{c.length:,}", size(c.logits_bytes), c.method, "yes" if c.method == "dense" else "no") for c in chosen]
    limit = format_bytes(threshold)
    title = f"One sequence's logits: {config.vocab_size:,} entries, {config.dtype}, threshold {limit}"
    _table(console, title, (">length", ">logits' size", "<method", "<logits made"), rows)
    rows = [
        (c.what, f"{c.error:.1e}", f"{c.allowed:.0e}", "[green]equal[/]" if c.holds else "[bold red]DIFFERENT[/]")
        for c in checks
    ]
    title = f"Logitless loss against dense float64: {tokens} tokens × {config.vocab_size:,} entries"
    _table(console, title, ("<comparison", ">error", ">allowed", "<"), rows)
    failed = sum(not check.holds for check in checks)
    verdict = f"{failed} of {len(checks)} comparisons differ" if failed else "value and gradients agree"
    console.print(verdict, highlight=False)


def _table(console: Console, title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A title and a table."""
    from ..workbench.common.tables import columns

    table = columns(*names, ruled=True)
    for row in rows:
        table.add_row(*row)
    console.print(f"[bold]{title}[/bold]", highlight=False)
    console.print(table, highlight=False)
