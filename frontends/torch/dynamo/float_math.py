"""Functions of `math` over floats that are inputs: those that TorchDynamo has no symbol for become symbols as well.

Elsewhere a float whose value Python needs, as for `math.log1p`, is compared itself: TorchDynamo compares the expression
over it, whose terms it has reordered, so that rounding makes its own guard fail.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.fx.experimental.proxy_tensor import get_proxy_mode, handle_sym_dispatch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as torch_sympy
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.symbol import SymT, symbol_is_type

from daceml_train.frontends.torch.dynamo.number_ranges import require
from daceml_train.frontends.torch.traces import Traces

_DOMAINS = {"exp": (-math.inf, 709.0), "log": (0.0, math.inf)}
"""Function -> the bounds within which Python returns a number."""


def _symbolic(name: str) -> Callable[[Any], Any]:
    """A function of `math` that is a symbol where its argument is one."""
    plain, opaque = getattr(math, name), getattr(torch_sympy, f"OpaqueUnaryFn_{name}")

    def function(a: Any) -> Any:
        if not isinstance(a, torch.SymFloat):
            return plain(a)
        if get_proxy_mode() is not None:
            return handle_sym_dispatch(function, (a,), {})
        node = a.node
        require(node, *_DOMAINS.get(name, (-math.inf, math.inf)), strict=True)
        hint = plain(node.hint) if node.has_hint() else None
        return torch.SymFloat(SymNode(opaque(node.expr), node.shape_env, float, hint))

    function.__name__ = function.__qualname__ = f"math_{name}"
    return function


FUNCTIONS = {getattr(math, name): _symbolic(name) for name in ("exp", "log", "asinh")}


def _printed(name: str) -> Callable[[Any, Any], str]:
    """How a guard writes a function of `math`, for a printer of PyTorch's."""
    return lambda printer, call: f"math.{name}({printer._print(call.args[0])})"


@functools.cache
def _install() -> None:
    printer: Any = PythonPrinter
    for function in FUNCTIONS:
        name = function.__name__
        if not hasattr(printer, f"_print_OpaqueUnaryFn_{name}"):
            setattr(printer, f"_print_OpaqueUnaryFn_{name}", _printed(name))
    functions: Any = TorchInGraphFunctionVariable
    call = functions.call_function

    @functools.wraps(call)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        ours = FUNCTIONS.get(self.value) if traces.depth and len(args) == 1 and not kwargs else None
        number = args[0].realize() if ours is not None else None
        if ours is None or not isinstance(number, SymNodeVariable) or not isinstance(number.sym_num, torch.SymFloat):
            return call(self, tx, args, kwargs)
        proxy = tx.output.create_proxy("call_function", ours, (number.as_proxy(),), {})
        return SymNodeVariable.create(tx, proxy, ours(number.sym_num))

    functions.call_function = call_function
    environment: Any = ShapeEnv
    evaluate = environment.evaluate_expr

    @functools.wraps(evaluate)
    def evaluate_expr(self: Any, orig_expr: Any, hint: Any = None, *arguments: Any, **keywords: Any) -> Any:
        if traces.depth and isinstance(hint, float) and isinstance(orig_expr, sympy.Expr) and orig_expr.args:
            known = "backed_var_to_val" if hasattr(self, "backed_var_to_val") else "var_to_val"  # before PyTorch 2.11
            floats = {s: v for s, v in getattr(self, known).items() if symbol_is_type(s, SymT.FLOAT)}
            if orig_expr.free_symbols and orig_expr.free_symbols <= floats.keys():
                for symbol in sorted(orig_expr.free_symbols, key=str):
                    evaluate(self, sympy.Eq(symbol, floats[symbol]))
                return sympy.Float(hint)
        return evaluate(self, orig_expr, hint, *arguments, **keywords)

    environment.evaluate_expr = evaluate_expr


traces = Traces(_install)
"""Traces in which they are."""
