"""Reward functions in TRL's form: built in, or anybody's by `module:function`."""

from __future__ import annotations

import ast
import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import iscoroutinefunction
from itertools import islice
from typing import Any

from ...errors import NotFiniteError, OptionError
from ...integrations.trl.rewards import SelfCertaintyReward
from ...units import plural
from ..common.functions import STOPS, blamed, function_named, is_finite
from .config import AlignConfig

Reward = Callable[..., list[float]]
NGRAM = 3
WITHOUT_ORDER = (str, bytes, bytearray, dict, set, frozenset)  # or of characters, which are no rewards


def python_lines(completions: Sequence[Any], **_: Any) -> list[float]:
    """The share of a completion's whole lines that are Python statements by themselves; 0 where it has none.

    Blank lines and comments count neither way. A lone name or literal is no statement here, since it says nothing;
    nor is a line whose brackets close on another line. The last line counts only if it ends.
    """
    return [_share(_text(completion)) for completion in completions]


def repetition_guard(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Minus the share of a completion's token 3-grams that occurred in it before: 0 to almost -1."""
    return [-_repeated(list(ids)) for ids in completion_ids]


BUILT_IN: dict[str, Reward] = {"python_lines": python_lines, "repetition_guard": repetition_guard}


def rewards_of(config: AlignConfig) -> list[tuple[Reward, float]]:
    """The reward functions of a run with their weights. Raises OptionError for those that cannot be found.

    Self-certainty is always the first: intuitor's reward, and a measurement of weight 0 for the other methods.
    """
    weight = config.self_certainty_weight if config.method == "intuitor" else 0.0
    certainty = SelfCertaintyReward(micro_batch=config.batch_size, memory_budget=config.memory_budget_bytes)
    found: list[tuple[Reward, float]] = [(certainty, weight)]
    rewarding = [weight]
    if config.guard_weight:
        found.append((repetition_guard, config.guard_weight))
        # Intuitor's is there by default, and no reward by itself.
        rewarding.append(0.0 if config.method == "intuitor" else config.guard_weight)
    given = config.kind.rewards if config.rewards is None else config.rewards
    named = {"repetition_guard"} if config.guard_weight else set()
    for part in given.split(","):
        if part.strip():
            name, number = _parse(part.strip(), named)
            found.append((_told_apart(name, [reward for reward, _ in found]), number))
            rewarding.append(number)
            named.add(name)
    if not any(rewarding):
        beside = " but the repetition guard" if config.guard_weight else ""
        raise OptionError(
            f"--rewards {given}: expected a reward that weighs something, got a weight of 0 for each{beside}"
        )
    return found


def _parse(text: str, named: set[str]) -> tuple[str, float]:
    """A reward's name, which is not `named` yet, and its weight."""
    name, equals, weight = text.partition("=")
    try:
        number = float(weight) if equals else 1.0
        if not is_finite(number):
            raise ValueError
    except ValueError:
        raise OptionError(f"--rewards {text}: expected NAME=WEIGHT with a number, got {weight!r}") from None
    name = name.strip()
    if name in named:
        guard = "; intuitor's weight of it is --repetition-guard" if name == "repetition_guard" else ""
        raise OptionError(f"--rewards: expected each reward once, got {name} again; add its weights up{guard}")
    return name, number


def _told_apart(name: str, others: list[Reward]) -> Reward:
    """The reward, which TRL's metrics and the summary tell from the others by its __name__."""
    reward = _find(name)
    if name not in BUILT_IN and reward.__name__ in {*BUILT_IN, *(other.__name__ for other in others)}:
        reward.__name__ = name  # with its module
    return reward


def _find(name: str) -> Reward:
    if name in BUILT_IN:
        return BUILT_IN[name]
    return _checked(function_named("--rewards", name, ", ".join(BUILT_IN)), name)


def _checked(reward: Reward, name: str) -> Reward:
    """The function, each of whose completions gets a number or None; OptionError, NotFiniteError for anything else.

    TRL would take a NaN for None, a completion without this reward.
    """
    by_name = f"--rewards {name}"

    def called_with(given: dict[str, Any]) -> str:
        return f"; it is called with {', '.join(given)}"

    @wraps(reward)
    def checked(**given: Any) -> list[float | None]:
        with blamed(by_name, called_with(given)):
            count = len(given["completions"])  # before: they are lists, which a function may change
            return _numbers(reward(**_copied(given)), count, by_name)

    @wraps(reward)
    async def checked_later(**given: Any) -> list[float | None]:
        answer: Any = reward
        with blamed(by_name, called_with(given), (*STOPS, GeneratorExit)):  # how a coroutine is closed
            count = len(given["completions"])
            return _numbers(await answer(**_copied(given)), count, by_name)

    checked.__name__ = checked_later.__name__ = getattr(reward, "__name__", name)  # of an object: as it was given
    later = iscoroutinefunction(reward) or iscoroutinefunction(getattr(reward, "__call__", None))  # noqa: B004
    return checked_later if later else checked  # pyright: ignore[reportReturnType]


def _copied(given: dict[str, Any]) -> dict[str, Any]:
    """Lists of its own for a function: what it does to them reaches neither the other functions nor the run."""
    return {name: copy.deepcopy(x) if isinstance(x, list) else x for name, x in given.items()}


def _numbers(values: Any, count: int, name: str) -> list[float | None]:
    expected = f"{name}: expected a number, or None for no reward, for each of {plural(count, 'completion')}"
    if isinstance(values, WITHOUT_ORDER) or not isinstance(values, Iterable):
        raise OptionError(f"{expected}, got {type(values).__name__}")
    found = list(islice(values, count + 1))  # once: it may be a generator, which may not end
    if len(found) != count:
        got = f"more than {plural(count, 'value')}" if len(found) > count else plural(len(found), "value")
        raise OptionError(f"{expected}, got {got}")
    for x in found:
        try:
            finite = x is None or is_finite(x)
        except (TypeError, ValueError, RuntimeError, OverflowError):  # of texts, arrays, tensors and huge numbers
            raise OptionError(f"{expected}, got {type(x).__name__} among them") from None
        if not finite:
            raise NotFiniteError(f"{name} returned {x}: expected a finite number in float32, or None for no reward")
    return [None if x is None else float(x) for x in found]


def leave_out_unrewarded(trainer: Any, weights: Sequence[float]) -> None:
    """Has a trainer of rollouts leave out completions without a reward; OptionError where a step has no others.

    TRL leaves out those that are without any, also of what weighs nothing; the others it takes for ones of reward 0.
    """
    calculate, counted = trainer._calculate_rewards, [i for i, weight in enumerate(weights) if weight]

    def calculate_checked(*args: Any) -> Any:
        found = calculate(*args)
        without = found[:, counted].isnan().all(1)
        if trainer.model.training and without.all():
            names = ", ".join(trainer.reward_func_names[i] for i in counted)
            raise OptionError(f"--rewards: {names} returned None for every completion of a step: nothing to learn from")
        found[without] = float("nan")
        return found

    trainer._calculate_rewards = calculate_checked


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else "".join(str(m.get("content") or "") for m in completion)


def _share(text: str) -> float:
    lines = [line.strip() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    lines = [line for line in lines if line and not line.startswith("#")]
    return sum(map(is_statement, lines)) / len(lines) if lines else 0.0


def is_statement(line: str) -> bool:
    """Whether one line, a block's opening included, is Python by itself and more than a name or literal."""
    forms = [line]
    if line.endswith(":"):
        forms = [f"{start}{line} pass" for start in ("", "if 1: pass\n", "try: pass\n", "match 1:\n ")]
    elif line.startswith("@"):
        forms = [f"{line}\ndef f(): pass"]
    return any(map(_parses, forms))


def _parses(source: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SyntaxWarning for "\d", "1 is 1" and the like
        try:
            body = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return any(not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Name | ast.Constant)) for s in body)


def _repeated(ids: list[int]) -> float:
    grams = list(zip(*(ids[i:] for i in range(NGRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
