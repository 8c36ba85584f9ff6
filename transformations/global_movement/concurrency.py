"""Concurrency: independent launches side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.lanes import Lanes
from daceml_train.passes.base import Pass


@dataclass(frozen=True)
class Concurrency(Pass):
    """Let launches that do not depend on each other run side by side on the cores of a CPU.

        [a] -> [b] -> [c],  [d]     =>     lane 0: [a] -> [b] -> [c],  lane 1: [d]

    The pass writes onto the graph what is allowed. The schedule follows from seconds that are measured in the first
    calls, and launches run in order where that is not slower. `lanes` is the most launches at once (0: one per
    thread, 1: in order); `memory` limits the arena, as a multiple of what it takes in order; `threads` pins the number
    of threads of operators, named by an array that they produce; those in `alone` run beside no other. No byte is
    moved more or less, and no bit of a result changes.
    """

    level = "global_movement"
    targets = ("cpu",)
    lanes: int = 0
    memory: float = 1.1
    threads: tuple[tuple[str, int], ...] = ()
    alone: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.lanes < 0 or self.memory < 1.0 or any(count < 1 for _, count in self.threads):
            raise Invalid(f"{self}: lanes is at least 0, memory at least 1, and a number of threads at least 1")

    def run(self, graph: Graph) -> Graph:
        lanes = Lanes(self.lanes, self.memory, self.threads, self.alone)
        if graph.lanes == lanes:
            return graph
        known = graph.producers()
        for name in (*(name for name, _ in self.threads), *self.alone):
            if name not in known:
                raise Invalid(f"concurrency names {name!r}, which no operator of graph {graph.name!r} produces")
        return replace(graph.copy(), lanes=lanes, applied=graph.applied + 1)
