"""Python's functions, methods and statements as JavaScript; each kind of node has its method, others are refused."""

from __future__ import annotations

import ast
import json

from .expressions import Expressions
from .signatures import Signature, own_nodes, refuse, signature


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
