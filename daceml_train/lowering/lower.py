"""Lowering: from an operator graph to a `Program`.

Movement operators become strided views where possible and copies elsewhere; kernels and other generated operators
become kernel launches; vendor operators become library calls; written inputs are updated in place by the kernel that
computes them, or by a copy at the end, after the last reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy

from daceml_train.analysis.aliases import is_alias, moved_strides, root_of, roots
from daceml_train.analysis.chunks import update_chains
from daceml_train.analysis.concat_aliases import concat_aliases
from daceml_train.analysis.memory import overwrites, summands
from daceml_train.codegen.cpu.launch import KernelCode, Layout
from daceml_train.codegen.cuda.launch import CudaPart
from daceml_train.codegen.library.templates import has_template, written_kernel
from daceml_train.codegen.library.tiles import tiled
from daceml_train.errors import Invalid, Refused, Unsupported
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.lanes import Lanes
from daceml_train.lowering.aten import Result, call_for, show
from daceml_train.lowering.chunks import launch_in_parts
from daceml_train.lowering.control import launch_control
from daceml_train.lowering.copies import copy_together, joined
from daceml_train.lowering.device import CPU, Device
from daceml_train.lowering.lifetimes import _layout, _seen, set_lifetimes
from daceml_train.lowering.program import (
    Allocation,
    Buffer,
    BufferView,
    CallLaunch,
    KernelLaunch,
    LaneRules,
    Program,
    ProgramInput,
)
from daceml_train.ops.control import ControlFlow
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.fallback import Operand
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.movement import Concat, Slice
from daceml_train.ops.operator import Operator
from daceml_train.ops.packed import has_product
from daceml_train.ops.read import Read
from daceml_train.tensor import Dim, DType, Shape, Tensor, same, same_shape, simplify

Ints = tuple[int, ...]


def lower(graph: Graph, results: int | None = None, device: Device = CPU, body: bool = False) -> Program:
    """The program of a graph of leaves and kernels. Raises `Unsupported` for an operator without lowering.

    The first `results` outputs (all, if None) go to the user, who may change them: no two share memory. Later ones
    are saved for a backward pass and may share it. A `body` of control flow has dense row-major outputs, and its sizes
    come from the enclosing program.
    """
    return _Lowering(graph, device, body).run(len(graph.outputs) if results is None else results)


def _constant(op: Operator) -> Kernel:
    """The kernel that writes a constant."""
    return Kernel((), (Statement(op, (), ("v0",)),), ("v0",))


class _Lowering:
    def __init__(self, graph: Graph, device: Device, body: bool) -> None:
        self.device = device
        self.graph, self.is_body, self.program = graph, body, Program(graph.name)
        self.places: dict[str, BufferView] = {}
        self.nodes = graph.producers()
        self.numbers: dict[tuple[Operator, tuple[Layout, ...], tuple[Layout, ...]], Ints] = {}
        """Kernels generated so far, or their parts, by structure and layouts: networks repeat their blocks."""
        self.visible = {self.base(name) for name in graph.outputs}
        aliases = roots(graph)
        self.overwrites = overwrites(graph, aliases, summands(graph, aliases))
        self.pieces = concat_aliases(graph)
        self.chains = update_chains(graph)
        self.in_parts = {i for c in self.chains.values() for i in (c.gradient, c.rows, *c.views)}
        self.wholes: dict[str, BufferView] = {}
        """Concatenations of which some operands are already written in place."""

    def base(self, name: str) -> str:
        """The array whose memory `name` is a view of, if all movement operators on the way can be views."""
        return root_of(self.nodes, name)

    def run(self, results: int) -> Program:
        self.inputs()
        for index, node in enumerate(self.graph.nodes):
            if index in self.chains:
                launch_in_parts(self, self.chains[index])
            elif index not in self.in_parts:
                self.node(node)
            self.program.nodes += [index] * (len(self.program.launches) - len(self.program.nodes))
        for position, name in enumerate(self.graph.outputs):
            self.program.outputs.append(self.output(name, apart=position < results))
        sources = {target: self.source(value) for target, value in self.graph.writes.items()}
        first = len(self.program.launches)
        for target, source in sources.items():
            self.write(target, source)
        self.program.launches[first:] = joined(self.program.launches[first:])
        self.program.nodes += [-1] * (len(self.program.launches) - len(self.program.nodes))
        set_lifetimes(self.program)
        if self.graph.lanes is not None and not self.is_body:
            self.program.rules = self.rules(self.graph.lanes)
        return self.program

    def rules(self, lanes: Lanes) -> LaneRules:
        """What the graph allows of its operators, for their launches."""
        node = {name: index for index, n in enumerate(self.graph.nodes) for name in n.outputs}
        launches: dict[int, list[int]] = {}
        for launch, index in enumerate(self.program.nodes):
            launches.setdefault(index, []).append(launch)
        threads = tuple((i, count) for name, count in lanes.threads for i in launches.get(node[name], ()))
        alone = tuple(i for name in lanes.alone for i in launches.get(node[name], ()))
        return LaneRules(lanes.most, lanes.memory, threads, alone)

    def inputs(self) -> None:
        program = self.program
        for index, (name, entry) in enumerate(self.graph.inputs.items()):
            t, mutable = entry.tensor, name in self.graph.writes
            program.inputs.append(ProgramInput(name, entry.role, entry.path, t.dtype, t.shape, t.strides, mutable))
            self.places[name] = self.new_place(Buffer(Allocation.input, t.dtype, t.shape, t.strides, index, mutable))
            for dim, size in enumerate(t.shape):
                if isinstance(size, sympy.Symbol):
                    program.symbols.setdefault(str(size), (index, dim))
        if not self.is_body and (missing := {str(s) for s in self.graph.symbols} - set(program.symbols)):
            raise Unsupported(f"no input has exactly the size {', '.join(sorted(missing))}")

    # ---- places -------------------------------------------------------------------------------------------------
    def new_place(self, slot: Buffer) -> BufferView:
        self.program.slots.append(slot)
        return BufferView(len(self.program.slots) - 1, slot.dtype, slot.shape, slot.strides)

    def allocate(self, name: str, tensor: Tensor) -> BufferView:
        """A buffer for a value that a kernel or an in-place library call computes, or its view in a concatenation."""
        if (piece := self.pieces.get(name)) is not None:
            if piece.whole not in self.wholes:
                self.wholes[piece.whole] = self.allocate(piece.whole, self.graph.tensors[piece.whole])
            whole = self.wholes[piece.whole]
            return replace(whole, shape=tensor.shape, strides=piece.strides, offset=piece.offset)
        home = Allocation.fresh if name in self.visible else Allocation.arena
        return self.new_place(Buffer(home, tensor.dtype, tensor.shape, tensor.strides))

    def place(self, name: str) -> BufferView:
        """The buffer view of array `name`; a constant is materialized when it must be read from memory."""
        if name not in self.places:
            node = self.nodes[name]
            self.places[name] = self.allocate(name, self.graph.tensors[name])
            self.kernel(node, _constant(node.op), (), [name])
        return self.places[name]

    def copy_of(self, place: BufferView, shape: Shape, home: Allocation, origin: str) -> BufferView:
        """A dense row-major copy of `place`."""
        tensor = Tensor(shape, place.dtype)
        target = self.new_place(Buffer(home, place.dtype, shape, tensor.strides))
        self.copy(place, target, origin)
        return target

    def copy(self, source: BufferView, target: BufferView, origin: str) -> None:
        """Copy between layouts."""
        copy_together(self, [(source, target)], origin)

    # ---- nodes --------------------------------------------------------------------------------------------------
    def node(self, node: Node) -> None:
        op = node.op
        if isinstance(op, Full | Iota):
            return  # inlined into their readers, or materialized by `place`
        if is_alias(op):
            self.places[node.outputs[0]] = self.alias(node)
        elif isinstance(op, Kernel):
            self.compute(node, op)
        elif isinstance(op, ControlFlow):
            launch_control(self, node, op)
        elif isinstance(op, Concat) and (op.placed or node.outputs[0] in self.pieces):
            self.join(node, op)
        elif self.written(node):
            pass
        elif op.vendor:
            self.call(node)
        elif op.is_composite:
            raise Invalid(f"composite operator {op.label} reached lowering", where=str(node.origin))
        else:
            arguments = tuple(f"x{i}" for i in range(len(node.inputs)))
            results = tuple(f"v{i}" for i in range(len(node.outputs)))
            self.compute(node, Kernel(arguments, (Statement(op, arguments, results),), results))

    def alias(self, node: Node) -> BufferView:
        name = node.outputs[0]
        home = Allocation.fresh if self.base(name) in self.visible else Allocation.arena
        return self.moved(node.op, self.place(node.inputs[0]), self.graph.tensors[name].shape, str(node.origin), home)

    def moved(
        self, op: Operator, x: BufferView, shape: Shape, origin: str, home: Allocation = Allocation.arena
    ) -> BufferView:
        """The buffer view of a movement operator's result: a view of its operand, or of a copy in `home`."""
        strides = moved_strides(op, x.shape, x.strides, shape)
        if strides is None:
            dense = self.copy_of(x, x.shape, home, origin)
            return replace(dense, shape=shape, strides=Tensor(shape).strides)
        start: Dim = 0
        match op:
            case Slice(dim=dim, start=first):
                start = first * x.strides[dim]
            case Read():
                _, start = op.strides(x.strides)
        return replace(x, shape=shape, strides=strides, offset=simplify(x.offset + start))

    def compute(self, node: Node, kernel: Kernel) -> None:
        """Launch a kernel; the constants it reads are moved into its body."""
        names, constants, inputs = list(kernel.arguments), [], []
        for argument, array in zip(kernel.arguments, node.inputs, strict=True):
            producer = self.nodes.get(array)
            if producer is not None and isinstance(producer.op, Full | Iota) and array not in self.places:
                constants.append(Statement(producer.op, (), (argument,)))
                names.remove(argument)
            else:
                inputs.append(array)
        if constants:
            updates = tuple((y, names.index(kernel.arguments[a])) for y, a in kernel.updates)
            kernel = Kernel(tuple(names), (*constants, *kernel.statements), kernel.yields, updates)
        self.kernel(node, kernel, tuple(inputs), list(node.outputs))

    def kernel(self, node: Node, kernel: Kernel, inputs: tuple[str, ...], outputs: list[str]) -> None:
        updates = dict(kernel.updates)
        operands = [self.place(name) for name in inputs]
        results = []
        for position, name in enumerate(outputs):
            if position in updates:
                self.places[name] = operands[updates[position]]
            elif name not in self.places:
                self.places[name] = self.allocate(name, self.graph.tensors[name])
            results.append(self.places[name])
        try:
            self.launch(kernel, operands, results, str(node.origin))
        except Refused:
            if len(kernel.statements) == 1 and not has_product(kernel):
                raise
            self.apart(kernel, operands, results, str(node.origin))

    def apart(self, kernel: Kernel, operands: Sequence[BufferView], results: Sequence[BufferView], origin: str) -> None:
        """Launch a kernel's statements one by one, if together they are not a loop nest.

        Fusion creates no such kernel; this is for constants that lowering moves into a body, such as a mask from two
        index arrays, and for user-defined pipelines.
        """
        places = dict(zip(kernel.arguments, operands, strict=True))
        types = kernel.types(*(Tensor(p.shape, p.dtype) for p in operands))
        scalars = {s.outputs[0]: s for s in kernel.statements if isinstance(s.op, Full) and s.op.shape == ()}
        for statement in kernel.statements:
            if statement.outputs[0] in scalars and statement.outputs[0] not in kernel.yields:
                continue
            if is_alias(statement.op):
                tensor = types[statement.outputs[0]]
                places[statement.outputs[0]] = self.moved(
                    statement.op, self.scalar_place(places, scalars, statement.inputs[0], origin), tensor.shape, origin
                )
                continue
            outputs = []
            for name in statement.outputs:
                t = types[name]
                places[name] = self.new_place(Buffer(Allocation.arena, t.dtype, t.shape, t.strides))
                outputs.append(places[name])
            read = [name for name in dict.fromkeys(statement.inputs) if name in places]
            inlined = [scalars[name] for name in dict.fromkeys(statement.inputs) if name not in places]
            body = Kernel(tuple(read), (*inlined, statement), statement.outputs)
            self.launch(body, [places[name] for name in read], outputs, origin)
        for name, result in zip(kernel.yields, results, strict=True):
            self.copy(places[name], result, origin)

    def scalar_place(
        self, places: dict[str, BufferView], scalars: dict[str, Statement], name: str, origin: str
    ) -> BufferView:
        """The buffer view of a value; a scalar constant is written to memory first."""
        if name not in places:
            op = scalars[name].op
            (tensor,) = op.infer()
            places[name] = self.new_place(Buffer(Allocation.arena, tensor.dtype, (), ()))
            self.launch(_constant(op), [], [places[name]], origin)
        return places[name]

    def launch(
        self, kernel: Kernel, operands: Sequence[BufferView], results: Sequence[BufferView], origin: str
    ) -> None:
        """Generate a kernel for these layouts and add its launch, with memory for its scratch arrays."""
        layouts = tuple(map(_layout, operands)), tuple(map(_layout, results))
        if (kernel, *layouts) not in self.numbers:
            code = tiled(kernel, *layouts) if self.device.toolchain.templates else None
            self.numbers[kernel, *layouts] = self.code(code or self.device.toolchain.generate(kernel, *layouts))
        updated = {y for y, _ in kernel.updates}
        written = [p for position, p in enumerate(results) if position not in updated]
        in_place = tuple(operand for _, operand in kernel.updates)
        self.start(self.numbers[kernel, *layouts], (*operands, *written), origin, len(operands), in_place)

    def code(self, code: KernelCode) -> Ints:
        """The numbers of a kernel's parts in the program, or that of the kernel."""
        first = len(self.program.codes)
        self.program.codes += code.parts or (code,)
        return tuple(range(first, len(self.program.codes)))

    def start(
        self, numbers: Ints, places: Sequence[BufferView], origin: str, operands: int, in_place: Ints = ()
    ) -> None:
        """Add the launches of a kernel, with memory for its scratch arrays. The first buffer views are its operands."""
        codes, scratch = self.program.codes, []
        for bytes_ in codes[numbers[0]].scratch:
            scratch.append(self.new_place(Buffer(Allocation.arena, DType.uint8, (bytes_,), (1,))))
        all_places = (*places, *scratch)
        writes = (*in_place, *range(operands, len(all_places)))
        for number in numbers:
            if isinstance(part := codes[number], CudaPart):
                here = tuple(all_places[position] for position in part.positions)
                self.program.launches.append(KernelLaunch(number, here, origin, part.writes))
            else:
                self.program.launches.append(KernelLaunch(number, all_places, origin, writes))

    def written(self, node: Node) -> bool:
        """Launch a hand-written kernel, if there is one for these operand layouts."""
        if not self.device.toolchain.templates:
            return False
        operands = [self.place(name) for name in node.inputs] if has_template(node.op) else []
        tensors = [self.graph.tensors[name] for name in node.outputs]
        layouts = tuple(map(_layout, operands)), tuple(Layout(t.shape, t.strides, t.dtype) for t in tensors)
        code = written_kernel(node.op, *layouts)
        if code is None:
            return False
        if (node.op, *layouts) not in self.numbers:
            self.numbers[node.op, *layouts] = self.code(code)
        updates = dict(node.op.updates)
        for k, (name, tensor) in enumerate(zip(node.outputs, tensors, strict=True)):
            self.places[name] = operands[updates[k]] if k in updates else self.allocate(name, tensor)
        results = [self.places[name] for k, name in enumerate(node.outputs) if k not in updates]
        numbers, in_place = self.numbers[node.op, *layouts], tuple(updates.values())
        self.start(numbers, (*operands, *results), str(node.origin), len(operands), in_place)
        return True

    def call(self, node: Node) -> None:
        graph = self.graph
        operands = tuple(graph.tensors[i] for i in node.inputs)
        results = tuple(graph.tensors[o] for o in node.outputs)
        call = call_for(node.op, operands, results, self.device.target)
        places = [self.place(name) for name in node.inputs]
        for index in call.dense_rows:
            x = places[index]
            if not same(x.strides[-1], 1) and not same(x.shape[-1], 1):
                places[index] = self.copy_of(x, x.shape, Allocation.arena, str(node.origin))
        outputs = {index for index in call.returns if index is not None}
        updates = dict(node.op.updates)
        for index, name in enumerate(node.outputs):
            if index in updates:
                self.places[name] = places[updates[index]]
            elif index in outputs:
                t, shown = results[index], show(results[index], call.seen)
                made_place = self.new_place(Buffer(Allocation.result, t.dtype, shown.shape, shown.strides))
                self.places[name] = replace(made_place, shape=t.shape, strides=t.strides)
            elif name in self.overwrites:
                shape = results[index].shape
                self.places[name] = replace(self.place(self.overwrites[name]), shape=shape)
            else:
                self.places[name] = self.allocate(name, results[index])

        def resolve(argument: Any) -> Any:
            match argument:
                case Operand(index=index):
                    return _seen(places[index], call.seen)
                case Result(index=index):
                    return _seen(self.places[node.outputs[index]], call.seen)
                case tuple() | list():
                    return tuple(resolve(a) for a in argument)
            return argument

        arguments = tuple(resolve(a) for a in call.arguments)
        returns = tuple(None if i is None else self.places[node.outputs[i]].slot for i in call.returns)
        filled = [i for i in range(len(results)) if i not in outputs or i in updates]
        writes = tuple(dict.fromkeys(self.places[node.outputs[i]].slot for i in filled))
        self.program.launches.append(
            CallLaunch(call.target, call.overload, arguments, returns, call.direct, str(node.origin), writes)
        )

    def join(self, node: Node, op: Concat) -> None:
        """Write the operands of a concatenation that are not in place: constants directly, others as copies."""
        (name,) = node.outputs
        whole = self.places[name] = self.wholes.get(name) or self.allocate(name, self.graph.tensors[name])
        start: Dim = 0
        copied: list[tuple[BufferView, BufferView]] = []
        for position, operand in enumerate(node.inputs):
            shape = self.graph.tensors[operand].shape
            if position not in op.placed and not any(same(size, 0) for size in shape):
                target = replace(whole, shape=shape, offset=simplify(whole.offset + start * whole.strides[op.dim]))
                constant = self.nodes.get(operand)
                if constant is not None and isinstance(constant.op, Full | Iota) and operand not in self.places:
                    self.launch(_constant(constant.op), [], [target], str(node.origin))
                else:
                    copied.append((self.place(operand), target))
            start = simplify(start + shape[op.dim])
        copy_together(self, copied, str(node.origin))

    def body(self, graph: Graph) -> Program:
        """The program of a body of control flow."""
        return lower(graph, device=self.device, body=True)

    def dense(self, name: str, origin: str, outer: int = 0) -> BufferView:
        """The buffer view of array `name`, or of a copy unless it is row-major below its `outer` first dimensions."""
        place = self.place(name)
        if same_shape(place.strides[outer:], Tensor(place.shape).strides[outer:]):
            return place
        return self.copy_of(place, place.shape, Allocation.arena, origin)

    # ---- results ------------------------------------------------------------------------------------------------
    def source(self, value: str) -> BufferView:
        """The buffer view of a written value; one that lies in a written input, but for its own as it is, is copied
        before any write.
        """
        place, name = self.place(value), self.base(value)
        if name in self.graph.writes and (self.graph.writes[name] != value or place != self.places[name]):
            return self.copy_of(place, place.shape, Allocation.arena, f"write of {value}")
        return place

    def write(self, target: str, source: BufferView) -> None:
        """Copy a written input's new value, unless a kernel updated it in place."""
        destination = self.places[target]
        if source != destination:
            self.copy(source, destination, f"write {target}")

    def output(self, name: str, apart: bool) -> BufferView:
        """A result in memory that is neither an input's nor the arena's nor, if `apart`, an earlier output's."""
        place = self.place(name)
        owned = self.program.slots[place.slot].home in (Allocation.fresh, Allocation.result)
        slot = self.program.slots[place.slot]
        whole = same_shape(place.strides, Tensor(slot.shape).strides) and same_shape(place.shape, slot.shape)
        backward = any(s < 0 if isinstance(s, int) else not s.is_nonnegative for s in place.strides)
        if (
            owned
            and not backward  # PyTorch has no such tensors
            and not (apart and place.slot in {p.slot for p in self.program.outputs})
            and (whole or not self.is_body)
        ):
            return place
        return self.copy_of(place, place.shape, Allocation.fresh, "output")
