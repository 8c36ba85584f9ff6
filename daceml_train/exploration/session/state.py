"""State: the graphs at one point of a session's history, with what is known of them, each computed when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from daceml_train.analysis.aliases import is_alias
from daceml_train.analysis.memory import Memory, memory, number
from daceml_train.analysis.traffic import Traffic, traffic
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.ops.elementwise import Full, Iota
from daceml_train.passes.base import Candidate, Pass


@dataclass(frozen=True)
class Totals:
    """What a graph costs: bytes moved, the most bytes that live at one time, operations, and what would run."""

    bytes: int
    peak: int
    """Of arrays that the program makes; parameters, state and the batch come on top."""
    flops: int
    operators: int
    kernels: int
    calls: int


@dataclass(eq=False)
class State:
    """`forward` is the captured graph after passes of level `forward`, `graph` the training graph made of it.

    `behind` says that a pass has run behind differentiation, so that `forward` must not change any more.
    """

    forward: Graph
    graph: Graph
    behind: bool = False
    found: dict[Pass, Sequence[Candidate]] = field(default_factory=dict, repr=False)
    """Matches by pass, as far as they were asked for."""

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes and operations per node."""
        return traffic(self.graph, {})

    @cached_property
    def memory(self) -> Memory:
        """What lives when."""
        return memory(self.graph)

    @cached_property
    def producers(self) -> dict[str, Node]:
        """Array name -> the node of the training graph that makes it."""
        return self.graph.producers()

    @cached_property
    def forward_producers(self) -> dict[str, Node]:
        """Array name -> the node of the forward graph that makes it."""
        return self.forward.producers()

    @property
    def bytes(self) -> int:
        """Bytes that the graph moves."""
        return number(self.traffic.bytes)

    @property
    def peak(self) -> int:
        """The most bytes of its own arrays that live at one time."""
        return self.memory.peak

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return number(self.traffic.flops)

    @cached_property
    def launches(self) -> tuple[int, int]:
        """Kernels and library calls that would run: operators of the graph, composites taken apart, that move bytes."""
        graph = leaves(self.graph).graph
        moving = zip(graph.nodes, traffic(graph, {}).entries, strict=True)
        run = [n for n, entry in moving if entry.bytes and not is_alias(n.op) and not isinstance(n.op, Full | Iota)]
        calls = sum(node.op.vendor for node in run)
        return len(run) - calls, calls

    @property
    def totals(self) -> Totals:
        """All of it."""
        return Totals(self.bytes, self.peak, self.flops, len(self.graph.nodes), *self.launches)

    def matches(self, transformation: Pass) -> Sequence[Candidate]:
        """The matches of a pass on the graph that it sees, computed once."""
        if transformation not in self.found:
            seen = self.forward if transformation.level == "forward" else self.graph
            self.found[transformation] = transformation.matches(seen)
        return self.found[transformation]
