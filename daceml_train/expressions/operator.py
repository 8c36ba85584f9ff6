"""Operator: an expression as one operator of the graph. It lowers to reads, elementwise operators, and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.errors import Invalid
from daceml_train.expressions.adjoint import derivative
from daceml_train.expressions.lowering import Lowering
from daceml_train.expressions.program import Program, parsed
from daceml_train.expressions.term import children
from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.tensor import Dim, Tensor, same_shape


@dataclass(frozen=True)
class Expression(Operator):
    """The operands through `program`, the text of an expression."""

    name = "expression"
    operands = ("*xs",)
    results = ("*ys",)
    program: str

    @property
    def parsed(self) -> Program:
        """The program."""
        return parsed(self.program)

    @property
    def zero_gradient(self) -> bool:  # type: ignore[override]
        """Whether no result can carry a gradient."""
        return not any(o.dtype.is_float for o in self.parsed.outputs)

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        inputs = self.parsed.inputs
        fits = len(operands) == len(inputs) and all(
            same_shape(x.shape, a.shape) and x.dtype is a.dtype for x, a in zip(operands, inputs, strict=True)
        )
        if not fits:
            expected, given = ", ".join(map(str, inputs)), ", ".join(map(str, operands))
            raise Invalid(f"this expression expects {expected}, given {given}")
        return tuple(Tensor(o.shape, o.dtype) for o in self.parsed.outputs)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        return Lowering(b, self.parsed, operands).results()

    def vjp(
        self, b: Builder, xs: tuple[Value, ...], ys: tuple[Value, ...], grad_ys: tuple[Value | None, ...]
    ) -> tuple[tuple[Value | None, ...]]:
        wanted = tuple(x.dtype.is_float for x in xs)
        present = [g for g, y in zip(grad_ys, ys, strict=True) if g is not None and y.dtype.is_float]
        seeded = tuple(g is not None and y.dtype.is_float for g, y in zip(grad_ys, ys, strict=True))
        text, reads = derivative(self.program, seeded, wanted)
        given = (*xs, *ys, *present)
        found = iter(b.emit(Expression(text), *(given[i] for i in reads)))
        return (tuple(next(found) if w else None for w in wanted),)

    def flops(self, *operands: Tensor) -> Dim:
        count = 0
        for stage in self.parsed.stages:
            points = 1
            for axis in (*stage.axes, *stage.reduced):
                points *= axis.size
            work = [t for t in children(stage.body) if t.args and t.op not in ("load", "cast")]
            count += points * (len(work) + (stage.kind != "point"))
        return count
