"""The derivative of levels: levels in the opposite order, in which a row adds to the cotangents of its children.

A body's derivative is cut three times. What forward saves for backward is the choice of `autodiff.partition`; saved
values become own results of the forward levels. Of the backward operators, only those that a child's cotangent needs,
and elementwise ones, run level by level. Matmuls and sums of which nothing in a level depends, above all gradients of
parameters, are *hoisted*: they run once, on the rows of all levels. That is the same sum, since a body treats rows
independently and contributions to a parameter's gradient are added; unused rows are zero, and so are matmuls of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from daceml_train.analysis.reachability import required
from daceml_train.analysis.sizes import bind, symbols_of
from daceml_train.autodiff.bodies import Cotangents, Derivative, Differentiate, derivative, operand_types, zeros
from daceml_train.autodiff.partition import FREE, Halves, partition
from daceml_train.errors import Unsupported
from daceml_train.graph.bodies import bodies, body_of
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.control import draws
from daceml_train.ops.fallback import Body
from daceml_train.ops.levels import ROWS, Levels
from daceml_train.ops.movement import Permute, View
from daceml_train.ops.operator import Operator, Value
from daceml_train.tensor import Dim, Tensor, simplify


def levels_cotangents(
    graph: Graph,
    position: int,
    op: Levels,
    cotangents: Cotangents,
    wanted: Sequence[bool],
    differentiate: Differentiate,
) -> list[Value | None]:
    """One cotangent per operand of the levels at `position`; they are replaced by ones that save more results."""
    if op.reverse:
        raise Unsupported("a second derivative of levels")
    cells = _differentiated(graph, graph.nodes[position], op, cotangents, wanted, differentiate)
    _save(graph, position, op, cells)
    active = sorted({state for cell in cells for state, _ in cell.seeds})
    backward, operands = _reverse(graph, position, op, cells, active, cotangents)
    nothing = not backward.infer(*(v.tensor for v in operands))  # all of it is hoisted
    results = [] if nothing else list(graph.emit(backward, *operands))
    states = dict(zip(active, results, strict=False))
    stacks = results[len(active) :]
    found: dict[int, list[Value]] = {}
    for cell in cells:
        outer = dict(cell.outer)
        for state, name in cell.seeds:
            outer[name] = _own(states[state], op, cell.kind)
        outer.update((name, stacks.pop(0)) for name in cell.stacked)
        _emit(graph, cell.hoisted, outer, op.counts[cell.kind])
        for operand, name in cell.gradients:
            found.setdefault(operand, []).append(outer[name])
    return [_total(found.get(i, [])) for i in range(len(wanted))]


def _total(values: Sequence[Value]) -> Value | None:
    total = values[0] if values else None
    for value in values[1:]:
        assert total is not None
        total = total + value
    return total


@dataclass
class _Cell:
    """The derivative of the cell of one kind. Names are those of values of its body."""

    kind: int
    body: Graph
    halves: Halves
    seeds: list[tuple[int, str]]
    """The cotangents of its rows of states: (state, name)."""
    own: list[tuple[int, str]]
    """The cotangents of its own results: (position of the result of `levels`, name)."""
    children: list[tuple[int, int, str]]
    """What it adds to cotangents of children: (state, operand of the indices, name)."""
    gradients: list[tuple[int, str]]
    """Cotangents of operands: (operand, name)."""
    loop: list[Node] = field(default_factory=list)
    """The operators that run level by level."""
    hoisted: list[Node] = field(default_factory=list)
    stacked: list[str] = field(default_factory=list)
    """Values of the loop that are rows of own results, since hoisted operators or gradients are these values."""
    outer: dict[str, Value] = field(default_factory=dict)
    """Values on the rows of all levels."""

    @property
    def types(self) -> Mapping[str, Tensor]:
        """The types of its values."""
        return {**self.body.tensors, **self.halves.backward.tensors}


# ---- differentiating bodies -----------------------------------------------------------------------------------------
def _differentiated(
    graph: Graph,
    node: Node,
    op: Levels,
    cotangents: Cotangents,
    wanted: Sequence[bool],
    differentiate: Differentiate,
) -> list[_Cell]:
    inner = bodies(op, operand_types(graph, node))
    for body in inner:
        _check_rows(body)
    active = {i for i in range(len(op.types)) if cotangents[i] is not None}
    while True:  # a state whose cotangent a row adds to has one in earlier levels
        results = [
            _derivative(op, kind, body, active, cotangents, wanted, differentiate) for kind, body in enumerate(inner)
        ]
        more = active.union(state for cell in results for state, _, _ in cell.children)
        if more == active:
            return [cell for cell in results if cell.seeds or cell.own]
        active = more


def _check_rows(body: Graph) -> None:
    for node in body.nodes:
        if any(ROWS in body.tensors[i].symbols for i in node.inputs):
            for name in node.outputs:
                if ROWS not in body.tensors[name].symbols:
                    raise Unsupported(f"the derivative of a cell whose {node.op.label} mixes its rows")


def _own_positions(op: Levels, kind: int) -> range:
    """The positions of the own results of a kind among those of the operator."""
    before = sum(len(op.cells[k].yields) - len(op.states[k]) for k in range(kind))
    first = len(op.types) + before
    return range(first, first + len(op.cells[kind].yields) - len(op.states[kind]))


def _derivative(
    op: Levels,
    kind: int,
    body: Graph,
    active: set[int],
    cotangents: Cotangents,
    wanted: Sequence[bool],
    differentiate: Differentiate,
) -> _Cell:
    states, positions = op.states[kind], _own_positions(op, kind)
    given = [i for i, state in enumerate(states) if state in active]
    others = [i for i, result in enumerate(positions) if cotangents[result] is not None]
    names = list(body.inputs)
    children = names[len(op.rows[kind]) : len(op.rows[kind]) + len(op.children[kind])]
    pairs = [(i, n) for i, n in zip(op.rows[kind], names, strict=False) if wanted[i]]
    shared = names[len(op.rows[kind]) + len(children) :]
    pairs += [(i, n) for i, n in zip(op.shared[kind], shared, strict=True) if wanted[i]]
    asked = [n for n in children if body.tensors[n].dtype.is_float] + [n for _, n in pairs]
    output: Derivative = derivative(body, [*given, *(len(states) + i for i in others)], asked, differentiate)
    added = [
        (s, i, v.name) for (s, i), n in zip(op.children[kind], children, strict=True) if (v := output.found.get(n))
    ]
    gradients = [(i, v.name) for i, n in pairs if (v := output.found.get(n)) is not None]
    joint = output.graph
    joint.outputs = [*body.outputs, *(name for _, _, name in added), *(name for _, name in gradients)]
    seeds = [(states[i], name) for i, name in zip(given, output.seeds, strict=False)]
    own = [(positions[i], name) for i, name in zip(others, output.seeds[len(given) :], strict=True)]
    return _Cell(kind, body, partition(joint, len(body.outputs)), seeds, own, added, gradients)


# ---- what forward saves ---------------------------------------------------------------------------------------------
def _save(graph: Graph, position: int, op: Levels, cells: Sequence[_Cell]) -> None:
    """Extend the levels at `position` with what the derivatives read, and note where all that they read is."""
    node, yields, fresh = graph.nodes[position], [list(body.yields) for body in op.cells], dict[tuple[int, str], str]()
    for cell in cells:
        _split(cell)
        count = len(op.rows[cell.kind]) + len(op.children[cell.kind])
        gathered = list(cell.body.inputs)[len(op.rows[cell.kind]) : count]
        for name in (*cell.halves.saved, *(n for n in cell.halves.kept if n in gathered)):
            if name not in yields[cell.kind] and ROWS in cell.body.tensors[name].symbols:
                yields[cell.kind].append(name)
                fresh[cell.kind, name] = graph.fresh("saved")
                graph.tensors[fresh[cell.kind, name]] = Tensor(())  # taken; its type follows
    names = iter(node.outputs[len(op.types) :])
    saving = replace(op, cells=tuple(replace(b, yields=tuple(y)) for b, y in zip(op.cells, yields, strict=True)))
    outputs = list(node.outputs[: len(op.types)])
    results: dict[tuple[int, str], str] = {}
    for kind, body in enumerate(saving.cells):
        for i, yielded in enumerate(body.yields[len(op.states[kind]) :], len(op.states[kind])):
            result = next(names) if i < len(op.cells[kind].yields) else fresh[kind, str(yielded)]
            outputs.append(result)
            results[kind, str(yielded)] = result
    for result, tensor in zip(outputs, saving.infer(*operand_types(graph, node)), strict=True):
        graph.tensors[result] = tensor
    graph.nodes[position] = Node(saving, node.inputs, tuple(outputs), node.origin)
    for cell in cells:
        arguments = list(cell.body.inputs)
        count = len(op.rows[cell.kind]) + len(op.children[cell.kind])
        shared = zip(arguments[count:], op.shared[cell.kind], strict=True)
        for name, operand in (*zip(arguments, op.rows[cell.kind], strict=False), *shared):
            cell.outer[name] = graph.value(node.inputs[operand])
        for name in cell.halves.backward.inputs:
            if (cell.kind, name) in results:
                cell.outer[name] = graph.value(results[cell.kind, name])
            elif name in cell.body.outputs and name not in cell.outer:
                state = op.states[cell.kind][cell.body.outputs.index(name)]
                cell.outer[name] = _own(graph.value(outputs[state]), op, cell.kind)


def _own(state: Value, op: Levels, kind: int) -> Value:
    """The rows of a state that a kind computes."""
    if len(op.counts) == 1:
        return state
    start = list(op.starts())[kind]
    return state.slice(0, start, simplify(start + op.counts[kind]))


def _split(cell: _Cell) -> None:
    """Divide the backward operators into those of the loop and the hoisted ones."""
    back = cell.halves.backward
    fixed = [name for name in cell.halves.saved if ROWS not in cell.body.tensors[name].symbols]
    nodes, _ = required(cell.body.nodes, fixed)  # computed from what all rows share: once more, not saved
    nodes = [*nodes, *back.nodes]
    types = cell.types
    wanted = {name for _, _, name in cell.children}
    gradients = {name for _, name in cell.gradients}
    needed = set(wanted)
    live: set[str] = wanted | gradients
    for node in reversed(nodes):
        if live.isdisjoint(node.outputs):
            continue
        if draws(node.op):
            raise Unsupported(f"a derivative that needs the random numbers of {node.op.label} a second time")
        live.update(node.inputs)
        if not needed.isdisjoint(node.outputs) or not _hoistable(node, types):
            needed.update(node.inputs)
            cell.loop.append(node)
        else:
            cell.hoisted.append(node)
    cell.loop.reverse()
    cell.hoisted.reverse()
    inside = {name for node in cell.loop for name in node.outputs}
    outside = {name for node in cell.hoisted for name in node.inputs} | gradients
    common, _ = required(cell.loop, [n for n in inside & outside if ROWS not in types[n].symbols])
    cell.hoisted = [*common, *cell.hoisted]  # computed from what all rows share: in the loop, and outside
    results = {name for node in cell.hoisted for name in node.outputs}
    outside |= {name for node in common for name in node.inputs}
    moved = _moved(cell, outside - results)
    cell.hoisted = [*moved, *cell.hoisted]
    results |= {name for node in moved for name in node.outputs}
    outside |= {name for node in moved for name in node.inputs}
    cell.stacked = [name for node in cell.loop for name in node.outputs if name in outside and name not in results]
    for name in cell.stacked:
        if types[name].shape[0] != ROWS:
            raise Unsupported(f"the derivative of a cell that reads {types[name]}, whose first size is not its rows")


def _moved(cell: _Cell, read: set[str]) -> list[Node]:
    """Views and permutations in the loop to repeat outside, since they are read there and are no stack of rows.

    Also views of a stack of rows: it is kept once, not once per view.
    """
    types, producers = cell.types, {name: node for node in cell.loop for name in node.outputs}

    def by_row(name: str) -> bool:
        return types[name].shape[:1] == (ROWS,)

    waiting, found = list(read), set[str]()
    while waiting:
        name = waiting.pop()
        node = producers.get(name)
        if node is None or name in found or not isinstance(node.op, View | Permute):
            continue
        if by_row(name) and not (isinstance(node.op, View) and by_row(node.inputs[0])):
            continue
        found.add(name)
        waiting += node.inputs
    return [node for node in cell.loop if not found.isdisjoint(node.outputs)]


def _hoistable(node: Node, types: Mapping[str, Tensor]) -> bool:
    """Whether an operator can run once on the rows of all levels, of which unused ones are zero."""
    if isinstance(node.op, (Matmul, *FREE)):
        return True
    return not any(ROWS in types[name].symbols for name in node.outputs)


# ---- emitting -------------------------------------------------------------------------------------------------------
@dataclass
class _Reverse:
    """The levels in the opposite order, under construction kind by kind."""

    active: Sequence[int]
    """The states with cotangents."""
    operands: list[Value]
    cells: list[Body] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    children: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    shared: list[tuple[int, ...]] = field(default_factory=list)
    states: list[tuple[int, ...]] = field(default_factory=list)

    def operand(self, value: Value) -> int:
        """The position of an operand."""
        first = 1 + len(self.active)
        for i, other in enumerate(self.operands[first:], first):
            if other.name == value.name:
                return i
        self.operands.append(value)
        return len(self.operands) - 1

    def add(self, cell: _Cell, indices: Mapping[int, Value]) -> None:
        """Add the cell of the next kind; `indices` has the forward levels' operands."""
        results = [*(name for _, _, name in cell.children), *cell.stacked]
        _, read = required(cell.loop, results)
        types = cell.types
        seeds = [(state, name) for state, name in cell.seeds if name in read]
        taken = dict.fromkeys(n for n in (*cell.body.inputs, *cell.halves.backward.inputs) if n in read)
        outer = [n for n in taken if n in cell.outer]
        by_row = [n for n in outer if ROWS in types[n].symbols]
        common = [n for n in outer if ROWS not in types[n].symbols]
        step = Graph(f"levels_{cell.kind}")
        for name in (*by_row, *(name for _, name in seeds), *common):
            step.input(name, types[name])
        for node in cell.loop:
            step.append(node.op, node.inputs, node.outputs)
        step.outputs = results
        self.cells.append(body_of(step))
        self.rows.append(tuple(self.operand(cell.outer[n]) for n in by_row))
        self.children.append(tuple((self.active.index(s), self.operand(indices[i])) for s, i, _ in cell.children))
        self.shared.append(tuple(self.operand(cell.outer[n]) for n in common))
        self.states.append(tuple(self.active.index(state) for state, _ in seeds))

    def skip(self) -> None:
        """Add nothing for the next kind, which has no derivative."""
        self.cells.append(Body((), (), ()))
        self.rows.append(())
        self.children.append(())
        self.shared.append(())
        self.states.append(())


def _reverse(
    graph: Graph, position: int, op: Levels, cells: Sequence[_Cell], active: Sequence[int], cotangents: Cotangents
) -> tuple[Levels, list[Value]]:
    """The levels in the opposite order, and their operands."""
    node = graph.nodes[position]
    first = [cotangents[s] or zeros(graph, graph.tensors[node.outputs[s]]) for s in active]
    results = _Reverse(active, [graph.value(node.inputs[0]), *first])
    indices = {i: graph.value(name) for i, name in enumerate(node.inputs)}
    by_kind = {cell.kind: cell for cell in cells}
    for kind in range(len(op.cells)):
        if (cell := by_kind.get(kind)) is None:
            results.skip()
            continue
        cell.outer.update((name, g) for i, name in cell.own if (g := cotangents[i]) is not None)
        results.add(cell, indices)
    types = tuple(op.types[state] for state in active)
    backward = Levels(
        tuple(results.cells),
        types,
        op.counts,
        tuple(results.rows),
        tuple(results.children),
        tuple(results.shared),
        tuple(results.states),
        reverse=True,
    )
    return backward, results.operands


def _emit(graph: Graph, nodes: Sequence[Node], outer: dict[str, Value], count: Dim) -> None:
    """Emit operators of a body for `count` rows."""
    for node in nodes:
        results = graph.append(_with_rows(node.op, count), tuple(outer[i].name for i in node.inputs))
        outer.update(zip(node.outputs, results, strict=True))


def _with_rows(op: Operator, count: Dim) -> Operator:
    """An operator of a body as it is outside of it, on `count` rows."""
    return bind(op, {**{s.name: s for s in symbols_of(op)}, ROWS.name: count})
