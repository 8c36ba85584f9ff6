"""Sizes whose expressions outgrow what SymPy simplifies in time: they become constants of the program.

Models that pad images to a multiple and divide them into windows nest `%` and `//` in each other, layer by layer, and
each comparison of two sizes simplifies the whole of it: a Swin of four layers took PyTorch 50 s to trace, and minutes
to differentiate. Once such an expression has more than `TERMS` parts, the sizes in it are guarded to be what they are
now, so that each image size has a program of its own. Sizes under strides and pooling alone, which are divided by
numbers, are not affected.
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import FloorDiv, Mod, PythonMod

from daceml_train import logs
from daceml_train.frontends.torch.traces import Traces

TERMS = 40
"""Parts of an expression with nested remainders above which its sizes are constants."""
_WHY = "expressions of sizes nest too many remainders"


class _SizedTraces(Traces):
    def begin(self) -> None:
        if not self.depth:
            self.noted()  # of a trace that was captured by nobody


@functools.cache
def _install() -> None:
    environment: Any = ShapeEnv
    original = environment.evaluate_expr

    @functools.wraps(original)
    def evaluate_expr(self: Any, orig_expr: Any, *arguments: Any, **keywords: Any) -> Any:
        if traces.depth and isinstance(orig_expr, sympy.Basic):
            known = "backed_var_to_val" if hasattr(self, "backed_var_to_val") else "var_to_val"  # before PyTorch 2.11
            values = getattr(self, known)
            fixed = self.__dict__.setdefault("fixed_by_daceml_train", set())
            for size in sorted((_nested(orig_expr) & values.keys()) - fixed, key=str):
                fixed.add(size)
                text = f"a size of {values[size]} is a constant of the program, since {_WHY}"
                traces.note(text)
                logs.event(logs.RECOMPILES, text)
                original(self, sympy.Eq(size, values[size]))
            orig_expr = self.replace(orig_expr)
        return original(self, orig_expr, *arguments, **keywords)

    environment.evaluate_expr = evaluate_expr


traces = _SizedTraces(_install)
"""Traces in which sizes may become constants, and note which."""


def _nested(expression: sympy.Basic) -> set[sympy.Symbol]:
    """The sizes of a large expression that are under a remainder of a remainder, or divided by one another."""
    if next(islice(sympy.preorder_traversal(expression), TERMS, None), None) is None:
        return set()
    found: set[Any] = set()
    for part in expression.atoms(FloorDiv, Mod, PythonMod):
        base, divisor = part.args
        if base.has(Mod, PythonMod) or divisor.free_symbols:
            found |= divisor.free_symbols | {s for m in base.atoms(Mod, PythonMod) for s in m.free_symbols}
    return found
