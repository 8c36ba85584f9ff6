"""`.item()` of a floating-point number: a value of the graph that Python sees after it has run, and no break.

TorchDynamo has this as a setting for all numbers. An integer mostly becomes a size or an index, of which a program
cannot be compiled, so that it still breaks the graph where a function may be compiled in pieces, as do the integers of
`.tolist()`. So does each number of a function that takes a branch by one, or whose graph cannot be compiled: that is
known only after it was traced, which then starts over.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from torch._dynamo import graph_break_hints
from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UserError, unimplemented
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

from daceml_train.frontends.torch.traces import Traces

_broken: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
"""Functions in which numbers break the graph."""


def start_over() -> None:
    """Trace the function once more, with breaks, if its graph contains a number; else nothing."""
    if traces.code is not None:
        _broken.add(traces.code)
        traces.code = None
        raise TensorifyScalarRestartAnalysis(restart_reason="a number breaks the graph")


class _ScalarTraces(Traces):
    code: types.CodeType | None = None
    """The function whose graph contains a number."""

    def begin(self) -> None:
        self.code = None


@functools.cache
def _install() -> None:
    tensors: Any = TensorVariable
    numbers: Any = SymNodeVariable
    item, tolist, evaluate = tensors.method_item, tensors.method_tolist, numbers.evaluate_expr

    def method_item(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if traces.depth and not tx.one_graph:
            code = tx.output.root_tx.f_code
            if code in _broken or self.dtype is None or not self.dtype.is_floating_point:
                _break("Tensor.item()")
            traces.code = code
        return item(self, tx, *args, **kwargs)

    def method_tolist(self: Any, tx: Any) -> Any:
        if traces.depth and not tx.one_graph:
            _break("Tensor.tolist()")
        return tolist(self, tx)

    def evaluate_expr(self: Any, *args: Any) -> Any:
        try:
            return evaluate(self, *args)
        except UserError:
            start_over()
            raise

    tensors.method_item, tensors.method_tolist = method_item, method_tolist
    numbers.evaluate_expr = evaluate_expr


traces = _ScalarTraces(_install)
"""Traces that may contain such numbers."""


def _break(call: str) -> None:
    unimplemented(
        gb_type=call,
        context="",
        explanation="Integers break the graph, and so do numbers of a function that branches on one.",
        hints=[*graph_break_hints.SUPPORTABLE],
    )
