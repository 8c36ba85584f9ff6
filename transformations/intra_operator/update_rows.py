"""UpdateRows: plain SGD changes only the rows of a table that the batch has read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.embedding import AddRows, EmbeddingGrad
from daceml_train.ops.movement import Expand
from daceml_train.ops.operator import Value
from daceml_train.ops.optimizer import SGDUpdate
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, simplify


@dataclass(frozen=True)
class UpdateRows(Rewrite):
    """Subtract the rows of a table's gradient from the table directly, so the gradient is never stored.

        g, i -> [embedding_grad] -> d;  p, d, rate -> [sgd_update] -> p_next
            =>     g, rate -> [-rate * g] -> r;  p, i, r -> [add_rows] -> p_next

    Bytes: the gradient, as large as the table, is neither written nor read. Where `UpdateInPlace` lets the rows be
    added in place, no other row is touched either.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, SGDUpdate):
            return None
        gradient = uses.producers.get(node.inputs[1])
        return {"gradient": gradient} if gradient is not None and isinstance(gradient.op, EmbeddingGrad) else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        gradient, op = match.bindings["gradient"], match.root.op
        assert isinstance(op, SGDUpdate)
        name, p, padding = gradient.outputs[0], match.root.inputs[0], gradient.op.padding_idx
        yield not op.has("momentum"), f"momentum changes rows of %{p} that the batch does not name"
        yield not op.has("weight_decay"), f"weight decay changes rows of %{p} that the batch does not name"
        yield padding < 0, f"row {padding} of %{p} has no gradient, which add_rows does not know"
        yield match.uses.only_reader(name, match.root), f"the gradient %{name} has another reader"

    def traffic(self, match: Match) -> Dim:
        return simplify(_bytes(match, self, after=True) - _bytes(match, self, after=False))

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        gradient, op = match.bindings["gradient"], match.root.op
        assert isinstance(op, SGDUpdate)
        p, rate, indices = values[match.root.inputs[0]], values[match.root.inputs[2]], values[gradient.inputs[1]]
        spread = match.uses.producers.get(gradient.inputs[0])
        once = spread is not None and isinstance(spread.op, Expand)  # rows that repeat are scaled once
        rows = values[spread.inputs[0] if spread is not None and once else gradient.inputs[0]]
        scaled = rows * (rate.cast(p.dtype) if op.maximize else -rate.cast(p.dtype))
        if spread is not None and once:
            scaled = scaled.expand(spread.op.shape)  # type: ignore[attr-defined]
        return builder.emit(AddRows(), p, indices, scaled)


def _bytes(match: Match, rewrite: UpdateRows, after: bool) -> Dim:
    """The bytes of the matched operators by themselves, before or after."""
    graph, uses, gradient = Graph(), match.uses, match.bindings["gradient"]
    spread = uses.producers.get(gradient.inputs[0])
    outer: Sequence[str] = (*match.root.inputs, *gradient.inputs, *(spread.inputs if spread is not None else ()))
    results = {gradient.outputs[0], *(spread.outputs if spread is not None else ())}
    values = {name: graph.input(name, uses.graph.tensors[name]) for name in dict.fromkeys(outer) if name not in results}
    if spread is not None:
        values |= dict(zip(spread.outputs, graph.emit(spread.op, *(values[i] for i in spread.inputs)), strict=True))
    if after:
        (p,) = rewrite.emit(match, graph, values)
    else:
        (found,) = graph.emit(gradient.op, *(values[i] for i in gradient.inputs))
        (p,) = graph.emit(match.root.op, values[match.root.inputs[0]], found, values[match.root.inputs[2]])
    graph.output(p)
    return traffic(graph).bytes
