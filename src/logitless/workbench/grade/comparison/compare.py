"""`--method all`: every method on one task, seed by seed, and how they compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ....errors import ConfigError, OptionError
from ....versions import versions
from ...common.files import read_lines, read_object, write_json, write_lines
from ...common.say import say
from ...common.written import METRICS_FILE, RUN_FILE, SUMMARY_FILE
from ...runs.ending import explained
from ...runs.examples import first_of
from ...runs.rundir import claim, record, stored
from ...sources.generation import align_tokens
from ...sources.model import build
from ..config import METHODS_COMPARED, GradeConfig
from ..legacy import TooLargeError
from ..single import SCHEMA, materials, named_reward, policy_of, run_one
from .curves import curves, draw
from .report import PAGE_FILE, PLOT_FILE, table, write_page

Record = dict[str, Any]


def run_all(config: GradeConfig, console: Console) -> dict[str, Any]:
    """Runs each method with each seed, on the same prompts and reward, and returns how they compare.

    Writes METHOD-SEED, a run's directory each, metrics.jsonl (all of theirs), comparison.png, comparison.html and
    summary.json. Resumed, it goes on with what is not finished. The legacy methods are left out, with the reason, where
    they do not fit.
    """
    if config.resume is not None and (before := stored(config.resume, config).max_steps) != config.max_steps:
        raise OptionError(
            f"--resume {config.resume}: --max-steps cannot change from {before} to {config.max_steps} in a comparison: "
            "what is finished would be set against longer runs; begin another one"
        )
    source, tokenizer = policy_of(config, console)
    place = claim(config, "all")
    with explained(place, "align"):
        model = build(config, source).eval()
        align_tokens(model, tokenizer)
        materials(config, place, model, tokenizer, console)
        del model
        record(config, place)
        left_out: dict[str, str] = {}
        for seed in range(config.seed, config.seed + config.seeds):
            for method in METHODS_COMPARED:
                if method not in left_out:
                    _one(config, place, method, seed, left_out, console)
        return _conclude(config, place, left_out, console)


def _one(config: GradeConfig, whole: Path, method: str, seed: int, left_out: dict[str, str], console: Console) -> None:
    """One method's run, unless it is finished; from where it was killed, if it was."""
    place = whole / f"{method}-{seed}"
    if (place / SUMMARY_FILE).exists():
        if (steps := _summary(place)["steps"]) != config.max_steps:
            raise ConfigError(
                f"{place} is of {steps} steps, others are of {config.max_steps}: remove it, to run it again"
            )
        return
    say(console, f"{method}, seed {seed} ...")
    begun = (place / RUN_FILE).exists()
    there: dict[str, Any] = {"resume": place if begun else None, "output_dir": None if begun else place}
    given = replace(config, method=method, seed=seed, seeds=1, json=None, config=None, **there)
    try:
        run_one(given, console, whole)
    except TooLargeError as error:
        left_out[method] = str(error)
        say(console, f"{method} is left out: {error}")


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
        "data": config.data or "stdlib",
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
