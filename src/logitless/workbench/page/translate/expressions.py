"""Python's expressions and statements as JavaScript; each kind of node has its method, others are refused."""

from __future__ import annotations

import ast
import dataclasses
import json
from types import FunctionType
from typing import Any, Protocol, Self

from .signatures import Signature, own_nodes, refuse, signature, signature_of

OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.USub: "neg",
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.In: "in_",
    ast.NotIn: "not_in",
}
FORMATS = {"": "str", ",": "commas", "02d": "two_digits"}
BUILTINS = frozenset({
    "abs", "all", "any", "bool", "frozenset", "getattr", "int", "len", "list", "max", "min", "next", "set", "sorted",
    "str", "sum", "tuple", "zip",
})  # fmt: skip
METHODS = {  # arguments
    "append": 1, "endswith": 1, "items": 0, "join": 1, "keys": 0, "replace": 2, "union": None, "values": 0,
}  # fmt: skip
RESERVED = frozenset({  # names in Python that mean something else in JavaScript
    "arguments", "await", "case", "catch", "const", "debugger", "default", "delete", "do", "enum", "eval", "export",
    "extends", "false", "function", "implements", "instanceof", "interface", "let", "new", "null", "package", "private",
    "protected", "public", "static", "super", "switch", "this", "throw", "true", "typeof", "undefined", "var", "void",
    "Map", "Raised", "Set",
})  # fmt: skip


class Definitions(Protocol):
    """What a translation asks of the program that it becomes a part of."""

    attributes_read: dict[str, str]  # name, where

    def named(self, module: str, name: str, value: Any) -> str:
        """JavaScript's name for what `name` means in a module."""
        ...

    def value(self, value: Any, name: str) -> str:
        """JavaScript for a value; `name` is what an error calls it."""
        ...


class Expressions:
    """Translates the expressions of one function; `scopes` are the enclosing functions' names, with signatures."""

    def __init__(
        self, program: Definitions, file: str, namespace: dict[str, Any], scopes: tuple[dict, ...] = ()
    ) -> None:
        self.program, self.file, self.namespace, self.scopes = program, file, namespace, scopes

    def inside(self, scope: dict[str, Signature | None]) -> Self:
        """The translator of what sees one more scope."""
        return type(self)(self.program, self.file, self.namespace, (*self.scopes, scope))

    def dispatch(self, kind: str, node: ast.AST) -> str:
        """The text of a node by the method for its kind."""
        method = getattr(self, f"_{kind}_{type(node).__name__.lower()}", None)
        if method is None:
            raise refuse(node, self.file, type(node).__name__)
        return method(node)

    def expr(self, node: ast.expr) -> str:
        """One expression."""
        return self.dispatch("say", node)

    def test(self, node: ast.expr) -> str:
        """An expression as a condition."""
        return f"$py.truth({self.expr(node)})"

    def safe(self, name: str, node: ast.AST) -> str:
        """A name that means nothing else in JavaScript."""
        if name in RESERVED or "$" in name or not name.isascii():
            raise refuse(node, self.file, f"the name {name}")
        return name

    def parameters(self, node: ast.FunctionDef | ast.Lambda) -> str:
        """The parameters with their defaults; those by name only follow the others."""
        arguments = node.args
        if arguments.vararg or arguments.kwarg:
            raise refuse(node, self.file, "*args")
        plain = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        defaults: dict[str, ast.expr | None] = dict(zip(reversed(plain), reversed(arguments.defaults), strict=False))
        defaults |= dict(zip((a.arg for a in arguments.kwonlyargs), arguments.kw_defaults, strict=True))
        names = [self.safe(name, node) for name in signature(node).names]
        return ", ".join(name if (d := defaults.get(name)) is None else f"{name} = {self.expr(d)}" for name in names)

    def store(self, target: ast.expr, value: str) -> str:
        """An assignment to a name, or to a tuple of names."""
        if isinstance(target, ast.Name):
            return f"{self.safe(target.id, target)} = {value};"
        if isinstance(target, ast.Tuple) and all(isinstance(t, ast.Name) for t in target.elts):
            return f"[{', '.join(ast.unparse(t) for t in target.elts)}] = $py.unpack({value}, {len(target.elts)});"
        raise refuse(target, self.file, "an assignment to this")

    def _scoped(self, name: str) -> bool:
        return any(name in scope for scope in self.scopes)

    def _say_name(self, node: ast.Name) -> str:
        if self._scoped(node.id):
            return node.id
        if node.id not in self.namespace:
            raise refuse(node, self.file, "a name that the module does not define")
        return self.program.named(self.file, node.id, self.namespace[node.id])

    def _say_constant(self, node: ast.Constant) -> str:
        return self.program.value(node.value, f"{self.file}:{node.lineno}")

    def _say_attribute(self, node: ast.Attribute) -> str:
        self.program.attributes_read.setdefault(node.attr, f"{self.file}:{node.lineno}")
        return f"{self.expr(node.value)}.{node.attr}"

    def _say_binop(self, node: ast.BinOp) -> str:
        return f"$py.{self._operator(node, node.op)}({self.expr(node.left)}, {self.expr(node.right)})"

    def _operator(self, node: ast.AST, operator: ast.AST) -> str:
        if type(operator) not in OPERATORS:
            raise refuse(node, self.file, type(operator).__name__)
        return OPERATORS[type(operator)]

    def _say_unaryop(self, node: ast.UnaryOp) -> str:
        if isinstance(node.op, ast.Not):
            return f"!{self.test(node.operand)}"
        return f"$py.{self._operator(node, node.op)}({self.expr(node.operand)})"

    def _say_boolop(self, node: ast.BoolOp) -> str:
        name = "and" if isinstance(node.op, ast.And) else "or"
        *before, text = [self.expr(value) for value in node.values]
        for value in reversed(before):
            text = f"$py.{name}({value}, () => {text})"
        return text

    def _say_compare(self, node: ast.Compare) -> str:
        operands = [self.expr(value) for value in (node.left, *node.comparators)]
        parts = []
        for operator, left, right, value in zip(node.ops, operands, operands[1:], node.comparators, strict=False):
            if isinstance(operator, ast.Is | ast.IsNot):
                if not (isinstance(value, ast.Constant) and value.value is None):
                    raise refuse(node, self.file, "identity with anything but None")
                parts.append(f"({'' if isinstance(operator, ast.Is) else '!'}$py.is_none({left}))")
            else:
                parts.append(f"$py.{self._operator(node, operator)}({left}, {right})")
        return parts[0] if len(parts) == 1 else f"({' && '.join(parts)})"

    def _say_ifexp(self, node: ast.IfExp) -> str:
        return f"({self.test(node.test)} ? {self.expr(node.body)} : {self.expr(node.orelse)})"

    def _say_joinedstr(self, node: ast.JoinedStr) -> str:
        return "(" + " + ".join(['""', *(self._piece(value) for value in node.values)]) + ")"

    def _piece(self, node: ast.expr) -> str:
        if not isinstance(node, ast.FormattedValue):
            return self.expr(node)
        spec = node.format_spec.values if isinstance(node.format_spec, ast.JoinedStr) else []
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in spec)
        if node.conversion != -1 or text not in FORMATS:
            raise refuse(node.value, self.file, f"the format {text!r}")
        return f"$py.{FORMATS[text]}({self.expr(node.value)})"

    def _say_tuple(self, node: ast.Tuple | ast.List) -> str:
        return f"[{', '.join(self.expr(value) for value in node.elts)}]"

    _say_list = _say_tuple

    def _say_set(self, node: ast.Set) -> str:
        return f"new Set([{', '.join(self.expr(value) for value in node.elts)}])"

    def _say_dict(self, node: ast.Dict) -> str:
        if None in node.keys:
            raise refuse(node, self.file, "** in a dict")
        pairs = (f"[{self.expr(k)}, {self.expr(v)}]" for k, v in zip(node.keys, node.values, strict=True) if k)
        return f"new Map([{', '.join(pairs)}])"

    def _say_starred(self, node: ast.Starred) -> str:
        return f"...$py.iter({self.expr(node.value)})"

    def _say_subscript(self, node: ast.Subscript) -> str:
        if not isinstance(node.slice, ast.Slice):
            return f"$py.item({self.expr(node.value)}, {self.expr(node.slice)})"
        if node.slice.step is not None:
            raise refuse(node, self.file, "a slice with a step")
        ends = ["null" if end is None else self.expr(end) for end in (node.slice.lower, node.slice.upper)]
        return f"$py.slice({self.expr(node.value)}, {', '.join(ends)})"

    def _say_lambda(self, node: ast.Lambda) -> str:
        inside = self.inside(dict.fromkeys(signature(node).names))
        return f"(({self.parameters(node)}) => {inside.expr(node.body)})"

    def _say_listcomp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> str:
        return self._comprehension(node.generators, [node.elt])

    _say_generatorexp = _say_listcomp

    def _say_setcomp(self, node: ast.SetComp) -> str:
        return f"new Set({self._comprehension(node.generators, [node.elt])})"

    def _say_dictcomp(self, node: ast.DictComp) -> str:
        return f"new Map({self._comprehension(node.generators, [node.key, node.value])})"

    def _comprehension(self, generators: list[ast.comprehension], parts: list[ast.expr]) -> str:
        """A list of what a comprehension yields; its names are its own."""
        names: dict[str, Signature | None] = {}
        inside = self.inside(names)
        opened: list[str] = []
        for generator in generators:
            iterated = inside.expr(generator.iter)
            targets = [n.id for n in ast.walk(generator.target) if isinstance(n, ast.Name)]
            if any(isinstance(n, ast.Name) and n.id in targets for n in ast.walk(generator.iter)):
                raise refuse(generator.iter, self.file, "a name that a comprehension takes over")
            names |= dict.fromkeys(targets)
            opened.append(
                f"for (const $each of $py.iter({iterated})) {{ const {inside.store(generator.target, '$each')}"
            )
            opened += [f"if (!{inside.test(condition)}) continue;" for condition in generator.ifs]
        values = [inside.expr(part) for part in parts]
        value = values[0] if len(values) == 1 else f"[{', '.join(values)}]"
        closed = "}" * len(generators)
        return f"(() => {{ const $out = []; {' '.join(opened)} $out.push({value}); {closed} return $out; }})()"

    def _say_call(self, node: ast.Call) -> str:
        if isinstance(node.func, ast.Attribute):
            return self._method_call(node, node.func)
        if not isinstance(node.func, ast.Name):
            raise refuse(node, self.file, "a call of this")
        name = node.func.id
        known = next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
        if self._scoped(name):
            return f"{name}({self._arguments(node, known)})"
        if name not in self.namespace and name in BUILTINS:
            return self._builtin(node, name)
        if name not in self.namespace:
            raise refuse(node, self.file, "a call of a name that the module does not define")
        value = self.namespace[name]
        if value is dataclasses.replace and len(node.args) == 1 and all(k.arg for k in node.keywords):
            changes = ", ".join(f"{k.arg}: {self.expr(k.value)}" for k in node.keywords)
            return f"$py.replaced({self.expr(node.args[0])}, {{{changes}}})"
        if not isinstance(value, FunctionType | type):
            raise refuse(node, self.file, "a call of this")
        new = "new " if isinstance(value, type) else ""
        return f"{new}{self.program.named(self.file, name, value)}({self._arguments(node, signature_of(value))})"

    def _method_call(self, node: ast.Call, func: ast.Attribute) -> str:
        if node.keywords:
            raise refuse(node, self.file, "a method's argument by name")
        given = ", ".join(self.expr(a) for a in node.args)
        if func.attr not in METHODS:
            return f"{self._say_attribute(func)}({given})"
        if METHODS[func.attr] not in (None, len(node.args)):
            raise refuse(node, self.file, "this number of arguments")
        return f"$py.{func.attr}({', '.join(filter(None, [self.expr(func.value), given]))})"

    def _builtin(self, node: ast.Call, name: str) -> str:
        """Python's own function; `key` of min and max and `strict` of zip come first."""
        options = {k.arg: self.expr(k.value) for k in node.keywords}
        given = [self.expr(a) for a in node.args]
        first = {"max": "key", "min": "key", "zip": "strict"}.get(name)
        if set(options) - {first}:
            raise refuse(node, self.file, "this argument")
        if first is not None:
            given.insert(0, options.get(first, "null"))
        return f"$py.{name}({', '.join(given)})"

    def _arguments(self, node: ast.Call, known: Signature | None) -> str:
        """Arguments in the order of the parameters; those given by name need a known signature."""
        given = [self.expr(a) for a in node.args]
        named = {k.arg: self.expr(k.value) for k in node.keywords}
        if known is None or any(isinstance(a, ast.Starred) for a in node.args):
            if named:
                raise refuse(node, self.file, "an argument by name")
            return ", ".join(given)
        rest = known.names[len(given) :]
        if set(named) - set(rest) or (known.required & set(rest)) - set(named):
            raise refuse(node, self.file, "a call without a required argument, or with an unknown one,")
        while rest and rest[-1] not in named:
            rest = rest[:-1]
        return ", ".join([*given, *(named.get(name, "undefined") for name in rest)])


class Writer(Expressions):
    """Translates one function or record of a module."""

    def function(self, node: ast.FunctionDef, name: str) -> str:
        """A function declaration, or expression without a name; a generator for a generator."""
        star = "*" if _yields(node) else ""
        return f"function{star} {name}({self.parameters(node)}) {{\n{self._body(node)}\n}}"

    def method(self, node: ast.FunctionDef) -> str:
        """A method, a getter for a property; `self` is `this`."""
        kinds = [ast.unparse(d) for d in node.decorator_list]
        if kinds not in ([], ["property"], ["cached_property"]) or _yields(node) or node.args.args[0].arg != "self":
            raise refuse(node, self.file, "this method")
        body = self._body(node)
        if kinds == ["cached_property"]:
            body = f"return $py.once(this, {json.dumps(node.name)}, () => {{\n{body}\n}});"
        node.args.args.pop(0)
        return f"{'get ' if kinds else ''}{node.name}({self.parameters(node)}) {{ const self = this;\n{body}\n}}"

    def _body(self, node: ast.FunctionDef) -> str:
        names: dict[str, Signature | None] = dict.fromkeys(signature(node).names)
        stored = [n.id for n in own_nodes(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        inner = {n.name: signature(n) for n in own_nodes(node) if isinstance(n, ast.FunctionDef)}
        fresh = [self.safe(name, node) for name in dict.fromkeys([*stored, *inner]) if name not in names]
        inside = self.inside({**names, **dict.fromkeys(stored), **inner})
        declared = [f"let {', '.join(fresh)};"] if fresh else []
        return "\n".join([*declared, *inside.block(node.body)])

    def block(self, body: list[ast.stmt]) -> list[str]:
        """Statements, one text each."""
        return [text for node in body if (text := self.dispatch("do", node))]

    def _do_expr(self, node: ast.Expr) -> str:
        value = node.value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return ""  # a docstring
        if isinstance(value, ast.Yield) and value.value is not None:
            return f"yield {self.expr(value.value)};"
        if isinstance(value, ast.YieldFrom):
            return f"yield* $py.iter({self.expr(value.value)});"
        return f"{self.expr(value)};"

    def _do_return(self, node: ast.Return) -> str:
        return "return;" if node.value is None else f"return {self.expr(node.value)};"

    def _do_assign(self, node: ast.Assign) -> str:
        if len(node.targets) != 1:
            raise refuse(node, self.file, "an assignment to several targets")
        return self.store(node.targets[0], self.expr(node.value))

    def _do_annassign(self, node: ast.AnnAssign) -> str:
        return self.store(node.target, self.expr(node.value)) if node.value is not None else ""

    def _do_augassign(self, node: ast.AugAssign) -> str:
        if not isinstance(node.target, ast.Name):
            raise refuse(node, self.file, "an assignment to this")
        before = ast.copy_location(ast.Name(node.target.id, ast.Load()), node)
        return self.store(node.target, self.expr(ast.copy_location(ast.BinOp(before, node.op, node.value), node)))

    def _do_if(self, node: ast.If) -> str:
        lines = [f"if ({self.test(node.test)}) {{", *self.block(node.body), "}"]
        return "\n".join([*lines, "else {", *self.block(node.orelse), "}"] if node.orelse else lines)

    def _do_for(self, node: ast.For) -> str:
        if node.orelse:
            raise refuse(node, self.file, "an else after a loop")
        head = f"for (const $each of $py.iter({self.expr(node.iter)})) {{"
        return "\n".join([head, self.store(node.target, "$each"), *self.block(node.body), "}"])

    def _do_raise(self, node: ast.Raise) -> str:
        error = node.exc
        if not (isinstance(error, ast.Call) and isinstance(error.func, ast.Name) and len(error.args) == 1):
            raise refuse(node, self.file, "raising this")
        return f"throw new Raised({json.dumps(error.func.id)}, {self.expr(error.args[0])});"

    def _do_functiondef(self, node: ast.FunctionDef) -> str:
        if node.decorator_list:
            raise refuse(node, self.file, "a decorated function")
        return f"{node.name} = {self.function(node, '')};"


def _yields(node: ast.FunctionDef) -> bool:
    return any(isinstance(n, ast.Yield | ast.YieldFrom) for n in own_nodes(node))
