"""Schedule: an order of operators that minimizes the peak of live bytes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.graph.graph import Graph
from daceml_train.passes.base import Pass
from daceml_train.transformations.global_movement.checks import committed
from daceml_train.transformations.global_movement.liveness import Liveness, liveness_of, reordered


@dataclass(frozen=True)
class Schedule(Pass):
    """Reorder operators to lower the peak of live bytes; the peak never grows.

        x -> [f] -> y, ..., y -> [g] -> z     =>     ..., x -> [f] -> y -> [g] -> z

    An operator that frees more than it allocates runs as soon as possible, counted together with the readers that it
    makes ready: a weight gradient with the update that consumes it. All others keep their order (list scheduling;
    Graham, "Bounds on Multiprocessing Timing Anomalies", 1969), or operators that allocate more than they free wait for
    their first reader, if that peak is lower. Then operators are moved out of the peak one by one while that lowers it,
    at most `moves` times. The bytes moved do not change. Updates come after the last check of the data, so that a step
    whose data are refused has changed nothing (`checks`).
    """

    level = "global_movement"
    moves: int = 64

    def run(self, graph: Graph) -> Graph:
        graph = committed(graph)
        items = liveness_of(graph)
        count = len(items.nodes)
        if count < 3:
            return graph
        orders = [list(range(count)), *(listed(items, depth) for depth in (0, 1, 2)), postponed(items)]
        costs = [cost(items, order) for order in orders]
        best = min(range(len(orders)), key=lambda i: (costs[i], i))
        order = improved(items, orders[best], self.moves)
        if cost(items, order)[0] >= costs[0][0]:
            return graph
        return reordered(graph, (items.nodes[i] for i in order))


def cost(items: Liveness, order: Sequence[int]) -> tuple[int, int]:
    """The sort key: the peak, then the sum of live bytes over all positions."""
    live = items.live(order)
    return max(live, default=0), sum(live)


def listed(items: Liveness, depth: int) -> list[int]:
    """The order of list scheduling that looks `depth` readers ahead."""
    return _Listing(items, depth).run()


def postponed(items: Liveness) -> list[int]:
    """The order in which an item that allocates more than it frees waits for the first one that depends on it."""
    count = len(items.nodes)
    first, last = [count] * len(items.bytes), [-1] * len(items.bytes)
    for item, touched in enumerate(items.touches):
        for block in touched:
            first[block], last[block] = min(first[block], item), item
    key = [float(item) for item in range(count)]
    earliest = [float(count)] * count
    """The least key of the items that depend on an item."""
    for item in reversed(range(count)):
        result = sum(items.bytes[b] for b in items.touches[item] if first[b] == item)
        freed = sum(items.bytes[b] for b in items.touches[item] if last[b] == item and first[b] != item)
        if result > freed and earliest[item] < count:
            key[item] = earliest[item]
        for other in items.before[item]:
            earliest[other] = min(earliest[other], key[item])
    return sorted(range(count), key=lambda item: (key[item], item))


CLOSURE = 8
"""How many pending items may be run to enable one that lowers the live bytes."""


class _Listing:
    """List scheduling. Of the items that lower the live bytes, counted with their pending predecessors and the readers
    that they make ready, the one that lowers them most runs first; else the first ready one in the original order.
    """

    def __init__(self, items: Liveness, depth: int) -> None:
        self.items, self.depth = items, depth
        count = len(items.nodes)
        self.after: list[list[int]] = [[] for _ in range(count)]
        self.waits = [len(before) for before in items.before]
        for item, before in enumerate(items.before):
            for other in sorted(before):
                self.after[other].append(item)
        self.touchers: list[list[int]] = [[] for _ in items.bytes]
        for item, touched in enumerate(items.touches):
            for block in touched:
                self.touchers[block].append(item)
        self.remaining = [len(touchers) for touchers in self.touchers]
        self.there = [False] * len(items.bytes)
        self.done = [False] * count
        self.version = [0] * count
        self.order: list[int] = []
        self.gains: list[tuple[int, int, int]] = []
        """(change of the live bytes, item, version) of items that lower them."""

    def run(self) -> list[int]:
        count = len(self.items.nodes)
        first = 0
        for item in range(count):
            if not self.waits[item]:
                self.weigh(item)
        while len(self.order) < count:
            found = self.gain()
            if found is None:
                while self.done[first]:
                    first += 1
                found = [first]  # its predecessors come before it in the original order
            for item in found:
                self.execute(item)
        return self.order

    def gain(self) -> list[int] | None:
        while self.gains:
            change, item, version = heapq.heappop(self.gains)
            if not self.done[item] and version == self.version[item]:
                now, found = self.change(item)
                if now == change:
                    return found
                if now < 0:
                    heapq.heappush(self.gains, (now, item, version))
        return None

    def execute(self, item: int) -> None:
        """Run an item and re-evaluate the items that this affects."""
        self.done[item] = True
        self.order.append(item)
        changed = set(self.after[item])
        for block in self.items.touches[item]:
            if not self.there[block]:
                self.there[block] = True
                changed.update(self.touchers[block])
            self.remaining[block] -= 1
            if self.remaining[block] == 1:
                changed.update(self.touchers[block])
        for other in self.after[item]:
            self.waits[other] -= 1
        for other in sorted(changed):
            if not self.done[other]:
                self.weigh(other)

    def weigh(self, item: int) -> None:
        """Enqueue an item if running it, with its predecessors and readers, lowers the live bytes."""
        change, _ = self.change(item)
        self.version[item] += 1
        if change < 0:
            heapq.heappush(self.gains, (change, item, self.version[item]))

    def closure(self, item: int, taken: set[int]) -> list[int] | None:
        """The item after its pending predecessors; None if those are more than `CLOSURE` items."""
        if self.waits[item] > CLOSURE:
            return None
        found: list[int] = []
        seen = {item}
        stack = [(item, iter(self.items.before[item]))]
        while stack:
            top, needs = stack[-1]
            other = next((o for o in needs if not self.done[o] and o not in taken and o not in seen), None)
            if other is None:
                found.append(top)
                stack.pop()
                continue
            seen.add(other)
            if len(seen) > CLOSURE:
                return None
            stack.append((other, iter(self.items.before[other])))
        return found

    def change(self, item: int) -> tuple[int, list[int]]:
        """The largest reduction of live bytes by the item, its predecessors and up to `depth` of its readers, and the
        items to run for it.
        """
        items, there, used = self.items, set[int](), dict[int, int]()
        total = least = 0
        order: list[int] = []
        taken: set[int] = set()
        length = 0
        following: int | None = item
        for step in range(self.depth + 1):
            found = None if following is None else self.closure(following, taken)
            if found is None:
                break
            for other in found:
                taken.add(other)
                order.append(other)
                for block in items.touches[other]:
                    if not self.there[block] and block not in there:
                        there.add(block)
                        total += items.bytes[block]
                    used[block] = used.get(block, 0) + 1
                    if used[block] == self.remaining[block] and block not in items.kept:
                        total -= items.bytes[block]
            if step == 0 or total < least:
                least, length = total, len(order)
            assert following is not None
            waiting = (o for o in self.after[following] if o not in taken and self.waits[o] <= CLOSURE)
            following = next(waiting, None)
        return least, order[:length]


def improved(items: Liveness, order: list[int], moves: int) -> list[int]:
    """The order with single items moved out of its peak while that lowers the cost."""
    after: list[list[int]] = [[] for _ in items.nodes]
    for item, before in enumerate(items.before):
        for other in before:
            after[other].append(item)
    best = cost(items, order)
    for _ in range(moves):
        live = items.live(order)
        peak = live.index(max(live))
        where = {item: position for position, item in enumerate(order)}
        for moved in _moves(items, after, order, where, peak):
            tried = cost(items, moved)
            if tried[0] < best[0]:
                order, best = moved, tried
                break
        else:
            return order
    return order


TRIED = 12
"""How many moves are tried per round."""


def _moves(
    items: Liveness, after: Sequence[Sequence[int]], order: list[int], where: dict[int, int], peak: int
) -> list[list[int]]:
    """Orders in which an item moves from before the peak to after it, or vice versa; the largest arrays first."""
    spans: dict[int, list[int]] = {}
    for position, item in enumerate(order):
        for block in items.touches[item]:
            span = spans.setdefault(block, [position, position, position])
            span[1] = span[1] if position > peak else position
            span[2] = position
    across = [b for b, (first, _, last) in spans.items() if first <= peak < last or first < peak <= last]
    across.sort(key=lambda b: -items.bytes[b])
    found: list[list[int]] = []
    for block in across[: 2 * TRIED]:
        first, reached, last = spans[block]
        producer, reader = order[first], order[last]
        if first == reached and first < peak:  # nothing before the peak reads it: produce it later
            target = min((where[i] for i in after[producer]), default=len(order))
            if target > peak + 1:
                found.append([*order[:first], *order[first + 1 : target], producer, *order[target:]])
        if last > peak and block not in items.kept:  # read it earlier
            target = max((where[i] for i in items.before[reader]), default=-1) + 1
            if target <= peak:
                found.append([*order[:target], reader, *order[target:last], *order[last + 1 :]])
        if len(found) >= TRIED:
            break
    return found
