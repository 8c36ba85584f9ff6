"""Derivatives of control flow: a branch's is a branch of derivatives, a loop's is a loop in the opposite direction.

The derivative of a body rematerializes the values of the body that it needs from the operands and, in a loop, from the
states before each step, which the forward loop stacks for it. Gradients of what all steps read are computed after the
loop where they are matmuls (`autodiff.hoisted_sums`); the loop carries others as sums.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from daceml_train.autodiff.bodies import (
    Cotangents,
    Derivative,
    Differentiate,
    derivative,
    inputs_read,
    operand_types,
    pruned,
    zeros,
)
from daceml_train.autodiff.hoisted_sums import HoistedSum, hoisted_sum
from daceml_train.autodiff.levels import levels_cotangents
from daceml_train.errors import Unsupported
from daceml_train.graph.bodies import bodies, body_of
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import Cond, Scan, dense
from daceml_train.ops.levels import Levels
from daceml_train.ops.operator import Value


def control_cotangents(
    graph: Graph, position: int, cotangents: Cotangents, wanted: Sequence[bool], differentiate: Differentiate
) -> list[Value | None]:
    """One cotangent per operand of the node at `position`, None for those that are not requested or not reached.

    A loop's node is replaced by one that also stacks the states that its derivative reads.
    Raises `Unsupported` for a loop whose number of steps depends on data.
    """
    node = graph.nodes[position]
    try:
        match node.op:
            case Cond():
                return _cond(graph, node, node.op, cotangents, wanted, differentiate)
            case Scan():
                return _scan(graph, position, node.op, cotangents, wanted, differentiate)
            case Levels():
                return levels_cotangents(graph, position, node.op, cotangents, wanted, differentiate)
    except Unsupported as error:  # operators in bodies have no origin
        raise Unsupported(f"inside {node.op.label}: {error.message}", where=str(node.origin)) from error
    raise Unsupported(
        f"the derivative of {node.op.label}, whose number of steps depends on data",
        where=str(node.origin),
        advice="a loop with a fixed number of steps has a derivative",
    )


# ---- branches -------------------------------------------------------------------------------------------------------
def _cond(
    graph: Graph, node: Node, op: Cond, cotangents: Cotangents, wanted: Sequence[bool], differentiate: Differentiate
) -> list[Value | None]:
    given = [i for i, g in enumerate(cotangents) if g is not None]
    inner = bodies(op, operand_types(graph, node))
    asked = [i for i, want in enumerate(wanted[1:]) if want]
    outputs = [derivative(body, given, [list(body.inputs)[i] for i in asked], differentiate) for body in inner]
    reached = [i for i in asked if any(d.found.get(d.arguments[i]) is not None for d in outputs)]
    if not reached:
        return [None] * len(node.inputs)
    for d in outputs:
        d.graph.outputs = []
        for i in reached:
            d.graph.output(d.found.get(d.arguments[i]) or zeros(d.graph, d.graph.tensors[d.arguments[i]]))
    read = [inputs_read(d.graph) for d in outputs]
    kept = [
        i for i in range(len(node.inputs) - 1) if any(d.arguments[i] in r for d, r in zip(outputs, read, strict=True))
    ]
    branches = [body_of(pruned(d.graph, [*(d.arguments[i] for i in kept), *d.seeds])) for d in outputs]
    operands = [graph.value(node.inputs[0]), *(graph.value(node.inputs[i + 1]) for i in kept)]
    results = graph.emit(Cond(*branches), *operands, *(g for g in cotangents if g is not None))
    found: list[Value | None] = [None] * len(node.inputs)
    for i, value in zip(reached, results, strict=True):
        found[i + 1] = value
    return found


# ---- loops ----------------------------------------------------------------------------------------------------------
def _scan(
    graph: Graph, position: int, op: Scan, cotangents: Cotangents, wanted: Sequence[bool], differentiate: Differentiate
) -> list[Value | None]:
    node = graph.nodes[position]
    (body,) = bodies(op, operand_types(graph, node))
    names, count, first = list(body.inputs), op.carried, op.carried + op.sliced
    stacked = [i for i in range(count, len(cotangents)) if cotangents[i] is not None]
    others = [i for i in range(count, len(names)) if wanted[i]]
    carried, result = _step(body, op, cotangents, stacked, others, differentiate)
    slices = [i for i in others if i < first and result.found.get(names[i]) is not None]
    shared = [i for i in others if i >= first and result.found.get(names[i]) is not None]
    step, seeds = result.graph, result.seeds[len(carried) :]
    hoisted = _hoisted(result, [names[i] for i in shared], {*names[:first], *seeds}, names[first:])
    shared = [i for i in shared if names[i] not in hoisted]
    summed = [step.input(step.fresh(f"sum_{names[i]}"), dense(step.tensors[names[i]])) for i in shared]
    stacking = {name for total in hoisted.values() for name in total.reads}
    fresh = sorted(stacking.difference(names[:first], seeds))
    step.outputs = []
    step.output(*(result.found.get(names[i]) or zeros(step, step.tensors[names[i]]) for i in carried))
    step.output(*(before + _found(result, names[i]) for i, before in zip(shared, summed, strict=True)))
    step.output(*(_found(result, names[i]) for i in slices), *map(step.value, fresh))
    read = inputs_read(step)
    kept = [i for i in range(count) if names[i] in read | stacking]
    states = [i for i in kept if names[i] in read]
    inputs = [i for i in range(count, first) if names[i] in read]
    rest = [i for i in range(first, len(names)) if names[i] in read]
    saved = dict(zip(kept, _saving(graph, position, op, kept), strict=True))
    own = [*result.seeds[: len(carried)], *(v.name for v in summed), *seeds]
    arguments = [*own, *(names[i] for i in (*states, *inputs, *rest))]
    operands: list[Value] = []
    for i in carried:
        operands.append(cotangents[i] or zeros(graph, graph.tensors[node.outputs[i]]))
    operands += [zeros(graph, graph.tensors[node.inputs[i]]) for i in shared]
    given = [g for i in stacked if (g := cotangents[i]) is not None]
    operands += [*given, *(saved[i] for i in states), *(graph.value(node.inputs[i]) for i in (*inputs, *rest))]
    backward = Scan(
        body_of(pruned(step, arguments)),
        len(carried) + len(shared),
        len(stacked) + len(states) + len(inputs),
        op.trips,
        not op.reverse,
    )
    results = graph.emit(backward, *operands) if step.outputs else ()
    found = {names[i]: v for i, v in zip((*carried, *shared, *slices), results, strict=False)}
    stacks = {names[i]: graph.value(node.inputs[i]) for i in range(count, first)} | dict(zip(seeds, given, strict=True))
    stacks |= {names[i]: v for i, v in saved.items()}
    stacks |= dict(zip(fresh, results[len(results) - len(fresh) :], strict=True))
    found |= {name: total.total(stacks) for name, total in hoisted.items()}
    return [found.get(name) if want else None for name, want in zip(names, wanted, strict=True)]


def _step(
    body: Graph,
    op: Scan,
    cotangents: Cotangents,
    stacked: Sequence[int],
    others: Sequence[int],
    differentiate: Differentiate,
) -> tuple[list[int], Derivative]:
    """The derivative of one step, and the states that have cotangents."""
    names = list(body.inputs)
    carried = [i for i in range(op.carried) if cotangents[i] is not None]
    floats = [i for i in range(op.carried) if body.tensors[names[i]].dtype.is_float]
    while True:  # a state whose cotangent depends on others in one step has a cotangent in the previous step, too
        result = derivative(body, [*carried, *stacked], [names[i] for i in (*floats, *others)], differentiate)
        more = sorted({*carried, *(i for i in floats if result.found.get(names[i]) is not None)})
        if more == carried:
            return carried, result
        carried = more


def _hoisted(
    result: Derivative, shared: Sequence[str], existing: Collection[str], same: Sequence[str]
) -> dict[str, HoistedSum]:
    """The gradients of what all steps read that are computed after the loop; several may read one stack."""
    found: dict[str, HoistedSum] = {}
    for _ in range(2):
        for name in shared:
            stacks = {*existing, *(read for total in found.values() for read in total.reads)}
            if name not in found and (total := hoisted_sum(result.graph, _found(result, name).name, stacks, same)):
                found[name] = total
    return found


def _found(result: Derivative, name: str) -> Value:
    value = result.found[name]
    assert value is not None
    return value


def _saving(graph: Graph, position: int, op: Scan, states: Sequence[int]) -> list[Value]:
    """The stacked states before each step: results that the forward loop gets for its derivative."""
    if not states:
        return []
    node = graph.nodes[position]
    names = [op.body.arguments[i] for i in states]
    saving = replace(op, body=replace(op.body, yields=(*op.body.yields, *names)))
    results = saving.infer(*operand_types(graph, node))[len(node.outputs) :]
    outputs = []
    for tensor in results:
        outputs.append(graph.fresh("states"))
        graph.tensors[outputs[-1]] = tensor
    graph.nodes[position] = Node(saving, node.inputs, (*node.outputs, *outputs), node.origin)
    return [graph.value(name) for name in outputs]
