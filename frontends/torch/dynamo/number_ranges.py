"""Python's numbers where programs have others: integers beyond 53 bits, and what Python refuses to compute.

A program computes with 64-bit integers and doubles; a division by zero is infinite, the logarithm of a negative number
is NaN. So an integer that is large is a constant, as is one from which a large one is computed. That a divisor is not
zero, and that an argument is in the domain of its function, are conditions of the program; elsewhere Python runs.
So are truth values of numbers, the sign of one whose absolute value is taken, and which of two is the larger one: a
program simplifies expressions as if its symbols were sizes, which are positive.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import SymNodeVariable
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


def require(number: Any, low: float, high: float, strict: bool = False) -> None:
    """Make it a condition of the program that a number (a `SymNode`) is within these bounds, the lower one `strict`."""
    if not _tracing() or number.is_constant() or not number.has_hint():
        return
    above = number.gt if strict else number.ge
    inside = low == -math.inf or above(number.wrap_float(low)).guard_bool("", 0)
    if not inside or (high != math.inf and not number.le(number.wrap_float(high)).guard_bool("", 0)):
        unimplemented(
            gb_type="a number outside of a function's domain",
            context=str(number),
            explanation="Python raises an error for it, or returns a complex or large number.",
            hints=[],
        )


def _in_domain(compute: Any, low: float, high: float, strict: bool = False) -> Any:
    @functools.wraps(compute)
    def computed(self: Any, *arguments: Any) -> Any:
        if self.pytype is float:
            require(self, low, high, strict)
        return compute(self, *arguments)

    return computed


def _rounded(rounded: Any) -> Any:
    @functools.wraps(rounded)
    def computed(self: Any, digits: int | None = None) -> Any:
        if _tracing() and digits is not None and digits < 0:  # which PyTorch ignores
            unimplemented(gb_type="digits of an integer", context=str(self), explanation="Python rounds it.", hints=[])
        return rounded(self, digits)

    return computed


def _of_positive_base(power: Any) -> Any:
    @functools.wraps(power)
    def computed(self: Any, exponent: Any) -> Any:
        known = exponent.maybe_as_float() if exponent.is_constant() else None
        if known is None or not float(known).is_integer():
            require(self, 0.0, math.inf)
        return power(self, exponent)

    return computed


def _signed(number: Any) -> bool:
    """Whether a number, a `SymNode`, is an integer that may be negative, as sizes may not."""
    if not _tracing() or number.pytype is not int or number.is_constant() or not number.has_hint():
        return False
    return any(not symbol.is_nonnegative for symbol in number.expr.free_symbols)


def _of_known_sign(absolute: Any) -> Any:
    @functools.wraps(absolute)
    def computed(self: Any) -> Any:
        if not _signed(self):
            return absolute(self)
        return self if self.ge(self.wrap_int(0)).guard_bool("", 0) else self.neg()

    return computed


def _of_known_order(chosen: Any, first: str) -> Any:
    """The larger or smaller one of two integers: `first` says how the first one compares where it is chosen."""

    @functools.wraps(chosen)
    def computed(self: Any, other: Any) -> Any:
        if not (_signed(self) or _signed(other)) or self.pytype is not other.pytype:
            return chosen(self, other)
        return self if getattr(self, first)(other).guard_bool("", 0) else other

    return computed


def _known(create: Any) -> Any:
    """A truth value as the constant that it is under a condition of the program."""

    def created(_: Any, /, tx: Any, proxy: Any, sym_num: Any = None, **options: Any) -> Any:
        result = create(tx, proxy, sym_num, **options)
        truth = getattr(result, "sym_num", None)
        if not _tracing() or not isinstance(truth, torch.SymBool) or not truth.node.has_hint():
            return result
        return ConstantVariable.create(truth.node.guard_bool("", 0))

    return classmethod(created)


_DOMAINS: dict[str, tuple[float, float, bool]] = {
    "sym_sqrt": (0.0, math.inf, False),
    "sym_log2": (0.0, math.inf, True),
    "sym_acos": (-1.0, 1.0, False),
    "sym_asin": (-1.0, 1.0, False),
    "sym_cosh": (-700.0, 700.0, False),
    "sym_sinh": (-700.0, 700.0, False),
    **{name: (-float(LARGE), float(LARGE), False) for name in ("trunc", "floor", "ceil", "round")},
}
"""Function -> the bounds of its argument, and whether the lower one is excluded."""


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
    for name, domain in _DOMAINS.items():
        setattr(SymNode, name, _in_domain(getattr(SymNode, name), *domain))
    torch.SymInt.__round__ = _rounded(torch.SymInt.__round__)  # type: ignore[method-assign]
    nodes: Any = SymNode
    nodes.float_pow = _of_positive_base(nodes.float_pow)
    nodes.abs = _of_known_sign(nodes.abs)
    nodes.sym_max, nodes.sym_min = _of_known_order(nodes.sym_max, "ge"), _of_known_order(nodes.sym_min, "le")
    numbers: Any = SymNodeVariable
    numbers.create = _known(numbers.create)
    for name in _GROWING:
        setattr(SymNode, name, _within_range(getattr(SymNode, name)))


traces = Traces(_install)
"""Traces in which they are."""
