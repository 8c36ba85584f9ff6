"""ShardOptimizer: each rank updates a shard of every parameter (Rajbhandari et al., "ZeRO", 2020, stage 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from daceml_train.analysis.network import sent, sent_by
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.collective import AllGather, AllReduce, OwnShards, ReduceScatter, SumRows, shard_size
from daceml_train.ops.elementwise import Cast, Elementwise, Full
from daceml_train.ops.movement import Slice, View
from daceml_train.ops.operator import Value
from daceml_train.ops.optimizer import ParameterUpdate
from daceml_train.ops.reduction import Reduce
from daceml_train.passes.base import without_dead_code
from daceml_train.tensor import Dim, Tensor
from daceml_train.transformations.distribution.messages import DistributionPass, joined, positions

GRADIENT = "gradient of "
"""How the text of a sum begins that is a parameter's gradient."""


@dataclass(frozen=True)
class ShardOptimizer(DistributionPass):
    """Sum one shard of each gradient on each rank, and update that shard with that shard of the optimizer's state.

        g -> [all_reduce] -> [update p, state]
        =>  g -> [reduce_scatter] -> [update shard of p, shard of state] -> [all_gather] -> p

    A shard of n elements on N ranks has S = ceil(n / N); zeros beyond the end of an array fill the last ones. What is
    computed of gradients element by element is computed of shards, sums and extremes of shards become those of all
    ranks, and what else reads a gradient has the whole of it. State becomes an input [S]. In all N S instead of n
    elements are sent.
    """

    def run(self, graph: Graph) -> Graph:
        updates = _updates(graph)
        return without_dead_code(_Shards(graph, updates).run()) if updates else graph

    def promised(self, graph: Graph) -> Dim:
        total = sent(graph)
        updates = _updates(graph)
        for place, reduced in updates.items():
            if not reduced:  # the parameter alone is gathered
                p, ranks = graph.tensors[graph.nodes[place].inputs[0]], _ranks(graph)
                total = total + AllGather(ranks).network_bytes(Tensor((shard_size(p.shape, ranks),), p.dtype))
        nodes = {id(node): node for reduced in updates.values() for node in reduced}
        for node in nodes.values():
            assert isinstance(node.op, AllReduce)
            x = graph.tensors[node.inputs[0]]
            own = Tensor((shard_size(x.shape, node.op.ranks),), x.dtype)
            total = total - sent_by(graph, (node,)) + 2 * AllGather(node.op.ranks).network_bytes(own)
        return total


def _updates(graph: Graph) -> dict[int, list[Node]]:
    """The updates that read sums of gradients through operators on single elements, by their place in the graph, and
    these sums; none where the sum is one of rows, which all ranks have.
    """
    sums: dict[str, list[Node]] = {}
    rows: set[str] = set()
    found: dict[int, list[Node]] = {}
    for place, node in enumerate(graph.nodes):
        if isinstance(node.op, AllReduce) and node.op.of.startswith(GRADIENT):
            sums[node.outputs[0]] = [node]
        elif isinstance(node.op, Elementwise | Cast):
            shape = graph.tensors[node.outputs[0]].shape
            same = [name for name in node.inputs if graph.tensors[name].shape == shape]
            if any(name in sums for name in same):
                sums[node.outputs[0]] = [s for name in same for s in sums.get(name, ())]
            elif any(name in rows for name in same):
                rows.add(node.outputs[0])
        elif isinstance(node.op, SumRows) or (isinstance(node.op, View | Slice) and node.inputs[0] in rows):
            rows.add(node.outputs[0])
        elif isinstance(node.op, ParameterUpdate) and node.inputs[1] in sums:
            found[place] = sums[node.inputs[1]]
        elif isinstance(node.op, ParameterUpdate) and node.inputs[1] in rows and _state(graph, node):
            found[place] = []
    return found


def _ranks(graph: Graph) -> int:
    """The number of ranks that sum gradients."""
    return next(node.op.ranks for node in graph.nodes if isinstance(node.op, AllReduce | SumRows))


def _state(graph: Graph, update: Node) -> list[str]:
    """The state of an update that is as large as its parameter."""
    assert isinstance(update.op, ParameterUpdate)
    names = update.inputs[3 : len(update.inputs) - len(update.op.given)]
    return [name for name in names if graph.tensors[name].shape == graph.tensors[update.inputs[0]].shape != ()]


@dataclass
class _Shard:
    """This rank's shard [S] of an array of `shape`.

    `padding` is what it has beyond the end of the array, if that is known; `positive`: no element is negative.
    """

    value: Value
    shape: tuple[Dim, ...]
    padding: float | None = None
    positive: bool = False


@dataclass
class _Shards:
    """The graph on its way from whole gradients to shards."""

    graph: Graph
    updates: dict[int, list[Node]]
    other: Graph = field(init=False)
    names: dict[str, str] = field(default_factory=dict)
    shards: dict[str, _Shard] = field(default_factory=dict)
    own: dict[str, _Shard] = field(default_factory=dict)
    """The shards of arrays that all ranks have."""
    position: Iterator[int] = field(init=False)
    constants: dict[str, float] = field(default_factory=dict)
    ranks: int = 1

    def run(self) -> Graph:
        graph = self.graph
        reduced = {id(node) for nodes in self.updates.values() for node in nodes}
        self.position = positions(graph)
        self.ranks = _ranks(graph)
        scalars = [(n.outputs[0], n.op.value) for n in graph.nodes if isinstance(n.op, Full) and not n.op.shape]
        self.constants = {name: float(value) for name, value in scalars if not getattr(value, "free_symbols", ())}
        self._inputs()
        for node in graph.nodes:
            with self.other.at(node.origin):
                if id(node) in reduced:
                    self._scatter(node)
                elif not any(name in self.shards for name in node.inputs) or not self._on_shards(node):
                    self._on_whole(node)
        for name in graph.outputs:
            self._whole(name)
        return self._finish()

    def _inputs(self) -> None:
        """The inputs, of which state that updates alone read becomes shards."""
        graph, readers = self.graph, self.graph.readers()
        self.other = Graph(graph.name, applied=graph.applied + 1)
        updates = {id(graph.nodes[place]) for place in self.updates}
        state: set[str] = set()
        for place in self.updates:
            node = graph.nodes[place]
            for name in _state(graph, node):
                entry = graph.inputs.get(name)
                alone = all(id(r) in updates or isinstance(r.op, Elementwise) for r in readers[name])
                if entry is not None and entry.role is Role.state and alone:
                    state.add(name)
        for name, entry in graph.inputs.items():
            tensor = entry.tensor
            if name in state:
                tensor = Tensor((shard_size(tensor.shape, self.ranks),), tensor.dtype)
            value = self.other.input(name, tensor, entry.role, entry.path)
            if name in state:
                self.shards[name] = _Shard(value, entry.tensor.shape)

    def _scatter(self, node: Node) -> None:
        x = self.other.value(self.names.get(node.inputs[0], node.inputs[0]))
        size = shard_size(x.shape, self.ranks)
        flat, missing = x.view((x.tensor.size,)), size * self.ranks - int(x.tensor.size)
        if missing:
            (zeros,) = self.other.emit(Full(0.0, (missing,), x.dtype))
            flat = joined([flat, zeros], 0)
        assert isinstance(node.op, AllReduce)
        block = flat.view((self.ranks, size)).apply(ReduceScatter(self.ranks, node.op.position, node.op.of))
        self.shards[node.outputs[0]] = _Shard(block.view((size,)), x.shape, padding=0.0)

    def _on_shards(self, node: Node) -> bool:
        """The node on shards; False if it needs whole arrays."""
        op, tensors = node.op, self.graph.tensors
        if isinstance(op, Elementwise | Cast):
            shape = tensors[node.outputs[0]].shape
            if not shape or any(tensors[name].shape not in ((), shape) for name in node.inputs):
                return False
            operands = [self._shard(name) if tensors[name].shape else None for name in node.inputs]
            values = [self._scalar(n) if s is None else s.value for n, s in zip(node.inputs, operands, strict=True)]
            (result,) = self.other.emit(op, *values)
            known = [
                self.constants.get(n) if s is None else s.padding for n, s in zip(node.inputs, operands, strict=True)
            ]
            positive = _nonnegative(op, operands, node.inputs)
            self.shards[node.outputs[0]] = _Shard(result, shape, _padding(op, known), positive)
            return True
        if isinstance(op, ParameterUpdate):
            shape = tensors[node.inputs[0]].shape
            if not shape or any(tensors[name].shape not in ((), shape) for name in node.inputs):
                return False
            values = [self._shard(n).value if tensors[n].shape else self._scalar(n) for n in node.inputs]
            for name, result in zip(node.outputs, self.other.emit(op, *values), strict=True):
                if tensors[name].shape:
                    self.shards[name] = _Shard(result, shape)
                else:
                    self.names[name] = result.name
            return True
        if isinstance(op, Reduce) and len(op.dims) == len(tensors[node.inputs[0]].shape) and not op.keepdim:
            shard = self.shards[node.inputs[0]]
            if shard.padding == 0.0 and (op.kind == "sum" or (op.kind == "max" and shard.positive)):
                own = shard.value.apply(replace(op, dims=(0,))).view((1,))
                what = f"{op.kind} of {node.outputs[0]}"
                if op.kind == "sum":
                    total = own.apply(AllReduce(self.ranks, next(self.position), what)).view(())
                else:
                    total = own.apply(AllGather(self.ranks, next(self.position), what)).reduce("max", (0,))
                self.names[node.outputs[0]] = total.name
                return True
        return False

    def _scalar(self, name: str) -> Value:
        return self.other.value(self.names.get(name, name))

    def _shard(self, name: str) -> _Shard:
        """This rank's shard of an array, which all ranks may have."""
        if name in self.shards:
            return self.shards[name]
        if name not in self.own:
            whole = self.other.value(self.names.get(name, name))
            (own,) = self.other.emit(OwnShards(self.ranks, next(self.position)), whole)
            self.own[name] = _Shard(own, whole.shape, padding=0.0)
        return self.own[name]

    def _on_whole(self, node: Node) -> None:
        inputs = tuple(self._whole(name) for name in node.inputs)
        results = self.other.append(node.op, inputs, origin=node.origin)
        self.names |= {old: new.name for old, new in zip(node.outputs, results, strict=True)}

    def _whole(self, name: str) -> str:
        """The whole of an array, gathered from all ranks where each has a shard."""
        if name in self.names or name not in self.shards:
            return self.names.get(name, name)
        shard = self.shards[name]
        value, cast = shard.value, shard.value.dtype
        if not cast.is_float:
            raise AssertionError(f"{name} is a shard of {cast.name}, which is not gathered")
        flat = value.apply(AllGather(self.ranks, next(self.position), f"shards of {name}"))
        whole = flat.slice(0, 0, math.prod(int(n) for n in shard.shape)).view(shard.shape)
        self.names[name] = whole.name
        return whole.name

    def _finish(self) -> Graph:
        graph, state = self.graph, {n for n in self.graph.inputs if n in self.shards}
        writes: dict[str, str] = {}
        for target, name in graph.writes.items():
            if target in state:
                writes[target] = self._shard(name).value.name
            else:
                writes[target] = self._whole(name)
        found = graph.finish(self.other, self.names)
        found.writes = writes
        return found


def _nonnegative(op: Elementwise | Cast, shards: Sequence[_Shard | None], names: Sequence[str]) -> bool:
    """Whether no element of a result is negative."""
    positive = [shard is not None and shard.positive for shard in shards]
    if isinstance(op, Cast):
        return all(positive)
    if op.row.result == "bool" or op.kind in ("abs", "square", "sqrt"):
        return True
    return (all(positive) and op.kind in ("mul", "add", "maximum", "div")) or (
        op.kind == "mul" and names[0] == names[1]
    )


def _padding(op: Elementwise | Cast, known: Sequence[float | None]) -> float | None:
    """What a result is beyond the end of its array, from what its operands are there; None if that is not known."""
    if all(value is not None for value in known):
        found = float(op.evaluate(*(np.asarray(value, np.float32) for value in known))[0])
        return found if math.isfinite(found) else None
    if isinstance(op, Elementwise) and ((op.kind == "mul" and 0.0 in known) or (op.kind == "div" and known[0] == 0.0)):
        return 0.0
    return None


__all__ = ["ShardOptimizer"]
