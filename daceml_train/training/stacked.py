"""Stacked graphs: a graph for K trials at once, equal to K graphs but for their inputs.

    w[64, 64], x[8, 64], lr -> [step] -> w'     =>     w[K, 64, 64], x[8, 64], lr[K] -> [step] -> w'[K, 64, 64]

Inputs of trials have a new first dimension; all others are shared, and what follows from them alone is computed once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from daceml_train.errors import Invalid, Unsupported
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.ops.operator import Value
from daceml_train.tensor import Tensor
from daceml_train.training.stack_rules import Operand, Stacking, stacked_results


def stacked(graph: Graph, count: int, inputs: Collection[str]) -> Graph:
    """The graph for `count` trials, of which each has `inputs` for itself. All results have the new first dimension.

    Raises `Unsupported` with the operator and the user's line where an operator has no rule.
    """
    if count < 1 or not set(inputs) <= graph.inputs.keys():
        raise Invalid(f"a graph of {count} trials with inputs {', '.join(sorted(inputs))} for each")
    graph = leaves(graph).graph
    other, names, own = Graph(graph.name), {}, set(inputs)
    for name, entry in graph.inputs.items():
        tensor = stacked_type(entry.tensor, count) if name in own else entry.tensor
        names[name] = other.input(name, tensor, entry.role, entry.path).name
    for node in graph.nodes:
        operands = [Operand(other.value(names[name]), name in own) for name in node.inputs]
        with other.at(node.origin):
            results = _results(other, node, operands, count)
        names |= zip(node.outputs, (value.name for value in results), strict=True)
        if any(operand.stacked for operand in operands):
            own |= set(node.outputs)
    for name in {*graph.outputs, *graph.writes.values()} - own:
        names[name] = Operand(other.value(names[name]), False).everywhere(count).name
    if shared := sorted(graph.writes.keys() - set(inputs)):
        raise Unsupported(f"%{shared[0]} is written by each trial and belongs to all of them")
    return graph.finish(other, names)


def _results(graph: Graph, node: Node, operands: Sequence[Operand], count: int) -> Sequence[Value]:
    if not any(operand.stacked for operand in operands):
        return graph.append(node.op, tuple(operand.value.name for operand in operands))
    try:
        return stacked_results(Stacking(node.op, operands, count))
    except Unsupported as error:
        raise Unsupported(str(error), where=str(node.origin)) from error


def stacked_type(tensor: Tensor, count: int) -> Tensor:
    """The type of `count` tensors, one after the other."""
    order = None if tensor.order is None else (0, *(d + 1 for d in tensor.order))
    return replace(tensor, shape=(count, *tensor.shape), order=order)


__all__ = ["stacked", "stacked_type"]
