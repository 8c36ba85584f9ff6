"""The page of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.concurrency.rows import mean

Row = dict[str, Any]


def page(found: dict[str, Any]) -> str:
    """Markdown: a table per measurement."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield "# Concurrency"
    yield ""
    yield "How the launches of a step share the cores of a CPU: threads per launch, lanes, and what happens beside"
    yield "other processes. [Execution](../internals/execution.md) says how it works. Measured by"
    yield ""
    yield "    .venv/bin/python -m benchmarks.concurrency --page"
    yield ""
    versions = found["versions"]
    yield f"on {found['date']}, {found['processor']}, {found['cores']} cores, PyTorch {versions['torch']}, commit"
    yield f"{found['commit']}. All rows are of this run."
    for name, section in SECTIONS.items():
        if name in found:
            yield from ("", *section(found[name]))
            if found.get(f"{name} under load"):
                yield ""
                yield "Other processes had the cores for part of this measurement."


def _tiny(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Tiny steps"
    yield ""
    yield "Microseconds, medians. `native` is the part of a call that runs kernels and matmuls; the rest is Python."
    yield ""
    columns = "network", "PyTorch eager", "a call", "native", "C by hand", "a call / C by hand"
    yield from _table(columns, [_tiny_row(row) for row in rows])


def _tiny_row(row: Row) -> list[str]:
    by_hand = row.get("by hand")
    times = (row["eager"], row["call"], row["native"], by_hand)
    shown = ["–" if t is None else f"{1e6 * t:.1f}" for t in times]
    return [row["network"], *shown, "–" if by_hand is None else f"{row['call'] / by_hand:.2f}"]


def _lanes(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Branches"
    yield ""
    yield "Milliseconds a step on two threads, medians of calls in turn. `simulated` is the gain over launches in order"
    yield "that the schedule promised; lanes are used where a trial in the first calls found them faster."
    yield ""
    columns = ("network", "launches", "all threads", "chosen threads, in order", "default", "lanes")
    yield from _table(
        (*columns, "all threads / default", "in order / default", "simulated", "arena / in order"),
        [
            [
                row["network"],
                str(row["launches"]),
                *(f"{1e3 * row[way]:.2f}" for way in ("all threads", "in order", "default")),
                str(row["lanes"]),
                f"{row['all threads'] / row['default']:.2f}",
                f"{row['in order'] / row['default']:.2f}",
                f"{row['simulated']:.2f}" if row["simulated"] else "–",
                f"{row['memory']:.2f}",
            ]
            for row in rows
        ],
    )
    yield ""
    yield f"Geometric mean over all threads: {mean([row['all threads'] / row['default'] for row in rows]):.2f}."


def _threads(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Threads per launch"
    yield ""
    yield "Milliseconds, the sum of the least times of all launches: with the threads chosen in the first steps, with"
    yield "the best of one and two for each launch, and with two for all."
    yield ""
    yield from _table(
        ("network", "two threads", "chosen", "best", "chosen / best", "steps that were measured"),
        [
            [
                row["network"],
                *(f"{1e3 * row[way]:.3f}" for way in ("all", "chosen", "best")),
                f"{row['chosen'] / row['best']:.3f}",
                str(row["runs"]),
            ]
            for row in rows
        ],
    )


def _busy(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Beside a busy loop"
    yield ""
    yield "A process keeps one of the two cores busy. Times as long as the median step on one thread beside it."
    yield ""
    ways = "one thread", "default", "all threads"
    yield from _table(
        ("network", "one thread, ms", *(f"{way}: {what}" for way in ways for what in ("median", "99 %", "worst"))),
        [
            [
                row["network"],
                f"{1e3 * row['one thread']:.3f}",
                *(
                    f"{1.0 if (way, what) == ('one thread', '') else row[f'{way}{what}']:.2f}"
                    for way in ways
                    for what in ("", " 99 %", " worst")
                ),
            ]
            for row in rows
        ],
    )


def _simulate(rows: Sequence[Row]) -> Iterator[str]:
    yield "## 68 cores, simulated"
    yield ""
    yield "Milliseconds a step on 68 cores that are three times as slow, where a team of threads costs 3 µs and 3 µs"
    yield "more per doubling, from the measured seconds of each launch on one thread (`daceml-train simulate`). No"
    yield "schedule is shorter than the bound: the critical path, or all work shared out."
    yield ""
    yield from _table(
        (
            "network",
            "launches",
            "all cores, in order",
            "best number each",
            "lanes",
            "gain",
            "lanes / bound",
            "scheduling, s",
        ),
        [
            [
                row["network"],
                str(row["launches"]),
                *(f"{1e3 * row[way]:.2f}" for way in ("all cores", "best", "lanes")),
                f"{row['all cores'] / row['lanes']:.2f}",
                f"{row['lanes'] / row['bound']:.2f}",
                f"{row['scheduling']:.2f}",
            ]
            for row in rows
        ],
    )
    yield ""
    yield f"Geometric mean of the gains: {mean([row['all cores'] / row['lanes'] for row in rows]):.2f}."


SECTIONS: dict[str, Callable[[Sequence[Row]], Iterator[str]]] = {
    "tiny": _tiny,
    "lanes": _lanes,
    "threads": _threads,
    "busy": _busy,
    "simulate": _simulate,
}


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'---|' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
