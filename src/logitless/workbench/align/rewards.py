"""Reward functions in TRL's form: built in, or anybody's by `module:function`."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any

from ...errors import NotFiniteError, OptionError
from ...integrations.trl.rewards import SelfCertaintyReward
from ..common.functions import function_named
from .config import AlignConfig

Reward = Callable[..., list[float]]
NGRAM = 3


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
    if config.guard_weight:
        found.append((repetition_guard, config.guard_weight))
    given = config.kind.rewards if config.rewards is None else config.rewards
    return found + [_parse(part.strip()) for part in given.split(",") if part.strip()]


def _parse(text: str) -> tuple[Reward, float]:
    name, equals, weight = text.partition("=")
    try:
        number = float(weight) if equals else 1.0
        if not math.isfinite(number):
            raise ValueError
    except ValueError:
        raise OptionError(f"--rewards {text}: expected NAME=WEIGHT with a number, got {weight!r}") from None
    return _find(name.strip()), number


def _find(name: str) -> Reward:
    if name in BUILT_IN:
        return BUILT_IN[name]
    return _checked(function_named("--rewards", name, ", ".join(BUILT_IN)), name)


def _checked(reward: Reward, name: str) -> Reward:
    """The function, whose NaN raises NotFiniteError: TRL takes it for None, a completion without this reward."""
    asynchronous: Any = reward
    if iscoroutinefunction(asynchronous):
        return asynchronous

    @wraps(reward)
    def checked(*args: Any, **kwargs: Any) -> list[float]:
        values = reward(*args, **kwargs)
        for x in values:
            if x is not None and not math.isfinite(x):
                raise NotFiniteError(f"--rewards {name} returned {x}: expected a finite number, or None for no reward")
        return values

    return checked


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
