"""The match of a fusion pass: a pair of groups that it would join."""

from __future__ import annotations

from dataclasses import dataclass

from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.tensor import Dim, simplify
from daceml_train.transformations.fusion.grouping import Group, Grouping


@dataclass(frozen=True, eq=False)
class FusionMatch:
    """Two groups, in topological order, that would become one kernel. The grouping is shared and not changed."""

    transformation: Pass
    grouping: Grouping
    first: Group
    second: Group
    limit: int

    @property
    def where(self) -> str:
        """Both groups, by the arrays that they produce and their last operators."""
        groups = ((self.grouping.made(g)[-1], g.items[-1].op.label) for g in (self.first, self.second))
        return " with ".join(f"%{name} ({label})" for name, label in groups)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays of the graph that the groups produce."""
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
