"""What only computes: expressions of user code that call PyTorch's functions, methods of tensors, or modules."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator

import torch

LOOKS = frozenset(
    ("item", "tolist", "numpy", "backward", "cpu", "cuda", "to", "data_ptr", "storage", "register_hook", "grad_fn")
)
"""Methods of tensors that do more than compute."""
RANDOM = ("rand", "bernoulli", "normal", "multinomial", "dropout", "poisson", "manual_seed", "set_", "save", "load")


def computes(name: str) -> bool:
    """Whether a function or method of PyTorch of this name only computes."""
    return not name.endswith("_") and name not in LOOKS and not name.startswith(RANDOM)


def modules_of(function: types.FunctionType) -> set[str]:
    """The global names that stand for PyTorch's modules of functions."""
    known = (torch, torch.nn.functional, torch.special, torch.linalg)
    return {name for name, value in function.__globals__.items() if any(value is m for m in known)}


class Checker:
    """Whether expressions only compute with tensors."""

    def __init__(self, function: types.FunctionType) -> None:
        code = function.__code__
        self.locals = frozenset(code.co_varnames)
        self.modules = modules_of(function).difference(code.co_varnames, code.co_freevars, code.co_cellvars)
        self.own = function.__code__.co_varnames[: function.__code__.co_argcount][:1]

    def chain(self, node: ast.expr) -> bool:
        """Whether this is a name, or attributes and constant subscripts of one."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant):
                return False
            node = node.value
        return isinstance(node, ast.Name)

    def root(self, node: ast.expr) -> str:
        """The name at the start of attributes."""
        while isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    def library(self, node: ast.expr) -> bool:
        """Whether this names a function of PyTorch."""
        return isinstance(node, ast.Attribute) and self.root(node) in self.modules and self.chain(node)

    def pure(self, node: ast.expr, marked: frozenset[str]) -> bool:
        """Whether an expression only computes; calls of functions named `marked` do not."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Tuple | ast.List):
            return all(self.pure(e, marked) for e in node.elts)
        if isinstance(node, ast.BinOp):
            return self.pure(node.left, marked) and self.pure(node.right, marked)
        if isinstance(node, ast.UnaryOp):
            return not isinstance(node.op, ast.Not) and self.pure(node.operand, marked)
        if isinstance(node, ast.Attribute | ast.Subscript):
            return self.chain(node) or (
                (isinstance(node, ast.Attribute) or isinstance(node.slice, ast.Constant))
                and self.pure(node.value, marked)
            )
        if isinstance(node, ast.Name):
            return True
        if not isinstance(node, ast.Call) or any(k.arg is None for k in node.keywords):
            return False
        if not isinstance(node.func, ast.Attribute) or not computes(node.func.attr) or node.func.attr in marked:
            return False
        whole = self.library(node.func) or self.called(node.func) or self.method(node.func, marked)
        return whole and all(self.pure(a, marked) for a in (*node.args, *(k.value for k in node.keywords)))

    def called(self, node: ast.Attribute) -> bool:
        """Whether this is an attribute of the model."""
        return self.chain(node) and self.root(node) in self.own

    def of_model(self, node: ast.Attribute) -> bool:
        """Whether this is what the model has to call, and no method of a tensor of it."""
        of_tensor = isinstance(node.value, ast.Attribute) and hasattr(torch.Tensor, node.attr)
        return self.called(node) and not of_tensor

    def method(self, node: ast.Attribute, marked: frozenset[str]) -> bool:
        """Whether this is a method of a tensor that is computed or named."""
        named = self.root(node) not in self.modules and hasattr(torch.Tensor, node.attr)
        return named and self.pure(node.value, marked)


def calls(node: ast.AST) -> bool:
    """Whether there is a call in it."""
    return any(isinstance(n, ast.Call) for n in ast.walk(node))


def named(targets: list[ast.expr]) -> list[str] | None:
    """The names that an assignment sets; None if it sets anything else."""
    found: list[str] = []
    for target in targets:
        if isinstance(target, ast.Name):
            found.append(target.id)
        elif isinstance(target, ast.Tuple | ast.List) and (inner := named(target.elts)) is not None:
            found += inner
        else:
            return None
    return found


def parsed(function: types.FunctionType) -> ast.FunctionDef | None:
    """The function's syntax tree at its lines; None if its source is not known."""
    try:
        lines, first = inspect.getsourcelines(function.__code__)  # of the function itself, where it wraps another one
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef) or tree.name != function.__code__.co_name:
        return None
    ast.increment_lineno(tree, first - 1)
    tree.decorator_list = []
    return tree


def methods_of(function: types.FunctionType) -> Iterator[ast.stmt]:
    """The statements of a method after its documentation."""
    tree = parsed(function)
    if tree is None:
        raise ValueError
    for node in tree.body:
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node
