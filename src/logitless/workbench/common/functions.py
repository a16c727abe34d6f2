"""Functions that somebody names on the command line, as `module:function`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import OptionError


def function_named(option: str, name: str, built_in: str | None = None) -> Callable[..., Any]:
    """The function of `module:function`, whose module is imported; the current directory is searched too.

    option: what the errors name, such as --rewards. Raises OptionError for whatever keeps it from being found.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise OptionError(f"{option} {name}: expected {'' if built_in is None else f'{built_in} or '}module:function")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # `logitless` is a script elsewhere; python -m would have it
    try:
        found = getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        raise OptionError(f"{option} {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
    if not callable(found):
        raise OptionError(f"{option} {name}: expected a function, got {type(found).__name__}")
    return found
