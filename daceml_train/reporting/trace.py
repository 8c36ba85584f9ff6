"""Chrome trace: the measured launches as events, with what they move; the arrays alive as a counter.

The format is that of chrome://tracing and Perfetto: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daceml_train.reporting.model import Contents, Launched


def events(report: Contents) -> dict[str, Any]:
    """One event per launch, in microseconds from the start; a process per function, a thread per program.

    Launches side by side have a thread per lane. They are drawn one after the other in their lane; what they wait for
    in others is not shown.
    """
    found: list[dict[str, Any]] = []
    for process, function in enumerate(report.functions):
        found.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": function.name}})
        starts = started(function.launches)
        for place, launch in enumerate(function.launches):
            if launch.seconds is None:
                continue
            start = starts[place]
            found.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": launch.program + (0 if launch.place is None else 2 * launch.place[1]),
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
            if place < len(function.memory):
                args = {"arrays": function.memory[place]}
                found.append({"ph": "C", "pid": process, "name": "memory", "ts": 1e6 * start, "args": args})
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"of": f"{report.kind} of {report.name}"}}


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
