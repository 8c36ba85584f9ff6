"""FuseMatmulBias: the matmul's library call adds a bias that no kernel has absorbed."""

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
    """Add a bias in the matmul's library call, where the addition is the only operator between two library calls.

        a, b -> [matmul] -> p;  p, bias[N] -> [add] -> y     =>     bias, a, b -> [matmul_add] -> y

    The pass runs after fusion: an addition is free in a kernel that computes other operators, too.
    Bytes: p is neither written nor read.
    """

    level = "layout"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        operands = added(node)
        if operands is None:
            return None
        for seen, bias in (operands, operands[::-1]):
            matmul = MatmulTerm.of(uses, seen)
            if matmul is None:
                continue
            shape, row = uses.graph.tensors[matmul.node.outputs[0]].shape, uses.graph.tensors[bias].shape
            matrix = len(shape) == 2 and same_shape(row, shape[1:])
            if matrix and same_shape(uses.graph.tensors[seen].shape[-1:], row):
                return {"matmul": matmul, "bias": bias}
        return None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        matmul = match.bindings["matmul"]
        alone = matmul.only_reader(match.uses, match.root)
        yield alone, f"the matmul %{matmul.node.outputs[0]} has another reader"

    def traffic(self, match: Match) -> Dim:
        return -2 * match.uses.bytes(match.bindings["matmul"].node.outputs[0])

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        a, b = (values[i] for i in match.bindings["matmul"].node.inputs)
        (y,) = builder.emit(MatmulAdd(), values[match.bindings["bias"]], a, b)
        return (y.view(match.uses.graph.tensors[match.root.outputs[0]].shape),)


def added(node: Node) -> tuple[str, str] | None:
    """The two arrays that a node adds, as an operator or as a kernel with that single statement."""
    op: Operator = node.op
    inputs = node.inputs
    if isinstance(op, Kernel) and len(op.statements) == 1 and op.yields == op.statements[0].outputs and not op.updates:
        (statement,), operand = op.statements, dict(zip(op.arguments, inputs, strict=True))
        op, inputs = statement.op, tuple(operand[i] for i in statement.inputs)
    if isinstance(op, Elementwise) and op.kind == "add":
        return inputs[0], inputs[1]
    return None
