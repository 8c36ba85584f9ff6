"""Saved arrays: those that the forward pass produces and the backward pass or the update reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from daceml_train.analysis.aliases import roots
from daceml_train.analysis.phases import phases
from daceml_train.exploration.views.tree import hidden, label_of
from daceml_train.graph.graph import Graph
from daceml_train.reporting.numbers import number

REMATERIALIZED = "_again"
"""A part of the names of rematerialized arrays; see `Rematerialize`."""


@dataclass(frozen=True)
class Crossing:
    """An array from the forward pass that is read after it.

    `readers` are the arrays produced by its readers after the forward pass; `rematerialized` is true for an array that
    is recomputed there, so that the forward pass need not keep the original.
    """

    array: str
    type: str
    bytes: int
    producer: str
    module: str
    readers: tuple[str, ...]
    gradients: tuple[str, ...]
    """Labels of its readers, with their modules."""
    rematerialized: bool


def crossings(graph: Graph, sizes: Mapping[str, int] | None = None, results: int | None = None) -> list[Crossing]:
    """The largest first; without inputs, which need not be kept."""
    phase_of, root_of = phases(graph, results), roots(graph)
    produced_at = {name: place for place, node in enumerate(graph.nodes) for name in node.outputs}
    late: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        if phase_of[place] == "forward" or hidden(node):
            continue
        for name in dict.fromkeys(root_of.get(i, i) for i in node.inputs):
            if name in produced_at and not hidden(graph.nodes[produced_at[name]]):
                late.setdefault(name, []).append(place)
    found = []
    for name, places in late.items():
        producer, rematerialized = graph.nodes[produced_at[name]], REMATERIALIZED in name
        if phase_of[produced_at[name]] != "forward" and not rematerialized:
            continue
        size = number(graph.tensors[name].bytes, sizes or {})
        gradients = tuple(
            dict.fromkeys(f"{graph.nodes[p].origin.module or 'the step'}: {label_of(graph.nodes[p])}" for p in places)
        )
        readers = tuple(n for p in places for n in graph.nodes[p].outputs)
        found.append(
            Crossing(
                name,
                str(graph.tensors[name]),
                size if isinstance(size, int) else 0,
                label_of(producer),
                producer.origin.module,
                readers,
                gradients,
                rematerialized,
            )
        )
    return sorted(found, key=lambda c: (-c.bytes, c.array))
