"""Parameters of Python's functions, and the error for Python without a translation."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

INNER = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Signature(NamedTuple):
    """Names of a callable's parameters, in order, and of those without a default."""

    names: tuple[str, ...]
    required: frozenset[str]


def signature(node: ast.FunctionDef | ast.Lambda) -> Signature:
    """The parameters of a function in the syntax."""
    plain = [a.arg for a in (*node.args.posonlyargs, *node.args.args)]
    bare = len(plain) - len(node.args.defaults)
    named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return Signature(
        (*plain, *(a.arg for a in node.args.kwonlyargs)),
        frozenset((*plain[:bare], *(a.arg for a, default in named if default is None))),
    )


def signature_of(value: Callable[..., Any]) -> Signature:
    """The parameters of a function or a record."""
    found = inspect.signature(value).parameters.values()
    return Signature(tuple(p.name for p in found), frozenset(p.name for p in found if p.default is p.empty))


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions and comprehensions inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, INNER):
            yield from own_nodes(child)


def refuse(node: ast.AST, file: str, what: str) -> NotImplementedError:
    """The error for a piece of Python without a translation."""
    return NotImplementedError(f"{file}:{getattr(node, 'lineno', 0)}: {what} has no translation: {ast.unparse(node)}")
