"""The report of a search as HTML: the tree of stages over steps, the processes over time, and the values of trials.

The tree is that of all stages on the storage, whichever study or process trained them. Every text is escaped.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Protocol

from daceml_train.reporting import page, tables
from daceml_train.reporting.numbers import counted, percent, seconds_text
from daceml_train.reporting.picture import WIDTH, svg

LEAVES = 64
"""How many paths of the tree a picture shows."""
ROWS = 60
"""How many rows a table has."""
COLORS = ("#0072b2", "#d98200", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7f00", "#7f6fb0")
"""The colors of processes, in order, distinct for the color-blind (Okabe and Ito), from the start after the last."""


class Contents(Protocol):
    """What a page shows: see `daceml_train.trials.report.Report`."""

    @property
    def requested(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def ratio(self) -> float: ...
    @property
    def twice(self) -> int: ...
    @property
    def unsaved(self) -> int: ...
    @property
    def workers(self) -> Sequence[Any]: ...
    @property
    def rows(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def ends(self) -> Sequence[Any]: ...


@dataclass
class Branch:
    """A stage in the picture: its record, the stages that begin at its end, and its height, counted in rows."""

    record: Mapping[str, Any]
    children: list[Branch] = field(default_factory=list)
    row: float = 0.0


def fragment(report: Contents) -> str:
    """The contents of a page or a notebook."""
    return page.styled(_parts(report))


def _parts(report: Contents) -> Iterator[str]:
    yield "<h1>Search by stages</h1>"
    yield page.cards(_cards(report))
    if report.twice:
        why = "no checkpoint was kept where trials parted, or it was lost"
        yield f"<p>{report.twice:,} steps were trained a second time: {why}.</p>"
    if report.unsaved:
        yield f"<p>{counted(report.unsaved, 'checkpoint')} could not be written.</p>"
    if not report.rows:
        yield "<p>Nothing was trained yet.</p>"
        return
    colors = {worker.name: COLORS[place % len(COLORS)] for place, worker in enumerate(report.workers)}
    yield "<h2>The tree of stages</h2>"
    yield "<p>Each bar is a stage, trained once; it is labeled with the settings in which it differs from its siblings."
    yield " The cursor shows all settings, the trials that end there, and their value.</p>"
    yield _tree(report, colors)
    yield "<h2>Who trained what</h2>"
    yield _timeline(report.rows, colors)
    span = _span(report.rows)
    heading = ("process", "", "stages", "steps", "time", "of the search")
    rows = [_worker(worker, colors, span) for worker in report.workers]
    yield tables.table(heading, rows, sortable=False)
    if report.ends:
        yield "<h2>Trials</h2>"
        yield from _trials(report)


def _cards(report: Contents) -> Iterator[tuple[str, str]]:
    yield "steps asked for", f"{report.requested:,}"
    yield "steps trained", f"{report.steps:,}"
    yield "times fewer", f"{report.ratio:.2f}"
    yield "steps saved", f"{max(report.requested - report.steps, 0):,}"
    yield "training, with compilation", seconds_text(report.seconds)
    if report.rows:  # the median: the first stage of a process compiles
        per_step = statistics.median(row["seconds"] / (row["end"] - row["start"]) for row in report.rows)
        yield "of training saved, about", seconds_text(per_step * max(report.requested - report.steps, 0))
    trials, processes = len({(end.run, end.trial) for end in report.ends}), len(report.workers)
    yield ("trial" if trials == 1 else "trials"), str(trials)
    yield ("process" if processes == 1 else "processes"), str(processes)


# ---- the tree -------------------------------------------------------------------------------------------------------
def grown(rows: Sequence[Mapping[str, Any]]) -> list[Branch]:
    """The stages as trees, in the order of their settings; one whose beginning has no record is a tree of its own."""
    branches = {row["key"]: Branch(row) for row in rows}
    roots: list[Branch] = []
    for branch in branches.values():
        before = branches.get(branch.record["before"])
        (roots if before is None else before.children).append(branch)
    for siblings in (roots, *(branch.children for branch in branches.values())):
        siblings.sort(key=lambda branch: (-branch.record["end"], str(branch.record["settings"])))
    return roots


def _tree(report: Contents, colors: Mapping[str, str]) -> str:
    roots = grown(report.rows)
    shown, leaves = _placed(roots)
    most = max(branch.record["end"] for branch in shown)
    left, right, height = 14, WIDTH - 14, 18

    def x(step: float) -> float:
        return left + (right - left) * step / float(most)

    ends: dict[str, list[Any]] = defaultdict(list)
    for end in report.ends:
        ends[end.key].append(end)
    parts = list(_axis(most, x, height * min(leaves, LEAVES) + 8))
    labels = {id(b): text for siblings in (roots, *(b.children for b in shown)) for b, text in _differences(siblings)}
    drawn = {id(branch) for branch in shown}
    for branch in shown:
        row, y = branch.record, height * branch.row + 4
        for child in (child for child in branch.children if id(child) in drawn):
            below = height * child.row + 9
            parts.append(
                f'<path style="fill:none;stroke:var(--grey)" d="M{x(row["end"]):.1f},{y + 5:.1f} V{below:.1f} h4" '
                'stroke-width="1"/>'
            )
        title = escape(_about(row, ends[row["key"]]))
        width = max(x(row["end"]) - x(row["start"]) - 2, 2.0)
        parts.append(
            f'<rect x="{x(row["start"]) + 1:.1f}" y="{y:.1f}" width="{width:.1f}" height="10" rx="2" '
            f'fill="{colors[row["worker"]]}" fill-opacity=".75"><title>{title}</title></rect>'
        )
        if text := labels.get(id(branch), ""):
            fits = text[: max(int(width / 5.2), 0)]
            if len(fits) == len(text):
                parts.append(
                    f'<text x="{x(row["start"]) + 5:.1f}" y="{y + 8.5:.1f}" font-size="9" pointer-events="none" '
                    f'style="fill:#fff">{escape(text)}</text>'
                )
    more = f"<p>and {leaves - LEAVES} more paths</p>" if leaves > LEAVES else ""
    return svg(height * min(leaves, LEAVES) + 30, parts, "The tree of stages") + more


def _placed(roots: Sequence[Branch]) -> tuple[list[Branch], int]:
    """The branches of the first paths, with their rows, and the number of all paths. Parents are between children."""
    order: list[Branch] = []
    todo = list(reversed(roots))
    while todo:
        branch = todo.pop()
        order.append(branch)
        todo += reversed(branch.children)
    row = 0
    for branch in order:
        if not branch.children:
            branch.row, row = row, row + 1
    for branch in reversed(order):
        if branch.children:
            branch.row = (branch.children[0].row + branch.children[-1].row) / 2
    shown = [branch for branch in order if _first(branch) < LEAVES]
    for branch in shown:
        branch.row = min(branch.row, LEAVES - 1)
    return shown, row


def _first(branch: Branch) -> float:
    while branch.children:
        branch = branch.children[0]
    return branch.row


def _axis(most: int, x: Any, height: float) -> Iterator[str]:
    unit = 10 ** math.floor(math.log10(max(most, 1)))
    every = next(unit * part for part in (0.1, 0.2, 0.5, 1, 2) if most / (unit * part) <= 10)
    for place in range(int(most / max(every, 1)) + 1):
        at = x(place * max(every, 1))
        yield f'<line class="grid" x1="{at:.1f}" y1="0" x2="{at:.1f}" y2="{height:.1f}"/>'
        label = f"{place * max(every, 1):g}"
        yield f'<text class="number" x="{at:.1f}" y="{height + 14:.1f}" text-anchor="middle">{label}</text>'


def _differences(siblings: Sequence[Branch]) -> Iterator[tuple[Branch, str]]:
    """What a stage sets that its siblings do not: the settings of its first step."""
    every = [dict(branch.record["settings"]) for branch in siblings]
    names = sorted({name for settings in every for name in settings})
    differing = [name for name in names if len({repr(settings.get(name)) for settings in every}) > 1]
    for branch, settings in zip(siblings, every, strict=True):
        yield branch, ", ".join(f"{name}={_short(settings.get(name))}" for name in differing)


def _about(row: Mapping[str, Any], ends: Sequence[Any]) -> str:
    settings = ", ".join(f"{name}={_short(value)}" for name, value in row["settings"])
    lines = [f"steps {row['start']} to {row['end']}: {settings}", f"{row['worker']}, {seconds_text(row['seconds'])}"]
    if ends:
        trials = ", ".join(str(number) for number in sorted({end.trial for end in ends}))
        value = "" if ends[0].value is None else f", value {_short(ends[0].value)}"
        lines.append(f"trials {trials}{value}")
    return "\n".join(lines)


# ---- processes and trials -------------------------------------------------------------------------------------------
def _span(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    return min(row["at"] for row in rows), max(row["at"] + row["seconds"] for row in rows)


def _timeline(rows: Sequence[Mapping[str, Any]], colors: Mapping[str, str]) -> str:
    """A line per process, with its stages over time."""
    start, end = _span(rows)
    left, right, height = 130, WIDTH - 14, 20
    scale = (right - left) / max(end - start, 1e-9)
    parts = []
    for place, (worker, color) in enumerate(colors.items()):
        y = height * place
        parts.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(worker[-18:])}</text>')
        for row in (row for row in rows if row["worker"] == worker):
            at, width = left + (row["at"] - start) * scale, max(row["seconds"] * scale - 0.5, 0.7)
            parts.append(
                f'<rect x="{at:.1f}" y="{y + 3}" width="{width:.1f}" height="14" fill="{color}" fill-opacity=".75">'
                f"<title>{escape(_about(row, ()))}</title></rect>"
            )
    bottom = height * len(colors)
    parts.append(f'<text class="number" x="{left}" y="{bottom + 14}">0</text>')
    parts.append(
        f'<text class="number" x="{right}" y="{bottom + 14}" text-anchor="end">{seconds_text(end - start)}</text>'
    )
    return svg(bottom + 20, parts, "Processes over time")


def _worker(worker: Any, colors: Mapping[str, str], span: tuple[float, float]) -> tuple[str, ...]:
    color = f'<span class="bar" style="width:12px;background:{colors[worker.name]}"></span>'
    of = percent(worker.seconds / max(span[1] - span[0], 1e-9))
    return escape(worker.name), color, str(worker.stages), f"{worker.steps:,}", seconds_text(worker.seconds), of


def _trials(report: Contents) -> Iterator[str]:
    runs = list(dict.fromkeys(end.run for end in report.ends))
    by_trial: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
    for end in report.ends:
        by_trial[end.run, end.trial][end.steps] = end.value
    rungs = sorted({end.steps for end in report.ends})[-8:]
    rows = []
    for (run, number), values in list(by_trial.items())[:ROWS]:
        name = f"{number}" if len(runs) == 1 else f"search {runs.index(run) + 1}, trial {number}"
        cells = [escape(_short(values[rung])) if rung in values else "" for rung in rungs]
        rows.append((escape(name), *cells))
    yield tables.table(("trial", *(f"after {rung:,} steps" for rung in rungs)), rows, sortable=False)
    if len(by_trial) > ROWS:
        yield f"<p>and {len(by_trial) - ROWS} more</p>"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_short, value))})"
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


__all__ = ["fragment", "grown"]
