"""AssignLayouts: choose for the whole graph at once which arrays are channels-last."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from daceml_train.analysis.aliases import is_alias
from daceml_train.analysis.device_model import DeviceModel
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.weights_only import HELD
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.convolution import LIBRARY_TYPES, Geometry
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.kernel import Kernel, Statement, canonical
from daceml_train.ops.movement import Concat, Expand, Flip, Pad, Reorder, Slice, View
from daceml_train.ops.operator import Operator
from daceml_train.ops.pooling import AvgPool2d, AvgPool2dGrad, MaxPool2d, MaxPool2dGrad
from daceml_train.passes.base import Pass, without_dead_code
from daceml_train.tensor import Tensor, channels_last, hint, same_memory
from daceml_train.transformations.layout.min_cut import Assignment

EITHER = (MaxPool2d, MaxPool2dGrad, AvgPool2d, AvgPool2dGrad, Pad, Concat, Flip)
"""Library calls, besides convolutions, that run in the layout of their operands and return results in it."""


@dataclass(frozen=True)
class AssignLayouts(Pass):
    """Choose row-major or channels-last for each image-like array, and reorder where the choice changes.

        x -> [conv] -> y -> [kernel] -> z -> [conv] -> u      =>      x -> [reorder] -> x' -> [conv] -> y' -> ...

    Each array of four or five dimensions (of three where convolutions have one dimension), each library call and each
    kernel has a label. The cost of a labeling is its bytes: a reorder (one for all readers that want the other layout)
    reads and writes the array; a convolution in row-major order reorders within its call; a kernel that reads an array
    in another layout than its own reads it strided, at `strided` times its bytes. Inputs and results of the graph keep
    their layout. All costs are pairwise, so a minimum cut finds the cheapest assignment for the whole graph at once.
    Kernels write their results in the chosen layout; only library calls and the graph's inputs and results need a
    separate reorder. With `prepared`, reorders of parameters and buffers are free: an inference program executes them
    once (`analysis.weights_only`). `library` is whose convolutions run (None: cuDNN's on a GPU, oneDNN's on a CPU).
    """

    level = "layout"
    strided: float = 0.5
    prepared: bool = False
    library: Literal["onednn", "cudnn"] | None = None

    def on(self, model: DeviceModel) -> Pass:
        return self if self.library is not None else replace(self, library="cudnn")

    def run(self, graph: Graph) -> Graph:
        if not any(isinstance(node.op, Geometry) for node in graph.nodes):
            return graph
        chosen, cost = _Costs(graph, self).solve(free=True)
        _, before = _Costs(graph, self).solve(free=False)
        if cost >= before:
            return graph
        after = _Rebuild(graph, chosen).run()
        gained = self.moved(after) - self.moved(graph)
        return after if gained <= 0 or self.prepared else graph

    def moved(self, graph: Graph) -> float:
        """The bytes that a graph moves, symbols counted as a fixed number."""
        counted = hint(traffic(graph).bytes)
        for node in graph.nodes:
            if isinstance(node.op, Geometry):
                operands = [graph.tensors[name] for name in node.inputs]
                counted += self.reorders(node.op, operands) - hint(node.op.reorders(*operands))
        return counted

    def reorders(self, op: Operator, operands: Sequence[Tensor]) -> float:
        """The bytes that a library call reorders."""
        if self.library == "cudnn" and isinstance(op, Geometry):
            return hint(op.cudnn_reorders(*operands))
        return hint(op.reorders(*operands))


def image_ranks(graph: Graph) -> frozenset[int]:
    """The ranks of arrays whose layout can be chosen: images and volumes, and sequences only where one-dimensional
    convolutions read them (elsewhere an array of three dimensions is a batch of matrices).
    """
    sequences = any(isinstance(node.op, Geometry) and len(node.op.stride) == 1 for node in graph.nodes)
    return frozenset((3, 4, 5) if sequences else (4, 5))


def choosable(tensor: Tensor, ranks: Collection[int]) -> bool:
    """Whether an array can be row-major or channels-last, and the two differ."""
    rank = tensor.rank
    last = channels_last(rank)
    return rank in ranks and tensor.order in (None, last) and not same_memory(tensor.shape, None, last)


def is_last(tensor: Tensor) -> bool:
    """Whether an array is channels-last."""
    return tensor.order is not None and tensor.order == channels_last(tensor.rank)


def flexible(op: Operator, types: Sequence[Tensor], ranks: Collection[int]) -> bool:
    """Whether a library call runs in either layout on arrays of these types."""
    images = [t for t in types if t.rank in ranks]
    if any(t.order not in (None, channels_last(t.rank)) for t in images):
        return False
    if isinstance(op, Geometry):
        return all(t.dtype in LIBRARY_TYPES for t in images)
    return isinstance(op, EITHER) and len(images) == len(types)


def keeps_order(op: Operator, before: Tensor, after: Tensor) -> bool:
    """Whether the result of an alias has its operand's memory order."""
    return isinstance(op, Slice) or (isinstance(op, Expand) and before.rank == after.rank)


Label = Mapping[Hashable, bool]


class _Costs:
    """The assignment problem of a graph. Variables, True for channels-last:

    an array's name; ("call", n), ("kernel", n) for node n; ("last", name) and ("rows", name): a version of the array
    in that layout exists.
    """

    def __init__(self, graph: Graph, options: AssignLayouts) -> None:
        self.graph, self.options, self.problem = graph, options, Assignment()
        held = {n for n, e in graph.inputs.items() if e.role in HELD and n not in graph.writes}
        self.free = held if options.prepared else set[str]()
        self.ranks = image_ranks(graph)
        self.names = [name for name, tensor in graph.tensors.items() if choosable(tensor, self.ranks)]
        self.broadcast: set[str] = set()
        self.choosable = set(self.names)
        for name in self.names:
            self.versions(name)
        for name in graph.inputs:
            self.stays(name)
        for number, node in enumerate(graph.nodes):
            self.node(number, node)
        for name in graph.outputs[: len(graph.outputs) - graph.kept]:
            self.needs(name, is_last(graph.tensors[name]))
        for value in graph.writes.values():
            self.stays(value)

    def bytes(self, name: str) -> float:
        """The size of an array, symbols counted as a fixed number."""
        return hint(self.graph.tensors[name].bytes)

    def stays(self, name: str) -> None:
        """The array keeps its layout."""
        if name in self.choosable:
            self.problem.fix(name, is_last(self.graph.tensors[name]))

    def versions(self, name: str) -> None:
        """A version in the layout that the array does not have is a reorder."""
        bytes_ = 0.0 if name in self.free else 2 * self.bytes(name)
        self.problem.unless(("last", name), name, bytes_)
        self.problem.unless(name, ("not rows", name), bytes_)

    def needs(self, name: str, label: Hashable | bool) -> None:
        """Add a reader of the array in the layout `label`: a variable, or a fixed choice."""
        if name not in self.choosable:
            return
        if isinstance(label, bool):
            self.problem.fix(("last", name) if label else ("not rows", name), label)
        else:
            self.problem.implies(label, ("last", name))
            self.problem.implies(("not rows", name), label)

    def node(self, number: int, node: Node) -> None:
        graph, op = self.graph, node.op
        types = [graph.tensors[name] for name in (*node.inputs, *node.outputs)]
        if is_alias(op):
            self.alias(node)
        elif op.vendor and flexible(op, types, self.ranks):
            self.call(number, node)
        elif op.vendor:
            for name in node.inputs:
                self.needs(name, is_last(graph.tensors[name]))
            for name in node.outputs:
                self.stays(name)
        elif isinstance(op, Full | Iota):
            self.stays(node.outputs[0])
        else:
            for name in dict.fromkeys((*node.inputs, *node.outputs)):
                if name in self.choosable and name not in self.broadcast:
                    self.problem.apart(("kernel", number), name, self.options.strided * self.bytes(name))

    def alias(self, node: Node) -> None:
        (x,), (y,) = node.inputs, node.outputs
        before, after = self.graph.tensors[x], self.graph.tensors[y]
        if keeps_order(node.op, before, after) and x in self.choosable and y in self.choosable:
            self.problem.equal(x, y)
            return
        if isinstance(node.op, Expand):
            self.broadcast.add(y)
        if x in self.choosable and not keeps_order(node.op, before, after):
            self.problem.cost(x, not is_last(before), 2 * self.bytes(y))
        self.stays(y)

    def call(self, number: int, node: Node) -> None:
        runs: Hashable = ("call", number)
        for name in node.inputs:
            self.needs(name, runs)
        for name in node.outputs:
            if name in self.choosable:
                self.problem.equal(name, runs)
        for label in (False, True):
            operands = [laid_out(self.graph.tensors[name], label, self.ranks) for name in node.inputs]
            self.problem.cost(runs, label, self.options.reorders(node.op, operands))

    def solve(self, free: bool) -> tuple[Label, float]:
        """A cheapest assignment and its cost; unless `free`, one in which each array keeps its current layout."""
        for name in () if free else self.names:
            self.stays(name)
        return self.problem.solve()


def laid_out(tensor: Tensor, last: bool, ranks: Collection[int]) -> Tensor:
    """The type of an array in the chosen layout, if its layout can be chosen."""
    if tensor.rank not in ranks or tensor.order not in (None, channels_last(tensor.rank)):
        return tensor
    return Tensor(tensor.shape, tensor.dtype, channels_last(tensor.rank) if last else None)


class _Rebuild:
    """The graph in the chosen layouts."""

    def __init__(self, graph: Graph, chosen: Label) -> None:
        self.graph, self.chosen, self.other = graph, chosen, graph.empty()
        self.ranks = image_ranks(graph)
        self.now = {name: name for name in graph.inputs}
        self.made: dict[tuple[str, bool], str] = {}
        """(array, channels-last) -> its version in that layout."""

    def run(self) -> Graph:
        graph, other = self.graph, self.other
        for number, node in enumerate(graph.nodes):
            with other.at(node.origin):
                self.node(number, node)
        for name in graph.outputs[: len(graph.outputs) - graph.kept]:
            self.now[name] = self.version(name, is_last(graph.tensors[name]), exact=True)
        return without_dead_code(graph.finish(other, self.now))

    def node(self, number: int, node: Node) -> None:
        types = [self.graph.tensors[name] for name in (*node.inputs, *node.outputs)]
        if is_alias(node.op):
            self.append(node, node.op, tuple(self.now[name] for name in node.inputs))
        elif node.op.vendor and flexible(node.op, types, self.ranks):
            last = self.chosen.get(("call", number), any(map(is_last, types)))
            exact = not (isinstance(node.op, Geometry) and last)
            self.append(node, node.op, tuple(self.version(name, last, exact) for name in node.inputs))
        elif node.op.vendor:
            inputs = (self.version(name, is_last(self.graph.tensors[name]), exact=True) for name in node.inputs)
            self.append(node, node.op, tuple(inputs))
        else:
            self.kernel(number, node)
        for name in node.outputs:
            if name in self.chosen:
                self.now[name] = self.version(name, self.chosen[name])

    def append(self, node: Node, op: Operator, inputs: tuple[str, ...]) -> None:
        names = [n if n not in self.other.tensors else self.other.fresh(n) for n in node.outputs]
        self.other.append(op, inputs, names, node.origin)
        self.now.update(zip(node.outputs, names, strict=True))

    def version(self, name: str, last: bool, exact: bool = False) -> str:
        """The array in a layout, reordered once where it has the other one.

        Where both describe the same memory, only `exact` requires the label as well.
        """
        now = self.now[name]
        tensor = self.other.tensors[now]
        if (
            tensor.rank not in self.ranks
            or is_last(tensor) is last
            or tensor.order not in (None, channels_last(tensor.rank))
        ):
            return now
        equal = same_memory(tensor.shape, None, channels_last(tensor.rank))
        if equal and not exact:
            return now
        if (name, last) not in self.made:
            order = channels_last(tensor.rank) if last else tuple(range(tensor.rank))
            op = View(tensor.shape) if equal and not last else Reorder(order)
            (result,) = self.other.append(op, (now,))
            self.made[name, last] = result.name
        return self.made[name, last]

    def kernel(self, number: int, node: Node) -> None:
        """Emit a kernel, or an operator with generated code, that writes its results in the chosen layouts."""
        mode = self.chosen.get(("kernel", number), False)
        inputs = tuple(self.made.get((name, mode), self.now[name]) for name in node.inputs)
        op = node.op
        inferred = op.infer(*(self.other.tensors[i] for i in inputs))
        wrong = {
            position: order
            for position, (name, tensor) in enumerate(zip(node.outputs, inferred, strict=True))
            if not same_memory(tensor.shape, tensor.order, order := self.order(name))
        }
        if wrong:
            if not isinstance(op, Kernel):
                given = dict(zip(node.inputs, inputs, strict=True))  # an operand may occur twice
                op, _ = canonical(tuple(given), [Statement(op, node.inputs, node.outputs)], node.outputs)
                inputs = tuple(given.values())
            op = stored(op, wrong)
        self.append(node, op, inputs)

    def order(self, name: str) -> tuple[int, ...]:
        """The order of an array's dimensions: the chosen one, or its own where it cannot be chosen."""
        tensor = self.graph.tensors[name]
        if name not in self.chosen:
            return tensor.order or tuple(range(tensor.rank))
        return channels_last(tensor.rank) if self.chosen[name] else tuple(range(tensor.rank))


def stored(kernel: Kernel, orders: Mapping[int, tuple[int, ...]]) -> Kernel:
    """The kernel with some of its results written in other orders."""
    statements, yields = list(kernel.statements), list(kernel.yields)
    for position, order in orders.items():
        yields[position] = f"y{position}"
        statements.append(Statement(Reorder(order), (kernel.yields[position],), (yields[position],)))
    result, _ = canonical(kernel.arguments, statements, yields)
    return Kernel(result.arguments, result.statements, result.yields, kernel.updates)
