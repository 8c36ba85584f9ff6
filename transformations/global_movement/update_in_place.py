"""UpdateInPlace: a new parameter or optimizer state overwrites the old one after the old one's last reader."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.aliases import readers_of_memory, roots
from daceml_train.analysis.memory import Blocks
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.kernel.plan import Plan
from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.embedding import AddRows
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.operator import Operator
from daceml_train.passes.base import Pass
from daceml_train.tensor import Tensor, same_memory
from daceml_train.transformations.global_movement.checks import SMALL, checked
from daceml_train.transformations.global_movement.scalar_updates import as_kernel, with_scalar_updates


@dataclass(frozen=True)
class UpdateInPlace(Pass):
    """Store a written value over the input it replaces, immediately after the gradient's last use.

        p, g -> [update] -> p_next;  write p <- p_next      =>      p, g -> [update over p]

    The gradient's memory is free from then on. A kernel qualifies if it reads each element before it overwrites it and
    never after, which `codegen.kernel.plan` decides, and if every other reader of the input can run before it. Values
    of rank 0, which all elements read, get a kernel of their own. `add_rows` qualifies, too: it touches only the rows
    that its indices name. Small arrays that a check of the data depends on keep their old values until the end.
    """

    level = "global_movement"

    def run(self, graph: Graph) -> Graph:
        graph = with_scalar_updates(graph)
        base, blocks = roots(graph), Blocks(graph, len(graph.outputs))
        readers = readers_of_memory(graph, base)
        seen = {base[name] for name in graph.outputs} | {base[n] for t, n in graph.writes.items() if base[n] != t}
        targets = {value: target for target, value in graph.writes.items()}
        needed = checked(graph)
        results = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs}
        kernels: dict[int, tuple[Kernel | None, list[tuple[int, int]]]] = {}
        wanted = [float(i) for i in range(len(graph.nodes))]
        for index, node in enumerate(graph.nodes):
            rows = isinstance(node.op, AddRows)
            kernel = as_kernel(node)
            if kernel is None and not rows:
                continue
            pairs = []
            for position, name in enumerate(node.outputs):
                target = targets.get(name, "")
                if target not in node.inputs or (graph.tensors[name].rank == 0 and not _only_scalars(graph, node)):
                    continue
                if name in needed and small(graph.tensors[name]):
                    continue  # a batch that is refused leaves it as it was
                if kernel is not None and position in dict(kernel.updates):
                    continue  # it is stored over another operand already
                if rows and node.inputs[0] != target:
                    continue  # it adds to its table, to no other operand
                once = [base[i] for i in node.inputs].count(target) == 1
                if once and target not in seen and (kernel is None or alike(graph, name, target)):
                    others = [r for r in readers[target] if r != index]
                    if not others or max(others) < index or not later(node, graph, base, readers):
                        pairs.append((position, node.inputs.index(target)))
            if kernel is not None:
                pairs = storable(graph, blocks, node, kernel, pairs)
            if pairs:
                kernels[index] = kernel, pairs
                needs = [results[i] for i in node.inputs if i in results]
                needs += [r for _, argument in pairs for r in readers[node.inputs[argument]] if r != index]
                wanted[index] = max(needs, default=-1) + 0.5
        before = {
            index: {p: set(readers[graph.nodes[index].inputs[p[1]]]) - {index} for p in pairs}
            for index, (_, pairs) in kernels.items()
        }
        order, dropped = ordered(graph, results, wanted, before, overwritten(graph, base, readers))
        nodes = list(graph.nodes)
        for index, (kernel, pairs) in kernels.items():
            node, kept = nodes[index], [p for p in pairs if (index, p) not in dropped]
            if kernel is not None and len(kept) < len(pairs):
                kept = storable(graph, blocks, node, kernel, kept)
            if kept:
                nodes[index] = replace(node, op=over(node.op if kernel is None else kernel, tuple(kept)))
        other = graph.copy()
        other.nodes = [nodes[i] for i in order]
        return other


def ordered(
    graph: Graph,
    results: Mapping[str, int],
    wanted: Sequence[float],
    before: Mapping[int, Mapping[tuple[int, int], set[int]]],
    already: Mapping[int, set[int]],
) -> tuple[list[int], set[tuple[int, tuple[int, int]]]]:
    """Nodes after their operands, and after those that read what they store over, by `wanted` otherwise.

    `before` has those readers for each pair of a result and an argument that this pass adds, `already` for what nodes
    store over that another pass made so.

    Two kernels may each read what the other one stores over. Then the one that comes first cannot store there: such
    pairs are returned, too.
    """
    operands = [{results[i] for i in node.inputs if i in results} for node in graph.nodes]
    for index, found in already.items():
        operands[index] |= found
    waits = [set(found) for found in operands]
    for index, pairs in before.items():
        waits[index].update(*pairs.values())
    readers: dict[int, list[int]] = {}
    for index, found in enumerate(waits):
        for other in found:
            readers.setdefault(other, []).append(index)
    order: list[int] = []
    dropped: set[tuple[int, tuple[int, int]]] = set()
    done: set[int] = set()
    ready = [(wanted[i], i) for i, found in enumerate(waits) if not found]
    heapq.heapify(ready)
    while len(order) < len(waits):
        if not ready:  # a cycle, in which one waits for others only because of what it stores over
            index = min((i for i in before if i not in done and operands[i] <= done), key=lambda i: (wanted[i], i))
            dropped.update((index, pair) for pair, found in before[index].items() if not found <= done)
            waits[index] = set()
            ready = [(wanted[index], index)]
        _, index = heapq.heappop(ready)
        if index in done:
            continue
        order.append(index)
        done.add(index)
        for reader in readers.get(index, ()):
            if index in waits[reader]:
                waits[reader].discard(index)
                if not waits[reader]:
                    heapq.heappush(ready, (wanted[reader], reader))
    return order, dropped


def overwritten(graph: Graph, base: Mapping[str, str], readers: Mapping[str, Sequence[int]]) -> dict[int, set[int]]:
    """Node that stores over operands -> the other readers of these operands, all of which come before it."""
    return {
        index: {r for _, argument in node.op.updates for r in readers[base[node.inputs[argument]]]} - {index}
        for index, node in enumerate(graph.nodes)
        if node.op.updates
    }


def _only_scalars(graph: Graph, node: Node) -> bool:
    """Whether a node has no larger arrays; otherwise, another thread may still read the old value."""
    return not any(graph.tensors[name].rank for name in (*node.inputs, *node.outputs))


def storable(
    graph: Graph, blocks: Blocks, node: Node, kernel: Kernel, pairs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The (result, argument) pairs that a kernel can store together.

    Planning kernels is what this pass spends its time on, and nearly every update can be stored in full: all pairs
    are tried at once before one by one.
    """
    if not pairs or can_store(graph, blocks, node, kernel, (*kernel.updates, *pairs)):
        return pairs
    kept: list[tuple[int, int]] = []
    for pair in pairs:
        if can_store(graph, blocks, node, kernel, (*kernel.updates, *kept, pair)):
            kept.append(pair)
    return kept


def can_store(graph: Graph, blocks: Blocks, node: Node, kernel: Kernel, pairs: tuple[tuple[int, int], ...]) -> bool:
    """Whether a kernel can be generated that stores these results over these arguments."""
    operands = [
        Layout(t.shape, blocks.places[name].strides if name in blocks.places else t.strides, t.dtype)
        for name in node.inputs
        for t in (graph.tensors[name],)
    ]
    results = [Layout(t.shape, t.strides, t.dtype) for name in node.outputs for t in (graph.tensors[name],)]
    for result, argument in pairs:
        results[result] = operands[argument]
    return _plannable(replace(kernel, updates=pairs), tuple(operands), tuple(results))


@functools.lru_cache(maxsize=1024)  # passes ask for all kernels of a graph, several times
def _plannable(kernel: Kernel, operands: tuple[Layout, ...], results: tuple[Layout, ...]) -> bool:
    try:
        Plan(analyze(kernel, [Tensor(o.shape, o.dtype) for o in operands]), operands, results)
    except Refused:
        return False
    return True


def small(tensor: Tensor) -> bool:
    """Whether an array is so small that a copy costs nothing; sizes that vary are not."""
    size = tensor.bytes
    return isinstance(size, int) and size <= SMALL


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
    return replace(op, updates=(*op.updates, *pairs))
