"""Interpret: the reference semantics of a graph in NumPy, with floats in float64; tests compare programs with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from daceml_train.analysis.sizes import bind, solve
from daceml_train.errors import Invalid
from daceml_train.graph.bodies import bodies
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.ops.collective import Collective
from daceml_train.ops.control import Cond, ControlFlow, Scan, While
from daceml_train.ops.fallback import Aten
from daceml_train.ops.levels import ROWS, Levels
from daceml_train.ops.operator import Array
from daceml_train.tensor import DType, Tensor


@dataclass(frozen=True)
class Results:
    """The results of a graph: its outputs in order, the new value of each written input, and arrays by name."""

    outputs: tuple[Array, ...]
    writes: dict[str, Array]
    values: dict[str, Array]
    sizes: dict[str, int]


@dataclass(frozen=True)
class Precision:
    """The types in which floats are computed: float64, or with `narrow` float32 for all that are not float64.

    With `rounded`, every operator's results are rounded to the element types that they have in memory.
    """

    rounded: bool = False
    narrow: bool = False

    def given(self, value: Array, dtype: DType) -> Array:
        """An input in the type in which it is computed with."""
        return value.astype(_narrow(dtype) if self.narrow else wide(dtype), copy=not self.narrow)

    def result(self, value: Array, dtype: DType) -> Array:
        """The result of an operator as its readers get it."""
        if self.narrow:
            return value.astype(_narrow(dtype), copy=False)
        return _round(value, dtype) if self.rounded else value


def interpret(
    graph: Graph, inputs: Mapping[str, Any], rounded: bool = False, keep: bool = True, narrow: bool = False
) -> Results:
    """Run `graph` on arrays; composites run through their lowering, symbols take their values from the shapes.

    Floats become float64, complex numbers complex128; integers and booleans keep their type. If `rounded`, every
    operator's results are rounded to the element types that they have in memory, which measures the rounding noise
    that any implementation has. Unless `keep`, an array is freed after its last reader, and `values` has only results.
    Raises `Invalid` if an input does not fit, or if an operator's reference contradicts its shape rule.
    """
    (results,) = _interpreted([graph], [inputs], Precision(rounded, narrow), keep)
    return results


def interpret_ranks(
    graphs: Sequence[Graph], inputs: Sequence[Mapping[str, Any]], rounded: bool = False, keep: bool = True
) -> list[Results]:
    """Run a graph on each of several ranks, given the inputs of each; collectives exchange arrays between them.

    The graphs differ at most in sizes. With a single rank, all ranks of a collective have the same arrays. Raises as
    `interpret` does, and `Invalid` for a collective of another number of ranks.
    """
    return _interpreted(graphs, inputs, Precision(rounded), keep)


def _interpreted(
    graphs: Sequence[Graph], inputs: Sequence[Mapping[str, Any]], precision: Precision, keep: bool
) -> list[Results]:
    given = [{name: np.asarray(value) for name, value in of_rank.items()} for of_rank in inputs]
    sizes, scopes = [], []
    for graph, of_rank in zip(graphs, given, strict=True):
        sizes.append(solve(graph.inputs, {name: value.shape for name, value in of_rank.items()}))
        scopes.append({n: _given(n, value, graph.inputs[n].tensor, precision) for n, value in of_rank.items()})
    results = []
    values_of_ranks = _run_ranks(graphs, scopes, sizes, precision, keep)
    for graph, values, found in zip(graphs, values_of_ranks, sizes, strict=True):
        outputs = tuple(values[name] for name in graph.outputs)
        results.append(Results(outputs, {target: values[n] for target, n in graph.writes.items()}, values, found))
    return results


def _run(graph: Graph, scope: dict[str, Array], sizes: Mapping[str, int], precision: Precision) -> dict[str, Array]:
    """The results of a body by name."""
    return _run_ranks([graph], [scope], [sizes], precision, keep=False)[0]


def _run_ranks(
    graphs: Sequence[Graph],
    scopes: Sequence[dict[str, Array]],
    sizes: Sequence[Mapping[str, int]],
    precision: Precision,
    keep: bool,
) -> list[dict[str, Array]]:
    """Every array of the graph of each rank by name, or its results; the ranks run their nodes in step."""
    lowered = [leaves(graph) for graph in graphs]
    dying = [[] if keep else _last_reads(each.graph) for each in lowered]
    for position, nodes in enumerate(zip(*(each.graph.nodes for each in lowered), strict=True)):
        exchanged = None
        if isinstance(nodes[0].op, Collective) and len(nodes) > 1:
            if nodes[0].op.ranks != len(nodes) or any(type(node.op) is not type(nodes[0].op) for node in nodes):
                raise Invalid(f"{nodes[0].op.label} of {nodes[0].op.ranks} ranks on {len(nodes)}")
            operands = [tuple(scope[i] for i in node.inputs) for node, scope in zip(nodes, scopes, strict=True)]
            exchanged = nodes[0].op.exchange(operands)
        for rank, (node, scope, each) in enumerate(zip(nodes, scopes, lowered, strict=True)):
            op = bind(node.op, sizes[rank])
            operands_of_rank = [scope[i] for i in node.inputs]
            if exchanged is not None:
                results: Sequence[Array] = (exchanged[rank],)
            elif isinstance(op, ControlFlow):
                results = _control(each.graph, node, op, operands_of_rank, sizes[rank], precision)
            else:
                results = op.evaluate(*operands_of_rank)
            _keep(each.graph, node, scope, results, sizes[rank], precision)
            if not keep:
                del operands_of_rank, results
                for name in dying[rank][position]:
                    del scope[name]
    return [
        {name: scope[inner] for name, inner in each.names.items() if inner in scope}
        for scope, each in zip(scopes, lowered, strict=True)
    ]


def _last_reads(graph: Graph) -> list[list[str]]:
    """For each node, the arrays that nothing reads after it; results of the graph are not among them."""
    kept = {*graph.outputs, *graph.writes.values()}
    seen: set[str] = set()
    dying: list[list[str]] = []
    for node in reversed(graph.nodes):
        names = dict.fromkeys(name for name in (*node.inputs, *node.outputs) if name not in kept and name not in seen)
        seen.update(names)
        dying.append(list(names))
    return dying[::-1]


def _keep(
    graph: Graph,
    node: Node,
    scope: dict[str, Array],
    results: Sequence[Array],
    sizes: Mapping[str, int],
    precision: Precision,
) -> None:
    """Put the results of a node, which must be what its shape rule says, into the scope."""
    for name, value in zip(node.outputs, results, strict=True):
        if not isinstance(
            node.op, Aten
        ):  # its shapes come from PyTorch, which reports wrong ones for embedding_bag's auxiliary results
            _check(node, value, bind(graph.tensors[name], sizes), precision)
        scope[name] = precision.result(value, graph.tensors[name].dtype)


def _control(
    graph: Graph, node: Node, op: ControlFlow, operands: Sequence[Array], sizes: Mapping[str, int], precision: Precision
) -> tuple[Array, ...]:
    """The results of a control-flow operator, whose bodies run as graphs."""
    assert isinstance(node.op, ControlFlow)
    inner = bodies(node.op, [graph.tensors[i] for i in node.inputs])

    def run(body: Graph, arguments: Sequence[Array]) -> list[Array]:
        values = _run(body, dict(zip(body.inputs, arguments, strict=True)), sizes, precision)
        return [values[name] for name in body.outputs]

    match op:
        case Cond():
            return tuple(run(inner[0 if operands[0] else 1], operands[1:]))
        case Scan(carried=carried, sliced=sliced, reverse=reverse):
            states, slices = list(operands[:carried]), operands[carried : carried + sliced]
            columns: list[list[Array]] = [[] for _ in node.outputs[carried:]]
            steps = range(int(bind(op.trips, sizes)))
            for step in reversed(steps) if reverse else steps:
                outputs = run(inner[0], [*states, *(x[step] for x in slices), *operands[carried + sliced :]])
                states = outputs[:carried]
                for column, value in zip(columns, outputs[carried:], strict=True):
                    column.append(value)
            types = [bind(graph.tensors[name], sizes) for name in node.outputs[carried:]]
            stacks = (
                np.stack(column[::-1] if reverse else column) if column else np.zeros(t.shape, wide(t.dtype))
                for column, t in zip(columns, types, strict=True)
            )
            return (*states, *stacks)
        case While(carried=carried):
            states = list(operands[:carried])
            while run(inner[0], [*states, *operands[carried:]])[0]:
                states = run(inner[1], [*states, *operands[carried:]])
            return tuple(states)
        case Levels():
            types = [bind(graph.tensors[name], sizes) for name in node.outputs]
            results = [np.zeros(t.shape, wide(t.dtype)) for t in types]

            def cell(kind: int, rows: int, arguments: Sequence[Array]) -> list[Array]:
                body = inner[kind]
                values = _run(
                    body, dict(zip(body.inputs, arguments, strict=True)), {**sizes, ROWS.name: rows}, precision
                )
                return [values[name] for name in body.outputs]

            _levels(op, [int(bind(count, sizes)) for count in op.counts], operands, results, cell)
            return tuple(results)
    raise Invalid(f"{op.label} has no reference", where=str(node.origin))


def _levels(
    op: Levels,
    counts: Sequence[int],
    operands: Sequence[Array],
    results: Sequence[Array],
    cell: Callable[[int, int, Sequence[Array]], list[Array]],
) -> None:
    """Fill the results of `levels`: its states, then the own results of its kinds. Raises `Invalid` for bad data."""
    bounds, kinds = operands[0], range(len(counts))
    check_bounds(bounds, counts)
    starts, count = np.cumsum([0, *counts]), len(op.types)
    states, stacks = results[:count], list(results[count:])
    if op.reverse:
        for state, first in zip(states, operands[1:], strict=False):
            state[...] = first
    own = {k: [stacks.pop(0) for _ in op.cells[k].yields[len(op.placed(k)) :]] for k in kinds}
    levels = range(len(bounds) - 1)
    for level in reversed(levels) if op.reverse else levels:
        for k in kinds:
            here = slice(bounds[level, k], bounds[level + 1, k])
            if here.start == here.stop:
                continue
            rows = slice(here.start + starts[k], here.stop + starts[k])
            chosen = [(state, operands[operand][here]) for state, operand in op.children[k]]
            for _, indices in chosen:
                check_children(indices, bounds, level, starts, k)
            taken = [states[s][rows] for s in op.states[k]] if op.reverse else [states[s][i] for s, i in chosen]
            arguments = [*(operands[i][here] for i in op.rows[k]), *taken, *(operands[i] for i in op.shared[k])]
            outputs = cell(k, here.stop - here.start, arguments)
            if op.reverse:
                for (s, indices), value in zip(chosen, outputs, strict=False):
                    np.add.at(states[s], indices, value)
            else:
                for s, value in zip(op.states[k], outputs, strict=False):
                    states[s][rows] = value
            for stack, value in zip(own[k], outputs[len(op.placed(k)) :], strict=True):
                stack[here] = value


def check_bounds(bounds: Array, counts: Sequence[int]) -> None:
    """Raise `Invalid` unless each kind's rows go from level to level, from 0 to at most their count."""
    if bounds[0].any() or (np.diff(bounds, axis=0) < 0).any() or (bounds[-1] > counts).any():
        raise Invalid(f"the bounds of levels are not sorted, or not in 0..{list(counts)}: {bounds.tolist()}")


def check_children(indices: Array, bounds: Array, level: int, starts: Array, kind: int) -> None:
    """Raise `Invalid` unless children are rows of earlier levels, or rows of no level."""
    wrong = (indices < 0) | (indices >= starts[-1])
    if wrong.any():
        raise Invalid(f"levels: kind {kind} in level {level} reads row {indices[wrong][0]} of {starts[-1]}")
    kinds = np.searchsorted(starts, indices, side="right") - 1
    own = indices - starts[kinds]
    late = (own >= bounds[level, kinds]) & (own < bounds[-1, kinds])
    if late.any():
        raise Invalid(
            f"levels: kind {kind} in level {level} reads row {indices[late][0]}, which no earlier level computes"
        )


def wide(dtype: DType) -> np.dtype[Any]:
    """The NumPy type in which the interpreter computes values of an element type."""
    if not dtype.is_float:
        return np.dtype(dtype.numpy)
    return np.dtype("complex128" if dtype.short[0] == "c" else "float64")


def _round(value: Array, dtype: DType) -> Array:
    """Values rounded to an element type, in the type in which the interpreter computes."""
    if not dtype.is_float or value.dtype == np.dtype(dtype.numpy):
        return value
    narrow = value.astype(dtype.numpy)
    if dtype is DType.bfloat16:  # the upper half of a float32, to the nearest, ties to even
        bits = np.atleast_1d(narrow).view(np.uint32).astype(np.uint64)
        bits += 0x7FFF + ((bits >> 16) & 1)
        nearest = (bits & 0xFFFF0000).astype(np.uint32).view(np.float32).reshape(narrow.shape)
        narrow = np.where(np.isfinite(narrow), nearest, narrow)
    return narrow.astype(value.dtype)


def _narrow(dtype: DType) -> np.dtype[Any]:
    """The NumPy type of an element type, float32 or complex64 at least."""
    if not dtype.is_float or dtype in (DType.float64, DType.complex128):
        return wide(dtype)
    return np.dtype("complex64" if dtype.short[0] == "c" else "float32")


def _given(name: str, value: Array, tensor: Tensor, precision: Precision) -> Array:
    kinds = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "c": "biufc"}[wide(tensor.dtype).kind]
    if value.dtype.kind not in kinds:
        raise Invalid(f"input {name!r} expects {tensor}; given an array of {value.dtype}")
    return precision.given(value, tensor.dtype)


def _check(node: Node, value: Array, tensor: Tensor, precision: Precision) -> None:
    if value.shape != tensor.shape or (value.dtype != wide(tensor.dtype) and not precision.narrow):
        raise Invalid(
            f"{node}: the reference returns {value.dtype} of {list(value.shape)}, the shape rule says {tensor}",
            where=str(node.origin),
        )
