"""What each gradient reads: the arrays that the forward pass makes and the backward pass or the update reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daceml_train.analysis.aliases import roots
from daceml_train.analysis.phases import phases
from daceml_train.exploration.views.tree import hidden, label_of
from daceml_train.graph.graph import Graph
from daceml_train.reporting.numbers import number

AGAIN = "_again"
"""What the names of arrays that are made a second time hold; see `Rematerialize`."""


@dataclass(frozen=True)
class Crossing:
    """An array from the forward pass that something behind it reads.

    `readers` are the arrays made by its readers behind the forward pass; `again` is true for an array that is made
    anew there, so that the forward pass need not keep the original.
    """

    array: str
    type: str
    bytes: int
    maker: str
    module: str
    readers: tuple[str, ...]
    gradients: tuple[str, ...]
    """What its readers are, with their modules."""
    again: bool


def crossings(graph: Graph, sizes: Mapping[str, int] | None = None, results: int | None = None) -> list[Crossing]:
    """The largest first; inputs, which nobody has to keep, are not among them."""
    phase_of, root_of = phases(graph, results), roots(graph)
    made = {name: place for place, node in enumerate(graph.nodes) for name in node.outputs}
    late: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if phase_of[place] == "forward" or hidden(node):
            continue
        for name in dict.fromkeys(root_of.get(i, i) for i in node.inputs):
            if name in made and not hidden(graph.nodes[made[name]]):
                late.setdefault(name, []).append(place)
    found = []
    for name, places in late.items():
        maker, again = graph.nodes[made[name]], AGAIN in name
        if phase_of[made[name]] != "forward" and not again:
            continue
        size = number(graph.tensors[name].bytes, sizes or {})
        told = tuple(
            dict.fromkeys(f"{graph.nodes[p].origin.module or 'the step'}: {label_of(graph.nodes[p])}" for p in places)
        )
        readers = tuple(n for p in places for n in graph.nodes[p].outputs)
        found.append(
            Crossing(
                name,
                str(graph.tensors[name]),
                size if isinstance(size, int) else 0,
                label_of(maker),
                maker.origin.module,
                readers,
                told,
                again,
            )
        )
    return sorted(found, key=lambda c: (-c.bytes, c.array))
