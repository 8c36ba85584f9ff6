"""Lifting: calls of the recursion within an expression become statements before it, so that the rest only computes."""

from __future__ import annotations

import ast

from daceml_train.frontends.torch.recursion.pure import Checker


class _Stays(Exception):
    """An expression that stays as it is."""


class Lifter:
    """Takes calls of functions named `marked`, and lists of them, out of expressions; keeps the order of all effects.

    What an expression reads before such a call is named before it, since the call may change it: globals, and
    attributes of the model, except those that are called. What it computes before such a call makes it stay.
    """

    def __init__(self, checker: Checker, marked: frozenset[str]) -> None:
        self.checker, self.marked = checker, marked
        self.count = 0
        self.found: list[ast.stmt] = []
        self.computed = self.calls = False

    def lifted(self, value: ast.expr) -> tuple[list[ast.stmt], ast.expr] | None:
        """The statements before an expression, and what is left of it, which only computes; None if it has to stay."""
        self.found, self.computed, self.calls = [], False, False
        try:
            left = self._of(value)
        except _Stays:
            return None
        return (self.found, left) if self.calls and self.checker.pure(left, self.marked) else None

    def named(self, value: ast.expr) -> tuple[ast.stmt, ast.expr]:
        """A statement that names a value, and the name."""
        name = f"__lifted_{self.count}"
        self.count += 1
        target: list[ast.expr] = [ast.copy_location(ast.Name(name, ast.Store()), value)]
        found = ast.copy_location(ast.Assign(target, value), value)
        return ast.fix_missing_locations(found), ast.copy_location(ast.Name(name, ast.Load()), value)

    def calls_itself(self, node: ast.AST) -> bool:
        """Whether this is a call of the recursion."""
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            return node.func.attr in self.marked
        if not isinstance(node.func, ast.Name):
            return False
        return node.func.id in self.marked or (node.func.id in self.checker.own and "forward" in self.marked)

    def _inert(self, node: ast.expr) -> bool:
        """Whether an expression means the same later."""
        if isinstance(node, ast.Constant):
            return True
        return self.checker.library(node) or (isinstance(node, ast.Name) and node.id in self.checker.locals)

    def _first(self, node: ast.expr) -> ast.expr:
        """The name of an expression, which is evaluated before what follows."""
        statement, name = self.named(node)
        self.found.append(statement)
        return name

    def _function(self, node: ast.expr) -> ast.expr:
        """What is left of a function that is called."""
        if not isinstance(node, ast.Attribute):
            return self._of(node)
        if self.checker.library(node) or self.checker.of_model(node):
            return node
        return ast.copy_location(ast.Attribute(self._of(node.value), node.attr, node.ctx), node)

    def _of(self, node: ast.expr) -> ast.expr:
        whole = self.calls_itself(node)
        if whole or (isinstance(node, ast.ListComp) and any(map(self.calls_itself, ast.walk(node)))):
            if self.computed:
                raise _Stays
            self.calls = True
            return self._first(node)
        if self._inert(node):
            return node
        if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and self.checker.called(node)):
            return node if self.computed else self._first(node)
        if self.checker.pure(node, self.marked):
            self.computed = True
            return node
        return self._inner(node)

    def _inner(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Call):
            result: ast.expr = ast.Call(
                self._function(node.func),
                [self._of(a) for a in node.args],
                [ast.keyword(k.arg, self._of(k.value)) for k in node.keywords],
            )
        elif isinstance(node, ast.BinOp):
            result = ast.BinOp(self._of(node.left), node.op, self._of(node.right))
        elif isinstance(node, ast.UnaryOp):
            result = ast.UnaryOp(node.op, self._of(node.operand))
        elif isinstance(node, ast.List | ast.Tuple):
            return ast.copy_location(type(node)([self._of(e) for e in node.elts], node.ctx), node)
        elif isinstance(node, ast.Attribute):
            return ast.copy_location(ast.Attribute(self._of(node.value), node.attr, node.ctx), node)
        else:
            raise _Stays
        self.computed = True
        return ast.copy_location(result, node)
