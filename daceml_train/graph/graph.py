"""Graph: a training step or model as operators over arrays in SSA form.

Every array is written once, by one node or as an input. State that a step mutates (parameters, running statistics,
optimizer state) is a pair in `writes`: the input's name and the name of its value after the step. Nodes are in
topological order. `daceml_train.sdfg.convert` converts a graph to an SDFG of library nodes and back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx
import sympy

from daceml_train.errors import Invalid
from daceml_train.graph.lanes import Lanes
from daceml_train.graph.networkx import to_networkx
from daceml_train.graph.node import SEED, Input, Node, Role
from daceml_train.graph.printer import show
from daceml_train.ops.operator import Operator, Origin, Value
from daceml_train.tensor import Tensor

__all__ = ["Graph", "Input", "Node", "Role"]


@dataclass
class Graph:
    """Operators over SSA arrays. Passes never edit nodes: they build another graph with `rebuild`."""

    name: str = "graph"
    inputs: dict[str, Input] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    writes: dict[str, str] = field(default_factory=dict)
    kept: int = 0
    """The number of trailing outputs that are saved for a backward graph, which accepts any memory order."""
    lanes: Lanes | None = None
    """How its operators may share the cores of a CPU; None: one after the other."""
    origin: Origin = Origin()
    """The origin of nodes emitted from now on; see `at`."""
    applied: int = field(default=0, compare=False)
    """The number of matches that passes applied on the way to this graph, for observers of a pipeline."""
    _counter: dict[str, int] = field(default_factory=dict, repr=False)

    # ---- building -----------------------------------------------------------------------------------------------
    def fresh(self, base: str) -> str:
        """An unused array name: `base`, or `base_1`, `base_2`, ..."""
        if base not in self.tensors and base != SEED:
            return base
        count = self._counter.get(base, 0)
        while True:
            count += 1
            if f"{base}_{count}" not in self.tensors:
                self._counter[base] = count
                return f"{base}_{count}"

    def input(self, name: str, tensor: Tensor, role: Role = Role.input, path: str = "") -> Value:
        """Declare an input array. Raises `Invalid` if the name is taken."""
        if name in self.tensors:
            raise Invalid(f"array {name!r} exists already in graph {self.name!r}")
        self.inputs[name] = Input(tensor, role, path)
        self.tensors[name] = tensor
        return Value(self, name, tensor)

    def emit(self, op: Operator, *operands: Value) -> tuple[Value, ...]:
        """Append `op`; the results are named after its label."""
        return self.append(op, tuple(v.name for v in operands))

    def append(
        self, op: Operator, inputs: tuple[str, ...], outputs: Sequence[str] = (), origin: Origin | None = None
    ) -> tuple[Value, ...]:
        """Append `op` on named arrays, with the given result names, if any."""
        for name in inputs:
            if name not in self.tensors:
                raise Invalid(f"{op.label} reads {name!r}, which no node of graph {self.name!r} produces")
        types = op.infer(*(self.tensors[i] for i in inputs))
        results: list[Value] = []
        for position, tensor in enumerate(types):
            base = op.label.rsplit(".", 1)[-1]
            name = outputs[position] if outputs else self.fresh(base)
            if name in self.tensors:
                raise Invalid(f"array {name!r} would be written twice, the second time by {op.label}")
            self.tensors[name] = tensor
            results.append(Value(self, name, tensor))
        self.nodes.append(Node(op, inputs, tuple(v.name for v in results), origin or self.origin))
        return tuple(results)

    def value(self, name: str) -> Value:
        """The array named `name`, as an operand for further nodes."""
        return Value(self, name, self.tensors[name])

    def output(self, *values: Value) -> None:
        """Declare results of the graph, in order."""
        self.outputs += [v.name for v in values]

    def write(self, target: str, value: Value) -> None:
        """Declare that input `target` has the value `value` after the step."""
        if target not in self.inputs:
            raise Invalid(f"{target!r} is written but is not an input of graph {self.name!r}")
        self.writes[target] = value.name

    @contextlib.contextmanager
    def at(self, origin: Origin) -> Iterator[None]:
        """Nodes emitted inside carry `origin`."""
        before, self.origin = self.origin, origin
        try:
            yield
        finally:
            self.origin = before

    # ---- reading ------------------------------------------------------------------------------------------------
    def producers(self) -> dict[str, Node]:
        """Array name -> the node that produces it (inputs are absent)."""
        return {name: node for node in self.nodes for name in node.outputs}

    def readers(self) -> dict[str, list[Node]]:
        """Array name -> nodes that read it, in order, each once."""
        readers: dict[str, list[Node]] = {name: [] for name in self.tensors}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers[name].append(node)
        return readers

    @property
    def results(self) -> list[str]:
        """Every array that is visible after the step: outputs and written values."""
        return [*self.outputs, *self.writes.values()]

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The size symbols of the inputs."""
        return {s for i in self.inputs.values() for s in i.tensor.symbols}

    def to_networkx(self) -> nx.DiGraph:
        """The graph as NetworkX's: a node per operator and per input, an edge per pair of which one reads the other.

        An operator's node is called by its first result, an input's by its name; see `graph.networkx` for attributes.
        """
        return to_networkx(self)

    # ---- rebuilding ---------------------------------------------------------------------------------------------
    def empty(self, name: str = "") -> Graph:
        """A graph with the same inputs and nothing else."""
        other = Graph(name or self.name, applied=self.applied)
        for key, entry in self.inputs.items():
            other.input(key, entry.tensor, entry.role, entry.path)
        return other

    def with_inputs(self, changed: Mapping[str, Input]) -> Graph:
        """The graph with some inputs in another memory order; all other types are inferred again."""
        other = Graph(self.name)
        for name, entry in self.inputs.items():
            entry = changed.get(name, entry)
            other.input(name, entry.tensor, entry.role, entry.path)
        for node in self.nodes:
            other.append(node.op, node.inputs, node.outputs, node.origin)
        return self.finish(other, {})

    def finish(self, other: Graph, names: dict[str, str]) -> Graph:
        """Add this graph's outputs and writes to `other`; `names` maps arrays of this graph to those of `other`."""
        other.outputs, other.kept = [names.get(n, n) for n in self.outputs], self.kept
        other.writes = {target: names.get(n, n) for target, n in self.writes.items()}
        other.lanes = None if self.lanes is None else self.lanes.renamed(names)
        return other

    def copy(self) -> Graph:
        """An independent graph with the same nodes."""
        inputs, tensors, writes = dict(self.inputs), dict(self.tensors), dict(self.writes)
        outputs = list(self.outputs)
        return Graph(
            self.name, inputs, list(self.nodes), tensors, outputs, writes, self.kept, self.lanes, applied=self.applied
        )

    def __str__(self) -> str:
        return show(self)
