"""What a translation is made of: the definitions of functions, records and constants, each once."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from .expressions import METHODS, Writer
from .signatures import refuse


def translate(exports: dict[str, Any]) -> str:
    """A JavaScript expression: an object with the translation of each value, and of all that they use.

    `exports` are functions, dataclasses, and values of them. What may be translated is small: whole numbers (BigInt,
    exact at any size), strings, booleans, None, tuples, lists, dicts, sets, dataclasses, functions and generators;
    `runtime.js` gives Python's meaning to the operators. Anything else raises NotImplementedError with file and
    line, so that nothing can differ silently.
    """
    program = Program()
    members = [f"{json.dumps(name)}: {program.value(value, name)}" for name, value in exports.items()]
    program.check()
    runtime = Path(__file__).with_name("runtime.js").read_text(encoding="utf-8")
    parts = [
        '"use strict";',
        runtime,
        *program.definitions,
        f"return {{replaced: $py.replaced, {', '.join(members)}}};",
    ]
    return "(() => {\n" + "\n".join(parts) + "\n})()"


class Program:
    """Definitions in an order in which they load: constants after the records that they are made of."""

    def __init__(self) -> None:
        self.definitions: list[str] = []
        self.attributes_read: dict[str, str] = {}  # name, where
        self._attributes: set[str] = set()
        self._owners: dict[str, Any] = {}  # by JavaScript's name

    def check(self) -> None:
        """Raises for an attribute that no record has."""
        for name, where in self.attributes_read.items():
            if name not in self._attributes:
                raise NotImplementedError(f"{where}: no translated record has an attribute {name}")

    def named(self, module: str, name: str, value: Any) -> str:
        """JavaScript's name for what `name` means in a module."""
        if isinstance(value, FunctionType | type):
            return self.value(value, name)

        def constant(value: Any, key: str) -> str:
            return f"const {key} = {self.value(value, name)};"

        return self._once(f"${module.split('.')[-1]}_{name}", value, constant)

    def value(self, value: Any, name: str) -> str:
        """JavaScript for a value; `name` is what an error calls it."""
        if value is None or isinstance(value, bool | str):
            return json.dumps(value).replace("<", "\\u003c")  # no "</script>" inside a page
        if isinstance(value, int):
            return f"{value}n"
        if isinstance(value, tuple | list):
            return f"[{self._joined(value, name)}]"
        if isinstance(value, set | frozenset):
            return f"new Set([{self._joined(sorted(value), name)}])"
        if isinstance(value, dict):
            return f"new Map([{self._joined(value.items(), name)}])"
        if isinstance(value, FunctionType):
            # A lambda in a table may be compared with None, which says that it is there; calling it throws.
            return "$py.opaque" if value.__name__ == "<lambda>" else self._defined(value, self._function)
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            return self._defined(value, self._record)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [getattr(value, f.name) for f in dataclasses.fields(value)]
            return f"new {self.value(type(value), name)}({self._joined(fields, name)})"
        raise NotImplementedError(f"{name}: a {type(value).__name__} has no translation")

    def _joined(self, values: Any, name: str) -> str:
        return ", ".join(self.value(v, name) for v in values)

    def _defined(self, value: Any, define: Callable[[Any, str], str]) -> str:
        return self._once(f"${value.__module__.split('.')[-1]}_{value.__name__}", value, define)

    def _once(self, key: str, value: Any, define: Callable[[Any, str], str]) -> str:
        if key not in self._owners:
            self._owners[key] = value
            self.definitions.append(define(value, key))
        if self._owners[key] is not value:
            raise NotImplementedError(f"{key} would name two things, one of them in {value!r:.80}")
        return key

    def _function(self, value: FunctionType, key: str) -> str:
        node, writer = self._source(value)
        if not isinstance(node, ast.FunctionDef) or value.__closure__ or node.decorator_list:
            raise refuse(node, writer.file, "a decorated function or a closure")
        return writer.function(node, key)

    def _record(self, value: type, key: str) -> str:
        node, writer = self._source(value)
        if not isinstance(node, ast.ClassDef):
            raise refuse(node, writer.file, "a record without a class")
        fields = dataclasses.fields(value)
        names = [f.name for f in fields]
        methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
        self._attributes |= {*names, *(method.name for method in methods)}
        if clash := self._attributes & METHODS.keys():
            raise refuse(node, writer.file, f"an attribute named like one of Python's own ({min(clash)})")
        lines = [
            f"class {key} {{",
            f"static fields = {json.dumps(names)};",
            f"constructor({', '.join(self._field(f) for f in fields)}) {{ $py.fill(this, [{', '.join(names)}]); }}",
            *(writer.method(method) for method in methods),
            "}",
        ]
        return "\n".join(lines)

    def _field(self, field: dataclasses.Field[Any]) -> str:
        if field.default_factory is not dataclasses.MISSING:
            raise NotImplementedError(f"field {field.name}: a default_factory has no translation")
        if field.default is dataclasses.MISSING:
            return field.name
        return f"{field.name} = {self.value(field.default, field.name)}"

    def _source(self, value: Any) -> tuple[ast.stmt, Writer]:
        lines, first = inspect.getsourcelines(value)
        node = ast.parse(textwrap.dedent("".join(lines))).body[0]
        ast.increment_lineno(node, first - 1)
        return node, Writer(self, value.__module__, vars(sys.modules[value.__module__]))
