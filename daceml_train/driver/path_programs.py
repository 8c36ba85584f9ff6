"""The programs of a path: one for each look at a value, and one for the rest, the gradients and the update.

The graph of the whole path is divided at the looks. What a look computed with a library call, or what the next
operators read, is an output of its program and an input of the later ones; all else that they need is rematerialized.
Values are known by what computes them, so paths with a common beginning share the programs of their looks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from daceml_train.analysis.reachability import ancestors, required
from daceml_train.autodiff.partition import FREE, POINTWISE
from daceml_train.driver.bound_optimizer import in_strides
from daceml_train.driver.goals import StepGoal, compile_differentiable
from daceml_train.driver.settings import Settings
from daceml_train.frontends.torch.paths.stitch import PathGraph, as_tensor
from daceml_train.frontends.torch.paths.trie import Call, Number
from daceml_train.graph.graph import Graph, Role
from daceml_train.lowering.device import CPU
from daceml_train.ops.gradient import Detach
from daceml_train.ops.reduction import Mean, Reduce, Variance
from daceml_train.passes.base import without_dead_code

_FREE = (*FREE, Detach)
"""Operators that move no bytes."""
_CHEAP = (*_FREE, *POINTWISE, Reduce, Mean, Variance)
"""Operators that cost no more than a program of their own does."""


@dataclass
class PathGoal(StepGoal):
    """A whole step, of which earlier programs of the same call have computed the values `saved`."""

    saved: tuple[str, ...] = ()
    from_capture = False

    @property
    def description(self) -> str:
        return f"{super().description} saved={self.saved}"

    def extend(self, graph: Graph) -> Graph:
        self.joint.graph = given(super().extend(graph), self.saved)
        return self.joint.graph


def given(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph with some of its values as inputs."""
    taken = set(names) - set(graph.outputs)
    other = graph.copy()
    other.nodes = [node for node in graph.nodes if not taken.issuperset(node.outputs)]
    for node in graph.nodes:
        if taken.issuperset(node.outputs):
            for name in node.outputs:
                entry = other.tensors.pop(name)
                other.input(name, entry, Role.saved)
    return _used(without_dead_code(other), taken)


def _used(graph: Graph, optional: set[str]) -> Graph:
    """The graph without unused inputs among `optional`."""
    read = {name for node in graph.nodes for name in node.inputs} | {*graph.outputs, *graph.writes.values()}
    for name in optional - read:
        if name in graph.inputs:
            del graph.inputs[name], graph.tensors[name]
    return graph


@dataclass
class Values:
    """Numbers for values: equal ones for what the same operators compute of the same inputs."""

    known: dict[Any, int] = field(default_factory=dict)

    def of(self, graph: Graph, sources: Mapping[str, Any]) -> dict[str, int]:
        """The number of each value of a graph."""
        numbers = {name: self._number(("input", _key(sources[name]))) for name in graph.inputs if name in sources}
        for node in graph.nodes:
            operands = tuple(numbers[name] for name in node.inputs)
            for position, name in enumerate(node.outputs):
                numbers[name] = self._number((repr(node.op), operands, position))
        return numbers

    def _number(self, key: Any) -> int:
        return self.known.setdefault(key, len(self.known))


def _key(source: Any) -> Any:
    return source if isinstance(source, int) else id(source)


class LookProgram:
    """Computes a value that user code looks at, and what later programs of the call need of it."""

    def __init__(
        self,
        graph: Graph,
        name: str,
        numbers: Mapping[str, int],
        sources: Mapping[str, Any],
        earlier: Sequence[LookProgram],
        options: Settings,
        also: Sequence[str] = (),
    ) -> None:
        available = {number: program for program in earlier for number in program.saved}
        looked = [name, *also]
        whole = ancestors(graph.nodes, looked)
        cut = [n for n in graph.tensors if n in whole and numbers.get(n) in available and n not in graph.inputs]
        own = graph.copy()
        own.name, own.outputs, own.writes = "look", looked, {}
        own = given(own, cut)
        own.outputs = [*looked, *_worth_keeping(graph, own, looked)]
        own = _used(own, set(own.inputs))
        self.saved: dict[int, int] = {numbers[n]: position for position, n in enumerate(own.outputs)}
        """Positions of its outputs by the values' numbers."""
        self.inputs = [numbers[n] if n in cut else sources[n] for n in own.inputs]
        self.from_earlier = [n in cut for n in own.inputs]
        self.needs = list({id(p): p for n in own.inputs if n in cut for p in [available[numbers[n]]]}.values())
        compiled = compile_differentiable(own, (), (), options, CPU)
        self.records, self.executable = compiled.records, compiled.forward
        position = {n: i for i, n in enumerate(own.inputs)}
        self.plan = self.executable.plan([])
        entries = self.executable.program.inputs
        self.order = [position[entry.name] for entry in entries]
        self.strides = [tuple(self.plan.value(s) for s in entry.strides) for entry in entries]
        self.addresses = (ctypes.c_void_p * len(entries))()

    def run(self, values: CallValues) -> None:
        """Compute what is looked at and what is saved, and note it in `values`."""
        for program in self.needs:
            if id(program) not in values.ran:
                program.run(values)
        values.ran.add(id(self))
        alive = []
        for place, (index, strides) in enumerate(zip(self.order, self.strides, strict=True)):
            source = self.inputs[index]
            tensor = values.saved[source] if self.from_earlier[index] else values.tensor(source)
            alive.append(tensor := in_strides(tensor, strides))
            self.addresses[place] = tensor._cdata
        outputs = self.plan.run_addresses(self.addresses)
        for number, place in self.saved.items():
            values.saved[number] = outputs[place]


@dataclass(frozen=True)
class Look:
    """A look at a value: the program that computes it, and the value's number."""

    program: LookProgram
    number: int
    generation: int
    """How many times numbers had become inputs when it was compiled."""

    def value(self, values: CallValues) -> Tensor:
        """The value in this call."""
        if id(self.program) not in values.ran:
            self.program.run(values)
        return values.saved[self.number]


def nearly_computed(graph: Graph, name: str, others: Sequence[str], known: Callable[[str], bool]) -> list[str]:
    """Those of the values `others` that hardly cost more once `name` is computed, from inputs that are known."""
    before = ancestors(graph.nodes, [name])
    found = []
    for other in others:
        nodes, read = required(graph.nodes, [other])
        more = [node for node in nodes if before.isdisjoint(node.outputs)]
        cheap = all(isinstance(node.op, _CHEAP) for node in more)
        if cheap and all(known(n) for n in read if n in graph.inputs):
            found.append(other)
    return found


def _worth_keeping(graph: Graph, own: Graph, looked: Sequence[str]) -> list[str]:
    """What later programs take from the one that computes `own`: results of library calls, and what is read next."""
    inside = {n for node in own.nodes for n in node.outputs}
    read_later = {n for node in graph.nodes if inside.isdisjoint(node.outputs) for n in node.inputs}
    kept = []
    for node in own.nodes:
        free = isinstance(node.op, _FREE)
        if free or (isinstance(node.op, POINTWISE) and read_later.isdisjoint(node.outputs)):
            continue
        kept += [n for n in node.outputs if n not in looked]
    return kept


@dataclass
class CallValues:
    """The inputs of programs in one call."""

    call: Call
    saved: dict[int, Tensor] = field(default_factory=dict)
    """What programs of this call have computed, by the values' numbers."""
    ran: set[int] = field(default_factory=set)
    numbers: dict[Number, Tensor] = field(default_factory=dict)

    def tensor(self, source: Any) -> Tensor:
        """An operand of the call, a number, or what the model holds."""
        if isinstance(source, int):
            copy = self.call.copies.get(source) if self.call.copies else None
            return self.call.operands[source] if copy is None else copy
        if isinstance(source, Tensor):
            return source
        if source not in self.numbers:
            self.numbers[source] = as_tensor(self.call.numbers[source])
        return self.numbers[source]


def divided(found: PathGraph, options: Settings) -> PathGraph:
    """The path's graph after the passes on forward graphs, with all that user code looks at as outputs that stay."""
    graph = found.captured.graph.copy()
    graph.outputs = [*graph.outputs, *found.looked]
    graph = options.pipeline.run(graph, ("forward",))
    end = 1 + found.kept
    looked = graph.outputs[end:]
    graph.outputs = graph.outputs[:end]
    return replace(found, captured=replace(found.captured, graph=graph), looked=looked)


class _WithoutGraph(torch.autograd.Function):
    """What user code keeps of a step with its gradient: as in eager execution, a second backward pass is an error."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time: daceml_train has run the step that computed it"
        )


_SOURCE = torch.zeros(0, requires_grad=True)
"""From which such tensors have their gradient."""


_APPLY: Callable[[Tensor, Tensor], Tensor] = _WithoutGraph.apply


def without_graph(value: Tensor) -> Tensor:
    """A value that seems to have a gradient, and whose backward pass is an error."""
    return _APPLY(value, _SOURCE)
