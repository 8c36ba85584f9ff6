"""AccumulateRows: an embedding's gradient is added to another array row by row, instead of being an array first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.codegen.loops import hint
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.embedding import AddRows, EmbeddingGrad
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, View
from daceml_train.tensor import Dim, same_shape
from daceml_train.transformations.intra_operator.accumulate_products import pointwise


@dataclass(frozen=True)
class AccumulateRows(Rewrite):
    """Add the rows of an embedding's gradient to an array of the table's size where they belong.

        g, i -> [embedding_grad] -> d;  c, d -> [add] -> y     =>     c, i, g -> [add_rows] -> y

    The gradient of a table that is also the weight of a linear layer is such a sum. Bytes: d is neither written nor
    read. Where `ReuseOperands` finds that nobody reads c any more, only the rows that the indices name are touched.
    """

    level = "intra_operator"

    def find(self, view: View, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Elementwise) or node.op.kind != "add":
            return None
        tensors = view.graph.tensors
        if not all(same_shape(tensors[i].shape, tensors[node.outputs[0]].shape) for i in node.inputs):
            return None
        first, second = node.inputs
        for d, c in ((second, first), (first, second)):
            gradient = view.producers.get(d)
            if gradient is not None and isinstance(gradient.op, EmbeddingGrad):
                return {"gradient": gradient, "c": c}
        return None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        view, gradient, c = match.view, match.parts["gradient"], match.parts["c"]
        name, padding = gradient.outputs[0], gradient.op.padding_idx
        yield padding < 0, f"row {padding} of %{name} has no gradient, which add_rows does not know"
        yield c != name, f"the gradient %{name} is added to itself"
        yield view.only_reader(name, match.root), f"the gradient %{name} has another reader"
        yield (
            not pointwise(view, c) or not view.only_reader(c, match.root),
            f"%{c} is made by an elementwise operator for this sum alone, whose kernel can read the gradient %{name}",
        )

    def traffic(self, match: Match) -> Dim:
        return -2 * match.view.bytes(match.parts["gradient"].outputs[0])

    def emit(self, match: Match, builder: Graph, now: Mapping[str, Value]) -> Iterable[Value]:
        rows, indices = (now[i] for i in match.parts["gradient"].inputs)
        view, c = match.view, match.parts["c"]
        maker = view.producers.get(c)
        table = now[c]
        alone = maker is not None and isinstance(maker.op, Matmul) and view.only_reader(c, match.root)
        if maker is not None and alone and hint(view.bytes(*maker.inputs)) < hint(view.bytes(c)):
            (table,) = builder.emit(maker.op, *(now[i] for i in maker.inputs))  # its factors wait for the rows instead
        return builder.emit(AddRows(), table, indices, rows)
