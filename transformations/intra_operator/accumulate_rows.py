"""AccumulateRows: the rows of an embedding's gradient are added to another array (index_add), never stored alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.embedding import AddRows, EmbeddingGrad
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, hint, same_shape
from daceml_train.transformations.intra_operator.accumulate_matmuls import pointwise


@dataclass(frozen=True)
class AccumulateRows(Rewrite):
    """Add the rows of an embedding's gradient to an array of the table's size at their indices (index_add).

        g, i -> [embedding_grad] -> d;  c, d -> [add] -> y     =>     c, i, g -> [add_rows] -> y

    The gradient of a table that is also the weight of a linear layer is such a sum. Bytes: d is neither written nor
    read. Where `ReuseOperands` finds that c has no later reader, only the rows that the indices name are touched.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Elementwise) or node.op.kind != "add":
            return None
        tensors = uses.graph.tensors
        if not all(same_shape(tensors[i].shape, tensors[node.outputs[0]].shape) for i in node.inputs):
            return None
        first, second = node.inputs
        for d, c in ((second, first), (first, second)):
            gradient = uses.producers.get(d)
            if gradient is not None and isinstance(gradient.op, EmbeddingGrad):
                return {"gradient": gradient, "c": c}
        return None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, gradient, c = match.uses, match.bindings["gradient"], match.bindings["c"]
        name, padding = gradient.outputs[0], gradient.op.padding_idx
        yield padding < 0, f"row {padding} of %{name} has no gradient, which add_rows does not know"
        yield c != name, f"the gradient %{name} is added to itself"
        yield uses.only_reader(name, match.root), f"the gradient %{name} has another reader"
        yield (
            not pointwise(uses, c) or not uses.only_reader(c, match.root),
            f"%{c} is produced by an elementwise operator for this sum alone, which can read the gradient %{name}",
        )

    def traffic(self, match: Match) -> Dim:
        return -2 * match.uses.bytes(match.bindings["gradient"].outputs[0])

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        rows, indices = (values[i] for i in match.bindings["gradient"].inputs)
        uses, c = match.uses, match.bindings["c"]
        producer = uses.producers.get(c)
        table = values[c]
        alone = producer is not None and isinstance(producer.op, Matmul) and uses.only_reader(c, match.root)
        if producer is not None and alone and hint(uses.bytes(*producer.inputs)) < hint(uses.bytes(c)):
            (table,) = builder.emit(
                producer.op, *(values[i] for i in producer.inputs)
            )  # its factors wait for the rows instead
        return builder.emit(AddRows(), table, indices, rows)
