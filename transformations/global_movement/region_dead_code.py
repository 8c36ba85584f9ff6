"""Dead-code elimination in branches and loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from daceml_train.analysis.reachability import required
from daceml_train.graph.graph import Node
from daceml_train.ops.control import Cond, ControlFlow, Scan
from daceml_train.ops.fallback import Body
from daceml_train.ops.kernel import Statement


def without_dead_regions(node: Node, op: ControlFlow, seen: Collection[str]) -> Node:
    """The branch or loop without results outside `seen` and without the operands that only those need.

    A loop keeps the states that its visible results depend on, in any step.
    """
    match op:
        case Cond():
            return _cond(node, op, [i for i, name in enumerate(node.outputs) if name in seen])
        case Scan():
            return _scan(node, op, seen)
    return node


def _live(body: Body, yields: Sequence[str | None]) -> tuple[tuple[Statement, ...], set[str]]:
    """The statements that `yields` need, and the values that those statements and `yields` read."""
    statements, read = required(body.statements, yields)
    return tuple(statements), read


def _cond(node: Node, op: Cond, results: Sequence[int]) -> Node:
    yields = [tuple(body.yields[i] for i in results) for body in op.bodies]
    live = [_live(body, given) for body, given in zip(op.bodies, yields, strict=True)]
    read = [
        i
        for i, names in enumerate(zip(*(body.arguments for body in op.bodies), strict=True))
        if any(name in needed for name, (_, needed) in zip(names, live, strict=True))
    ]
    if len(results) == len(node.outputs) and len(read) == len(node.inputs) - 1:
        return node
    bodies = [
        Body(tuple(body.arguments[i] for i in read), statements, given)
        for body, (statements, _), given in zip(op.bodies, live, yields, strict=True)
    ]
    inputs = (node.inputs[0], *(node.inputs[i + 1] for i in read))
    return dataclasses.replace(node, op=Cond(*bodies), inputs=inputs, outputs=tuple(node.outputs[i] for i in results))


def _scan(node: Node, op: Scan, seen: Collection[str]) -> Node:
    body, count = op.body, op.carried
    stacks = [i for i in range(count, len(node.outputs)) if node.outputs[i] in seen]
    states = [i for i in range(count) if node.outputs[i] in seen]
    while True:
        yields = tuple(body.yields[i] for i in (*states, *stacks))
        statements, needed = _live(body, yields)
        more = [i for i in range(count) if i in states or body.arguments[i] in needed]
        if more == states:
            break
        states = more
    rest = [i for i in range(count, len(node.inputs)) if body.arguments[i] in needed]
    if len(states) + len(rest) == len(node.inputs) and len(states) + len(stacks) == len(node.outputs):
        return node
    kept = [*states, *rest]
    inner = Body(tuple(body.arguments[i] for i in kept), statements, yields)
    sliced = sum(i < count + op.sliced for i in rest)
    return dataclasses.replace(
        node,
        op=Scan(inner, len(states), sliced, op.trips, op.reverse),
        inputs=tuple(node.inputs[i] for i in kept),
        outputs=tuple(node.outputs[i] for i in (*states, *stacks)),
    )
