"""HoistMatmuls: the matmuls of an array's slices with one matrix become one matmul of the whole array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.movement import Slice
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Pass, Uses, without_dead_code
from daceml_train.tensor import Dim, product, same, same_shape
from daceml_train.transformations.intra_operator.density import dense


@dataclass(frozen=True)
class HoistMatmuls(Pass):
    """Multiply a whole sequence by a weight at once, before the loop that reads it step by step.

        x -> [slice t] -> [matmul w] -> p_t, for every t     =>     x -> [matmul w] -> p -> [slice t] -> p_t

    The pass runs before differentiation, so the gradients of x and w are one matmul each as well.
    Bytes: for n slices, w is read once instead of n times; all else is unchanged. At least `least` matmuls are joined.
    """

    level = "forward"
    least: int = 2

    def run(self, graph: Graph) -> Graph:
        families = [f for f in self.matches(graph) if f.refusal is None]
        return hoisted(graph, families) if families else graph

    def matches(self, graph: Graph) -> list[Family]:
        """The families of matmuls that share a matrix, refused ones included."""
        uses = Uses.of(graph)
        found: dict[tuple[str, str, int, bool], list[Member]] = {}
        for node in graph.nodes:
            member = member_of(uses, node)
            if member is not None:
                found.setdefault((member.x, node.inputs[1], member.cut.dim, bool(member.miss)), []).append(member)
        return [Family(self, uses, tuple(members)) for members in found.values() if len(members) >= self.least]


@dataclass(frozen=True)
class Member:
    """A matmul whose left operand is a slice of `x`, viewed as a matrix of x's rows."""

    node: Node
    cut: Slice
    x: str
    miss: str = ""
    """Why it is almost a member."""


@dataclass(frozen=True, eq=False)
class Family:
    """Matmuls of the slices of one array with one matrix: what `HoistMatmuls` joins, or why it does not."""

    transformation: Pass
    uses: Uses
    members: Sequence[Member]

    @property
    def where(self) -> str:
        """The sliced array, the matrix, and how many matmuls there are."""
        node = self.members[0].node
        return f"{len(self.members)} matmuls of slices of %{self.members[0].x} with %{node.inputs[1]}"

    @property
    def arrays(self) -> tuple[str, ...]:
        """The results of the matmuls."""
        return tuple(name for member in self.members for name in member.node.outputs)

    @property
    def refusal(self) -> str | None:
        """Why the matmuls must not be joined, or None."""
        if miss := self.members[0].miss:
            return miss
        x = self.members[0].x
        size = self.uses.graph.tensors[x].shape[self.members[0].cut.dim]
        reached: Dim = 0
        for start, stop in sorted((member.cut.start, member.cut.stop) for member in self.members):
            if start != reached:
                return f"the slices of %{x} overlap or leave gaps: rows would be multiplied twice or for nothing"
            reached = stop
        if not same(reached, size):
            return f"the slices of %{x} leave gaps: rows would be multiplied for nothing"
        return None if dense(self.uses, x) else f"%{x} would have to be copied to view it as one matrix"

    @property
    def traffic(self) -> Dim:
        """Bytes that joining adds (negative: saves)."""
        return -(len(self.members) - 1) * self.uses.bytes(self.members[0].node.inputs[1])

    def apply(self) -> Graph:
        """The graph with these matmuls joined. Raises `Refused` with the reason where that is not legal."""
        if reason := self.refusal:
            raise Refused(f"{self.transformation.name} of {self.where}: {reason}")
        return hoisted(self.uses.graph, [self])


def member_of(uses: Uses, node: Node) -> Member | None:
    """`node` as a matmul of a slice, or None."""
    if not isinstance(node.op, Matmul) or uses.graph.tensors[node.outputs[0]].rank != 2:
        return None
    producer = uses.producers.get(node.inputs[0])
    if producer is not None and isinstance(producer.op, ViewOp):
        producer = uses.producers.get(producer.inputs[0])
    if producer is None or not isinstance(producer.op, Slice):
        return None
    (x,), cut = producer.inputs, producer.op
    sizes, matrix = uses.graph.tensors[x].shape, uses.graph.tensors[node.inputs[0]].shape
    if not (cut.dim < len(sizes) - 1 and same_shape(matrix[-1:], sizes[-1:])):
        return None
    where = f" (at {producer.origin})" if str(producer.origin) else ""
    if cut.step != 1:
        return Member(node, cut, x, f"%{producer.outputs[0]} takes rows of %{x} in steps of {cut.step}{where}")
    if not (isinstance(cut.start, int) and isinstance(cut.stop, int)):
        return Member(node, cut, x, f"where %{producer.outputs[0]} is cut from %{x} depends on a size{where}")
    return Member(node, cut, x)


def hoisted(graph: Graph, families: Sequence[Family]) -> Graph:
    """The graph with the matmuls of each family joined, at the position of the first of them."""
    family_of = {member.node.outputs[0]: (family, member) for family in families for member in family.members}
    joint: dict[int, Value] = {}
    other = graph.empty()
    other.applied = graph.applied + len(families)
    values = {name: other.value(name) for name in graph.inputs}
    for node in graph.nodes:
        if node.outputs[0] not in family_of:
            names = [name if name not in other.tensors else other.fresh(name) for name in node.outputs]
            results = other.append(node.op, tuple(values[i].name for i in node.inputs), names, node.origin)
            values.update(zip(node.outputs, results, strict=True))
            continue
        family, member = family_of[node.outputs[0]]
        with other.at(node.origin):
            if id(family) not in joint:
                x, w = values[member.x], values[node.inputs[1]]
                y = x.view((product(x.shape[:-1]), x.shape[-1])) @ w
                joint[id(family)] = y.view((*x.shape[:-1], w.shape[-1]))
            cut = member.cut
            part = joint[id(family)].slice(cut.dim, cut.start, cut.stop)
            values[node.outputs[0]] = part.view(graph.tensors[node.outputs[0]].shape)
    return without_dead_code(graph.finish(other, {old: value.name for old, value in values.items()}))
