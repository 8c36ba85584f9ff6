"""Messages between ranks: collectives that nothing needs before the update, and how several of them become one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from daceml_train.analysis.network import sent
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.collective import Collective
from daceml_train.ops.operator import Value, make
from daceml_train.passes.base import Pass
from daceml_train.tensor import Dim

Names = Mapping[str, str]
"""Arrays of a graph -> those of the graph that is built from it."""


@dataclass(frozen=True)
class DistributionPass(Pass):
    """Base of the passes that say how sums over ranks travel. Each promises the bytes that a rank sends afterward."""

    level: ClassVar[str] = "distribution"

    def promised(self, graph: Graph) -> Dim:
        """Bytes that each rank sends in the graph after the pass, computed without running it."""
        return sent(graph)


def depths(graph: Graph, nodes: Sequence[Node]) -> dict[int, int]:
    """How many of `nodes` come before each node of a graph on its longest path, by the node's identity."""
    counted = {id(node) for node in nodes}
    of_array: dict[str, int] = {}
    found: dict[int, int] = {}
    for node in graph.nodes:
        depth = max((of_array.get(name, 0) for name in node.inputs), default=0)
        found[id(node)] = depth
        of_array.update((name, depth + (id(node) in counted)) for name in node.outputs)
    return found


def merged(
    graph: Graph, groups: Sequence[Sequence[Node]], emit: Callable[[Graph, Sequence[Node], Names], Sequence[Value]]
) -> Graph:
    """The graph, in which `emit` produces the only results of the nodes of each group, in their order.

    No node of a group needs the result of another one. Whatever needs none of the results comes first.
    """
    grouped = [node for group in groups for node in group]
    depth = depths(graph, grouped)
    group_of = {id(node): number for number, group in enumerate(groups) for node in group}
    place = {id(node): index for index, node in enumerate(graph.nodes)}
    place |= {id(node): max(place[id(n)] for n in group) for group in groups for node in group}  # it waits for the last
    order = sorted(graph.nodes, key=lambda node: (depth[id(node)], id(node) in group_of, place[id(node)]))
    other, names, done = graph.empty(), dict[str, str](), set[int]()
    other.applied += len(groups)
    for node in order:
        if (number := group_of.get(id(node))) is None:
            inputs = tuple(names.get(name, name) for name in node.inputs)
            results: Sequence[Value] = other.append(node.op, inputs, origin=node.origin)
            names |= {old: new.name for old, new in zip(node.outputs, results, strict=True)}
        elif number not in done:
            done.add(number)
            with other.at(node.origin):
                results = emit(other, groups[number], names)
            names |= {each.outputs[0]: new.name for each, new in zip(groups[number], results, strict=True)}
    return graph.finish(other, names)


def deferred(graph: Graph) -> list[tuple[Node, Collective]]:
    """The collectives of a graph that may be sent together with others, in the order in which all ranks run them."""
    found = [(node, node.op) for node in graph.nodes if isinstance(node.op, Collective) and node.op.deferred]
    return sorted(found, key=lambda pair: pair[1].position)


def positions(graph: Graph) -> Iterator[int]:
    """Positions of further collectives."""
    first = max((node.op.position for node in graph.nodes if isinstance(node.op, Collective)), default=-1) + 1
    while True:
        yield first
        first += 1


def joined(parts: Sequence[Value], dim: int) -> Value:
    """Values side by side along a dimension; a single one itself."""
    first, *others = parts
    return first.apply(make("concat", dim=dim), *others) if others else first


__all__ = ["DistributionPass", "deferred", "depths", "joined", "merged", "positions"]
