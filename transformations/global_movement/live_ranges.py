"""Live ranges: when each array of a step is in memory, and which ones are cheap to free and rematerialize.

An array that is read early and late leaves memory in the pause between two readers if its operator runs a second time
before the later reader. The operands of that operator must be live at that time: they are live anyway, stay live
longer, or are rematerialized too. Of all pauses that contain the peak position, the one with the lowest cost per byte
is chosen, until the budget is spent or nothing lowers the peak. Each choice takes time proportional to the number of
operators, and there are at most as many choices as arrays above the size threshold.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from daceml_train.transformations.global_movement.remat_costs import RematCosts
from daceml_train.transformations.global_movement.remat_plan import RematPlan

TOGETHER = 4
"""The largest number of operators that run a second time for one array."""
SMALL = 16
"""An operand that is this many times smaller than the array computed from it is kept, not rematerialized."""


@dataclass(frozen=True, order=True)
class Gap:
    """A block is read at position `before` and next at `until`; `price` is the cost per byte."""

    price: float
    block: int
    before: int
    until: int


@dataclass
class RematRecipe:
    """How to rematerialize a block at a position."""

    reads: list[int] = field(default_factory=list)
    """Blocks that must be live at that position."""
    items: list[int] = field(default_factory=list)
    """Items that run one more time."""
    longer: list[int] = field(default_factory=list)
    """Blocks whose live range is extended to that position."""
    earlier: list[int] = field(default_factory=list)
    """Blocks that are rematerialized later anyway, and now by that position."""
    briefly: list[int] = field(default_factory=list)
    """Blocks that are rematerialized for this purpose alone."""
    more: list[tuple[int, int, int]] = field(default_factory=list)
    """(first position, last position, bytes) of additional memory."""


class LiveRanges:
    """The live ranges of blocks; item i runs at position i."""

    def __init__(self, runs: RematCosts) -> None:
        self.runs, self.items, self.makers = runs, runs.items, runs.makers
        end = len(self.items.nodes)
        self.live = np.array(self.items.live(range(end)), dtype=np.int64)
        self.users: dict[int, list[int]] = {}
        """Block -> the positions that touch it, including those of items that run a second time."""
        for item, touched in enumerate(self.items.touches):
            for block in touched:
                self.users.setdefault(block, []).append(item)
        self.spans = {b: [(u[0], end if b in self.items.kept else u[-1])] for b, u in self.users.items()}
        self.again: set[tuple[int, int]] = set()
        """(item, the position at which it runs a second time)."""
        self.spent = 0.0

    @property
    def choice(self) -> RematPlan:
        """The items that run a second time; every position is a stage of its own."""
        return RematPlan(tuple(range(len(self.items.nodes))), frozenset(self.again), self.spent)

    def pauses(self, least: int) -> Iterator[Gap]:
        """The pauses of blocks of at least `least` bytes whose operators are cheap."""
        for block, users in self.users.items():
            size, producer = self.items.bytes[block], self.makers[block]
            if size >= max(least, 1) and block not in self.items.kept and self.runs.light[producer]:
                yield from self._between(block, users, self.runs.costs[producer] / size)

    def _between(self, block: int, users: Sequence[int], price: float) -> Iterator[Gap]:
        return (Gap(price, block, before, until) for before, until in pairwise(users) if until > before + 1)

    def lower(self, budget: float, least: int) -> None:
        """Free blocks of at least `least` bytes to lower the peak; rematerializing them costs at most `budget`."""
        waiting = list(self.pauses(least))
        heapq.heapify(waiting)
        while waiting:
            peak = int(self.live.argmax())
            elsewhere = []
            chosen = None
            while waiting and chosen is None:
                pause = heapq.heappop(waiting)
                users = self._users_within(pause)
                if len(users) > 2:  # an item that now runs a second time reads the block in this pause
                    for part in self._between(pause.block, users, pause.price):
                        heapq.heappush(waiting, part)
                elif not pause.before < peak < pause.until:
                    elsewhere.append(pause)
                elif (found := self._best(pause, peak)) is not None:
                    price, recipe = found
                    if waiting and price > max(pause.price, waiting[0].price):
                        heapq.heappush(waiting, Gap(price, pause.block, pause.before, pause.until))
                    elif self.spent + self._cost(recipe) <= budget:
                        chosen = pause, recipe
            if chosen is None:
                return
            self._take(*chosen)
            waiting += elsewhere
            heapq.heapify(waiting)

    def _users_within(self, pause: Gap) -> list[int]:
        users = self.users[pause.block]
        return users[bisect.bisect_left(users, pause.before) : bisect.bisect_right(users, pause.until)]

    # ---- one pause ----------------------------------------------------------------------------------------------
    def _best(self, pause: Gap, peak: int) -> tuple[float, RematRecipe] | None:
        """The cost of rematerializing a block after a pause, per byte that leaves the peak, and how to do it.

        None if that is impossible or would not lower the peak.
        """
        for stay in (True, False):
            recipe = self._recipe(pause.block, pause.until, stay)
            if recipe is None:
                continue
            gain = self.items.bytes[pause.block] - sum(size for a, b, size in recipe.more if a <= peak <= b)
            if gain > 0 and self._after(pause, recipe).max() <= self.live[peak]:
                return self._cost(recipe) / gain, recipe
        return None

    def _recipe(self, block: int, position: int, stay: bool) -> RematRecipe | None:
        """How to rematerialize a block at a position; with `stay`, operands that are dead by then live longer."""
        recipe, seen = RematRecipe(), set[int]()
        todo = [block]
        while todo:
            result = todo.pop()
            item = self.makers[result]
            if item in seen:
                continue
            seen.add(item)
            if not self.runs.light[item] or len(seen) > TOGETHER:
                return None
            following = None if result == block else self._next(result, position)
            if following is not None:
                recipe.earlier.append(result)
                recipe.more.append((position, following - 1, self.items.bytes[result]))
            else:
                recipe.items.append(item)
                if result != block:
                    recipe.briefly.append(result)
                    recipe.more.append((position, position, self.items.bytes[result]))
            for other in self.items.touches[item]:
                if self.makers[other] == item:
                    if other != result:  # produced along with it and freed at once
                        recipe.more.append((position, position, self.items.bytes[other]))
                    continue
                recipe.reads.append(other)
                if not self._there(other, position) and other not in recipe.longer:
                    small = SMALL * self.items.bytes[other] <= self.items.bytes[block]
                    if (stay or small) and self._next(other, position) is None:
                        recipe.longer.append(other)
                        recipe.more.append((self.spans[other][-1][1] + 1, position, self.items.bytes[other]))
                    else:
                        todo.append(other)
        return recipe

    def _index(self, block: int, position: int) -> int:
        """The last live range of a block that begins at or before a position; -1 if there is none."""
        return bisect.bisect_right(self.spans[block], position, key=lambda span: span[0]) - 1

    def _there(self, block: int, position: int) -> bool:
        index = self._index(block, position)
        return index >= 0 and self.spans[block][index][1] >= position

    def _next(self, block: int, position: int) -> int | None:
        """Where a block is rematerialized next after a position."""
        index = self._index(block, position) + 1
        return self.spans[block][index][0] if index < len(self.spans[block]) else None

    def _cost(self, recipe: RematRecipe) -> float:
        return sum(self.runs.costs[item] for item in recipe.items)

    def _after(self, pause: Gap, recipe: RematRecipe) -> np.ndarray:
        """The live bytes if a block is freed in a pause."""
        live = self.live.copy()
        live[pause.before + 1 : pause.until] -= self.items.bytes[pause.block]
        for first, last, size in recipe.more:
            live[first : last + 1] += size
        return live

    def _take(self, pause: Gap, recipe: RematRecipe) -> None:
        self.live = self._after(pause, recipe)
        self.spent += self._cost(recipe)
        for block in recipe.reads:
            if pause.until not in self.users[block]:
                bisect.insort(self.users[block], pause.until)
        spans, index = self.spans[pause.block], self._index(pause.block, pause.before)
        spans[index : index + 1] = [(spans[index][0], pause.before), (pause.until, spans[index][1])]
        self.again.add((self.makers[pause.block], pause.until))
        for block in recipe.longer:
            first, _ = self.spans[block][-1]
            self.spans[block][-1] = (first, pause.until)
        for block in recipe.briefly:
            bisect.insort(self.spans[block], (pause.until, pause.until))
            self.again.add((self.makers[block], pause.until))
        for block in recipe.earlier:
            index = self._index(block, pause.until) + 1
            first, last = self.spans[block][index]
            self.spans[block][index] = (pause.until, last)
            self.again.discard((self.makers[block], first))
            self.again.add((self.makers[block], pause.until))
