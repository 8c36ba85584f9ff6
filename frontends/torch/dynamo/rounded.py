"""Rounded numbers that a forward pass notes: Python rounds them after the graph has run, to the decimal that it writes.

A graph would round in binary, which is another number at times, and has no operator for it: each value of a schedule
that is noted as `round(rate, 4)` would be a program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.exc import unimplemented
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from daceml_train.frontends.torch.traces import Traces

_round: Any = SymNodeVariable.call_method


class RoundedVariable(VariableTracker):
    """`round(number, digits)`, which breaks the graph where more is done with it than to keep it or to print it."""

    def __init__(self, number: SymNodeVariable, digits: int, **options: Any) -> None:
        super().__init__(**options)
        self.number, self.digits = number, digits

    def reconstruct(self, codegen: Any) -> None:
        """Code that rounds the number."""
        codegen.add_push_null(lambda: codegen.load_import_from("builtins", "round"))
        codegen(self.number)
        codegen.append_output(codegen.create_load_const(self.digits))
        codegen.extend_output(create_call_function(2, False))

    def python_type(self) -> type:
        """A rounded number with digits after the point is a float."""
        return float

    def known(self, tx: Any) -> SymNodeVariable:
        """The number as the graph rounds it, for comparisons; none that depends on data."""
        if free_unbacked_symbols(self.number.sym_num):
            unimplemented(
                gb_type="a rounded number",
                context=str(self.number),
                explanation="Python computes with a number of a tensor's that it has rounded.",
                hints=[],
            )
        found: SymNodeVariable = _round(self.number, tx, "__round__", [VariableTracker.build(tx, self.digits)], {})
        return found

    def as_proxy(self) -> Any:
        """The number as the graph rounds it."""
        return self.known(InstructionTranslator.current_tx()).as_proxy()


def _digits(number: SymNodeVariable, arguments: Sequence[Any], keywords: Any) -> int | None:
    """The digits that a float is rounded to; None for a call that rounds to an integer."""
    if len(arguments) != 1 or keywords or not isinstance(number.sym_num, torch.SymFloat):
        return None
    given = arguments[0].as_python_constant() if arguments[0].is_python_constant() else None
    return given if isinstance(given, int) else None


def _computing(name: str) -> Any:
    """A method of a rounded number that computes with it."""

    def method(self: RoundedVariable, tx: Any, *arguments: Any, **keywords: Any) -> Any:
        return getattr(self.known(tx), name)(tx, *arguments, **keywords)

    return method


for _name in dir(SymNodeVariable):
    if _name.endswith("_impl"):
        setattr(RoundedVariable, _name, _computing(_name))


@functools.cache
def _install() -> None:
    numbers: Any = SymNodeVariable

    @functools.wraps(_round)
    def method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        digits = _digits(self, args, kwargs) if traces.depth and name == "__round__" else None
        return _round(self, tx, name, args, kwargs) if digits is None else RoundedVariable(self, digits)

    numbers.call_method = method


traces = Traces(_install)
"""Traces in which they do."""
