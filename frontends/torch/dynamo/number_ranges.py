"""Python's integers and divisions where programs have others: numbers beyond 53 bits, and divisors that may be zero.

A program computes with 64-bit integers and doubles, and a division by zero is infinite. So an integer that is large is
a constant, as is one from which a large one is computed, and that a divisor is not zero is a condition of the program.
"""

from __future__ import annotations

import functools
from typing import Any

from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._guards import TracingContext
from torch.fx.experimental.sym_node import SymNode

from daceml_train.frontends.torch.traces import Traces

LARGE = 2**53
"""The least absolute value of an integer that no program computes with."""
_DIVISIONS = ("float_truediv", "int_truediv", "int_floordiv", "mod")
_GROWING = ("add", "sub", "mul", "pow_by_natural", "lshift")


def _checking_divisor(divide: Any) -> Any:
    @functools.wraps(divide)
    def divided(self: Any, other: Any) -> Any:
        if _tracing() and not other.is_constant() and other.has_hint():
            zero = other.wrap_int(0) if other.pytype is int else other.wrap_float(0.0)
            other.ne(zero).guard_bool("", 0)
        return divide(self, other)

    return divided


def _within_range(compute: Any) -> Any:
    @functools.wraps(compute)
    def computed(self: Any, other: Any) -> Any:
        result = compute(self, other)
        if _tracing() and result.pytype is int and result.has_hint() and abs(result.hint) >= LARGE:
            unimplemented(
                gb_type="a large integer",
                context=str(result),
                explanation=f"Python computes with integers of {LARGE} and more.",
                hints=[],
            )
        return result

    return computed


def _tracing() -> bool:
    """Whether TorchDynamo traces for us, and has not come to the backend."""
    return traces.depth > 0 and TracingContext.try_get() is not None


@functools.cache
def _install() -> None:
    builder: Any = VariableBuilder
    wrap = builder.wrap_symint

    @functools.wraps(wrap)
    def wrap_symint(self: Any, value: int, *arguments: Any, **keywords: Any) -> Any:
        if traces.depth and abs(value) >= LARGE:
            self.install_guards(GuardBuilder.CONSTANT_MATCH)
            return ConstantVariable.create(value=value, source=self.source)
        return wrap(self, value, *arguments, **keywords)

    builder.wrap_symint = wrap_symint
    for name in _DIVISIONS:
        setattr(SymNode, name, _checking_divisor(getattr(SymNode, name)))
    for name in _GROWING:
        setattr(SymNode, name, _within_range(getattr(SymNode, name)))


traces = Traces(_install)
"""Traces in which they are."""
