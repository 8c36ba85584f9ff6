"""ChunkUpdates: a large gradient is produced and consumed in chunks of rows, so it is never stored whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from daceml_train.analysis.aliases import memories
from daceml_train.analysis.chunks import UpdateChain, readers_of, update_chain_of
from daceml_train.analysis.memory import number
from daceml_train.analysis.traffic import traffic
from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.embedding import EmbeddingGrad
from daceml_train.passes.base import Pass
from daceml_train.tensor import Dim, simplify

HEADS = Matmul | EmbeddingGrad
"""The operators whose gradients may be computed in chunks."""


@dataclass(frozen=True)
class ChunkUpdates(Pass):
    """Compute a weight's gradient in chunks, and update the rows of each chunk before the next is computed.

        a, b -> [matmul] -> d;  d, p -> [update over p]
            =>     for rows r:  a[r], b -> [matmul] -> d[r];  d[r], p[r] -> [update over p[r]]

    The gradient takes the memory of one chunk, of `part` bytes, and its bytes stay in the cache: it is neither written
    to memory nor read from there. The same applies to the gradient of an embedding's table, which is zeros plus rows
    (index_add), and to a matmul plus such rows. Gradients of less than `min_bytes` stay whole. The update must be the
    only reader of the gradient, elementwise, and in place. Where other operators are between the two, the gradient
    moves after them.
    """

    level = "global_movement"
    targets = ("cpu",)
    part: int = 1 << 23
    min_bytes: int = 1 << 24

    def run(self, graph: Graph) -> Graph:
        found: dict[int, Parted] = {}
        for match in self.matches(graph):
            if match.refusal is None and isinstance(match.chain, UpdateChain):
                found.setdefault(
                    match.chain.update, match
                )  # an update of two parameters consumes one gradient in chunks
        return parted(graph, list(found.values())) if found else graph

    def matches(self, graph: Graph) -> list[Parted]:
        """One match per large gradient or other matmul, in graph order."""
        readers, memory = readers_of(graph), memories(graph)
        return [
            Parted(self, graph, node, update_chain_of(graph, position, readers, memory, apart=True))
            for position, node in enumerate(graph.nodes)
            if isinstance(node.op, HEADS) and node.op.chunks == 1 and self.large(graph, node)
        ]

    def large(self, graph: Graph, node: Node) -> bool:
        """Whether a gradient has known sizes and is large enough."""
        size = graph.tensors[node.outputs[0]].bytes
        return isinstance(size, int) and size >= max(self.min_bytes, 2 * self.part)


@dataclass(frozen=True, eq=False)
class Parted:
    """A gradient, and the chain to its update or the reason why there is none."""

    transformation: ChunkUpdates
    graph: Graph
    node: Node
    chain: UpdateChain | str

    @property
    def where(self) -> str:
        """The producer of the gradient, as the graph's text shows it."""
        return str(self.node)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The gradient."""
        return self.node.outputs

    @property
    def refusal(self) -> str | None:
        """Why the gradient stays whole, or None."""
        if isinstance(self.chain, str):
            return self.chain
        between = self.chain.update - self.chain.gradient - 1 - len(self.chain.views) - (self.chain.rows is not None)
        (name,), tensors = self.node.outputs, self.graph.tensors
        if between and sum(number(tensors[n].bytes) for n in self.node.inputs) > number(tensors[name].bytes):
            return f"%{name} would be computed later, and its larger operands would stay live until then"
        return None

    @cached_property
    def traffic(self) -> Dim:
        """Bytes that applying adds."""
        return simplify(traffic(self.apply()).bytes - traffic(self.graph).bytes)

    def apply(self) -> Graph:
        """The graph with the gradient in chunks. Raises `Refused` with the reason where it stays whole."""
        if reason := self.refusal:
            raise Refused(f"{self.transformation.name} at {self.node}: {reason}", where=str(self.node.origin))
        return parted(self.graph, [self])

    @property
    def parts(self) -> int:
        """The number of chunks."""
        tensor = self.graph.tensors[self.node.outputs[0]]
        rows, size = tensor.shape[0], tensor.bytes
        assert isinstance(rows, int) and isinstance(size, int)
        return min(-(-size // self.transformation.part), rows)


def parted(graph: Graph, found: Sequence[Parted]) -> Graph:
    """The graph with these gradients in chunks."""
    other = graph.copy()
    wanted = [float(position) for position in range(len(graph.nodes))]
    for match in found:
        chain = match.chain
        assert isinstance(chain, UpdateChain) and isinstance(match.node.op, HEADS)
        other.nodes[chain.gradient] = replace(match.node, op=replace(match.node.op, chunks=match.parts))
        members = sorted({chain.gradient, chain.gradient if chain.rows is None else chain.rows, *chain.views})
        for k, position in enumerate(members):
            wanted[position] = chain.update - 1 + (k + 1) / (len(members) + 1)
    other.nodes = [other.nodes[i] for i in sorted(range(len(wanted)), key=wanted.__getitem__)]
    other.applied = graph.applied + len(found)
    return other
