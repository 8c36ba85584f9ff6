"""Fallback: any operator of PyTorch's dispatcher, so no model fails because of a missing operator.

Its derivative is a `Body` that the frontend attaches at capture, from PyTorch's own derivative.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.kernel import Statement
from daceml_train.ops.operator import Array, Builder, Operator, Value, make
from daceml_train.tensor import Dim, DType, Tensor


@dataclass(frozen=True)
class Operand:
    """Placeholder in `arguments` and `keywords` for the operand with that number."""

    index: int

    def __str__(self) -> str:
        return f"%{self.index}"


@dataclass(frozen=True)
class Body:
    """A derivative as a small SSA program of operators.

    `arguments` names the operands, then the results, then one cotangent per floating-point result. `yields` has one
    entry per operand: the name of its cotangent, or None where it has none.
    """

    arguments: tuple[str, ...]
    statements: tuple[Statement, ...]
    yields: tuple[str | None, ...]

    def emit(self, b: Builder, arguments: tuple[Value, ...]) -> tuple[Value | None, ...]:
        """Append the statements to `b`, applied to `arguments`; returns the yielded values."""
        if len(arguments) != len(self.arguments):
            raise Invalid(f"a derivative's body takes {len(self.arguments)} values, given {len(arguments)}")
        scope = dict(zip(self.arguments, arguments, strict=True))
        for statement in self.statements:
            results = b.emit(statement.op, *(scope[i] for i in statement.inputs))
            scope.update(zip(statement.outputs, results, strict=True))
        return tuple(None if name is None else scope[name] for name in self.yields)


@dataclass(frozen=True)
class Aten(Operator):
    """The dispatcher's operator `target`, such as `aten.cumsum.default` or `mylib.filter.default`.

    `arguments` and `keywords` (pairs of name and value) hold nested tuples of `Operand`s, numbers, strings, None,
    `DType`s and size expressions; a memory format, layout or device is given by its name as a string. `types` are the
    results' types, with their memory order. `random` marks an operator that draws from PyTorch's generator: it is
    neither duplicated nor merged nor rematerialized.
    """

    name = "aten"
    operands = ("*xs",)
    results = ("*ys",)
    vendor = True
    may_raise = True
    target: str
    arguments: tuple[Any, ...]
    types: tuple[Tensor, ...]
    keywords: tuple[tuple[str, Any], ...] = ()
    random: bool = False
    backward: Body | None = field(default=None, compare=False)

    @property
    def label(self) -> str:
        return self.target.removesuffix(".default")

    @property
    def zero_gradient(self) -> bool:  # type: ignore[override]
        """Whether no result can carry a gradient."""
        return not any(t.dtype.is_float for t in self.types)

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        count = 1 + max((o.index for o in placeholders((self.arguments, self.keywords))), default=-1)
        if len(operands) != count:
            raise Invalid(f"{self.label} as captured takes {count} operands, given {len(operands)}")
        return self.types

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        import torch

        function: Any = torch.ops
        for part in self.target.split("."):
            function = getattr(function, part)
        tensors = [torch.as_tensor(np.array(a)) for a in operands]
        keywords = {name: _concrete(value, tensors, self.label) for name, value in self.keywords}
        results = function(*_concrete(self.arguments, tensors, self.label), **keywords)
        flat = _flatten(results)
        return tuple(np.asarray(t.detach().numpy()) for t in flat)

    def vjp(
        self, b: Builder, xs: tuple[Value, ...], ys: tuple[Value, ...], grad_ys: tuple[Value | None, ...]
    ) -> tuple[tuple[Value | None, ...]]:
        if self.backward is None:
            raise Unsupported(
                f"operator {self.label} has no derivative but a gradient flows through it",
                advice="detach its input, or register a derivative for it",
            )
        cotangents = (
            g if g is not None else zeros_like(b, y) for y, g in zip(ys, grad_ys, strict=True) if y.dtype.is_float
        )
        return (self.backward.emit(b, (*xs, *ys, *cotangents)),)

    def flops(self, *operands: Tensor) -> Dim:
        """One per element of the results, since the operator's computation is unknown."""
        return sum((t.size for t in self.types), start=0)


def full(b: Builder, value: float | complex, shape: tuple[Dim, ...], dtype: DType) -> Value:
    """A tensor of one constant; one of complex numbers is PyTorch's, since kernels compute with none."""
    if not dtype.is_complex:
        return b.emit(make("full", value=value, shape=shape, dtype=dtype))[0]
    return b.emit(Aten("aten.full.default", (shape, value), (Tensor(shape, dtype),), (("dtype", dtype),)))[0]


def zeros_like(b: Builder, y: Value) -> Value:
    """The cotangent of a floating-point array of which no gradient is asked."""
    return full(b, 0.0, y.shape, y.dtype)


def placeholders(value: Any) -> list[Operand]:
    """The operands' placeholders in nested tuples, in order."""
    if isinstance(value, Operand):
        return [value]
    return [o for item in value for o in placeholders(item)] if isinstance(value, tuple) else []


def _concrete(value: Any, tensors: list[Any], label: str) -> Any:
    """A captured argument as PyTorch takes it; floating-point types become float64, as operands do."""
    import torch

    match value:
        case Operand(index=index):
            return tensors[index]
        case tuple():
            return tuple(_concrete(item, tensors, label) for item in value)
        case DType():
            return getattr(
                torch,
                {"float16": "float64", "float32": "float64", "complex64": "complex128"}.get(value.numpy, value.numpy),
            )
        case sympy.Expr():
            if not value.is_number:
                raise Invalid(f"{label} is evaluated with the symbolic size {value}")
            return int(value) if value.is_integer else float(value)
        case str():
            named = getattr(torch, value.removeprefix("torch."), None)
            return named if isinstance(named, torch.memory_format | torch.layout) else value
    return value


def _flatten(results: Any) -> list[Any]:
    """The tensors of a result, which is a tensor or a nested sequence of tensors."""
    if isinstance(results, list | tuple):
        return [t for item in results for t in _flatten(item)]
    return [] if results is None else [results]
