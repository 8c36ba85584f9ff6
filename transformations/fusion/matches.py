"""A pair of groups that a fusion pass would join, as a match of its own."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.tensor import Dim, simplify
from daceml_train.transformations.fusion.grouping import Group, Grouping


@dataclass(frozen=True, eq=False)
class FusionMatch:
    """Two groups, in topological order, that would be one kernel. The grouping is that of the graph, and only read."""

    transformation: Pass
    grouping: Grouping
    first: Group
    second: Group
    limit: int

    @property
    def where(self) -> str:
        """Both groups, by the arrays that they make and the operators that end them."""
        groups = ((self.grouping.made(g)[-1], g.items[-1].op.label) for g in (self.first, self.second))
        return " with ".join(f"%{name} ({label})" for name, label in groups)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays of the graph that both groups make."""
        return (*self.grouping.made(self.first), *self.grouping.made(self.second))

    @property
    def refusal(self) -> str | None:
        """Why the groups cannot be one kernel, or None."""
        return self.grouping.refusal(self.first, self.second, self.limit)

    @property
    def traffic(self) -> Dim:
        """Bytes that joining adds (negative: saves)."""
        apart = self.grouping.cost(self.first) + self.grouping.cost(self.second)
        return simplify(self.grouping.cost(self.first, self.second) - apart)

    def apply(self) -> Graph:
        """The graph with these two groups joined. Raises `Refused` where they cannot be."""
        if reason := self.refusal:
            raise Refused(f"{self.transformation.name} at {self.where}: {reason}", where=str(self.second.origin))
        grouping = Grouping(self.grouping.graph)
        first, second = (grouping.producer[g.items[0].outputs[0]].group for g in (self.first, self.second))
        assert first is not None and second is not None
        return grouping.build(grouping.join(first, second))
