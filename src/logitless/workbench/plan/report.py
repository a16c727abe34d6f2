"""A plan for people and machines: tables by rich, JSON with a versioned schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.table import Table

from ...models.shapes import Traced
from ...units import format_bytes, one_unit, plural
from ..common.tables import columns
from .commands import FILLED_IN, flags, hint, planned, wide, with_its_own_step
from .components import Component
from .fit import Fit
from .plan import Plan, both
from .setting import Setting
from .states import trained_parameters

SCHEMA = 1
LEAST_NAME, BESIDE_NAMES = 18, 62  # characters of --what-if's changes, broken at hyphens, and of the columns beside


def headline(setting: Setting, units: str) -> str:
    """The setting on one line."""
    s = setting
    sequences = f"{s.batch_size} × {s.responses_per_prompt}" if s.responses_per_prompt > 1 else str(s.batch_size)
    pairs = " pairs" if s.kind.sequences == 2 else ""
    split = "".join(f", {name} {n}" for name, n in (("tp", s.tensor_parallel), ("cp", s.context_parallel)) if n > 1)
    return (
        f"{s.model.name} ({s.model.parameters:,} parameters) · {s.algorithm} · {sequences}{pairs} × "
        f"{plural(s.length, 'token')} · {s.gpus} × {format_bytes(s.gpu_bytes, units)} · {s.sharding}{split}"
    )


def show(dense: Plan, logitless: Plan, console: Console, units: str = "GiB", *, components: bool = False) -> None:
    """The verdict and the phases, dense against logitless; every component where asked for."""
    setting = logitless.setting
    console.print(headline(setting, units), style="bold", highlight=False, markup=False)
    console.print(
        f"{plural(setting.accumulation, 'forward pass')} of {plural(setting.micro_rows, 'row')}, "
        f"{plural(setting.tokens, 'token')}, on each GPU; {format_bytes(setting.reserve, units)} of it in reserve",
        highlight=False,
    )
    size = one_unit((n for plan in (dense, logitless) for n in (plan.margin, *plan.peaks.values())), units)
    for plan in (dense, logitless):
        top = plan.largest
        console.print(verdict(plan, size), highlight=False)
        console.print(f"  largest single allocation: {top.name}, {size(top.largest)}", highlight=False)
    console.print(_phases(dense, logitless, size), highlight=False)
    if components:
        console.print(_components(dense, logitless, units), highlight=False)
    for note in notes(setting, units):
        console.print(f"[dim]{note}[/dim]", highlight=False)


def more(fitted: bool, components: bool) -> str:
    """The options that show what was not asked for."""
    offers = [] if components else ["--components lists what each phase holds"]
    if fitted:
        offers.append("--fit leaves parallelism, offloading, tiles and optimizer as given: --what-if tries them")
    else:
        offers.append("--fit searches a setting that fits, and says why")
    return "; ".join(offers)


def notes(setting: Setting, units: str = "GiB") -> list[str]:
    """What a reader of the numbers should know about this setting."""
    kind, found = setting.kind, []
    if setting.algorithm in ("grpo", "intuitor") and setting.responses_per_prompt == 1:
        found.append("one response per prompt: a group of one has no advantage; give --responses-per-prompt")
    if setting.batch_rows < setting.ranks:
        some = f"{setting.batch_rows} a step for {setting.ranks} GPUs or groups of them, so some have none"
        found.append(f"rows: {some}; give a larger --batch-size, or --context-parallel")
    if setting.dense_logits == "all" and setting.prompt_length and not kind.soft_tokens:
        found.append("dense: logits of the prompts too, as transformers and verl make them; see --dense-logits")
    if kind.reference and setting.lora_rank and setting.reference == "auto":
        found.append("no reference model: the base model without its adapters is one")
    if setting.lora_rank and setting.model.adapted_experts and setting.model.moe_layers:
        found.append("adapters of experts: PEFT merges them into a copy of all of a layer's experts at each pass")
    if kind.soft_tokens:
        found.append("dense: every step of a generation passes all tokens before it again, as there is no cache")
    if not setting.model.in_catalog:
        found.append(f"{setting.model.name}: parameters counted by transformers; {_activations_of(setting, units)}")
    return found


def _activations_of(setting: Setting, units: str) -> str:
    """Where the activations of a family outside of the catalogue come from, and where they are not what a GPU has."""
    shape = setting.model
    like = "Mixtral" if shape.moe_layers else "Llama"
    if not shape.traced.kept:
        low = ", far too few for layers that carry a state: measure a real run" if shape.stateful else ""
        return f"its layers cannot be traced, so activations as of a {like}'s{low}"
    if shape.stateful:
        alike = both(replace(setting, model=replace(shape, traced=Traced())))[1].peak
        return (
            "activations as traced of its own layers, which carry a state, without kernels for it (fla, mamba-ssm); "
            f"these keep far less: of a {like}'s layers of its sizes, logitless would take {format_bytes(alike, units)}"
        )
    if shape.traced.kept_scores:
        return (
            "activations as traced of its own layers, whose attention makes scores whole unless a kernel is installed"
        )
    return "activations as traced of its own layers"


def verdict(plan: Plan, size: Callable[[int], str]) -> str:
    """Whether a plan fits, with its margin, as a line of rich markup."""
    peak = f"peak {size(plan.peak)} in {plan.peak_phase}"
    if plan.fits:
        return f"[bold]{plan.way}[/bold] [green]fits[/green]: {peak}, {size(plan.margin)} left on each GPU"
    return f"[bold]{plan.way}[/bold] [red]does not fit[/red]: {peak}, {size(-plan.margin)} too much"


def lives(component: Component, phases: Sequence[str]) -> str:
    """ "always", or the phases as ranges: "forward … loss, backward"."""
    if set(component.phases) == set(phases):
        return "always"
    runs: list[list[str]] = []
    for before, phase in zip(("", *phases), phases, strict=False):
        if phase in component.phases:
            if runs and runs[-1][-1] == before:
                runs[-1].append(phase)
            else:
                runs.append([phase])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} … {run[-1]}" for run in runs)


def _components(dense: Plan, logitless: Plan, units: str) -> Table:
    table = columns("<component", "<shape", ">dense", ">logitless", "<lives")
    phases = logitless.setting.kind.phases
    size = one_unit((c.nbytes for plan in (dense, logitless) for c in plan.components), units)
    mine = {c.name: c for c in logitless.components}
    theirs = {c.name: c for c in dense.components}
    for name in dict.fromkeys([*theirs, *mine]):
        left, right = theirs.get(name), mine.get(name)
        some = right or left
        assert some is not None
        cells = ["–" if c is None else size(c.nbytes) for c in (left, right)]
        table.add_row(name, some.shape, *cells, lives(some, phases))
    return table


def _phases(dense: Plan, logitless: Plan, size: Callable[[int], str]) -> Table:
    table = columns("<phase", ">dense", ">logitless", ">saved")
    for phase, nbytes in logitless.peaks.items():
        before = dense.peaks[phase]
        saved = size(before - nbytes) if before != nbytes else "–"
        cells = [size(plan.peaks[phase]) for plan in (dense, logitless)]
        cells = [
            f"[bold]{c}[/bold]" if phase == p.peak_phase else c for c, p in zip(cells, (dense, logitless), strict=True)
        ]
        table.add_row(phase, *cells, saved)
    return table


def show_sweep(rows: Sequence[tuple[int, Plan, Plan]], console: Console, units: str = "GiB") -> None:
    """Peaks over sequence lengths and algorithms: dense over logitless, and each algorithm over the first one."""
    setting = rows[0][1].setting
    first = {length: ways for length, *ways in reversed(rows)}  # of each length the first row
    several = len(rows) > len(first)
    over = [f">dense,\nlogitless\n/ {setting.algorithm}'s"] if several else []
    table = columns(">tokens", "<algorithm", ">dense", ">logitless", ">dense /\nlogitless", *over, "<fits")
    size = one_unit((plan.peak for _, *ways in rows for plan in ways), units)
    for length, *ways in rows:
        dense, logitless = ways
        fits = " and ".join(plan.way for plan in ways if plan.fits) or "neither"
        cells = [size(dense.peak), size(logitless.peak), f"{dense.peak / logitless.peak:.2f}"]
        if several:
            parts = (f"{way.peak / before.peak:.2f}" for way, before in zip(ways, first[length], strict=True))
            cells.append(", ".join(parts))
        table.add_row(f"{length:,}", logitless.setting.algorithm, *cells, fits)
    console.print(
        f"[bold]peak on each GPU: {setting.model.name} · batch {setting.batch_size} × {setting.responses_per_prompt} · "
        f"{setting.gpus} × {format_bytes(setting.gpu_bytes, units)} · {setting.sharding}[/bold]",
        highlight=False,
    )
    console.print(table, highlight=False)


def show_changes(rows: Sequence[tuple[str, Plan, Plan]], console: Console, units: str = "GiB") -> None:
    """Peaks with one option changed; the first row is the setting itself."""
    room = console.width - BESIDE_NAMES
    whole = room >= LEAST_NAME  # otherwise rich breaks names anywhere, and leaves no column out
    what_if = "=what if" if whole else "<what if"
    table = columns(what_if, ">dense", ">logitless", ">change", "<logitless peaks in", "<fits")
    base = rows[0][2].peak
    size = one_unit((plan.peak for _, *ways in rows for plan in ways), units)
    for name, dense, logitless in rows:
        change = logitless.peak - base
        sign = "+" if change > 0 else ""
        cells = [
            size(dense.peak),
            size(logitless.peak),
            f"{sign}{size(change)}" if change else "–",
        ]
        broken = "\n".join(wrap(name, room)) if whole else name
        table.add_row(broken, *cells, logitless.peak_phase, "yes" if logitless.fits else "no")
    console.print("[bold]what if[/bold]")
    console.print(table, highlight=False)


def show_fits(found: dict[str, Fit | None], console: Console, units: str = "GiB") -> None:
    """Each recommended setting with its reasons and command lines."""
    for name, fit in found.items():
        if fit is None:
            console.print(
                f"[bold]{name}[/bold]: [red]nothing fits[/red]: give more GPUs, more memory or a smaller model"
            )
            continue
        same = [other for other, before in found.items() if before is not None and before.plan == fit.plan]
        if same[0] != name:
            why = "a pass with a row more would not fit, a larger batch is more passes"
            console.print(f"[bold]{name}[/bold]: as {same[0]}; {why}")
            continue
        console.print(f"[bold]{name}[/bold]: {headline(fit.plan.setting, units)}", highlight=False)
        console.print(verdict(fit.plan, one_unit((fit.plan.peak, fit.plan.margin), units)), highlight=False)
        table = columns("<option", "<value", "<why")
        for row in fit.reasons:
            table.add_row(*row)
        console.print(table, highlight=False)
        for line in _lines(fit.plan.setting):
            console.print(line, highlight=False, soft_wrap=True)
        console.print()


def _lines(setting: Setting) -> Iterator[str]:
    """The command lines of a setting, what is to be filled in, and those that would run it with another optimizer."""
    lines = flags(setting).values()
    yield planned(setting)
    yield from lines
    if names := [name for name in FILLED_IN if any(name in line.split() for line in lines)]:
        yield f"[dim]to be filled in: {', '.join(names)}[/dim]"
    if wide(setting) and not setting.sharding.startswith("zero"):  # DeepSpeed's are bf16 with a copy, as planned
        yield "[dim]with float32 weights, TRL and accelerate take 2 to 13 % more than planned: leave them room[/dim]"
    if (other := hint(setting)) is not None:
        yield f"[dim]{other}[/dim]"
    if own := with_its_own_step(setting):
        yield "[dim]with that one (bfloat16 weights, no float32 copy of them) it takes no more than planned:[/dim]"
        yield from own.values()


def plan_json(plan: Plan) -> dict[str, Any]:
    """One way's components, peaks and verdict."""
    return {
        "components": [asdict(c) for c in plan.components],
        "peaks": plan.peaks,
        "peak_bytes": plan.peak,
        "peak_phase": plan.peak_phase,
        "largest_allocation": {"name": plan.largest.name, "bytes": plan.largest.largest},
        "margin_bytes": plan.margin,
        "fits": plan.fits,
    }


def as_json(dense: Plan, logitless: Plan) -> dict[str, Any]:
    """The whole plan; sizes in bytes on each GPU."""
    setting = logitless.setting
    return {
        "schema": SCHEMA,
        "setting": {key: value for key, value in asdict(setting).items() if key != "model"},
        "model": {**asdict(setting.model), "parameters": setting.model.parameters},
        "trained_parameters": trained_parameters(setting),
        "accumulation": setting.accumulation,
        "tokens_per_step": setting.tokens_per_step,
        "notes": notes(setting),
        "dense": plan_json(dense),
        "logitless": plan_json(logitless),
    }


def fits_json(found: dict[str, Fit | None]) -> dict[str, Any]:
    """The recommended settings; null where nothing fits."""
    return {name: None if fit is None else _fit_json(fit) for name, fit in found.items()}


def _fit_json(fit: Fit) -> dict[str, Any]:
    keys = ("option", "value", "why")
    return {
        "setting": {key: value for key, value in asdict(fit.plan.setting).items() if key != "model"},
        "allowed_bytes": fit.allowed,
        "plan": plan_json(fit.plan),
        "reasons": [dict(zip(keys, row, strict=True)) for row in fit.reasons],
        "command": planned(fit.plan.setting),
        "flags": flags(fit.plan.setting),
    }
