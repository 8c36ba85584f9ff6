"""Partition: a joint forward and backward graph cut in two, with the arrays that the first keeps for the second.

What depends on a cotangent is backward. A forward value that the backward pass reads is saved if it reaches memory
anyway (a library call reads or makes it, or it is a reduction); a cheap elementwise value is computed again from such
values, as is what only the backward pass needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.elementwise import Cast, Elementwise, Full, Iota
from daceml_train.ops.movement import Expand, Permute, Slice, View
from daceml_train.ops.random import Uniform

FREE = (View, Permute, Expand, Slice, Full, Iota)
POINTWISE = (Elementwise, Cast, Uniform)


@dataclass(frozen=True)
class Halves:
    """The two programs of a differentiable call.

    `forward` has the joint graph's first outputs, then the saved arrays. `backward` takes, in this order, the joint
    inputs named in `kept`, the saved arrays, and the cotangents; it gives the gradients.
    """

    forward: Graph
    backward: Graph
    kept: tuple[str, ...]
    saved: tuple[str, ...]


def partition(joint: Graph, results: int) -> Halves:
    """Cut `joint`, whose outputs are `results` forward results followed by gradients."""
    makers = joint.producers()
    cotangents = [name for name, entry in joint.inputs.items() if entry.role is Role.cotangent]
    forward_names = _needed(joint, [*joint.outputs[:results], *joint.writes.values()])
    written = set(joint.writes)
    material = _material(joint, forward_names)

    backward: list[Node] = []
    placed: set[str] = set()
    kept: dict[str, None] = {}
    saved: dict[str, None] = {}
    again: dict[str, bool] = {}

    def recomputable(name: str) -> bool:
        """Whether a forward value is computed again: it is free, or cheap and made from what is in memory."""
        node = makers.get(name)
        if node is None:
            return name not in written
        if name not in again:
            again[name] = False
            if isinstance(node.op, FREE):
                again[name] = all(makers.get(i) is not None or i not in written for i in node.inputs)
            elif name not in forward_names:
                again[name] = True
            elif isinstance(node.op, POINTWISE) and name not in material:
                again[name] = all(i in material or recomputable(i) for i in node.inputs)
        return again[name]

    def place(node: Node) -> None:
        if node.outputs[0] not in placed:
            placed.update(node.outputs)
            for name in node.inputs:
                need(name)
            backward.append(node)

    def need(name: str) -> None:
        node = makers.get(name)
        if name in tainted:
            assert node is not None or name in cotangents
            if node is not None:
                place(node)
        elif node is None and name not in written:
            kept[name] = None
        elif node is not None and recomputable(name):
            place(node)
        else:
            saved[name] = None

    tainted = _dependent(joint, cotangents)
    for node in joint.nodes:  # in order, so that the backward pass needs no deep recursion
        if not tainted.isdisjoint(node.outputs) and not forward_names.issuperset(node.outputs):
            place(node)
    for name in joint.outputs[results:]:
        need(name)

    forward = joint.empty(f"{joint.name}_forward")
    for name in cotangents:
        del forward.inputs[name], forward.tensors[name]
    _add(forward, joint, [n for n in joint.nodes if not forward_names.isdisjoint(n.outputs)])
    forward.outputs = [*joint.outputs[:results], *saved]
    forward.writes = dict(joint.writes)

    reverse = Graph(f"{joint.name}_backward")
    for name in kept:
        reverse.input(name, joint.tensors[name], joint.inputs[name].role, joint.inputs[name].path)
    for name in saved:
        reverse.input(name, joint.tensors[name], Role.saved)
    for name in cotangents:
        reverse.input(name, joint.tensors[name], Role.cotangent)
    _add(reverse, joint, backward)
    reverse.outputs = list(joint.outputs[results:])
    return Halves(forward, reverse, tuple(kept), tuple(saved))


def _add(graph: Graph, joint: Graph, nodes: Sequence[Node]) -> None:
    graph.nodes = list(nodes)
    graph.tensors.update({name: joint.tensors[name] for node in nodes for name in node.outputs})


def _needed(graph: Graph, names: Sequence[str]) -> set[str]:
    needed = set(names)
    for node in reversed(graph.nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
            needed.update(node.outputs)
    return needed


def _dependent(graph: Graph, names: Sequence[str]) -> set[str]:
    found = set(names)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def _material(graph: Graph, forward: set[str]) -> set[str]:
    """Forward arrays that reach memory whatever is fused: inputs, what library calls read or make, reductions."""
    makers = graph.producers()
    material = set(graph.inputs) | {name for name in graph.outputs if name in forward}
    for node in graph.nodes:
        if forward.isdisjoint(node.outputs) or isinstance(node.op, FREE):
            continue
        if not isinstance(node.op, POINTWISE):
            material.update(node.outputs)
        if node.op.vendor:
            for name in node.inputs:
                while (maker := makers.get(name)) is not None and isinstance(maker.op, FREE) and maker.inputs:
                    material.add(name)
                    name = maker.inputs[0]
                material.add(name)
    return material
