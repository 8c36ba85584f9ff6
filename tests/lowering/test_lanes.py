"""Lanes: schedules of launches on several cores, and their plans: order, memory, waits."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from daceml_train.lowering.arena import Lifetime, plan_arena
from daceml_train.lowering.lane_plan import WINDOWS, LanePlan, lane_plan, reuse_edges
from daceml_train.lowering.lanes import Task, bound, ranks, scheduled, segments, shortest
from daceml_train.lowering.streams import Access, Work, dependences


# ---- schedules ----
def graph(count: int, seed: int, width: int = 12) -> list[list[int]]:
    """Random predecessors among the launches just before each."""
    draw = random.Random(seed)
    found: list[list[int]] = []
    for i in range(count):
        near = range(max(0, i - width), i)
        found.append(sorted(draw.sample(near, min(len(near), draw.randint(0, 3)))))
    return found


def tasks(count: int, seed: int, cores: int, fork: float = 1e-6) -> list[Task]:
    """Launches of a microsecond to a millisecond that scale up to a limit, after a fork."""
    draw, found = random.Random(seed), []
    counts = [1 << k for k in range(cores.bit_length()) if 1 << k <= cores]
    for _ in range(count):
        work, most = 10 ** draw.uniform(-6, -3), draw.choice([1, 2, 8, 64])
        seconds = {p: work / min(p, most) + (fork * (1 + math.log2(p)) if p > 1 else 0) for p in counts}
        found.append(Task(seconds, alone=draw.random() < 0.05))
    return found


@pytest.mark.parametrize("cores", [2, 4, 16])
@pytest.mark.parametrize("wide", [False, True])
def test_a_schedule_keeps_dependences_and_cores(cores: int, wide: bool) -> None:
    for seed in range(8):
        edges, given = graph(60, seed), tasks(60, seed, cores)
        found, modes = shortest(edges, given, cores, wide)
        for i, before in enumerate(edges):
            assert all(found.end[p] <= found.start[i] for p in before)
            assert len(found.lanes[i]) in (modes[i], cores) and len(set(found.lanes[i])) == len(found.lanes[i])
            assert not given[i].alone or len(found.lanes[i]) == cores
            assert wide or len(found.lanes[i]) in (1, cores)
        for i, j in itertools.combinations(range(60), 2):
            if found.start[i] < found.end[j] and found.start[j] < found.end[i]:
                assert not set(found.lanes[i]) & set(found.lanes[j]), "two launches on one core at a time"
        assert found.seconds >= bound(edges, given, cores) * (1 - 1e-9)


def test_the_longest_path_starts_first() -> None:
    chain, short = [[], [0], [1], []], [Task({1: 1.0})] * 4
    assert ranks(chain, [1.0] * 4) == [3.0, 2.0, 1.0, 1.0]
    found = scheduled(chain, short, [1] * 4, 1)
    assert found.order[0] == 0
    two, _ = shortest(chain, short, 2, wide=False)
    assert two.seconds == pytest.approx(3.0, rel=1e-3), "the chain, and the fourth launch beside it"


def test_independent_launches_fill_the_cores() -> None:
    given = [Task({1: 1e-3, 2: 0.6e-3})] * 8
    found, modes = shortest([[]] * 8, given, 2, wide=False)
    assert set(modes) == {1} and found.seconds == pytest.approx(4e-3, rel=0.01)
    (part,) = segments(found, 2)
    assert sorted(map(len, part)) == [4, 4]


def test_launches_that_scale_run_alone() -> None:
    given = [Task({1: 1e-3, 2: 0.5e-3})] * 4
    chain = [[i - 1] if i else [] for i in range(4)]
    found, modes = shortest(chain, given, 2, wide=False)
    assert set(modes) == {2} and segments(found, 2) == [[[0, 1, 2, 3]]]


# ---- plans ----
def random_works(seed: int, launches: int = 24, arrays: int = 14) -> list[Work]:
    """Launches that read and write random arrays, some of them a part of an array."""
    draw, found = random.Random(seed), []
    for i in range(launches):
        touched = draw.sample(range(arrays), draw.randint(1, 3))
        parts = [Access(a, *draw.choice([(0, 8), (0, 8), (0, 4), (4, 8)])) for a in touched]
        writes = draw.randint(1, len(parts)) if i < arrays or draw.random() < 0.8 else 0
        found.append(Work(tuple(parts[writes:]), tuple(parts[:writes])))
    return found


def conflicts(a: Work, b: Work) -> bool:
    """Whether two launches touch the same bytes and one of them writes."""
    pairs = [*itertools.product(a.writes, (*b.reads, *b.writes)), *itertools.product(a.reads, b.writes)]
    return any(x.space == y.space and x.start < y.stop and y.start < x.stop for x, y in pairs)


def happens_before(plan: LanePlan, waits: Sequence[Sequence[int]]) -> list[set[int]]:
    """Per launch all launches that have ended when it starts, whatever each of them takes."""
    found: list[set[int]] = [set() for _ in plan.order]
    barrier: set[int] = set()
    for part in plan.segments:
        for launch in sorted((i for lane in part for i in lane), key=plan.position.__getitem__):
            lane = part[plan.place[launch][1]]
            at = lane.index(launch)
            before = {*waits[launch], *lane[max(at - 1, 0) : at]}
            assert all(plan.position[p] < plan.position[launch] for p in before), "it could wait for ever"
            found[launch] = barrier.union(before, *(found[p] for p in before))
        barrier = barrier.union(i for lane in part for i in lane)
    return found


def wrong(
    works: Sequence[Work], plan: LanePlan, waits: Sequence[Sequence[int]], memory: dict[int, tuple[int, int]]
) -> str:
    """What two launches could do at the same time, or in the wrong order; empty if nothing."""
    ended = happens_before(plan, waits)
    for i, j in itertools.combinations(range(len(works)), 2):
        if conflicts(works[i], works[j]) and i not in ended[j]:
            return f"launch {j} needs launch {i}"
    touching = arrays_of(works)
    for a, b in itertools.combinations(memory, 2):
        if memory[a][0] < memory[b][1] and memory[b][0] < memory[a][1]:
            pairs = list(itertools.product(touching[a], touching[b]))
            if not (all(i in ended[j] for i, j in pairs) or all(j in ended[i] for i, j in pairs)):
                return f"arrays {a} and {b} share memory"
    return ""


def arrays_of(works: Sequence[Work]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i, work in enumerate(works):
        for array in dict.fromkeys(a.space for a in (*work.reads, *work.writes)):
            found.setdefault(array, []).append(i)
    return found


def planned(
    seed: int, cores: int, window: int | None
) -> tuple[list[Work], LanePlan, list[list[int]], dict[int, tuple[int, int]]]:
    """Random launches, a plan from random seconds, what each launch waits for, and the memory of the arrays."""
    draw, works = random.Random(seed), random_works(seed)
    given = []
    for _ in works:
        one = 10 ** draw.uniform(-6, -4)
        given.append(Task({1: one} if draw.random() < 0.7 else {1: one, cores: 0.6 * one}, alone=draw.random() < 0.1))
    plan, _ = lane_plan(works, given, cores, window)
    touching = arrays_of(works)
    lives = {a: Lifetime(64 * draw.randint(1, 4), *plan.life(touching[a])) for a in touching}
    offsets, _ = plan_arena(list(lives.values()))
    memory = {a: (at, at + lives[a].bytes) for a, at in zip(lives, offsets, strict=True)}
    edges = [set(before) for before in dependences(works)]
    for launch, before in reuse_edges(plan, touching, memory).items():
        edges[launch] |= before
    return works, plan, plan.waits([sorted(before) for before in edges]), memory


@pytest.mark.parametrize("cores", [2, 3, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_no_two_launches_that_conflict_overlap(cores: int, window: int | None) -> None:
    for seed in range(60):
        works, plan, waits, memory = planned(seed, cores, window)
        assert sorted(plan.order) == list(range(len(works)))
        assert sorted(i for part in plan.segments for lane in part for i in lane) == list(range(len(works)))
        assert wrong(works, plan, waits, memory) == "", seed


def test_a_wait_that_is_left_out_is_found() -> None:
    removed = 0
    for seed in range(30):
        works, plan, waits, memory = planned(seed, 2, None)
        for launch, own in enumerate(waits):
            for p in own:
                without = [list(w) for w in waits]
                without[launch].remove(p)
                assert wrong(works, plan, without, memory), f"{launch} need not wait for {p}"
                removed += 1
    assert removed > 50


def test_a_dependence_that_is_left_out_is_found() -> None:
    found = 0
    for seed in range(40):
        works, plan, _, memory = planned(seed, 2, None)
        edges = [set(before) for before in dependences(works)]
        for launch, before in enumerate(edges):
            for p in sorted(before):
                mutant = [sorted(b - {p}) if i == launch else sorted(b) for i, b in enumerate(edges)]
                found += bool(wrong(works, plan, plan.waits(mutant), memory))
    assert found > 50


def test_memory_is_shared_only_where_all_launches_of_the_earlier_array_have_ended() -> None:
    works = [Work((), (Access(a, 0, 1),)) for a in range(4)]
    plan = LanePlan([0, 1, 2, 3], [[[0, 2], [1, 3]]])
    same = dict.fromkeys(range(4), (0, 64))
    edges = reuse_edges(plan, {a: [a] for a in range(4)}, same)
    assert edges == {1: {0}, 2: {1}, 3: {2}}
    waits = plan.waits([sorted(edges.get(i, ())) for i in range(4)])
    assert waits == [[], [0], [1], [2]] and wrong(works, plan, waits, same) == ""
    assert wrong(works, plan, [[]] * 4, same) == "arrays 0 and 1 share memory"
