"""Concat aliases: operands that are written directly into the memory of their concatenation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from daceml_train.analysis.aliases import view_strides
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.movement import Concat, Permute, View
from daceml_train.tensor import Dim, simplify


@dataclass(frozen=True)
class ConcatAlias:
    """The position of an array in the memory of array `whole`: strides and offset in elements."""

    whole: str
    strides: tuple[Dim, ...]
    offset: Dim


def concat_aliases(graph: Graph) -> dict[str, ConcatAlias]:
    """The operands that are written in place into concatenations, and where; a concatenation may be one itself."""
    found: dict[str, ConcatAlias] = {}
    producers = graph.producers()
    for node in reversed(graph.nodes):  # so that the position of an outer concatenation is known
        if isinstance(node.op, Concat):
            outer = found.get(node.outputs[0])
            for position in node.op.placed:
                results = concat_alias(graph, producers, node, position, outer)
                assert results is not None, f"{node} cannot have its operand {position} in place"
                found[results[0]] = results[1]
    return found


def concat_alias(
    graph: Graph, producers: Mapping[str, Node], node: Node, position: int, outer: ConcatAlias | None = None
) -> tuple[str, ConcatAlias] | None:
    """The array that an operand of a concatenation aliases, and where in the result it would have to lie.

    None if the operand does not cover all of that array, or if no strides exist. `outer` is the position of the result,
    if the result itself lies in another concatenation.
    """
    op, (whole,) = node.op, node.outputs
    assert isinstance(op, Concat)
    tensor = graph.tensors[whole]
    strides, offset = (outer.strides, outer.offset) if outer is not None else (tensor.strides, 0)
    for name in node.inputs[:position]:
        offset = simplify(offset + graph.tensors[name].shape[op.dim] * strides[op.dim])
    name = node.inputs[position]
    while (producer := producers.get(name)) is not None and isinstance(producer.op, View | Permute):
        (source,) = producer.inputs
        before = operand_strides(producer.op, graph.tensors[name].shape, strides, graph.tensors[source].shape)
        if before is None:
            return None
        name, strides = source, before
    return name, ConcatAlias(outer.whole if outer is not None else whole, strides, offset)


def operand_strides(
    op: View | Permute, shape: Sequence[Dim], strides: tuple[Dim, ...], source: tuple[Dim, ...]
) -> tuple[Dim, ...] | None:
    """The strides of an alias's operand of sizes `source`, given those of its result; None if none exist."""
    if isinstance(op, Permute):
        found: list[Dim] = [0] * len(strides)
        for result, dim in enumerate(op.dims):
            found[dim] = strides[result]
        return tuple(found)
    return view_strides(tuple(shape), strides, source)
