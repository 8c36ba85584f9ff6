"""Streams: an assignment of launches to streams that needs few streams and few events.

Launches depend on each other through the memory that they read and write. The dependences are reduced to the minimum
equivalent graph. Two ways to assign streams are tried. A maximum matching covers the launches with the fewest chains
that keep independent launches apart, and every edge outside the chains becomes an event (Kwon et al., "Nimble", NeurIPS
2020). A list schedule gives each launch the stream on which it begins first (Topcuoglu et al., "HEFT", TPDS 2002). The
one that takes less time by a simulation of the device is used. Sets are bit masks in integers, so thousands of launches
take milliseconds.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

GAIN = 0.95
"""Several streams are used if their estimated time is below this share of one stream's time."""
EVENT_SECONDS = 1e-6
"""The cost of a dependence between streams within a CUDA graph."""
MOST_STREAMS = 8
"""Vendor libraries keep a workspace per stream."""
NUMBERS_OF_STREAMS = (2, 3, 4, MOST_STREAMS)
"""How many streams are tried."""


@dataclass(frozen=True)
class Access:
    """Bytes `start` up to `stop` of memory `space`, which a launch reads or writes."""

    space: int
    start: int
    stop: int


@dataclass(frozen=True)
class Work:
    """The accesses of a launch, its seconds when it runs alone, and the share of the device that it occupies then."""

    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    seconds: float = 0.0
    share: float = 1.0


@dataclass
class Schedule:
    """Launch -> stream, and per launch the earlier launches on other streams that it waits for."""

    stream: list[int]
    waits: list[list[int]]
    streams: int = 1
    reason: str = ""
    """The reason for a single stream, if there is only one."""
    seconds: float = 0.0
    """The estimated time of all launches."""
    recorded: frozenset[int] = field(init=False)
    """Launches after which an event is recorded."""

    def __post_init__(self) -> None:
        self.recorded = frozenset(x for waits in self.waits for x in waits)


def one_stream(count: int, reason: str = "", seconds: float = 0.0) -> Schedule:
    """All launches on one stream."""
    return Schedule([0] * count, [[] for _ in range(count)], 1, reason, seconds)


def schedule(works: Sequence[Work]) -> Schedule:
    """The streams of a program's launches; a single one unless several are expected to be faster."""
    edges = dependences(works)
    single = sum(w.seconds for w in works)
    busy, longest = sum(w.seconds * w.share for w in works), _longest(works, edges)
    if max(busy, longest) > GAIN * single or single <= 0:
        return one_stream(len(works), "no two launches would be faster if they ran at the same time", single)
    several = [assign(len(works), edges)]
    several += [list_schedule(works, edges, number) for number in NUMBERS_OF_STREAMS]
    for each in several:
        each.seconds = elapsed(works, each)
    best = min(several, key=lambda each: each.seconds)
    if best.seconds > GAIN * single:
        events = sum(map(len, best.waits))
        return one_stream(len(works), f"{events} events would cost what several streams gain", single)
    return best


def elapsed(works: Sequence[Work], plan: Schedule) -> float:
    """The estimated seconds of launches on these streams.

    A launch begins when the one before it on its stream has ended, and `EVENT_SECONDS` after those that it waits for.
    Launches that occupy more than the whole device together slow each other down in proportion.
    """
    streams: list[list[int]] = [[] for _ in range(plan.streams)]
    for launch in reversed(range(len(works))):
        streams[plan.stream[launch]].append(launch)  # the next one is last
    ends: dict[int, float] = {}
    free = [0.0] * plan.streams
    running: dict[int, tuple[int, float]] = {}  # stream -> launch, and the seconds that it still takes alone
    now = 0.0
    while len(ends) < len(works):
        starts = []
        for number, queue in enumerate(streams):
            if number in running or not queue or any(w not in ends for w in plan.waits[queue[-1]]):
                continue
            start = max(free[number], *(ends[w] + EVENT_SECONDS for w in plan.waits[queue[-1]]), now)
            if start <= now:
                running[number] = (launch := queue.pop(), works[launch].seconds)
            else:
                starts.append(start)
        slowed = max(1.0, sum(works[launch].share for launch, _ in running.values()))
        until = min([*starts, *(now + left * slowed for _, left in running.values())])
        for number, (launch, left) in list(running.items()):
            left -= (until - now) / slowed
            if left <= 1e-12:
                ends[launch] = free[number] = until
                del running[number]
            else:
                running[number] = launch, left
        now = until
    return now


def _longest(works: Sequence[Work], edges: Sequence[Sequence[int]]) -> float:
    """Seconds of the longest chain of launches that depend on each other."""
    ends: list[float] = []
    for work, before in zip(works, edges, strict=True):
        ends.append(work.seconds + max((ends[i] for i in before), default=0.0))
    return max(ends, default=0.0)


class _Memory:
    """The last writer and readers of each interval of one memory; intervals are sorted and disjoint."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.parts: list[tuple[int, int, tuple[int, ...]]] = []  # (stop, last writer or -1, readers since)

    def touch(self, launch: int, access: Access, writes: bool) -> set[int]:
        """Record an access; returns the launches on which it depends."""
        start, stop = access.start, access.stop
        if start >= stop:
            return set()
        first = bisect.bisect_right(self.starts, start) - 1
        if first < 0 or self.parts[first][0] <= start:
            first += 1
        last, found, at = first, set(), start
        starts: list[int] = []
        parts: list[tuple[int, int, tuple[int, ...]]] = []

        def keep(begin: int, end: int, writer: int, readers: tuple[int, ...]) -> None:
            if begin < end:
                starts.append(begin)
                parts.append((end, writer, readers))

        while last < len(self.starts) and self.starts[last] < stop:
            begin, (end, writer, readers) = self.starts[last], self.parts[last]
            keep(begin, min(start, end), writer, readers)
            if not writes:
                keep(at, begin, -1, (launch,))
                keep(max(begin, start), min(end, stop), writer, (*readers, launch))
            elif end > stop or last + 1 == len(self.starts) or self.starts[last + 1] >= stop:
                keep(start, stop, launch, ())
            found |= {writer, *readers} if writes else {writer}
            keep(max(begin, stop), end, writer, readers)
            at, last = end, last + 1
        if not writes:
            keep(max(at, start), stop, -1, (launch,))
        elif last == first:
            keep(start, stop, launch, ())
        order = sorted(range(len(starts)), key=starts.__getitem__)
        self.starts[first:last] = [starts[i] for i in order]
        self.parts[first:last] = [parts[i] for i in order]
        return found - {-1, launch}


def dependences(works: Sequence[Work]) -> list[list[int]]:
    """Per launch, the earlier ones that must have completed: those whose results it reads or whose memory it writes."""
    memories: dict[int, _Memory] = {}
    edges: list[list[int]] = []
    for index, work in enumerate(works):
        found: set[int] = set()
        for writes, accesses in ((False, work.reads), (True, work.writes)):
            for access in accesses:
                found |= memories.setdefault(access.space, _Memory()).touch(index, access, writes)
        edges.append(sorted(found))
    return edges


def reduced(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """The minimum equivalent graph (transitive reduction). `edges` are predecessors."""
    before: list[int] = []
    kept: list[list[int]] = []
    for predecessors in edges:
        covered, own = 0, []
        for p in sorted(predecessors, reverse=True):
            if not covered >> p & 1:
                own.append(p)
                covered |= before[p] | 1 << p
        kept.append(own[::-1])
        before.append(covered)
    return kept


def assign(count: int, edges: Sequence[Sequence[int]], most: int = MOST_STREAMS) -> Schedule:
    """Streams for launches 0, 1, ... with these predecessors: independent launches are on different ones.

    Beyond `most` streams, chains share a stream, which adds unnecessary order.
    """
    minimal = reduced(edges)
    following = _matched(count, minimal)
    stream, chains = [-1] * count, 0
    for launch in range(count):
        if stream[launch] < 0:
            at: int | None = launch
            while at is not None:
                stream[at] = chains % most
                at = following.get(at)
            chains += 1
    waits = [[p for p in before if stream[p] != stream[launch]] for launch, before in enumerate(minimal)]
    return Schedule(stream, waits, min(chains, most))


def list_schedule(works: Sequence[Work], edges: Sequence[Sequence[int]], streams: int) -> Schedule:
    """Each launch in turn on the stream on which it begins first, or else on that of a launch that it depends on.

    A stream is left to the launch with the longest path after it among those that wait for the stream's last one:
    another one takes it only if it would begin later elsewhere by more than it takes.
    """
    stream: list[int] = []
    ends: list[float] = []
    waits: list[list[int]] = []
    free = [0.0] * streams
    waited = [[-1] * streams for _ in range(streams)]  # the last launch of another stream that a stream has waited for
    minimal = reduced(edges)
    heirs, last = _heirs(works, minimal), [-1] * streams
    for launch, (work, before) in enumerate(zip(works, minimal, strict=True)):
        begins = [
            max([ready, *(ends[p] + (EVENT_SECONDS if stream[p] != number else 0.0) for p in before)])
            for number, ready in enumerate(free)
        ]
        kept = [previous >= 0 and heirs[previous] > launch for previous in last]
        prices = [begin + work.seconds * others for begin, others in zip(begins, kept, strict=True)]
        own = {stream[p] for p in before}
        chosen = min(range(streams), key=lambda number: (prices[number], number not in own, number))
        needed = [p for p in before if stream[p] != chosen and waited[chosen][stream[p]] < p]
        for p in needed:  # in ascending order
            waited[chosen][stream[p]] = p
        stream.append(chosen)
        waits.append(needed)
        free[chosen] = begins[chosen] + work.seconds
        ends.append(free[chosen])
        last[chosen] = launch
    return Schedule(stream, waits, len({*stream}))


def _heirs(works: Sequence[Work], minimal: Sequence[Sequence[int]]) -> list[int]:
    """Per launch the one that depends on it with the most seconds from its begin to the end of all; -1 without any."""
    left = [work.seconds for work in works]
    heirs = [-1] * len(works)
    for launch in reversed(range(len(works))):
        for p in minimal[launch]:
            if heirs[p] < 0 or left[launch] > left[heirs[p]]:
                heirs[p] = launch
                left[p] = works[p].seconds + left[launch]
    return heirs


def _matched(count: int, minimal: Sequence[Sequence[int]]) -> dict[int, int]:
    """Launch -> the next one in its chain: a maximum matching of the edges (Hopcroft and Karp)."""
    pairs = [(p, launch) for launch, before in enumerate(minimal) for p in before]
    if not pairs:
        return {}
    # SciPy takes memory in every process that imports it, and a warm start needs none of it.
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_bipartite_matching

    rows, columns = np.array(pairs).T
    graph = csr_matrix((np.ones(len(pairs), dtype=np.int8), (rows, columns)), shape=(count, count))
    match = maximum_bipartite_matching(graph, perm_type="column")
    return {p: int(launch) for p, launch in enumerate(match) if launch >= 0}
