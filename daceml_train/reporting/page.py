"""The report as HTML: tables and pictures; nothing is loaded from elsewhere, every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from daceml_train.reporting import picture, text
from daceml_train.reporting.model import Change, Compiled, Contents, Group, Kept, Launched, grouped
from daceml_train.reporting.numbers import bytes_text, counted, flops_text, percent, roofline_text, seconds_text, share
from daceml_train.reporting.tables import PLAIN, POLICY, SCRIPT, table
from daceml_train.reporting.tables import STYLE as TABLES
from daceml_train.runtime.roofline import Machine

NAME = 90
"""The maximum number of characters of an operator's description."""

STYLE = (
    """
.daceml-report{--ink:#1d2327;--soft:#5b656d;--line:#e3e7ea;--paper:#fff;--card:#f6f8f9;--blue:#0072b2;--grey:#b9c2c9;
--orange:#d98200;color:var(--ink);background:var(--paper);font:14px/1.5 system-ui,sans-serif;max-width:980px}
.daceml-report h1{font-size:22px;margin:0 0 4px}.daceml-report h2{font-size:16px;margin:28px 0 8px}
.daceml-report p{margin:4px 0;color:var(--soft)}
.daceml-report .cards{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}
.daceml-report .cards div{background:var(--card);border-radius:8px;padding:8px 14px}
.daceml-report .cards b{display:block;font-size:18px;font-variant-numeric:tabular-nums}
.daceml-report table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;background:none}
.daceml-report th,.daceml-report td{text-align:right;border-bottom:1px solid var(--line);padding:4px 8px}
.daceml-report th{font-weight:600;color:var(--soft)}.daceml-report tr,.daceml-report td{background:none}
.daceml-report th:first-child,.daceml-report td:first-child{text-align:left;overflow-wrap:anywhere}
.daceml-report .short,.daceml-report td:not(:first-child),.daceml-report th:not(:first-child){white-space:nowrap}
.daceml-report .bar{display:inline-block;height:9px;background:var(--blue);border-radius:2px;vertical-align:middle}
.daceml-report svg{width:100%;max-width:720px;display:block;overflow:visible;font:12px system-ui,sans-serif}
.daceml-report svg text{fill:var(--ink)}.daceml-report svg .number{fill:var(--soft)}
.daceml-report svg .before{fill:var(--grey)}.daceml-report svg .after,.daceml-report svg .area{fill:var(--blue)}
.daceml-report svg .area{opacity:.75}.daceml-report svg .base{fill:var(--grey);opacity:.6}
.daceml-report svg .grid{stroke:var(--line)}.daceml-report svg .roof{fill:none;stroke:var(--orange);stroke-width:2.5}
.daceml-report svg circle{fill:var(--blue);fill-opacity:.45;stroke:var(--blue)}
.daceml-report svg .strip{fill:transparent}.daceml-report svg .strip:hover{fill:var(--orange);fill-opacity:.35}
.daceml-report svg rect:hover,.daceml-report svg circle:hover{opacity:.75}
.daceml-report ul{margin:4px 0;padding-left:20px}
@media (prefers-color-scheme:dark){.daceml-report{--ink:#e4e8eb;--soft:#9aa5ad;--line:#333b41;--paper:#14181b;
--card:#1e2428;--blue:#4ba7dd;--grey:#59646c;--orange:#f0a52e}}
"""
    + TABLES
)


def document(report: Contents) -> str:
    """A whole page."""
    return whole(f"{report.kind} of {report.name}", fragment(report), sortable=True)


def whole(title: str, inside: str, sortable: bool = False) -> str:
    """A page around a fragment; the title is escaped here. If its tables are `sortable`, it has a script for that."""
    policy, script = (POLICY, f"<script>{SCRIPT}</script>") if sortable else (PLAIN, "")
    dark = "<style>body{margin:24px}@media (prefers-color-scheme:dark){body{background:#14181b}}</style>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">{dark}'
        f"</head><body>{inside}{script}</body></html>\n"
    )


def fragment(report: Contents) -> str:
    """The contents of a page or a notebook."""
    return styled(_parts(report))


def styled(parts: Iterable[str]) -> str:
    """Parts of a page, which are HTML, in its style."""
    return f'<style>{STYLE}</style><div class="daceml-report">{"".join(parts)}</div>'


def cards(entries: Iterable[tuple[str, str]]) -> str:
    """Cards, each a name and a value; both are escaped here."""
    inside = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in entries)
    return f'<div class="cards">{inside}</div>'


def _parts(report: Contents) -> Iterator[str]:
    yield f"<h1>{escape(report.kind)} of {escape(report.name)}</h1>"
    yield from (f"<p>{escape(line)}</p>" for line in text.headline(report))
    if report.empty:
        yield "<p>nothing is compiled yet: the first call compiles</p>"
    for place, function in enumerate(report.functions, 1):
        if len(report.functions) > 1:
            yield f"<h1>[{place}] {escape(text.title(function))}</h1>"
        yield from _function(report, function)
    if report.background:
        yield f"<h2>Compilation in the background</h2><ul>{_items(report.background)}</ul>"
    if report.cuda_graphs:
        yield f"<h2>CUDA graphs</h2><ul>{_items(report.cuda_graphs)}</ul>"
    if report.paths:
        shown = escape("\n".join(report.paths))
        yield f"<h2>Python runs the model, and programs compute</h2><pre>{shown}</pre>"
    if report.breaks:
        title = "Not one graph, because" if report.paths else "Runs in PyTorch, because"
        yield f"<h2>{title}</h2><ul>{_items(report.breaks)}</ul>"
    if report.graph_breaks:
        yield f"<h2>Several graphs, between which Python runs, because</h2><ul>{_items(report.graph_breaks)}</ul>"
    elif not report.breaks and not report.empty and not any(function.fallbacks for function in report.functions):
        yield "<p>No graph breaks, and no operator runs in PyTorch for lack of a rule.</p>"
    if report.eager is not None:
        largest = report.eager.by_operator.items()
        rows = [(escape(name), bytes_text(size), _bar(size, report.eager.bytes)) for name, size in largest]
        yield "<h2>What PyTorch moves in eager execution</h2>"
        yield table(("operator", "bytes", ""), rows)


def _function(report: Contents, function: Compiled) -> Iterator[str]:
    if function.sizes:
        yield f"<p>at the sizes last used, {escape(', '.join(f'{n} = {v}' for n, v in function.sizes.items()))}</p>"
    yield cards(_cards(report, function))
    yield "<h2>Bytes moved</h2>"
    yield picture.bars(function, report.eager if len(report.functions) == 1 else None)
    groups = grouped(function.launches, lambda x: x.operators)
    if groups:
        yield "<h2>Largest movers</h2>"
        yield _groups("operators of a kernel or call", groups, function, report.machine)
    if report.machine is not None and (drawn := picture.roofline(groups, report.machine)):
        yield "<h2>Roofline</h2>"
        threads = counted(report.machine.threads, "thread")
        yield f"<p>{escape(report.machine.processor)}, {threads}; areas are times</p>{drawn}"
    if groups:
        yield "<h2>By pass of the step</h2>"
        yield _groups("pass", grouped(function.launches, lambda x: x.phase), function, report.machine)
        yield "<h2>By module</h2>"
        yield _groups("module", grouped(function.launches, _module), function, report.machine)
    if function.device != "cpu":
        yield f"<h2>On the device</h2><p>{escape(', '.join(text.on_device(function)))}</p>"
        shaped = grouped((x for x in function.launches if x.shape), lambda x: x.shape)
        yield _groups("threads of a kernel", shaped, function, report.machine)
    if function.memory:
        yield f"<h2>Memory over the step</h2>{picture.memory(function)}"
    if function.kept:
        yield "<h2>Saved for the backward pass</h2>"
        total = sum(kept.bytes for kept in function.kept)
        yield f"<p>{counted(len(function.kept), 'array')}, {bytes_text(total)}</p>{_arrays(function.kept)}"
    if function.recomputed:
        yield "<h2>Rematerialized in the backward pass</h2>"
        total = sum(array.bytes for array in function.recomputed)
        summary = f"{counted(len(function.recomputed), 'array')}, {bytes_text(total)} that need not be kept"
        yield f"<p>{summary}</p>{_arrays(function.recomputed)}"
    yield "<h2>Transformations</h2>"
    yield _passes(function)
    yield from _compilation(function)


def _cards(report: Contents, function: Compiled) -> Iterator[tuple[str, str]]:
    theirs = report.eager.bytes if report.eager is not None else 0
    if theirs and isinstance(function.moved, int) and len(report.functions) == 1:
        yield "of PyTorch's bytes", f"{100 * function.moved / theirs:.0f} %"
    yield "moved", bytes_text(function.moved)
    if isinstance(function.flops, int):
        yield "arithmetic", flops_text(function.flops)
    if function.memory:
        yield "peak memory", bytes_text(function.peak)
    if (spent := function.seconds) is not None:
        yield "measured", seconds_text(spent)
        if report.machine is not None and spent:
            least = sum(report.machine.seconds(x.bytes, x.flops) for x in function.launches)
            yield "of the roofline", roofline_text(least / spent)
    yield "kernels, distinct", f"{function.kernels}, {function.distinct_kernels}"
    yield "library calls", str(sum(function.calls.values()))


def _groups(heading: str, groups: Sequence[Group], function: Compiled, machine: Machine | None) -> str:
    whole = sum(launch.bytes for launch in function.launches)
    timed = any(g.seconds is not None for g in groups)
    rows = []
    for group in groups:
        row = [escape(_short(group.name)), str(group.count), bytes_text(group.bytes), _bar(group.bytes, whole)]
        row.append(flops_text(group.flops) if group.flops else "")
        if timed:
            row.append("" if group.seconds is None else seconds_text(group.seconds))
            row.append(roofline_text(group.roofline(machine)))
        rows.append(tuple(row))
    times = ("time", "of roofline") if timed else ()
    return table((heading, "launches", "bytes", "", "arithmetic", *times), rows)


def _module(launch: Launched) -> str:
    return ".".join(launch.module.split(".")[:3]) or "the step itself"


def _passes(function: Compiled) -> str:
    rows = []
    for level in function.levels:
        seconds = f"{level.seconds:.2f} s"
        name = f"<b>{escape(level.name)}</b>"
        rows.append((name, bytes_text(level.after), percent(level.saved), _flops(level), seconds))
        for of, change in function.passes:
            if of == level.name and (change.before != change.after or change.operators[0] != change.operators[1]):
                name = f"&ensp;{escape(change.name)}"
                seconds = f"{change.seconds:.2f} s"
                rows.append((name, bytes_text(change.after), percent(change.saved), _flops(change), seconds))
    return table(("level and pass", "bytes after it", "saved", "arithmetic after it", "time"), rows, sortable=False)


def _flops(change: Change) -> str:
    return flops_text(change.flops) if isinstance(change.flops, int) else escape(change.flops)


def _arrays(arrays: Sequence[Kept]) -> str:
    rows = [(k.array, bytes_text(k.bytes), _short(k.operators), k.module) for k in arrays]
    return table(("array", "bytes", "produced by", "module"), [tuple(map(escape, row)) for row in rows])


def _compilation(function: Compiled) -> Iterator[str]:
    if function.fallbacks:
        yield "<h2>Run by PyTorch for lack of a rule</h2>"
        yield f"<ul>{_items([f'{operator} {line}'.strip() for operator, line in function.fallbacks])}</ul>"
    if lines := (*function.constant_sizes, *function.notes):
        yield f"<ul>{_items(lines)}</ul>"
    if function.needs_python:
        yield f"<p>{text.THROUGH_PYTHON}{escape(function.needs_python)}</p>"
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in function.stages.items())
    yield f"<p>{'found in the cache' if function.warm else 'compiled'}: {escape(stages)}</p>"
    if function.calls:
        calls = ", ".join(f"{name} × {count}" for name, count in function.calls.items())
        yield f"<p>library calls: {escape(calls)}</p>"


def _bar(part: int, whole: int) -> str:
    of = share(whole, whole - part) or 0.0
    return f'<span class="short"><span class="bar" style="width:{120 * of:.0f}px"></span> {percent(of)}</span>'


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 1]}…"


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)
