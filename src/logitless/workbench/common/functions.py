"""Functions that somebody names on the command line, as `module:function`."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from ...algebra.options import MOST_FLOAT
from ...errors import LogitlessError, OptionError, is_out_of_memory

HERE = Path(__file__).parents[2]  # of the package


def is_finite(value: Any) -> bool:
    """Whether a number is finite in float32, as rewards and losses are. Raises what `math.isfinite` does for others."""
    return math.isfinite(value) and abs(float(value)) <= MOST_FLOAT


STOPS: tuple[type[BaseException], ...] = (KeyboardInterrupt,)  # what stops a function and is not its own


@contextmanager
def blamed(what: str, hint: str = "", stops: tuple[type[BaseException], ...] = STOPS) -> Iterator[None]:
    """OptionError for whatever somebody's own code raises, with its place there; `hint` is said behind it."""
    try:
        yield
    except (LogitlessError, *stops):
        raise
    except BaseException as error:  # SystemExit and GeneratorExit, too
        if is_out_of_memory(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(last.filename).name}:{last.lineno})" if _is_theirs(last.filename) else ""
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise OptionError(f"{what}: {why}{where}{hint}") from error


def _is_theirs(file: str) -> bool:
    """Whether a file is neither of this package nor of Python's imports."""
    return not file.startswith("<") and HERE not in Path(file).parents


def function_named(option: str, name: str, built_in: str | None = None) -> Callable[..., Any]:
    """The function of `module:function`, whose module is imported; the current directory is searched too.

    option: what the errors name, such as --rewards. Raises OptionError for whatever keeps it from being found.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise OptionError(f"{option} {name}: expected {'' if built_in is None else f'{built_in} or '}module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # `logitless` is a script elsewhere; python -m would have it
    with blamed(f"{option} {name}"):
        found = getattr(import_module(module), attribute)
    if not callable(found):
        raise OptionError(f"{option} {name}: expected a function, got {type(found).__name__}")
    return found
