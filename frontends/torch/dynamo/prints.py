"""`print` in a forward pass: the line is printed after the graph has run, so that it does not break the graph.

TorchDynamo has this for functions that are registered as reorderable, with any backend, but it forgets the lines of
functions that are inlined and all keyword arguments, and prints tensors that were changed in the meantime. Here a line
of numbers and texts waits, in its order; all other lines break the graph, as does a text of the user's that may be
another one at each call, which would be compiled into each program.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo import graph_break_hints
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.misc import DebuggingVariable, StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from daceml_train.frontends.torch.traces import Traces


@functools.cache
def _install() -> None:
    debugging: Any = DebuggingVariable
    original = debugging.call_function

    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is not print or not traces.depth:
            return original(self, tx, args, kwargs)
        shown = [LazyVariableTracker.realize_all(arg) for arg in args] if not kwargs else []
        if kwargs or not all(map(_waits, shown)):
            unimplemented(
                gb_type="print of objects",
                context="",
                explanation="Lines of numbers and literal texts wait until the graph has run, all others break it.",
                hints=[*graph_break_hints.SUPPORTABLE],
            )
        tx.output.root_tx.debug_locals.append((self, shown))
        return ConstantVariable.create(None)

    debugging.call_function = call


traces = Traces(_install)
"""Traces that may contain lines that are printed."""


def _waits(arg: Any) -> bool:
    """Whether an argument of `print` is the same after the graph has run, and needs no program of its own."""
    if isinstance(arg, StringFormatVariable):
        return all(map(_waits, (*arg.sym_args, *arg.sym_kwargs.values())))
    if isinstance(arg, ConstantVariable):
        return arg.source is None or not isinstance(arg.value, str)
    return isinstance(arg, SymNodeVariable)
