"""The rule of `daceml_train::expression`: an expression is one operator of the graph."""

from __future__ import annotations

from collections.abc import Sequence

from daceml_train.expressions.operator import Expression
from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.ops.operator import Value


@rule("daceml_train.expression.default")
def _expression(t: Translator, operands: Sequence[Value], program: str) -> tuple[Value, ...]:
    return t.graph.emit(Expression(program), *operands)
