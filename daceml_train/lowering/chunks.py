"""Launches of a chunked gradient: a chunk of rows, the rows added to it, and the update that consumes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from daceml_train.analysis.chunks import UpdateChain, chunk_rows
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.index_add import rows_between
from daceml_train.graph.graph import Graph
from daceml_train.lowering.program import Allocation, Buffer, BufferView, CallLaunch, Program
from daceml_train.ops.elementwise import Full
from daceml_train.ops.embedding import EmbeddingGrad
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Shape, Tensor, same, simplify


class Lowering(Protocol):
    """The interface of lowering that this module uses."""

    graph: Graph
    program: Program
    places: dict[str, BufferView]

    def place(self, name: str) -> BufferView:
        """The buffer view of an array."""

    def dense(self, name: str, origin: str) -> BufferView:
        """The buffer view of an array if its rows are dense, else one of a copy."""

    def allocate(self, name: str, tensor: Tensor) -> BufferView:
        """A buffer for an array."""

    def new_place(self, slot: Buffer) -> BufferView:
        """A buffer of this allocation kind."""

    def moved(self, op: Operator, x: BufferView, shape: Shape, origin: str) -> BufferView:
        """The buffer view of an alias."""

    def launch(
        self, kernel: Kernel, operands: Sequence[BufferView], results: Sequence[BufferView], origin: str
    ) -> None:
        """Launch a generated kernel."""

    def code(self, code: KernelCode) -> tuple[int, ...]:
        """The number of a kernel's code in the program."""

    def start(
        self,
        numbers: tuple[int, ...],
        places: Sequence[BufferView],
        origin: str,
        operands: int,
        in_place: tuple[int, ...],
    ) -> None:
        """Launch a kernel by its number."""


def launch_in_parts(lowering: Lowering, chain: UpdateChain) -> None:
    """Add the launches of a chain, chunk by chunk. Each chunk is an array that dies before the next one is computed."""
    graph, program = lowering.graph, lowering.program
    update, head = graph.nodes[chain.update], _Head(lowering, chain)
    others = {k: lowering.place(name) for k, name in enumerate(update.inputs) if k != chain.argument}
    updated = dict(update.op.updates)
    for k, name in enumerate(update.outputs):
        there = others[updated[k]] if k in updated else None
        lowering.places[name] = there or lowering.allocate(name, graph.tensors[name])
    tensor, most = graph.tensors[graph.nodes[chain.gradient].outputs[0]], chunk_rows(graph, chain)
    count, width = tensor.shape
    assert isinstance(count, int)
    for first in range(0, count, most):
        length = min(most, count - first)
        slot = Buffer(Allocation.arena, tensor.dtype, (length, width), Tensor((length, width)).strides)
        part = lowering.new_place(slot)
        head.launch(part, first, length)
        _update(lowering, chain, part, others, first, length)
    program.nodes += [chain.update] * (len(program.launches) - len(program.nodes))


class _Head:
    """The producer of a chunk of the gradient."""

    def __init__(self, lowering: Lowering, chain: UpdateChain) -> None:
        self.lowering, self.chain = lowering, chain
        self.node = lowering.graph.nodes[chain.gradient]
        rows, indices = self.node.inputs
        if isinstance(self.node.op, EmbeddingGrad):
            origin = str(self.node.origin)
            self.added = [lowering.dense(indices, origin), lowering.dense(rows, origin)]
        else:
            self.factors = [lowering.place(name) for name in self.node.inputs]
            if chain.rows is not None:
                node = lowering.graph.nodes[chain.rows]
                self.added = [lowering.dense(name, str(node.origin)) for name in node.inputs[1:]]

    def launch(self, part: BufferView, first: int, length: int) -> None:
        """Add the launches that compute rows `first` to `first + length`."""
        program, op, origin = self.lowering.program, self.node.op, str(self.node.origin)
        program.nodes += [self.chain.gradient] * (len(program.launches) - len(program.nodes))
        if isinstance(op, EmbeddingGrad):
            zeros = Statement(Full(0.0, part.shape, part.dtype), (), ("v0",))
            self.lowering.launch(Kernel((), (zeros,), ("v0",)), [], [part], origin)
            self._add(part, first, length, op.padding_idx, origin)
        else:
            a, b = self.factors
            arguments = (part, _rows(a, first, length), b)
            program.launches.append(CallLaunch("mm", "", arguments, (), True, origin, (part.slot,)))
        program.nodes += [self.chain.gradient] * (len(program.launches) - len(program.nodes))
        if self.chain.rows is not None:
            self._add(part, first, length, -1, str(self.lowering.graph.nodes[self.chain.rows].origin))
            program.nodes.append(self.chain.rows)

    def _add(self, part: BufferView, first: int, length: int, skipped: int, origin: str) -> None:
        operands = (part, *self.added)
        table, indices, rows = (Layout(p.shape, p.strides, p.dtype) for p in operands)
        code = rows_between(table, indices, rows, first, first + length, skipped)
        assert code is not None, "the chain has types that index_add supports"
        self.lowering.start(self.lowering.code(code), operands, origin, len(operands), (0,))


def _rows(place: BufferView, first: int, length: int) -> BufferView:
    offset = simplify(place.offset + first * place.strides[0])
    return replace(place, shape=(length, *place.shape[1:]), offset=offset)


def _update(
    lowering: Lowering, chain: UpdateChain, part: BufferView, others: Mapping[int, BufferView], first: int, length: int
) -> None:
    graph, program, node = lowering.graph, lowering.program, lowering.graph.nodes[chain.update]
    assert isinstance(node.op, Kernel)
    origin, gradient = str(node.origin), part
    for position in chain.views:
        view = graph.nodes[position]
        gradient = lowering.moved(view.op, gradient, (length, *graph.tensors[view.outputs[0]].shape[1:]), origin)
    whole = graph.tensors[node.inputs[chain.argument]].shape

    def seen(place: BufferView) -> BufferView:
        by_rows = len(place.shape) == len(whole) and same(place.shape[0], whole[0])
        return _rows(place, first, length) if by_rows else place

    operands = [gradient if k == chain.argument else seen(others[k]) for k in range(len(node.inputs))]
    updated = dict(node.op.updates)
    results = [operands[updated[k]] if k in updated else lowering.places[n] for k, n in enumerate(node.outputs)]
    lowering.launch(node.op, operands, results, origin)
    program.nodes += [chain.update] * (len(program.launches) - len(program.nodes))
