"""Aliases: arrays that are other arrays' memory under another index."""

from __future__ import annotations

from daceml_train.graph.graph import Graph
from daceml_train.ops.movement import Expand, Permute, Slice, View
from daceml_train.ops.operator import Operator


def is_alias(op: Operator) -> bool:
    """Whether the result of `op` is its operand's memory: such an operator moves no bytes."""
    return isinstance(op, View | Permute | Expand | Slice)


def roots(graph: Graph) -> dict[str, str]:
    """Array name -> the array whose memory it is: itself, or the source of its chain of aliases."""
    root = {name: name for name in graph.inputs}
    for node in graph.nodes:
        for output in node.outputs:
            root[output] = root.get(node.inputs[0], node.inputs[0]) if is_alias(node.op) else output
    return root
