"""`--method all`: every method on one task, seed by seed, and how they compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ....errors import ConfigError, LogitlessError, OptionError
from ....versions import versions
from ...common.files import read_lines, read_object, write_json, write_lines
from ...common.say import say
from ...common.sealed import hashes_of
from ...common.written import METRICS_FILE, RUN_FILE, SUMMARY_FILE
from ...runs.ending import explained
from ...runs.examples import EXAMPLES_FILE, first_of
from ...runs.rundir import (
    claim,
    differing,
    finished_within,
    options_kept,
    prepared_for,
    record,
    record_finished,
    stored,
)
from ...sources.generation import align_tokens
from ...sources.model import ModelSource, build, rounding_of
from ...sources.tokenizer import TextTokenizer
from ..config import METHODS_COMPARED, GradeConfig
from ..legacy import TooLargeError
from ..single import SCHEMA, inputs_of, materials, named_reward, policy_of, reward_of, run_one
from .curves import curves, draw
from .report import PAGE_FILE, PLOT_FILE, table, write_page

Record = dict[str, Any]

RESULTS = (RUN_FILE, SUMMARY_FILE, METRICS_FILE, EXAMPLES_FILE)  # of a run, which are compared with others'


def run_all(config: GradeConfig, console: Console) -> dict[str, Any]:
    """Runs each method with each seed, on the same prompts and reward, and returns how they compare.

    Writes METHOD-SEED, a run's directory each, metrics.jsonl (all of theirs), comparison.png, comparison.html and
    summary.json. Resumed, it goes on with what is not finished. The legacy methods are left out, with the reason, where
    they do not fit.
    """
    if config.resume is not None:
        _check_options(config, config.resume)
    source, tokenizer = policy_of(config, console)
    place = claim(config, "all")
    with explained(place, "align"):
        with options_kept(place):
            _begin(config, place, source, tokenizer, console)
        left_out: dict[str, str] = {}
        for seed in range(config.seed, config.seed + config.seeds):
            for method in METHODS_COMPARED:
                if method not in left_out:
                    _one(config, place, method, seed, left_out, console)
        return _conclude(config, place, left_out, console)


def _begin(config: GradeConfig, place: Path, source: ModelSource, tokenizer: TextTokenizer, console: Console) -> None:
    """Prepares the prompts and the reward of all runs, and writes run.json."""
    model = build(config, source).eval()
    if rounding := rounding_of(config, model):
        say(console, f"warning: {rounding}")
    align_tokens(model, tokenizer)
    materials(config, place, model, tokenizer, console)
    reward, _ = reward_of(config, place, model, tokenizer)  # refused before the comparison has begun
    record(config, place, inputs=inputs_of(config, source, reward))


def _check_options(config: GradeConfig, whole: Path) -> None:
    """OptionError for an option that the numbers of a comparison depend on, and that is not what it began with."""
    before = stored(whole, config)
    for name, (was, now) in _differing(before, config).items():
        raise OptionError(
            f"--resume {whole}: --{name.replace('_', '-')} cannot change from {was} to {now} in a comparison: what is "
            "finished would be set against other runs; begin another"
        )


def _differing(before: GradeConfig, now: GradeConfig) -> dict[str, tuple[Any, Any]]:
    """As `differing`, but for where their metrics go."""
    return {name: values for name, values in differing(before, now).items() if name != "report_to"}


def _one(config: GradeConfig, whole: Path, method: str, seed: int, left_out: dict[str, str], console: Console) -> None:
    """One method's run, unless it is finished; from where it was killed, if it was."""
    place = whole / f"{method}-{seed}"
    if _is_finished(whole, place):
        return
    say(console, f"{method}, seed {seed} ...")
    own: dict[str, Any] = {"method": method, "seed": seed, "seeds": 1, "json": None, "config": None}
    begun = (place / RUN_FILE).exists()
    given = replace(config, **own, resume=place if begun else None, output_dir=place)
    if begun:
        _check_part(whole, place, given)
        (place / SUMMARY_FILE).unlink(missing_ok=True)  # of a run that was killed before its end was recorded
    try:
        run_one(given, console, whole)
    except TooLargeError as error:
        left_out[method] = str(error)
        say(console, f"{method} is left out: {error}")
        return
    record_finished(whole, place.name, hashes_of(place, RESULTS))


def _is_finished(whole: Path, place: Path) -> bool:
    """Whether a run has ended within this comparison. ConfigError where what it left is no longer what it was."""
    known = finished_within(whole).get(place.name)
    if known is None or not place.exists():
        return False
    found = hashes_of(place, RESULTS)
    for name, was in known.items():
        if found.get(name) != was:
            raise ConfigError(
                f"{place / name} is not what the run ended with: put it back, or remove {place}, to run it again"
            )
    return True


def _check_part(whole: Path, place: Path, given: GradeConfig) -> None:
    """ConfigError for a run of other options, prompts or rewards than those of the comparison that it lies in."""
    try:
        changed, prepared = _differing(stored(place, given), given), prepared_for(place)
    except LogitlessError:
        raise ConfigError(
            f"{place / RUN_FILE} is damaged, or of another version: remove {place}, to run it again"
        ) from None
    others = [f"--{name.replace('_', '-')}" for name in changed]
    others += [name for name, known in prepared_for(whole).items() if prepared.get(name) != known]
    if others:
        raise ConfigError(
            f"{place} is of a run with another {others[0]} than this comparison's: move it elsewhere, or remove "
            "it, to run it again"
        )


def _conclude(config: GradeConfig, place: Path, left_out: dict[str, str], console: Console) -> dict[str, Any]:
    """The comparison of all that ran, as numbers, as a plot and as a page."""
    runs = {
        (method, seed): place / f"{method}-{seed}"
        for method in METHODS_COMPARED
        for seed in range(config.seed, config.seed + config.seeds)
        if method not in left_out
    }
    records = [
        {"method": method, "seed": seed, **x}
        for (method, seed), run in runs.items()
        for x in read_lines(run / METRICS_FILE)
    ]
    write_lines(place / METRICS_FILE, records)
    summary = {
        "schema": SCHEMA,
        "method": "all",
        "model": config.model,
        **named_reward(config, place),
        "data": config.data_name,
        "steps": config.max_steps,
        "seeds": config.seeds,
        **table([_summary(run) for run in runs.values()], left_out),
        "curves": curves(records),
        "left_out": left_out,
        "versions": versions("torch", "transformers", "peft"),
        "output_dir": str(place),
    }
    draw(place / PLOT_FILE, records)
    completions = {method: first_of(run) for (method, seed), run in runs.items() if seed == config.seed}
    write_page(place / PAGE_FILE, place / PLOT_FILE, summary, completions)
    write_json(place / SUMMARY_FILE, summary)
    return summary


def _summary(place: Path) -> dict[str, Any]:
    return read_object(place / SUMMARY_FILE)
