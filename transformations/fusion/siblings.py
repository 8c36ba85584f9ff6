"""Fusion of operators that read the same array (horizontal fusion)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import sympy

from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.tensor import Dim
from daceml_train.transformations.fusion.grouping import Group, Grouping
from daceml_train.transformations.fusion.matches import FusionMatch

SMALL = 8
"""An array is this many times as large as results that are small beside it."""


@dataclass(frozen=True)
class FuseSiblings(Pass):
    """Join kernels over the same domain that read the same array, so it is read once.

        x -> [f] -> y,  x -> [g] -> z      =>      x -> [f; g] -> y, z

    `window` bounds the distance between the kernels in groups: hoisting one over many others would extend the live
    range of its result. The distance may be `far` if the results of the later kernel are small beside the shared array,
    as sums are, and it could run where the earlier one does. The shared array must account for at least `share` of the
    smaller kernel's bytes.
    """

    level = "fusion"
    limit: int = 96
    window: int = 16
    share: float = 0.2
    far: int = 1024

    def run(self, graph: Graph) -> Graph:
        grouping = Grouping(graph)
        for group in grouping.groups():
            while (sibling := self.sibling(grouping, group)) is not None:
                group = grouping.join(sibling, group)
        return grouping.build()

    def matches(self, graph: Graph) -> list[FusionMatch]:
        """The nearest sibling of each kernel that has one."""
        grouping = Grouping(graph)
        pairs = ((self.sibling(grouping, group), group) for group in grouping.groups())
        return [FusionMatch(self, grouping, first, second, self.limit) for first, second in pairs if first is not None]

    def joined(self, graph: Graph, names: Collection[str], apart: Collection[str]) -> Graph:
        """The graph with each kernel that produces one of `names` joined to its nearest sibling, earlier or later.

        Kernels that produce one of `apart` are left unchanged.
        """
        grouping = Grouping(graph)
        for group in grouping.groups():
            if any(name in names for item in group.items for name in item.outputs):
                if (earlier := self.sibling(grouping, group, apart=apart)) is not None:
                    grouping.join(earlier, group)
                elif (later := self.sibling(grouping, group, later=True, apart=apart)) is not None:
                    grouping.join(group, later)
        return grouping.build() if grouping.applied else graph

    def sibling(
        self, grouping: Grouping, group: Group, later: bool = False, apart: Collection[str] = ()
    ) -> Group | None:
        """The nearest earlier kernel (or the nearest later one) that shares an array with `group` and may join it.

        Kernels that produce one of `apart` may not.
        """
        if not group.fusible:
            return None
        sign = -1 if later else 1
        large = SMALL * magnitude(grouping.stored(group))
        ready = max((g.position for g in grouping.predecessors(group)), default=-1)
        found: dict[Group, set[str]] = {}
        for name in grouping.reads(group):
            base = grouping.source(name)[0]
            far = 0 if later or magnitude(grouping.tensors[base].bytes) < large else self.far
            for reader in grouping.consumers(base):
                other = reader.group
                if other is None or other is group or not other.fusible:
                    continue
                distance = sign * (group.position - other.position)
                if 0 < distance <= self.window or (0 < distance <= far and ready <= other.position):
                    found.setdefault(other, set()).add(base)
        own = magnitude(grouping.cost(group)) if found else 0.0
        for other in sorted(found, key=lambda g: -sign * g.position):
            if apart and any(name in apart for item in other.items for name in item.outputs):
                continue
            shared = magnitude(grouping.bytes(found[other]))
            worth = shared >= self.share * own or shared >= self.share * magnitude(grouping.cost(other))
            pair = (group, other) if later else (other, group)
            if worth and grouping.refusal(*pair, self.limit) is None:
                return other
        return None


def magnitude(size: Dim) -> float:
    """A number for comparing sizes with symbols: every symbol counts as 32."""
    if isinstance(size, int):
        return float(size)
    return float(sympy.sympify(size).subs(dict.fromkeys(size.free_symbols, 32)))
