"""ConcatenateInPlace: kernels write the operands of a concatenation directly into its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from daceml_train.analysis.aliases import readers_of_memory, roots
from daceml_train.analysis.concat_aliases import ConcatAlias, concat_alias, concat_aliases
from daceml_train.analysis.traffic import traffic
from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.control import ControlFlow
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.ops.movement import Concat
from daceml_train.ops.packed import has_product
from daceml_train.passes.base import Pass
from daceml_train.tensor import Dim, hint, same, same_shape, simplify


@dataclass(frozen=True)
class ConcatenateInPlace(Pass):
    """Let kernels write the operands of a concatenation directly into its result.

        x -> [f] -> a;  a, b -> [concat] -> y     =>     x -> [f] -> a in y;  b -> [concat] -> y

    Results of library calls and of the graph are copied as before, and so are operands of a second concatenation.
    Bytes: a is neither read nor written a second time.
    """

    level = "global_movement"

    def run(self, graph: Graph) -> Graph:
        joined = [n for n in graph.nodes if isinstance(n.op, Concat) and not n.op.placed]
        if not joined:
            return graph
        known = Known.of(graph)
        for node in in_turn(graph, joined):
            candidate = Joined(self, graph, node, known)
            if candidate.refusal is None:
                graph = candidate.apply()
                known.taken.update(concat_aliases(graph))
        return graph

    def matches(self, graph: Graph) -> list[Joined]:
        """The concatenations in the order of processing, refused ones included."""
        known = Known.of(graph)
        found = [n for n in graph.nodes if isinstance(n.op, Concat) and not n.op.placed]
        return [Joined(self, graph, node, known) for node in in_turn(graph, found)]


def in_turn(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Concatenations, large ones first: they save most, and an outer one determines where an inner one lies."""
    numbered = enumerate(nodes)
    return [n for _, n in sorted(numbered, key=lambda p: (-hint(graph.tensors[p[1].outputs[0]].bytes), -p[0]))]


@dataclass(frozen=True)
class Known:
    """Lookups of a graph; only `taken` changes when concatenations get operands in place."""

    producers: Mapping[str, Node]
    base: Mapping[str, str]
    readers: Mapping[str, Sequence[Node]]
    """Array that is no alias -> the nodes that read it, also through aliases."""
    visible: frozenset[str]
    taken: dict[str, ConcatAlias]

    @staticmethod
    def of(graph: Graph) -> Known:
        """The lookups of a graph."""
        base = roots(graph)
        readers = {name: [graph.nodes[i] for i in found] for name, found in readers_of_memory(graph, base).items()}
        visible = frozenset(base[name] for name in graph.results)
        return Known(graph.producers(), base, readers, visible, concat_aliases(graph))


@dataclass(frozen=True, eq=False)
class Joined:
    """A concatenation, and which of its operands can be written in place."""

    transformation: Pass
    graph: Graph
    node: Node
    known: Known

    @property
    def where(self) -> str:
        """The concatenation, as the graph's text shows it."""
        return str(self.node)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The result of the concatenation."""
        return self.node.outputs

    @cached_property
    def placed(self) -> tuple[int, ...]:
        """Positions of the operands that can be written in place."""
        return tuple(k for k, why in enumerate(self.reasons) if why is None)

    @property
    def refusal(self) -> str | None:
        """Why nothing can be written in place, or None."""
        return None if self.placed else self.reasons[0]

    @property
    def traffic(self) -> Dim:
        """Bytes that applying adds: operands in place are not copied, and constants beside them need not be stored."""
        producers = map(self.known.producers.get, self.node.inputs)
        if any(producer is not None and isinstance(producer.op, Full | Iota) for producer in producers):
            return simplify(traffic(self.apply()).bytes - traffic(self.graph).bytes)
        return simplify(sum((-2 * self.graph.tensors[self.node.inputs[k]].bytes for k in self.placed), start=0))

    def apply(self) -> Graph:
        """The graph with these operands in place. Raises `Refused` with the reason where there are none."""
        if reason := self.refusal:
            raise Refused(f"{self.transformation.name} at {self.node}: {reason}", where=str(self.node.origin))
        other, op = self.graph.copy(), self.node.op
        assert isinstance(op, Concat)
        position = next(i for i, n in enumerate(other.nodes) if n.outputs == self.node.outputs)
        other.nodes[position] = replace(self.node, op=replace(op, placed=self.placed))
        other.applied = self.graph.applied + 1
        return other

    @cached_property
    def reasons(self) -> list[str | None]:
        """Per operand, why it cannot be written in place, or None."""
        return [self.reason(position) for position in range(len(self.node.inputs))]

    def reason(self, position: int) -> str | None:
        """Why an operand cannot be written in place, or None."""
        graph, node, known = self.graph, self.node, self.known
        name = node.inputs[position]
        root = known.base[name]
        results = concat_alias(graph, known.producers, node, position, known.taken.get(node.outputs[0]))
        if results is None or results[0] != root or same(graph.tensors[name].size, 0):
            return f"%{name} is an alias whose strides do not exist in %{node.outputs[0]}"
        if not by_kernel(known.producers.get(root), root):
            return f"%{root} is not produced by a kernel in memory of its own"
        if has_product(known.producers[root].op):
            return f"%{root} is the result of a packed matmul, which is dense"
        if root in known.visible:
            return f"%{root} is a result of the graph"
        if root in known.taken or [known.base[i] for i in node.inputs].count(root) > 1:
            return f"%{root} already lies in a concatenation"
        dense = same_shape(results[1].strides, graph.tensors[root].strides)
        if not dense and any(n.op.vendor and not isinstance(n.op, Concat) for n in known.readers[root]):
            return f"a library call reads %{root}, which would not be dense"
        if not dense and any(has_product(n.op) for n in known.readers[root]):
            return f"a packed matmul reads %{root}, which would not be dense"
        return None


def by_kernel(producer: Node | None, name: str) -> bool:
    """Whether a generated kernel or another concatenation produces an array in memory of its own."""
    if producer is None or isinstance(producer.op, ControlFlow | Full | Iota):
        return False
    if isinstance(producer.op, Concat):
        return True
    if producer.op.vendor or producer.op.is_composite:
        return False
    return producer.outputs.index(name) not in dict(producer.op.updates)
