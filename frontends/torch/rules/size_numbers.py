"""Numbers that are expressions over sizes: their signs in PyTorch's trace, and operators for irrational ones."""

from __future__ import annotations

import functools
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.graph.graph import Graph
from daceml_train.ops.fallback import full
from daceml_train.ops.operator import Value, make
from daceml_train.tensor import Dim, DType, same

BINARY = {
    "Add": "add",
    "Mul": "mul",
    "FloatTrueDiv": "div",
    "IntTrueDiv": "div",
    "Pow": "pow",
    "FloatPow": "pow",
    "ToFloat": "add",
    "Max": "maximum",
    "Min": "minimum",
    "PythonMod": "remainder",
}
"""Functions of symbolic numbers -> elementwise operators of two operands, of one: the identity."""

_MATH = "sqrt cos cosh sin sinh tan tanh asin acos atan exp log asinh log2"
UNARY = {"Abs": "abs", **{f"OpaqueUnaryFn_{name}": name for name in _MATH.split()}}
"""Functions of `math`, which PyTorch does not simplify -> elementwise operators of one operand."""


class Unproven(Unsupported):
    """What is not proven for all values of sizes, such as an equality or a sign; with numbers for sizes it is known."""


def integer(node: fx.Node, argument: int | tuple[int, int], expected: Dim) -> Any:
    """PyTorch's own integer for an argument of a node, or for an element of one, to be compared by `holds`.

    Raises `Unproven` if it is not `expected`, the size that a rule was called with.
    """
    if isinstance(expected, int):
        return expected
    first, *rest = argument if isinstance(argument, tuple) else (argument,)
    found: Any = node.args[first] if first < len(node.args) else None
    for index in rest:
        found = found[index]
    return _checked(found.meta.get("val") if isinstance(found, fx.Node) else found, expected)


def extent(node: fx.Node, argument: int, dim: int, expected: Dim) -> Any:
    """PyTorch's own size of a tensor that is an argument of a node; see `integer`."""
    if isinstance(expected, int):
        return expected
    operand = node.args[argument]
    example = operand.meta["val"] if isinstance(operand, fx.Node) else None
    found = example.shape[dim] if isinstance(example, torch.Tensor) and dim < example.ndim else None
    return _checked(found, expected)


def _checked(found: Any, expected: Dim) -> Any:
    if not isinstance(found, int | torch.SymInt) or not same(types.size(found), expected):
        raise Unproven(f"the sign of {expected}")
    return found


def holds(condition: bool | torch.SymBool) -> bool:
    """Whether a condition on sizes holds in this trace; the program is then for sizes of which the same is true.

    Raises `Unproven` for sizes that depend on data.
    """
    try:
        return bool(condition)
    except GuardOnDataDependentSymNode as error:
        why = str(error).partition("(unhinted")[0].strip()
        raise Unproven(f"a condition on sizes that depend on data ({why})") from error


def is_ratio(expression: sympy.Expr) -> bool:
    """Whether a number is one of integers over sizes, as constants of kernels are, or has no sizes in it."""
    if not expression.free_symbols or expression.is_integer:
        return True
    return all(bool(part.is_integer) for part in sympy.fraction(sympy.together(expression)))


def real(graph: Graph, expression: sympy.Expr) -> Value:
    """An expression over sizes, such as the root of a size, as operators on 0-d arrays of float64."""
    if is_ratio(expression):
        return full(graph, expression, (), DType.float64)
    kind = {sympy.Add: "add", sympy.Mul: "mul", sympy.Pow: "pow"}.get(expression.func)
    if kind is None:
        raise Unproven(f"the number {expression}")
    values = [real(graph, part) for part in expression.args]
    return functools.reduce(lambda a, b: graph.emit(make(kind), a, b)[0], values)
