"""Partition: a joint forward and backward graph cut in two, with the arrays that the first saves for the second.

Nodes that depend on a cotangent are backward. A forward value that the backward pass reads is saved if it reaches
memory anyway (a library call reads or produces it, or it is a reduction). A cheap elementwise value is rematerialized
from such values; values that only the backward pass needs are computed there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from daceml_train.analysis.reachability import ancestors
from daceml_train.analysis.sizes import symbols_of
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.elementwise import Cast, Elementwise, Full, Iota
from daceml_train.ops.movement import Expand, Permute, Slice, View
from daceml_train.ops.random import Uniform
from daceml_train.ops.read import Read

FREE = (View, Permute, Expand, Slice, Read, Full, Iota)
POINTWISE = (Elementwise, Cast, Uniform)


@dataclass(frozen=True)
class Halves:
    """The two programs of a differentiable call.

    `forward` has the joint graph's first outputs, then the saved arrays. `backward` takes, in this order, the joint
    inputs named in `kept`, the saved arrays, and the cotangents; it returns the gradients.
    """

    forward: Graph
    backward: Graph
    kept: tuple[str, ...]
    saved: tuple[str, ...]


def partition(joint: Graph, results: int) -> Halves:
    """Cut `joint`, whose outputs are `results` forward results followed by gradients."""
    producers = joint.producers()
    cotangents = [name for name, entry in joint.inputs.items() if entry.role is Role.cotangent]
    forward_names = ancestors(joint.nodes, [*joint.outputs[:results], *joint.writes.values()])
    written = set(joint.writes)
    backward: list[Node] = []
    placed: set[str] = set()
    kept: dict[str, None] = {}
    saved: dict[str, None] = {}
    again = _recomputable(joint, forward_names)

    def absorb(name: str) -> Node | None:
        """The node to emit for an operand that is neither kept nor saved."""
        node = producers.get(name)
        if name in tainted or (node is not None and name in again):
            return node
        if node is None and name not in written:
            kept[name] = None
        else:
            saved[name] = None
        return None

    def place(name: str) -> None:
        """Emit the producer of `name` after the producers of its operands."""
        root = absorb(name)
        stack = [] if root is None else [(root, iter(root.inputs))]
        while stack:
            node, operands = stack[-1]
            if node.outputs[0] in placed:
                stack.pop()
                continue
            following = next((n for o in operands if (n := absorb(o)) and n.outputs[0] not in placed), None)
            if following is not None:
                stack.append((following, iter(following.inputs)))
                continue
            placed.update(node.outputs)
            backward.append(node)
            stack.pop()

    tainted = _dependent(joint, cotangents)
    wanted = tainted & ancestors(joint.nodes, joint.outputs[results:])
    for node in joint.nodes:  # in graph order, so rematerialized nodes precede their first use
        if not wanted.isdisjoint(node.outputs) and not forward_names.issuperset(node.outputs):
            place(node.outputs[0])
    for name in joint.outputs[results:]:
        place(name)

    kept |= dict.fromkeys(_carriers(joint, backward, [*kept, *saved, *cotangents]))
    forward = joint.empty(f"{joint.name}_forward")
    for name in cotangents:
        del forward.inputs[name], forward.tensors[name]
    _add(forward, joint, [n for n in joint.nodes if not forward_names.isdisjoint(n.outputs)])
    forward.outputs = [*joint.outputs[:results], *saved]
    forward.writes, forward.kept = dict(joint.writes), len(saved)

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


def _carriers(joint: Graph, nodes: Sequence[Node], given: Sequence[str]) -> Iterator[str]:
    """Inputs that are kept for their sizes alone: symbols of the backward pass that are no size of an array in `given`.

    A program reads each symbol where it is a size of an input; that `n + 1` is one does not tell it `n`.
    """
    needed = {symbol for node in nodes for symbol in symbols_of(node.op)}
    needed.update(s for node in nodes for name in node.outputs for s in joint.tensors[name].symbols)
    needed.update(symbol for name in given for symbol in joint.tensors[name].symbols)
    missing = needed - {size for name in given for size in joint.tensors[name].shape} if needed else needed
    for name, entry in joint.inputs.items():
        told = missing.intersection(entry.tensor.shape)
        if told and name not in joint.writes and entry.role is not Role.cotangent:
            missing -= told
            yield name


def _recomputable(joint: Graph, forward: set[str]) -> set[str]:
    """Forward values to rematerialize: those that are free, or cheap and computed from arrays in memory."""
    material, written = _material(joint, forward), set(joint.writes)
    again = {name for name in joint.inputs if name not in written}
    for node in joint.nodes:
        if isinstance(node.op, FREE):
            fits = written.isdisjoint(node.inputs)
        elif forward.isdisjoint(node.outputs):
            fits = True
        else:
            fits = isinstance(node.op, POINTWISE) and material.isdisjoint(node.outputs)
            fits = fits and all(i in again or (i in material and i not in written) for i in node.inputs)
        if fits:
            again.update(node.outputs)
    return again


def _add(graph: Graph, joint: Graph, nodes: Sequence[Node]) -> None:
    graph.nodes = list(nodes)
    graph.tensors.update({name: joint.tensors[name] for node in nodes for name in node.outputs})


def _dependent(graph: Graph, names: Sequence[str]) -> set[str]:
    found = set(names)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return found


def _material(graph: Graph, forward: set[str]) -> set[str]:
    """Forward arrays that reach memory despite fusion: inputs, operands and results of library calls, reductions."""
    producers = graph.producers()
    material = set(graph.inputs) | {name for name in graph.outputs if name in forward}
    for node in graph.nodes:
        if forward.isdisjoint(node.outputs) or isinstance(node.op, FREE):
            continue
        if not isinstance(node.op, POINTWISE):
            material.update(node.outputs)
        if node.op.vendor:
            for name in node.inputs:
                while (
                    (producer := producers.get(name)) is not None and isinstance(producer.op, FREE) and producer.inputs
                ):
                    material.add(name)
                    name = producer.inputs[0]
                material.add(name)
    return material
