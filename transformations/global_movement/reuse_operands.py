"""ReuseOperands: a kernel writes its result over an operand that is dead afterward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from daceml_train.analysis.memory import Blocks
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.embedding import AddRows
from daceml_train.ops.indexing import Scatter
from daceml_train.passes.base import Pass
from daceml_train.tensor import Tensor, same
from daceml_train.transformations.global_movement.scalar_updates import as_kernel
from daceml_train.transformations.global_movement.update_in_place import can_store

IN_PLACE = AddRows | Scatter
"""Library calls whose result may be stored over their first operand."""


@dataclass(frozen=True)
class ReuseOperands(Pass):
    """Store a kernel's result in the memory of an operand whose last reader is that kernel.

        x -> [f] -> y, x read for the last time     =>      x -> [f over x] -> y

    The kernel must read each element of the operand before it writes it and never after, which `codegen.kernel.plan`
    decides. Operand and result have the same type and layout, and neither is an input's memory or a result of the
    graph. Arrays below `min_bytes` are skipped. `add_rows` and `scatter` work in place, so elements that no index names
    are not touched; otherwise the bytes moved do not change. The live bytes shrink.
    """

    level = "global_movement"
    min_bytes: int = 1 << 14

    def run(self, graph: Graph) -> Graph:
        blocks = Blocks(graph, len(graph.outputs))
        found = candidates(graph, blocks, self.min_bytes)
        if not found:
            return graph
        last: dict[str, int] = {}
        for position, node in enumerate(graph.nodes):
            for name in (*node.inputs, *node.outputs):
                last.update((block, position) for block in memories(blocks, name))
        other = graph.copy()
        over: dict[str, str] = {}
        """Block whose array already lies in another's -> that other block; it lives as long as both."""
        for position, node in enumerate(graph.nodes):
            kernel = as_kernel(node)
            pairs: dict[int, int] = {}
            for result, operands in found.get(position, {}).items():
                for argument in operands:
                    block = _root(over, blocks.block(node.inputs[argument]))
                    fits = last[block] == position and argument not in pairs.values()
                    if fits and legal(graph, blocks, node, {**pairs, result: argument}):
                        pairs[result] = argument
                        output = blocks.block(node.outputs[result])
                        over[output] = block
                        last[block] = last[output]
                        break
            if pairs and isinstance(node.op, IN_PLACE):
                other.nodes[position] = replace(node, op=replace(node.op, in_place=True))
            elif pairs and kernel is not None:
                op = replace(kernel, updates=(*kernel.updates, *pairs.items()))
                other.nodes[position] = replace(node, op=op)
        return other


def memories(blocks: Blocks, name: str) -> set[str]:
    """The block of an array, and that of its source where the array is a copy."""
    names = (name, blocks.base.get(name, name))
    return {blocks.block(n) for n in names if n in blocks.places}


def _root(over: Mapping[str, str], block: str) -> str:
    while block in over:
        block = over[block]
    return block


def candidates(graph: Graph, blocks: Blocks, min_bytes: int) -> dict[int, dict[int, list[int]]]:
    """Position of a kernel -> result -> arguments over which it may be stored if they have no later reader."""
    visible = {block for name in graph.results for block in memories(blocks, name)}
    visible |= blocks.constants
    found: dict[int, dict[int, list[int]]] = {}
    for position, node in enumerate(graph.nodes):
        if isinstance(node.op, IN_PLACE) and not node.op.in_place:
            name = node.outputs[0]
            kept = blocks.places[name].block in visible or small(graph.tensors[name], min_bytes)
            if not kept and fits(graph, blocks, node, 0, graph.tensors[name], visible):
                found[position] = {0: [0]}
            continue
        kernel = as_kernel(node)
        if kernel is None or len(set(kernel.arguments)) < len(kernel.arguments):
            continue
        taken = {result for result, _ in kernel.updates}
        for result, name in enumerate(node.outputs):
            tensor = graph.tensors[name]
            elsewhere = result in taken or name in blocks.pieces or blocks.places[name].block in visible
            if elsewhere or small(tensor, min_bytes):
                continue
            fitting = [a for a in range(len(node.inputs)) if fits(graph, blocks, node, a, tensor, visible)]
            fitting = [a for a in fitting if legal(graph, blocks, node, {result: a})]
            if fitting:
                found.setdefault(position, {})[result] = fitting
    return found


def small(tensor: Tensor, min_bytes: int) -> bool:
    """Whether an array is below `min_bytes`; one whose size has symbols is not."""
    return isinstance(tensor.bytes, int) and tensor.bytes < min_bytes


def fits(graph: Graph, blocks: Blocks, node: Node, argument: int, tensor: Tensor, visible: set[str]) -> bool:
    """Whether an argument is a whole array of this type and layout whose memory may be overwritten."""
    name = node.inputs[argument]
    if name not in blocks.places or graph.tensors[name].shape != tensor.shape:
        return False
    block, strides = blocks.block(name), blocks.places[name].strides
    if len(memories(blocks, name)) > 1:
        return False  # an alias that needs a copy: to the graph it is its source
    if block not in blocks.made or block in visible or graph.tensors[name].dtype is not tensor.dtype:
        return False
    once = sum(block in memories(blocks, i) for i in node.inputs) == 1
    return once and strides == tensor.strides and same(blocks.tensors[block].size, tensor.size)


def legal(graph: Graph, blocks: Blocks, node: Node, pairs: Mapping[int, int]) -> bool:
    """Whether these results can be stored over these arguments; for a kernel, whether it can be generated."""
    if isinstance(node.op, IN_PLACE):
        return True
    kernel = as_kernel(node)
    assert kernel is not None
    return can_store(graph, blocks, node, kernel, (*kernel.updates, *pairs.items()))
