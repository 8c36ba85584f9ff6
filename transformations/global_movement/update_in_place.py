"""UpdateInPlace: a new parameter or optimizer state overwrites the old one after the old one's last reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.aliases import readers_of_memory, roots
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Cast, Elementwise, Full
from daceml_train.ops.embedding import AddRows
from daceml_train.ops.kernel import Kernel, Statement, canonical
from daceml_train.ops.movement import Reorder
from daceml_train.ops.operator import Operator
from daceml_train.passes.base import Pass
from daceml_train.tensor import same_memory

POINTWISE = (Elementwise, Cast, Full, Reorder)


@dataclass(frozen=True)
class UpdateInPlace(Pass):
    """Store a written value over the input it replaces, immediately after the gradient's last use.

        p, g -> [update] -> p_next;  write p <- p_next      =>      p, g -> [update over p]

    The gradient's memory is free from then on. A kernel qualifies if it is elementwise over one domain (so each element
    is read before it is overwritten, and never after) and if every other reader of the input can run before it.
    `add_rows` qualifies, too: it touches only the rows that its indices name.
    """

    level = "global_movement"

    def run(self, graph: Graph) -> Graph:
        base = roots(graph)
        readers = readers_of_memory(graph, base)
        seen = {base[name] for name in graph.outputs} | {base[n] for t, n in graph.writes.items() if base[n] != t}
        targets = {value: target for target, value in graph.writes.items()}
        made = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
        nodes, wanted = list(graph.nodes), [float(i) for i in range(len(graph.nodes))]
        for index, node in enumerate(graph.nodes):
            rows = isinstance(node.op, AddRows)
            kernel = as_kernel(node)
            if kernel is None and not rows:
                continue
            pairs = []
            for position, name in enumerate(node.outputs):
                target = targets.get(name, "")
                if graph.tensors[name].rank == 0 and len(node.outputs) > 1:
                    continue  # another thread may still read the old scalar
                if target not in node.inputs:
                    continue
                once = [base[i] for i in node.inputs].count(target) == 1
                fits = kernel is None or (alike(graph, name, target) and self.elementwise(graph, node, kernel))
                if once and target not in seen and fits:
                    others = [r for r in readers[target] if r != index]
                    if not others or max(others) < index or not later(node, graph, base, readers):
                        pairs.append((position, node.inputs.index(target)))
            if pairs:
                nodes[index] = replace(node, op=over(node.op if kernel is None else kernel, tuple(pairs)))
                needs = [made[i] for i in node.inputs if i in made]
                needs += [r for _, argument in pairs for r in readers[node.inputs[argument]] if r != index]
                wanted[index] = max(needs, default=-1) + 0.5
        other = graph.copy()
        other.nodes = [nodes[i] for i in sorted(range(len(nodes)), key=lambda i: (wanted[i], i))]
        return other

    def elementwise(self, graph: Graph, node: Node, kernel: Kernel) -> bool:
        """Whether every statement works element by element over one domain."""
        shapes = {graph.tensors[o].shape for o in node.outputs} - ({()} if len(node.outputs) > 1 else set())
        pointwise = all(isinstance(s.op, POINTWISE) for s in kernel.statements)
        return pointwise and len(shapes) == 1


def alike(graph: Graph, a: str, b: str) -> bool:
    """Whether the elements of two arrays of one shape have the same memory offsets."""
    first, second = graph.tensors[a], graph.tensors[b]
    return same_memory(first.shape, first.order, second.order)


def later(node: Node, graph: Graph, base: Mapping[str, str], readers: Mapping[str, Sequence[int]]) -> bool:
    """Whether a node's results have readers, so it cannot wait for the last reader of what it overwrites."""
    handed = {base[name] for name in graph.outputs}
    return any(name in handed or readers.get(name) for name in node.outputs)


def over(op: Operator, pairs: tuple[tuple[int, int], ...]) -> Operator:
    """The operator that stores these results over these operands."""
    if isinstance(op, AddRows):
        return replace(op, in_place=True)
    assert isinstance(op, Kernel)
    return replace(op, updates=pairs)


def as_kernel(node: Node) -> Kernel | None:
    """The node as a kernel, if it is one or a single elementwise operator."""
    if isinstance(node.op, Kernel):
        return node.op
    if isinstance(node.op, Elementwise | Cast):
        return canonical(node.inputs, [Statement(node.op, node.inputs, node.outputs)], node.outputs)[0]
    return None
