"""Chrome trace: the measured launches as events, with what they move; the arrays alive as a counter.

The format is that of chrome://tracing and Perfetto: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

from typing import Any

from daceml_train.reporting.model import Contents


def events(report: Contents) -> dict[str, Any]:
    """One event per launch, in microseconds from the start; a process per function, a thread per program."""
    found: list[dict[str, Any]] = []
    for process, function in enumerate(report.functions):
        found.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": function.name}})
        start = 0.0
        for place, launch in enumerate(function.launches):
            if launch.seconds is None:
                continue
            found.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": launch.program,
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
                    },
                }
            )
            if place < len(function.memory):
                args = {"arrays": function.memory[place]}
                found.append({"ph": "C", "pid": process, "name": "memory", "ts": 1e6 * start, "args": args})
            start += launch.seconds
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"of": f"{report.kind} of {report.name}"}}
