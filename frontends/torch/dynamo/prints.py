"""`print` and messages of loggers in a forward pass, which break no graph.

A line of `print` is printed after the graph has run. A message that a logger gives once, as `warning_once` of Hugging
Face's loggers, is given while the graph is captured: the method itself remembers what it said.

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
from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable, StringFormatVariable
from torch._dynamo.variables.tensor import SymNodeVariable

from daceml_train import logs
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
    _install_loggers()


def _install_loggers() -> None:
    loggers: Any = LoggingLoggerVariable
    original = loggers.call_method

    def call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if not name.endswith("_once") or not traces.depth or not callable(getattr(self.value, name, None)):
            return original(self, tx, name, args, kwargs)
        given = [LazyVariableTracker.realize_all(arg) for arg in args]
        named = {key: LazyVariableTracker.realize_all(arg) for key, arg in kwargs.items()}
        if all(arg.is_python_constant() for arg in (*given, *named.values())):
            values = {key: arg.as_python_constant() for key, arg in named.items()}
            getattr(self.value, name)(*(arg.as_python_constant() for arg in given), **values)
        else:
            logs.event(
                logs.BREAKS, f"a message of {self.value.name}.{name} is left out: it reads what the model computes"
            )
        return ConstantVariable.create(None)

    loggers.call_method = call


traces = Traces(_install)
"""Traces that may contain lines that are printed."""


def _waits(arg: Any) -> bool:
    """Whether an argument of `print` is the same after the graph has run, and needs no program of its own."""
    if isinstance(arg, StringFormatVariable):
        return all(map(_waits, (*arg.sym_args, *arg.sym_kwargs.values())))
    if isinstance(arg, ConstantVariable):
        return arg.source is None or not isinstance(arg.value, str)
    return isinstance(arg, SymNodeVariable)
