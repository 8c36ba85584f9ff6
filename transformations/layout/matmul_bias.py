"""FuseMatmulBias: a bias that no kernel took up is added by the product's own library call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import MatmulAdd
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.operator import Operator, Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, same_shape
from daceml_train.transformations.intra_operator.accumulate_matmuls import MatmulTerm


@dataclass(frozen=True)
class FuseMatmulBias(Rewrite):
    """Add a bias in the call that multiplies, where the addition is all that happens between two library calls.

        a, b -> [matmul] -> p;  p, bias[N] -> [add] -> y     =>     bias, a, b -> [matmul_add] -> y

    It runs behind fusion: an addition that a kernel computes along with other things is free there.
    Bytes: p is neither written nor read.
    """

    level = "layout"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        operands = added(node)
        if operands is None:
            return None
        for seen, bias in (operands, operands[::-1]):
            product = MatmulTerm.behind(uses, seen)
            if product is None:
                continue
            shape, row = uses.graph.tensors[product.node.outputs[0]].shape, uses.graph.tensors[bias].shape
            matrix = len(shape) == 2 and same_shape(row, shape[1:])
            if matrix and same_shape(uses.graph.tensors[seen].shape[-1:], row):
                return {"product": product, "bias": bias}
        return None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        product = match.bindings["product"]
        alone = product.only_reader(match.uses, match.root)
        yield alone, f"the product %{product.node.outputs[0]} has another reader"

    def traffic(self, match: Match) -> Dim:
        return -2 * match.uses.bytes(match.bindings["product"].node.outputs[0])

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        a, b = (values[i] for i in match.bindings["product"].node.inputs)
        (y,) = builder.emit(MatmulAdd(), values[match.bindings["bias"]], a, b)
        return (y.view(match.uses.graph.tensors[match.root.outputs[0]].shape),)


def added(node: Node) -> tuple[str, str] | None:
    """The two arrays that a node adds, as an operator or as a kernel of that single statement."""
    op: Operator = node.op
    inputs = node.inputs
    if isinstance(op, Kernel) and len(op.statements) == 1 and op.yields == op.statements[0].outputs and not op.updates:
        (statement,), operand = op.statements, dict(zip(op.arguments, inputs, strict=True))
        op, inputs = statement.op, tuple(operand[i] for i in statement.inputs)
    if isinstance(op, Elementwise) and op.kind == "add":
        return inputs[0], inputs[1]
    return None
