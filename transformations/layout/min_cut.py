"""The cheapest assignment of two labels to many variables with pairwise costs, as a minimum cut.

Exact and near-linear in practice. Source: Greig, Porteous, Seheult, "Exact maximum a posteriori estimation for binary
images", J. R. Statist. Soc. B 51 (1989); for the costs that a cut can express: Kolmogorov, Zabih, "What energy
functions can be minimized via graph cuts?", PAMI 26 (2004).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

LARGEST = 1 << 28
"""Capacities are 32-bit integers: finite costs are scaled so that their sum is at most this."""


@dataclass
class Assignment:
    """Costs of labeling variables `True` or `False`; a variable is created when it is first named."""

    number: dict[Hashable, int] = field(default_factory=dict)
    edges: dict[tuple[int, int], float] = field(default_factory=dict)
    forbidden: set[tuple[int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.number[_TRUE], self.number[_FALSE] = 0, 1

    def cost(self, variable: Hashable, label: bool, amount: float) -> None:
        """Labeling `variable` with `label` costs `amount`."""
        if label:
            self._edge(variable, _FALSE, amount)
        else:
            self._edge(_TRUE, variable, amount)

    def unless(self, true: Hashable, false: Hashable, amount: float) -> None:
        """`true` being True while `false` is False costs `amount`."""
        self._edge(true, false, amount)

    def apart(self, a: Hashable, b: Hashable, amount: float) -> None:
        """Different labels cost `amount`."""
        self._edge(a, b, amount)
        self._edge(b, a, amount)

    def implies(self, a: Hashable, b: Hashable) -> None:
        """Where `a` is True, `b` must be."""
        self.forbidden.add((self._of(a), self._of(b)))

    def equal(self, a: Hashable, b: Hashable) -> None:
        """Both must have one label."""
        self.implies(a, b)
        self.implies(b, a)

    def fix(self, variable: Hashable, label: bool) -> None:
        """`variable` must have this label."""
        if label:
            self.implies(_TRUE, variable)
        else:
            self.implies(variable, _FALSE)

    def _of(self, variable: Hashable) -> int:
        return self.number.setdefault(variable, len(self.number))

    def _edge(self, a: Hashable, b: Hashable, amount: float) -> None:
        if amount > 0:
            key = self._of(a), self._of(b)
            self.edges[key] = self.edges.get(key, 0.0) + amount

    def solve(self) -> tuple[dict[Hashable, bool], float]:
        """A cheapest assignment and its cost, to the precision of whole units of the scale."""
        total = sum(self.edges.values())
        unit = max(1.0, total / LARGEST)
        capacity = {key: max(1, round(amount / unit)) for key, amount in self.edges.items()}
        endless = sum(capacity.values()) + 1
        capacity.update(dict.fromkeys(self.forbidden, endless))
        if not capacity:
            return {}, 0.0
        # Imported here: SciPy takes memory in every process that imports it, and a warm start needs none of it.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        rows, columns = zip(*capacity, strict=True)
        values = np.fromiter(capacity.values(), np.int32)
        network = csr_array((values, (rows, columns)), shape=(len(self.number),) * 2)
        flow = maximum_flow(network, 0, 1)
        left = network - flow.flow
        left.data[left.data < 0] = 0
        left.eliminate_zeros()
        reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
        return {name: at in reached for name, at in self.number.items()}, flow.flow_value * unit


class _End:
    """Source and sink: no user of `Assignment` can have these as variables."""


_TRUE, _FALSE = _End(), _End()
