"""Where an adapter takes hold of its host, and one line that says what another version of the host has moved there."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..versions import version_of


@dataclass(frozen=True)
class Seam:
    """What an adapter relies on in a host: the parameters of functions, by their names "package.module:Class.method".

    package: its distribution's name; versions: those it was read and tested with, as pip takes them; functions: name ->
    parameters, "old|new" where versions differ in a name, or () for what only has to be there.
    """

    package: str
    versions: str
    functions: Mapping[str, tuple[str, ...]]

    @property
    def requirement(self) -> str:
        """The host as pip takes it, in quotes."""
        return f"'{self.package}{self.versions}'"

    def require(self) -> None:
        """Raises ConfigError that names what has moved, and ModuleNotFoundError where the host is not installed."""
        host = next(iter(self.functions)).partition(".")[0].partition(":")[0]
        try:
            importlib.import_module(host)
        except ModuleNotFoundError as error:
            if error.name != host:  # the host is there, and something that it needs is not
                raise
            missing = f"{host} is not installed: pip install {self.requirement}"
            raise ModuleNotFoundError(missing, name=host) from None
        lost = [line for name, parameters in self.functions.items() if (line := moved(name, parameters))]
        if lost:
            raise self.error("; ".join(lost))

    def error(self, what: str) -> ConfigError:
        """The error that says which version has what, and which was expected."""
        return ConfigError(
            f"{self.package} {version_of(self.package)}: {what}; install {self.requirement} or a newer logitless"
        )


def moved(name: str, expected: tuple[str, ...]) -> str:
    """What is no longer as expected about one function, '' where nothing is."""
    try:
        function: Callable[..., Any] = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return f"{name} is gone"
    if not expected:
        return ""
    got = tuple(inspect.signature(function).parameters)
    same = len(got) == len(expected) and all(x in names.split("|") for x, names in zip(got, expected, strict=True))
    return "" if same else f"{name.split(':')[1]} takes ({', '.join(got)}), expected ({', '.join(expected)})"


def methods_called(kind: type, name: str) -> Iterator[Any]:
    """The methods that a call of that name runs: its own, and the next one above as long as each names super."""
    for owner in kind.__mro__:
        method = owner.__dict__.get(name)
        if method is None:
            continue
        yield method
        if "super" not in names_in(method):
            return


def names_in(method: Callable[..., Any]) -> tuple[str, ...]:
    """The globals and attributes that a method's code names, beneath its wrappers."""
    return inspect.unwrap(method).__code__.co_names
