"""Leaves: a graph whose composite operators are recursively replaced by the operators that their `lower` emits."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.operator import Operator, Value
from daceml_train.tensor import same_shape


@dataclass(frozen=True)
class Leaves:
    """A graph without composites. Arrays keep their original names, except results of composites."""

    graph: Graph
    owners: list[int] = field(default_factory=list)
    """Per leaf, the position of the original node it comes from."""
    names: dict[str, str] = field(default_factory=dict)
    """Array of the original graph -> array of this one."""


@dataclass(frozen=True, eq=False)
class _Lowering:
    """A builder that lowers composites immediately. Inner arrays are named `<result of the composite>.<operator>`."""

    original: Graph
    lowered: Graph
    prefix: str
    keep: Collection[str]

    def emit(self, op: Operator, *operands: Value) -> tuple[Value, ...]:
        """Append `op`, or the operators that it lowers to."""
        if op.is_composite and op.label not in self.keep:
            return op.lowered(self, *operands)
        count = len(op.infer(*(v.tensor for v in operands)))
        outputs: list[str] = []
        for _ in range(count):
            name = base = f"{self.prefix}.{op.label.rsplit('.', 1)[-1]}"
            position = 0
            while name in outputs or name in self.lowered.tensors or name in self.original.tensors:
                position += 1
                name = f"{base}_{position}"
            outputs.append(name)
        results = self.lowered.append(op, tuple(v.name for v in operands), outputs)
        return tuple(Value(self, v.name, v.tensor) for v in results)


def leaves(graph: Graph, keep: Collection[str] = ()) -> Leaves:
    """The graph with only leaves and the composites named in `keep`.

    Raises `Invalid` where a lowering contradicts its operator's shape rule.
    """
    result = Leaves(graph.empty(), names={name: name for name in graph.inputs})
    for position, node in enumerate(graph.nodes):
        inputs = tuple(result.names[i] for i in node.inputs)
        if node.op.is_composite and node.op.label not in keep:
            for output, value in zip(node.outputs, _lower(graph, result.graph, node, inputs, keep), strict=True):
                result.names[output] = value.name
        else:
            if inputs == node.inputs and all(result.graph.tensors[i] is graph.tensors[i] for i in inputs):
                result.graph.nodes.append(node)  # its types are those of the original
                result.graph.tensors.update((output, graph.tensors[output]) for output in node.outputs)
            else:
                result.graph.append(node.op, inputs, node.outputs, node.origin)
            result.names.update((output, output) for output in node.outputs)
        result.owners.extend([position] * (len(result.graph.nodes) - len(result.owners)))
    graph.finish(result.graph, result.names)
    return result


def _lower(
    graph: Graph, lowered: Graph, node: Node, inputs: tuple[str, ...], keep: Collection[str]
) -> tuple[Value, ...]:
    builder = _Lowering(graph, lowered, node.outputs[0], keep)
    with lowered.at(node.origin.of(node.op.label)):
        values = node.op.lowered(builder, *(Value(builder, i, lowered.tensors[i]) for i in inputs))
    given, expected = [v.tensor for v in values], [graph.tensors[o] for o in node.outputs]
    fits = len(given) == len(expected) and all(
        g.dtype is e.dtype and same_shape(g.shape, e.shape) for g, e in zip(given, expected, strict=True)
    )
    if not fits:
        raise Invalid(
            f"{node}: the lowering has {', '.join(map(str, given))}, the shape rule {', '.join(map(str, expected))}",
            where=str(node.origin),
        )
    return values
