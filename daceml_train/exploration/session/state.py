"""State: the graphs at one point of a session's history and their properties, each computed on demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from daceml_train.analysis.aliases import is_alias
from daceml_train.analysis.memory import Memory, memory, number
from daceml_train.analysis.traffic import Known, Traffic, traffic
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.passes.base import Candidate, Pass


@dataclass(frozen=True)
class Totals:
    """The costs of a graph: bytes moved, the peak of live bytes, operations, and launches."""

    bytes: int
    peak: int
    """Of arrays that the program produces; parameters, state and the batch come on top."""
    flops: int
    operators: int
    kernels: int
    calls: int


@dataclass(eq=False)
class State:
    """`forward` is the captured graph after passes of level `forward`, `graph` the training graph derived from it.

    `differentiated` says that a pass has run after differentiation, so that `forward` must not change any more.
    """

    forward: Graph
    graph: Graph
    differentiated: bool = False
    found: dict[Pass, Sequence[Candidate]] = field(default_factory=dict, repr=False)
    """Matches by pass, as far as they were requested."""
    known: Known = field(default_factory=Known, repr=False)
    """What is known of the state before, and holds for all operators that a step left as they were."""

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes and operations per node."""
        return traffic(self.graph, {}, self.known)

    @cached_property
    def _forward(self) -> tuple[Traffic, Known]:
        known = Known()
        return traffic(self.forward, {}, known), known

    def change(self, level: str, after: Graph) -> int:
        """Bytes that `after` moves more than the graph that passes of a level see; only what differs is counted."""
        before, known = self._forward if level == "forward" else (self.traffic, self.known)
        return number(traffic(after, {}, known.copy()).bytes) - number(before.bytes)

    def following(self, forward: Graph, graph: Graph, differentiated: bool) -> State:
        """The state with other graphs."""
        return State(forward, graph, differentiated, known=self.known.copy())

    @cached_property
    def memory(self) -> Memory:
        """The liveness of arrays."""
        return memory(self.graph)

    @cached_property
    def producers(self) -> dict[str, Node]:
        """Array name -> its producer in the training graph."""
        return self.graph.producers()

    @cached_property
    def forward_producers(self) -> dict[str, Node]:
        """Array name -> its producer in the forward graph."""
        return self.forward.producers()

    @property
    def bytes(self) -> int:
        """Bytes that the graph moves."""
        return number(self.traffic.bytes)

    @property
    def peak(self) -> int:
        """The peak of live bytes of its own arrays."""
        return self.memory.peak

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return number(self.traffic.flops)

    @cached_property
    def launches(self) -> tuple[int, int]:
        """Kernels and library calls that would run: operators that move bytes, with composites decomposed."""
        graph = leaves(self.graph).graph
        moving = zip(graph.nodes, traffic(graph, {}).entries, strict=True)
        run = [n for n, entry in moving if entry.bytes and not is_alias(n.op) and not isinstance(n.op, Full | Iota)]
        calls = sum(node.op.vendor for node in run)
        return len(run) - calls, calls

    @property
    def totals(self) -> Totals:
        """All totals."""
        return Totals(self.bytes, self.peak, self.flops, len(self.graph.nodes), *self.launches)

    def matches(self, transformation: Pass) -> Sequence[Candidate]:
        """The matches of a pass on the graph that it sees, computed once."""
        if transformation not in self.found:
            seen = self.forward if transformation.level == "forward" else self.graph
            self.found[transformation] = transformation.matches(seen)
        return self.found[transformation]
