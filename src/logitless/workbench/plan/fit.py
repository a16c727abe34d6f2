"""The search for a setting that fits: the most tokens a step first, then the least work done twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from ...units import format_bytes, one_unit, plural
from .algorithms import ROLLOUT
from .commands import to_the_byte
from .plan import Plan, plan
from .setting import Setting, ceil_div

HEADROOM = {"conservative": (1, 5), "aggressive": (1, 50)}  # of a GPU's memory, kept free beyond the reserve
LADDER = ("ddp", "zero1", "zero2", "fsdp2")  # each divides more, and communicates more
SHORTEST = 128  # tokens of a response below which nobody trains
LORA_RANK = 16
MOST_GROWTH = 64  # times the batch that is asked for


@dataclass(frozen=True)
class Fit:
    """A setting that fits, and why each knob stands where it does."""

    name: str
    plan: Plan
    allowed: int  # bytes that the search let a GPU use
    reasons: tuple[tuple[str, str, str], ...]  # knob, value, reason


def fit(setting: Setting, units: str = "GiB") -> dict[str, Fit | None]:
    """A conservative and an aggressive setting; None where even the smallest does not fit.

    `setting` says what is wished for: its batch and lengths are not exceeded, and what it already turns on stays. Where
    both would be the same, the aggressive one has the longest response that fits, or with all of the response that is
    wished for the largest batch that fits in as many passes. units: of the sizes in the reasons, GiB or GB.
    """
    setting.check()
    found = {name: _fit(setting, name, units) for name in HEADROOM}
    careful, bold = found["conservative"], found["aggressive"]
    if careful is not None and bold is not None and bold.plan == careful.plan:
        found["aggressive"] = _grown(bold, setting, units)
    return found


def _fit(wish: Setting, name: str, units: str) -> Fit | None:
    part, of = HEADROOM[name]
    allowed = wish.gpu_bytes - wish.reserve - wish.gpu_bytes * part // of
    sizes = _sizes(wish)
    if not any(_rows(candidate, allowed) for candidate in _candidates(wish, *sizes[-1])):
        return None  # what is larger would not fit either: a long search that cannot succeed
    for batch, response in sizes:
        for candidate in _candidates(wish, batch, response):
            found = _rows(candidate, allowed)
            if found is not None:
                return Fit(name, plan(found), allowed, tuple(_reasons(found, wish, allowed, units)))
    return None


def _grown(found: Fit, wish: Setting, units: str) -> Fit:
    """The same with what more the same knobs and the same number of forward passes hold."""
    setting = found.plan.setting

    def longer(steps: int) -> Setting:
        return replace(setting, response_length=setting.response_length + steps * SHORTEST)

    def larger(prompts: int) -> Setting:
        return _of_batch(setting, setting.batch_size + prompts)

    short = (wish.response_length - setting.response_length) // SHORTEST
    grow, most = (longer, short) if short else (larger, (MOST_GROWTH - 1) * setting.batch_size)
    least = 0
    while least < most:  # the most that fits, by bisection
        middle = (least + most + 1) // 2
        if plan(grow(middle)).peak <= found.allowed:
            least = middle
        else:
            most = middle - 1
    grown = grow(least)
    return Fit(found.name, plan(grown), found.allowed, tuple(_reasons(grown, wish, found.allowed, units)))


def _of_batch(setting: Setting, batch: int) -> Setting:
    """The setting with another batch, in as many forward passes, generated at once where it was."""
    whole = setting.rollout_sequences >= ceil_div(setting.batch_rows, setting.shards)
    larger = replace(setting, batch_size=batch, micro_batch=0, rollout_batch=0 if whole else setting.rollout_batch)
    return replace(larger, micro_batch=ceil_div(larger.rows, setting.accumulation))


def _sizes(wish: Setting) -> list[tuple[int, int]]:
    """(batch, response length), the most tokens first, then the longer response."""
    batches = list(_halvings(wish.batch_size, 1))
    responses = list(_halvings(wish.response_length, min(SHORTEST, wish.response_length)))
    return sorted(product(batches, responses), key=lambda p: (-p[0] * (wish.prompt_length + p[1]), -p[1]))


def _candidates(wish: Setting, batch: int, response: int) -> Iterator[Setting]:
    """The wish at that size, with each LoRA rank, checkpointing, sharding and memory budget, the least costly first."""
    ranks = [wish.lora_rank] if wish.lora_rank else [0, LORA_RANK]
    checkpointing = [True] if wish.gradient_checkpointing else [False, True]
    start = LADDER.index(wish.sharding) if wish.sharding in LADDER else len(LADDER)
    shardings = LADDER[start:] or (wish.sharding,)
    budgets = (wish.memory_budget, max(1, wish.memory_budget // 4))
    knobs = product(ranks, checkpointing, shardings if wish.shards > 1 else (wish.sharding,), budgets)
    for rank, checkpointed, sharding, budget in knobs:
        yield replace(
            wish,
            batch_size=batch,
            response_length=response,
            lora_rank=rank,
            gradient_checkpointing=checkpointed,
            sharding=sharding,
            memory_budget=budget,
        )


def _rows(candidate: Setting, allowed: int) -> Setting | None:
    """The candidate with the largest rollout batch and micro-batch that fit; None if none does."""
    phases = candidate.kind.phases
    mine = ceil_div(candidate.batch_rows, candidate.shards)
    if ROLLOUT in phases:
        rollout = _largest(candidate, "rollout_batch", mine, lambda p: p.peaks[ROLLOUT] <= allowed)
        if rollout is None:
            return None
        candidate = rollout
    rest = [phase for phase in phases if phase != ROLLOUT]
    fits = lambda p: max(p.peaks[phase] for phase in rest) <= allowed  # noqa: E731
    return _largest(candidate, "micro_batch", candidate.rows, fits)


def _largest(candidate: Setting, knob: str, most: int, fits: Callable[[Plan], bool]) -> Setting | None:
    tries = (replace(candidate, **{knob: value}) for value in _halvings(most, 1))
    return next((setting for setting in tries if fits(plan(setting))), None)


def _halvings(most: int, least: int) -> Iterator[int]:
    """`most` and its halves, rounded down, to `least`."""
    while most > least:
        yield most
        most //= 2
    yield least


def _above(value: int, most: int, least: int = 1) -> int:
    """The next larger size that the search tried, and that did not fit."""
    return min(size for size in _halvings(most, least) if size > value)


def _reasons(found: Setting, wish: Setting, allowed: int, units: str) -> Iterator[tuple[str, str, str]]:
    """(knob, value, why not the cheaper or larger one)."""

    def unless(**changes: object) -> str:
        other = plan(replace(found, **changes))  # pyright: ignore[reportArgumentType]
        return f"would need {beyond(other.peak, allowed, units, other.peak_phase)}"

    yield "batch-size", str(found.batch_size), _batch_reason(found, wish, unless)
    yield "response-length", str(found.response_length), _response_reason(found, wish, unless)
    if found.lora_rank and not wish.lora_rank:
        yield "lora-rank", str(found.lora_rank), f"training all parameters {unless(lora_rank=0)}"
    else:
        yield "lora-rank", str(found.lora_rank), "as asked" if wish.lora_rank else "all parameters can be trained"
    if not found.gradient_checkpointing:
        why = "every activation fits: nothing is computed twice"
    else:
        why = "as asked" if wish.gradient_checkpointing else f"without it, it {unless(gradient_checkpointing=False)}"
    yield "gradient-checkpointing", "on" if found.gradient_checkpointing else "off", why
    if found.sharding != wish.sharding:
        before = LADDER[LADDER.index(found.sharding) - 1]
        yield "sharding", found.sharding, f"{before} {unless(sharding=before)}"
    else:
        yield "sharding", found.sharding, "one GPU" if found.shards == 1 else "as asked"
    yield from _row_reasons(found, wish, unless)


def beyond(needed: int, allowed: int, units: str, phase: str) -> str:
    """How much more than is allowed a phase needs, in sizes that are told apart."""
    size = one_unit((needed, allowed), units)
    if size(needed) == size(allowed):
        return f"{format_bytes(needed - allowed, units)} more than the {size(allowed)} that are allowed in {phase}"
    return f"{size(needed)} in {phase}, {size(allowed)} are allowed"


def _batch_reason(found: Setting, wish: Setting, unless: Callable[..., str]) -> str:
    if found.batch_size < wish.batch_size:
        larger = _above(found.batch_size, wish.batch_size)
        return f"{larger} {unless(batch_size=larger)}"
    if found.batch_size == wish.batch_size:
        return "as asked"
    if found.batch_size == MOST_GROWTH * wish.batch_size:
        return f"{wish.batch_size} were asked for; no more than {MOST_GROWTH} times as many are searched"
    more = _of_batch(found, found.batch_size + 1)
    why = unless(batch_size=more.batch_size, micro_batch=more.micro_batch, rollout_batch=more.rollout_batch)
    return f"{wish.batch_size} were asked for; {more.batch_size} in as many passes {why}"


def _response_reason(found: Setting, wish: Setting, unless: Callable[..., str]) -> str:
    if found.response_length == wish.response_length:
        return "as asked"
    shortest, longer = min(SHORTEST, wish.response_length), found.response_length + SHORTEST
    if found.response_length in _halvings(wish.response_length, shortest):
        longer = _above(found.response_length, wish.response_length, shortest)
    return f"{longer} {unless(response_length=longer)}"


def _row_reasons(found: Setting, wish: Setting, unless: Callable[..., str]) -> Iterator[tuple[str, str, str]]:
    searched = replace(found, batch_size=min(found.batch_size, wish.batch_size))  # before the batch grew
    why = "the whole batch of a GPU at once"
    if found.micro_rows < found.rows:
        more = _above(found.micro_rows, searched.rows)
        why = f"{more} {unless(micro_batch=more)}"
    yield "micro-batch", str(found.micro_rows), why
    steps = found.accumulation
    make = "makes" if steps == 1 else "make"
    whole = f"{plural(steps, 'pass')} of {plural(found.micro_rows, 'row')} {make} a GPU's {found.rows:,}"
    yield "accumulation", str(steps), whole
    if found.rollout_batch and ROLLOUT in found.kind.phases:
        mine = ceil_div(searched.batch_rows, searched.shards)
        why = "all of a GPU's sequences at once"
        if found.rollout_batch < mine:
            more = _above(found.rollout_batch, mine)
            why = f"{more} {unless(rollout_batch=more)}"
        yield "rollout-batch", str(found.rollout_sequences), why
    smaller = f"{to_the_byte(wish.memory_budget)} {unless(memory_budget=wish.memory_budget)}"
    budget = to_the_byte(found.memory_budget)
    yield "memory-budget", budget, "as asked" if found.memory_budget == wish.memory_budget else smaller
