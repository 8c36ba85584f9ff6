"""Rematerialization plans: an integer program over the stages of a step chooses arrays to keep or rematerialize.

The order of a step is cut into stages. One variable per array and later stage decides whether the array is in memory
when the stage begins; one per operator and later stage decides whether it runs a second time there. An array that a
stage reads must be in memory or be computed there, an array in memory must have been there or have been computed one
stage earlier, and the bytes at sampled positions of each stage must fit. This is Checkmate's formulation (Jain et al.,
"Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization", MLSys 2020) with stages of many operators
instead of one, so its size is that of the step times a constant.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from daceml_train.transformations.global_movement.liveness import Liveness

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True)
class RematPlan:
    """The rematerialized (item, stage) pairs, with the stage of every item and the cost of rematerialization."""

    stage_of: tuple[int, ...]
    again: frozenset[tuple[int, int]]
    cost: float


class RematStages:
    """The integer program of items in an order. `pure` marks the items that may run twice, at the given `costs`.

    `kept` blocks are never freed early; those in `dropped` must not outlive their stage.
    """

    def __init__(
        self,
        items: Liveness,
        order: Sequence[int],
        pure: Sequence[bool],
        costs: Sequence[float],
        kept: frozenset[int],
        dropped: frozenset[int],
        count: int,
    ) -> None:
        self.items, self.order, self.pure, self.costs = items, order, pure, costs
        self.dropped = dropped
        self.position = {item: p for p, item in enumerate(order)}
        self.live = items.live(order)
        self.users: dict[int, list[int]] = {}
        for p, item in enumerate(order):
            for block in items.touches[item]:
                self.users.setdefault(block, []).append(p)
        largest = max(self.live, default=0)
        self.big = [
            b
            for b, users in self.users.items()
            if b not in items.kept and (items.bytes[b] * 2000 >= largest or b in dropped)
        ]
        self.fixed = kept
        self.bounds = self._cut(count)
        self.count = len(self.bounds)
        self.stage_of = tuple(self._stage(self.position[i]) for i in range(len(items.nodes)))
        self.maker = {b: order[self.users[b][0]] for b in self.big}
        self.made: dict[int, list[int]] = {}
        for b in self.big:
            self.made.setdefault(self.maker[b], []).append(b)
        self._horizon()
        self._variables()

    # ---- structure ----------------------------------------------------------------------------------------------
    def _cut(self, count: int) -> list[int]:
        """First positions of the stages; an equal share of the bytes that are read after a pause begins in each."""
        pause = max(2, len(self.order) // (4 * count))
        late: list[tuple[int, int]] = []
        for b in self.big:
            users = self.users[b]
            late += [(q, self.items.bytes[b]) for p, q in pairwise(users) if q - p > pause]
        total, share, cuts = sum(size for _, size in late), 0, [0]
        for position, size in sorted(late):
            if share * count >= len(cuts[1:]) * total and position > cuts[-1]:
                cuts.append(position)
            share += size
        return cuts

    def _stage(self, position: int) -> int:
        return bisect.bisect_right(self.bounds, position) - 1

    def _horizon(self) -> None:
        """The last stage that may need each block, directly or to rerun an operator."""
        readers: dict[int, list[int]] = {b: [] for b in self.big}
        for b in self.big:
            readers[b] = [self.order[p] for p in self.users[b][1:]]
        self.reads: list[list[int]] = [[] for _ in self.items.nodes]
        for b in self.big:
            for item in readers[b]:
                self.reads[item].append(b)
        self.last = {b: self._stage(self.users[b][-1]) for b in self.big}
        for item in reversed(self.order):
            if self.pure[item] and item in self.made:
                furthest = max(self.last[b] for b in self.made[item])
                for b in self.reads[item]:
                    self.last[b] = max(self.last[b], furthest)

    def movable(self, block: int) -> bool:
        """Whether a block is read in a later stage than its producer's and may be rematerialized there."""
        producer = self.maker[block]
        late = self._stage(self.users[block][-1]) > self.stage_of[producer]
        return late and self.pure[producer] and block not in self.fixed

    def _variables(self) -> None:
        self.keep: dict[tuple[int, int], int] = {}
        self.run: dict[tuple[int, int], int] = {}
        for b in self.big:
            for k in range(self.stage_of[self.maker[b]] + 1, self.last[b] + 1):
                self.keep[b, k] = len(self.keep)
        for item, blocks in self.made.items():
            if self.pure[item] and not any(b in self.fixed for b in blocks):
                for k in range(self.stage_of[item] + 1, max(self.last[b] for b in blocks) + 1):
                    self.run[item, k] = len(self.keep) + len(self.run)

    # ---- program ------------------------------------------------------------------------------------------------
    def solve(self, limit: float | None, gap: float = 0.02) -> RematPlan | None:
        """The cheapest choice whose estimated bytes stay below `limit`; with None, the choice of the fewest bytes.

        None if there is none.
        """
        count = len(self.keep) + len(self.run)
        if not count:
            return RematPlan(self.stage_of, frozenset(), 0.0)
        rows: list[tuple[dict[int, float], float]] = []  # sum of coefficients * variables >= bound
        self._availability(rows)
        scale = float(max(self.live))
        self._memory(rows, scale, None if limit is None else limit / scale, count)
        variables = count + (limit is None)
        objective = np.zeros(variables)
        top = max(self.costs, default=1.0) or 1.0
        for (item, _), v in self.run.items():
            objective[v] = self.costs[item] / top
        for (block, _), v in self.keep.items():
            objective[v] = 1e-6 * self.items.bytes[block] / scale
        if limit is None:
            objective *= 1e-4
            objective[count] = 1.0
        # Imported here: SciPy takes memory in every process that imports it, and a warm start needs none of it.
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix, lower = _matrix(rows, variables)
        upper = np.ones(variables)
        if limit is None:
            upper[count] = np.inf
        for (block, k), v in self.keep.items():
            if block in self.dropped and k == self.stage_of[self.maker[block]] + 1:
                upper[v] = 0
        integers = np.ones(variables)
        integers[count:] = 0
        answer = milp(
            objective,
            integrality=integers,
            bounds=Bounds(np.zeros(variables), upper),
            constraints=LinearConstraint(matrix, lower, np.inf),
            options={"mip_rel_gap": gap, "node_limit": 60},
        )
        if answer.x is None:
            return None
        again = frozenset(key for key, v in self.run.items() if answer.x[v] > 0.5)
        return RematPlan(self.stage_of, again, sum(self.costs[item] for item, _ in again))

    def _there(self, block: int, k: int) -> dict[int, float]:
        """The block is in memory at the start of stage `k`, or is rematerialized in it."""
        terms = {}
        if (block, k) in self.keep:
            terms[self.keep[block, k]] = 1.0
        if (self.maker[block], k) in self.run:
            terms[self.run[self.maker[block], k]] = 1.0
        return terms

    def _availability(self, rows: list[tuple[dict[int, float], float]]) -> None:
        for b in self.big:
            first = self.stage_of[self.maker[b]]
            for k in sorted({self._stage(p) for p in self.users[b][1:]}):
                if k > first:
                    rows.append((self._there(b, k), 1.0))
            for k in range(first + 2, self.last[b] + 1):
                rows.append((self._there(b, k - 1) | {self.keep[b, k]: -1.0}, 0.0))
        for (item, k), v in self.run.items():
            for b in self.reads[item]:
                if self.stage_of[self.maker[b]] < k:
                    rows.append((self._there(b, k) | {v: -1.0}, 0.0))

    def _memory(
        self, rows: list[tuple[dict[int, float], float]], scale: float, limit: float | None, bound: int
    ) -> None:
        for p in self._samples():
            k = self._stage(p)
            free, terms = self.live[p], dict[int, float]()
            for b in self.big:
                users, size = self.users[b], self.items.bytes[b]
                first = self.stage_of[self.maker[b]]
                if first > k or users[0] > p:
                    continue
                later = self._used_in(b, k, p)
                if users[-1] >= p and not (first == k and later):
                    free -= size  # the terms below count it
                if first == k and later:
                    continue
                if first < k and later:
                    chosen = self._there(b, k)
                elif p == self.bounds[k]:
                    chosen = {v: 1.0 for v in [self.keep.get((b, k))] if v is not None}
                else:
                    chosen = {v: 1.0 for v in [self.keep.get((b, k + 1))] if v is not None}
                for v, one in chosen.items():
                    terms[v] = terms.get(v, 0.0) - one * size / scale
            if limit is None:
                rows.append((terms | {bound: 1.0}, free / scale))
            else:
                rows.append((terms, free / scale - limit))

    def _used_in(self, block: int, k: int, position: int) -> bool:
        """Whether the stage's own items use a block at `position` or later within stage `k`."""
        users = self.users[block]
        at = bisect.bisect_left(users, position)
        return at < len(users) and self._stage(users[at]) == k

    def _samples(self) -> list[int]:
        """Positions whose bytes are bounded: the start and the peak of each stage, and a few more of the first."""
        ends = [*self.bounds[1:], len(self.order)]
        found: set[int] = set()
        for start, end in zip(self.bounds, ends, strict=True):
            found.update((start, max(range(start, end), key=lambda p: self.live[p])))
            pieces = 8 if start == 0 else 2
            for piece in range(pieces):
                low, high = (start + (end - start) * (piece + i) // pieces for i in (0, 1))
                if low < high:
                    found.add(max(range(low, high), key=lambda p: self.live[p]))
        return sorted(found)


def _matrix(rows: list[tuple[dict[int, float], float]], variables: int) -> tuple[csr_array, np.ndarray]:
    from scipy.sparse import csr_array

    data = [c for terms, _ in rows for c in terms.values()]
    columns = [v for terms, _ in rows for v in terms]
    starts = np.cumsum([0, *(len(terms) for terms, _ in rows)])
    matrix = csr_array((data, columns, starts), shape=(len(rows), variables))
    return matrix, np.array([lower for _, lower in rows])
