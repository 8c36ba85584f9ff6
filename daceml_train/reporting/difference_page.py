"""Two reports on one page: before and after a change, or one model on two machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from daceml_train.reporting import page, picture, tables
from daceml_train.reporting.difference import Difference
from daceml_train.reporting.numbers import bytes_text, counted, flops_text, seconds_text

Report = Mapping[str, Any]
"""A report as its JSON has it."""
TOTALS = (
    ("bytes moved", "moved", bytes_text),
    ("arithmetic", "flops", flops_text),
    ("kernels", "kernels", str),
    ("distinct kernels", "distinct_kernels", str),
    ("arena", "arena", bytes_text),
    ("inputs", "inputs", bytes_text),
)


def document(a: Report, b: Report, names: tuple[str, str], found: Difference) -> str:
    """A whole page; `names` are what the reports are called, such as their files."""
    parts = page.styled(_parts(a, b, names, found))
    return page.whole(f"{names[0]} and {names[1]}", parts, sortable=True)


def _parts(a: Report, b: Report, names: tuple[str, str], found: Difference) -> Iterator[str]:
    yield f"<h1>{escape(names[0])} and {escape(names[1])}</h1>"
    for name, report in zip(names, (a, b), strict=True):
        machine = report.get("machine")
        on = f", on {_machine(machine)}" if machine else ""
        told = f"{name}: {report['kind']} of {report['name']}{on}"
        yield f"<p>{escape(told)}</p>"
    if found.same:
        yield "<p>The reports agree in everything but time.</p>"
    yield "<h2>Totals</h2>"
    yield tables.table(("", *names, "change"), list(_totals(a, b)), sortable=False)
    yield "<h2>Bytes moved</h2>"
    yield _bars(names, [sum(_numbers(of, "moved")) for of in (a, b)])
    yield "<h2>Launches</h2>"
    yield _launches(a, b, names)
    if found.lines:
        items = "".join(f"<li>{escape(line)}</li>" for line in found.lines)
        yield f"<h2>Only in one of them</h2><ul>{items}</ul>"


def _machine(machine: Mapping[str, Any]) -> str:
    return (
        f"{machine['processor']}, {counted(machine['threads'], 'thread')}, {machine['bandwidth'] / 1e9:.1f} GB/s, "
        f"{machine['peak'] / 1e9:.0f} GFLOP/s"
    )


def _numbers(report: Report, what: str) -> list[int]:
    """A number of each function; those with symbols are left out."""
    return [f[what] for f in report["functions"] if isinstance(f[what], int)]


def _totals(a: Report, b: Report) -> Iterator[tuple[str, ...]]:
    for label, what, shown in TOTALS:
        before, after = sum(_numbers(a, what)), sum(_numbers(b, what))
        yield label, escape(shown(before)), escape(shown(after)), _change(before, after)
    peaks = [max((f["inputs"] + max(f["memory"], default=0) for f in of["functions"]), default=0) for of in (a, b)]
    yield "peak memory", *map(bytes_text, peaks), _change(*peaks)
    spent = [_seconds([x for f in of["functions"] for x in f["launches"]]) for of in (a, b)]
    if spent[0] is not None and spent[1] is not None:
        yield "measured, one run each", *(seconds_text(s) for s in spent if s is not None), _change(spent[0], spent[1])


def _seconds(launches: Sequence[Mapping[str, Any]]) -> float | None:
    known = [x["seconds"] for x in launches if x.get("seconds") is not None]
    return sum(known) if known else None


def _change(before: float, after: float) -> str:
    if not before or before == after:
        return ""
    return f"{100 * (after - before) / before:+.1f} %".replace("-", "−")


def _bars(names: Sequence[str], sizes: Sequence[int]) -> str:
    parts, largest = [], max(sizes) or 1
    for place, (name, size, kind) in enumerate(zip(names, sizes, ("before", "after"), strict=True)):
        y, width, shown = 26 * place, max(1.0, 360 * size / largest), name if len(name) <= 28 else f"…{name[-27:]}"
        parts.append(f'<text x="200" y="{y + 17}" text-anchor="end">{escape(shown)}</text>')
        bar = f'<rect class="{kind}" x="210" y="{y + 5}" width="{width:.1f}" height="16" rx="2">'
        parts.append(f"{bar}<title>{escape(name)}: {size:,} bytes</title></rect>")
        parts.append(f'<text class="number" x="{218 + width:.1f}" y="{y + 17}">{bytes_text(size)}</text>')
    return picture.svg(26 * len(sizes), parts, "Bytes of both")


def _launches(a: Report, b: Report, names: tuple[str, str]) -> str:
    """Launches by what they run: their number, bytes and times in both, the largest difference first."""
    groups: list[dict[str, list[Mapping[str, Any]]]] = [{}, {}]
    for of, report in zip(groups, (a, b), strict=True):
        for launch in (x for f in report["functions"] for x in f["launches"]):
            of.setdefault(launch["operators"], []).append(launch)
    rows = []
    for name in dict.fromkeys([*groups[0], *groups[1]]):
        both = [of.get(name, []) for of in groups]
        moved = [sum(x["bytes"] for x in of) for of in both]
        times = [_seconds(of) for of in both]
        told = ["" if t is None else seconds_text(t) for t in times]
        ratio = f"{times[0] / times[1]:.2f} ×" if times[0] and times[1] else ""
        row = [escape(name), *(str(len(of)) for of in both), *map(bytes_text, moved), *told, ratio]
        rows.append((abs(moved[1] - moved[0]), max(times[0] or 0, times[1] or 0), row))
    rows.sort(key=lambda row: (-row[0], -row[1]))
    x, y = ("a", "b") if max(map(len, names)) > 12 else names
    heading = ["operators of a kernel or call", f"launches {x}", y, f"bytes {x}", y, f"time {x}", y, "times as fast"]
    return tables.table(heading, [tuple(row) for _, _, row in rows])
