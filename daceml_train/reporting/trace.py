"""Chrome trace: the measured launches as events, with what they move and wait for; the arrays alive as a counter.

The format is that of chrome://tracing and Perfetto: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from daceml_train.reporting.model import Contents, Launched


def events(report: Contents) -> dict[str, Any]:
    """One event per launch, in microseconds from the start; a process per function, a thread per program.

    Launches side by side have a thread per lane, and are drawn one after the other in it. Arrows (flow events) come
    from the launches in other lanes that a launch waits for.
    """
    found: list[dict[str, Any]] = []
    for process, function in enumerate(report.functions):
        found.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": function.name}})
        starts, firsts = started(function.launches), dict[int, int]()
        for place, launch in enumerate(function.launches):
            firsts.setdefault(launch.program, place)
        for place, launch in enumerate(function.launches):
            if launch.seconds is None:
                continue
            start = starts[place]
            found.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": _thread(launch),
                    "name": launch.name or launch.operators or launch.kernel,
                    "cat": f"{launch.kind},{launch.phase}",
                    "ts": 1e6 * start,
                    "dur": 1e6 * launch.seconds,
                    "args": {
                        "operators": launch.operators,
                        "module": launch.module,
                        "source": launch.source,
                        "kernel": launch.kernel,
                        "bytes": launch.bytes,
                        "flops": launch.flops,
                        "threads": launch.threads,
                    },
                }
            )
            found += _arrows(process, function.launches, starts, place, firsts[launch.program])
            if place < len(function.memory):
                args = {"arrays": function.memory[place]}
                found.append({"ph": "C", "pid": process, "name": "memory", "ts": 1e6 * start, "args": args})
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"of": f"{report.kind} of {report.name}"}}


def _thread(launch: Launched) -> int:
    return launch.program + (0 if launch.place is None else 2 * launch.place[1])


def _arrows(
    process: int, launches: Sequence[Launched], starts: Sequence[float], place: int, first: int
) -> Iterator[dict[str, Any]]:
    """Flow events from what a launch waits for in other lanes, apart from what that waits for itself.

    `first` is the place of its program's first launch.
    """
    launch = launches[place]
    implied: set[int] = set()
    for before in sorted(launch.before, reverse=True):
        other = launches[first + before]
        if before in implied:
            continue
        implied.update(other.before)
        if other.seconds is None or _thread(other) == _thread(launch):
            continue
        flow = {"pid": process, "name": "waits for", "cat": "dependence", "id": f"{process}.{first + before}.{place}"}
        middle = 1e6 * (starts[first + before] + other.seconds / 2)  # an arrow belongs to the event around its time
        yield {"ph": "s", "tid": _thread(other), "ts": middle, **flow}
        inside = 1e6 * (starts[place] + (launch.seconds or 0.0) / 2)
        yield {"ph": "f", "bp": "e", "tid": _thread(launch), "ts": inside, **flow}


def started(launches: Sequence[Launched]) -> list[float]:
    """Seconds from the start to the begin of each launch, in the order and the lanes in which they run."""
    places = [launch.place or (-1, 0, i) for i, launch in enumerate(launches)]
    order = sorted(range(len(launches)), key=lambda i: (launches[i].program, places[i][2]))
    found, ends, segment, floor = [0.0] * len(launches), dict[int, float](), (-1, -1), 0.0
    for i in order:
        own, lane = (launches[i].program, places[i][0]), places[i][1]
        if own != segment:  # a segment begins when the one before it has ended
            floor, ends, segment = max(ends.values(), default=floor), {}, own
        found[i] = ends.get(lane, floor)
        ends[lane] = found[i] + (launches[i].seconds or 0.0)
    return found
