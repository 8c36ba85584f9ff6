"""Streams against brute force: every dependence is kept, independent launches stay apart, events are fewest."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest

from daceml_train.lowering.streams import (
    EVENT_SECONDS,
    Access,
    Schedule,
    Work,
    assign,
    dependences,
    elapsed,
    list_schedule,
    reduced,
    schedule,
)
from tests.timing import thread_seconds


def closure(edges: list[list[int]]) -> list[set[int]]:
    """Per launch all that come before it."""
    before: list[set[int]] = []
    for predecessors in edges:
        before.append(set(predecessors).union(*(before[p] for p in predecessors)))
    return before


def ordered(result: Schedule) -> list[set[int]]:
    """Per launch what the streams and events of a schedule put before it."""
    last: dict[int, int] = {}
    edges: list[list[int]] = []
    for launch, (stream, waits) in enumerate(zip(result.stream, result.waits, strict=True)):
        edges.append([*waits, *([last[stream]] if stream in last else [])])
        last[stream] = launch
    return closure(edges)


def partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    results = []
    for rest in partitions(items[1:]):
        results.append([[items[0]], *rest])
        results += [[*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]] for i in range(len(rest))]
    return results


def fewest_events(edges: list[list[int]]) -> int:
    """Over all ways to lay the launches into chains of an order that allows all concurrency."""
    before, minimal = closure(edges), reduced(edges)
    best = sum(map(len, minimal))
    for parts in partitions(list(range(len(edges)))):
        steps = {pair for part in parts for pair in itertools.pairwise(sorted(part))}
        if all(a in before[b] for a, b in steps):
            best = min(best, sum((p, n) not in steps for n, ps in enumerate(minimal) for p in ps))
    return best


def random_edges(draw: random.Random, most: int) -> list[list[int]]:
    count, density = draw.randint(1, most), draw.random()
    return [[p for p in range(n) if draw.random() < density] for n in range(count)]


def test_random_orders_against_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(150):
        edges = random_edges(draw, 7)
        result = assign(len(edges), edges, most=100)
        assert closure(reduced(edges)) == closure(edges)
        assert ordered(result) == closure(edges)  # nothing less, and nothing more
        assert sum(map(len, result.waits)) == fewest_events(edges), edges


def test_list_schedules_keep_every_dependence() -> None:
    draw = random.Random(3)
    for _ in range(150):
        edges = random_edges(draw, 12)
        works = [Work((), (), draw.random(), draw.random()) for _ in edges]
        result = list_schedule(works, edges, draw.randint(1, 4))
        for before, needed in zip(ordered(result), closure(edges), strict=True):
            assert needed <= before
        chain = list_schedule(works, edges, 1)
        assert not any(chain.waits) and chain.streams == 1
        assert elapsed(works, chain) == pytest.approx(sum(work.seconds * max(1, work.share) for work in works))


def test_a_stream_is_left_to_the_longest_path() -> None:
    """A short launch after the first one goes to another stream, although its own begins earlier."""
    seconds, edges = [5e-6, 2e-6, 5e-6, 5e-6], [[], [0], [0], [2]]
    works = [Work((), (), each, 0.1) for each in seconds]
    result = list_schedule(works, edges, 2)
    assert result.stream == [0, 1, 0, 0] and result.waits == [[], [0], [], []]
    assert elapsed(works, result) == pytest.approx(15e-6)
    alone = list_schedule(works, edges, 1)
    assert elapsed(works, alone) == pytest.approx(17e-6)


def test_elapsed_seconds() -> None:
    """Launches on two streams: side by side, slowed down where they fill the device, and after an event."""

    def two(share: float, waits: list[list[int]]) -> float:
        works = [Work((), (), seconds, share) for seconds in (10e-6, 6e-6)]
        return elapsed(works, Schedule([0, 1], waits, 2))

    assert two(0.5, [[], []]) == pytest.approx(10e-6)
    assert two(1.0, [[], []]) == pytest.approx(16e-6)
    assert two(0.75, [[], []]) == pytest.approx(13e-6)  # 9 us side by side at two thirds of the speed, then 4
    assert two(0.5, [[], [0]]) == pytest.approx(16e-6 + EVENT_SECONDS)
    assert elapsed([], Schedule([], [], 1)) == 0


def test_reduction_and_matching_are_networkx_s() -> None:
    draw = random.Random(5)
    for _ in range(60):
        edges = random_edges(draw, 30)
        order = nx.DiGraph()
        order.add_nodes_from(range(len(edges)))
        order.add_edges_from((p, n) for n, before in enumerate(edges) for p in before)
        minimal = nx.transitive_reduction(order)
        assert {(p, n) for n, before in enumerate(reduced(edges)) for p in before} == set(minimal.edges)
        sides = nx.Graph()
        sides.add_nodes_from(top := [("from", n) for n in minimal])
        sides.add_edges_from((("from", a), ("to", b)) for a, b in minimal.edges)
        pairs = len(nx.bipartite.hopcroft_karp_matching(sides, top)) // 2
        assert assign(len(edges), edges, most=100).streams == len(edges) - pairs


def test_chains_that_share_a_stream_keep_every_dependence() -> None:
    draw = random.Random(2)
    for _ in range(100):
        edges = random_edges(draw, 12)
        result = assign(len(edges), edges, most=2)
        assert result.streams <= 2 and set(result.stream) == set(range(result.streams))
        assert all(a <= b for a, b in zip(closure(edges), ordered(result), strict=True))


def test_dependences_by_memory() -> None:
    """Against all pairs: a launch depends on earlier ones with which it shares bytes that one of them writes."""
    draw = random.Random(3)

    def accesses() -> tuple[Access, ...]:
        results = []
        for _ in range(draw.randint(0, 2)):
            start = draw.randint(0, 20)
            results.append(Access(draw.randint(0, 1), start, start + draw.randint(0, 8)))
        return tuple(results)

    def overlap(a: tuple[Access, ...], b: tuple[Access, ...]) -> bool:
        return any(
            x.space == y.space and max(x.start, y.start) < min(x.stop, y.stop) for x, y in itertools.product(a, b)
        )

    for _ in range(300):
        works = [Work(accesses(), accesses()) for _ in range(draw.randint(1, 9))]
        expected = [
            [
                i
                for i, a in enumerate(works[:k])
                if overlap(a.writes, b.reads) or overlap(a.writes, b.writes) or overlap(a.reads, b.writes)
            ]
            for k, b in enumerate(works)
        ]
        assert closure(dependences(works)) == closure(expected)


def branches(seconds: float, share: float, width: int = 4, depth: int = 6) -> list[Work]:
    """`width` independent chains that are joined at the end."""
    works = []
    for branch in range(width):
        for step in range(depth):
            reads = (Access(branch, step, step + 1),)
            works.append(Work(reads, (Access(branch, step + 1, step + 2),), seconds, share))
    works.append(Work(tuple(Access(b, depth, depth + 1) for b in range(width)), (Access(99, 0, 1),), seconds, share))
    return works


def test_several_streams_only_where_a_gain_is_expected() -> None:
    small = schedule(branches(10e-6, 0.2))
    assert small.streams == 4 and sum(map(len, small.waits)) == 3
    full = schedule(branches(10e-6, 1.0))
    assert full.streams == 1 and "faster" in full.reason
    tiny = schedule(branches(0.2e-6, 0.2, depth=1))
    assert tiny.streams == 1 and "events" in tiny.reason
    assert schedule([]).streams == 1


@pytest.mark.parametrize("count", [3000])
def test_thousands_of_launches(count: int) -> None:
    draw = random.Random(4)
    works = []
    for index in range(count):
        reads = tuple(Access(0, p, p + 1) for p in (draw.randint(max(0, index - 40), index) for _ in range(3)))
        works.append(Work(reads, (Access(0, index, index + 1),), 1e-5, 0.1))
    assert thread_seconds(lambda: schedule(works)) < 5  # ten times what it takes
    result = schedule(works)
    assert result.streams > 1
    edges = dependences(works)
    assert all(p in before for before, ps in zip(ordered(result), edges, strict=True) for p in ps)
