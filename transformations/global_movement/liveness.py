"""Liveness: the operators of a graph that take memory, and the bytes that are live under any order of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from daceml_train.analysis.aliases import is_alias
from daceml_train.analysis.memory import Blocks, number
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.collective import Collective
from daceml_train.ops.control import draws
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.transformations.global_movement.checks import checked, checks


@dataclass(frozen=True)
class Liveness:
    """Operators (except aliases and constants, which precede their first reader) and the memory they touch.

    A block is allocated by the first item that touches it and freed after the last, unless it is `kept`.
    """

    nodes: tuple[Node, ...]
    before: tuple[frozenset[int], ...]
    """Per item, the items that must run before it."""
    touches: tuple[tuple[int, ...], ...]
    """Per item, the blocks that it reads or writes, except those of inputs."""
    bytes: tuple[int, ...]
    """Per block."""
    kept: frozenset[int]
    """Blocks that live to the end."""
    overwrites: tuple[tuple[tuple[int, int], ...], ...]
    """Per item, pairs (block written, block read): the first takes the second's memory if nothing else needs it."""
    names: tuple[str, ...] = ()
    """Per block, the array that names it."""

    def live(self, order: Sequence[int]) -> list[int]:
        """The bytes that are live while each item runs, in this order."""
        remaining = [0] * len(self.bytes)
        for touched in self.touches:
            for block in touched:
                remaining[block] += 1
        there = [False] * len(self.bytes)
        curve, now = [], 0
        for item in order:
            shared, taken = 0, set[int]()
            for result, read in self.overwrites[item]:
                dies = remaining[read] == 1 and there[read] and read not in self.kept
                if dies and not there[result] and taken.isdisjoint((result, read)):
                    taken.update((result, read))
                    shared += self.bytes[read]
            for block in self.touches[item]:
                if not there[block]:
                    there[block] = True
                    now += self.bytes[block]
            curve.append(now - shared)
            for block in self.touches[item]:
                remaining[block] -= 1
                if not remaining[block] and block not in self.kept:
                    now -= self.bytes[block]
        return curve


def liveness_of(graph: Graph, over: Mapping[str, Sequence[str]] | None = None) -> Liveness:
    """The items of a graph in graph order; sizes with symbols are compared as in `analysis.memory`.

    `over` maps results of kernels to the operands over which they may be stored.
    """
    blocks = Blocks(graph, len(graph.outputs), add_in_place=False)
    numbers: dict[str, int] = {}
    sizes: list[int] = []

    def numbered(name: str) -> int | None:
        """The number of an array's block; None for inputs and for constants that take no memory."""
        if name not in blocks.places:
            return None
        block = blocks.block(name)
        if block not in blocks.made:
            return None
        if block not in numbers:
            numbers[block] = len(sizes)
            sizes.append(number(blocks.tensors[block].bytes))
        return numbers[block]

    producer: dict[str, frozenset[int]] = {}
    family: dict[str, list[int]] = {}
    nodes: list[Node] = []
    before: list[set[int]] = []
    touches: list[tuple[int, ...]] = []
    overwrites: list[tuple[tuple[int, int], ...]] = []
    drawn: int | None = None
    sent: int | None = None
    for node in graph.nodes:
        free = isinstance(node.op, Full | Iota) or (is_alias(node.op) and blocks.made.get(node.outputs[0]) is None)
        if free:
            producer[node.outputs[0]] = frozenset(i for name in node.inputs for i in producer.get(name, ()))
            continue
        index = len(nodes)
        nodes.append(node)
        before.append({i for name in node.inputs for i in producer.get(name, ())})
        if draws(node.op):  # PyTorch's generator produces its numbers in order
            before[index] |= set() if drawn is None else {drawn}
            drawn = index
        if isinstance(node.op, Collective):  # all ranks run them in one order, whatever the sizes of their batches are
            before[index] |= set() if sent is None else {sent}
            sent = index
        producer.update((name, frozenset((index,))) for name in node.outputs)
        found = (numbered(name) for name in (*node.inputs, *node.outputs))
        touches.append(tuple(dict.fromkeys(block for block in found if block is not None)))
        for name in dict.fromkeys(blocks.base.get(name, name) for name in node.inputs):
            family.setdefault(name, []).append(index)
        pairs = []
        for name in node.outputs:
            for operand in (over or {}).get(name, ()):
                a, b = numbered(name), numbered(operand)
                if a is not None and b is not None:
                    pairs.append((a, b))
        if (read := blocks.takes.get(node.outputs[0])) is not None:
            a, b = numbered(node.outputs[0]), numbered(read)
            if a is not None and b is not None:
                pairs.append((a, b))
        overwrites.append(tuple(pairs))
    for index, node in enumerate(nodes):
        for _, argument in node.op.updates:
            name = node.inputs[argument]
            before[index].update(i for i in family[blocks.base.get(name, name)] if i != index)
    _wait_for_checks(graph, nodes, before, producer)
    kept = {numbered(name) for name in graph.results} - {None}
    return Liveness(
        tuple(nodes),
        tuple(map(frozenset, before)),
        tuple(touches),
        tuple(sizes),
        frozenset(block for block in kept if block is not None),
        tuple(overwrites),
        tuple(numbers),
    )


def _wait_for_checks(
    graph: Graph, nodes: Sequence[Node], before: Sequence[set[int]], producer: Mapping[str, Iterable[int]]
) -> None:
    """Let updates wait for all checks, which keep their order, except those on which a check depends, and those that
    precede a check in the graph because what they read is overwritten before it.
    """
    refusing = checks(graph)
    if not refusing:
        return
    for earlier, later in itertools.pairwise(refusing):
        for index in producer[later.outputs[0]]:
            before[index].update(producer[earlier.outputs[0]])
    needed = checked(graph)
    for index, node in enumerate(nodes):
        updates = any(node.inputs[argument] in graph.writes for _, argument in node.op.updates)
        if updates and needed.isdisjoint(node.outputs):
            before[index].update(i for i in producer[refusing[-1].outputs[0]] if i < index)


def reordered(graph: Graph, nodes: Iterable[Node]) -> Graph:
    """The graph with its items in this order; aliases and constants precede their first reader."""
    producers = graph.producers()
    placed: set[str] = set(graph.inputs)
    order: list[Node] = []

    def place(node: Node) -> None:
        stack = [node]
        while stack:
            top = stack[-1]
            if top.outputs[0] in placed:
                stack.pop()
                continue
            missing = [producers[name] for name in top.inputs if name not in placed]
            if missing:
                stack.extend(missing)
                continue
            placed.update(top.outputs)
            order.append(top)
            stack.pop()

    for node in nodes:
        place(node)
    for name in graph.results:
        if name in producers:
            place(producers[name])
    other = graph.copy()
    other.nodes = order
    kept = {name for node in order for name in node.outputs}
    other.tensors = {name: t for name, t in graph.tensors.items() if name in kept or name in graph.inputs}
    return other
