"""Launches of control flow: its bodies, or the cells of levels, as programs of their own."""

from __future__ import annotations

from typing import Protocol

from daceml_train.errors import Unsupported
from daceml_train.graph.bodies import bodies
from daceml_train.graph.graph import Graph, Node
from daceml_train.lowering.cells import cell_program
from daceml_train.lowering.device import Device
from daceml_train.lowering.program import Allocation, Buffer, BufferView, Cells, ControlLaunch, Program
from daceml_train.ops.control import Cond, ControlFlow, Scan, While
from daceml_train.ops.levels import Levels


class Lowering(Protocol):
    """The interface of lowering that this module uses."""

    device: Device
    graph: Graph
    program: Program
    places: dict[str, BufferView]

    def place(self, name: str) -> BufferView:
        """The buffer view of an array."""

    def dense(self, name: str, origin: str, outer: int = 0) -> BufferView:
        """The buffer view of an array if it is row-major below its `outer` first dimensions, else one of a copy."""

    def new_place(self, slot: Buffer) -> BufferView:
        """A buffer of this allocation kind."""

    def body(self, graph: Graph) -> Program:
        """The program of a body."""


def launch_control(lowering: Lowering, node: Node, op: ControlFlow) -> None:
    """Lower the bodies to programs, on dense operands, and launch them."""
    launch = _levels(lowering, node, op) if isinstance(op, Levels) else _loop(lowering, node, op)
    lowering.program.launches.append(launch)


def _loop(lowering: Lowering, node: Node, op: ControlFlow) -> ControlLaunch:
    carried, sliced, trips, reverse = 0, 0, 0, False
    match op:
        case Scan():
            carried, sliced, trips, reverse = op.carried, op.sliced, op.trips, op.reverse
        case While():
            carried = op.carried
    origin, names = str(node.origin), node.inputs
    first = 1 if isinstance(op, Cond) else carried + sliced
    condition = lowering.place(names[0]) if isinstance(op, Cond) else None
    states = tuple(lowering.dense(name, origin) for name in names[:carried])
    slices = tuple(lowering.dense(name, origin, 1) for name in names[carried : carried + sliced])
    shared = tuple(lowering.dense(name, origin) for name in names[first:])
    programs, returns = _programs(lowering, node, op), _returns(lowering, node)
    return ControlLaunch(op.label, programs, condition, states, slices, shared, returns, trips, reverse, origin)


def _levels(lowering: Lowering, node: Node, op: Levels) -> ControlLaunch:
    """Cells are programs for any number of rows."""
    origin = str(node.origin)
    if not lowering.device.toolchain.templates:
        raise Unsupported("levels on a GPU", where=origin)
    operands = tuple(lowering.dense(name, origin) for name in node.inputs)
    graphs = bodies(op, [lowering.graph.tensors[name] for name in node.inputs])
    found = [cell_program(op, kind, body) for kind, body in enumerate(graphs)]
    programs, returns = tuple(lowering.body(each.graph) for each in found), _returns(lowering, node)
    own = tuple(len(body.yields) - len(op.placed(kind)) for kind, body in enumerate(op.cells))
    around = (tuple(each.gathers for each in found), tuple(each.added for each in found))
    written = tuple(each.written for each in found)
    cells = Cells(len(op.types), op.counts, op.rows, op.children, op.shared, op.states, own, *around, written)
    return ControlLaunch(op.label, programs, None, (), (), operands, returns, 0, op.reverse, origin, cells)


def _programs(lowering: Lowering, node: Node, op: ControlFlow) -> tuple[Program, ...]:
    return tuple(lowering.body(each) for each in bodies(op, [lowering.graph.tensors[name] for name in node.inputs]))


def _returns(lowering: Lowering, node: Node) -> tuple[int, ...]:
    """The slots of new buffers for the results."""
    for name in node.outputs:
        t = lowering.graph.tensors[name]
        lowering.places[name] = lowering.new_place(Buffer(Allocation.result, t.dtype, t.shape, t.strides))
    return tuple(lowering.places[name].slot for name in node.outputs)
