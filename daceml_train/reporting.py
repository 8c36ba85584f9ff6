"""Report: what compilation did to a module or a training step, as text, HTML and JSON.

A compiled function is one program (a training step) or two (a forward pass and its backward pass), which are shown
together. Sizes that vary between calls are shown at the values they had last.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daceml_train.driver.compilation import PassRecord, Record
from daceml_train.driver.module import state_of
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid
from daceml_train.passes.base import LEVELS
from daceml_train.tensor import Dim

_BEHIND = LEVELS[1:]
"""The levels that see forward and backward pass; what runs before them sees the forward pass alone."""


@dataclass(frozen=True)
class Change:
    """Bytes and operators before and after a pass, a level, or the cut into forward and backward pass.

    Bytes are numbers, or texts of expressions where a size is not known yet.
    """

    name: str
    before: int | str
    after: int | str
    operators: tuple[int, int]
    seconds: float

    @property
    def saved(self) -> float | None:
        """The share of the bytes that was saved; None where it is not a number."""
        return share(self.before, self.after)


@dataclass(frozen=True)
class Compiled:
    """One compiled function: the bytes it moves, level by level, and what it runs.

    `captured` are the bytes with one kernel or library call per operator, gradients and update included; `moved` those
    of what runs. `levels` begin there; `passes` has all passes, by level. `fallbacks` are operators that PyTorch runs
    for want of a rule, with the user's line. `stages` are seconds of compilation.
    """

    name: str
    programs: int
    captured: int | str
    moved: int | str
    flops: int | str
    levels: tuple[Change, ...]
    passes: tuple[tuple[str, Change], ...]
    kernels: int
    distinct_kernels: int
    calls: Mapping[str, int]
    fallbacks: tuple[tuple[str, str], ...]
    stages: Mapping[str, float]
    warm: bool
    arena: int
    sizes: Mapping[str, int]

    @property
    def saved(self) -> float | None:
        """The share of the captured bytes that is not moved any more."""
        return share(self.captured, self.moved)


@dataclass(frozen=True)
class Report:
    """Everything known of an optimized module or a training step; `breaks` are reasons why something runs in PyTorch.

    Printed, it is a table; a notebook shows it as HTML.
    """

    kind: str
    name: str
    functions: tuple[Compiled, ...]
    breaks: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The report as a JSON text."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        return _html(self)


def report(compiled: Any) -> Report:
    """What was compiled for a module from `optimize` or a step from `training_step`.

    Raises `Invalid` for anything else. Before the first call there is nothing to tell, and the report says so.
    """
    if isinstance(compiled, TrainingStep):
        name = f"{type(compiled.model).__name__}, {type(compiled.optimizer).__name__}"
        pieces = state_of(compiled.pieces)
        records = [*compiled.records, *(pieces.backend.records if pieces else ())]
        breaks = [*compiled.breaks, *(pieces.backend.breaks if pieces else ())]
        return Report("training step", name, _functions(records), _reasons(breaks))
    state = state_of(compiled)
    if state is None:
        raise Invalid(
            f"report takes what `optimize` or `training_step` returned, given {type(compiled).__name__}",
            advice="call report on that object",
        )
    functions = _functions(state.backend.records)
    return Report("module", state.source.__name__, functions, _reasons(state.backend.breaks))


def _reasons(breaks: Sequence[str]) -> tuple[str, ...]:
    """Each reason once and on one line, without TorchDynamo's hints to its developers."""
    lines = ([line.strip() for line in reason.splitlines()] for reason in breaks)
    kept = (" ".join(line for line in of if line and not line.startswith("Hint:")) for of in lines)
    return tuple(dict.fromkeys(kept))


# ---- from records ---------------------------------------------------------------------------------------------------
def _functions(records: Sequence[Record]) -> tuple[Compiled, ...]:
    """Records in the order of compilation, a backward pass joined to the forward pass before it."""
    groups: list[list[Record]] = []
    for record in records:
        if groups and len(groups[-1]) == 1 and record.name == f"{groups[-1][0].name} backward":
            groups[-1].append(record)
        else:
            groups.append([record])
    return tuple(_compiled(group) for group in groups)


def _compiled(group: Sequence[Record]) -> Compiled:
    first = group[0]
    linked = [r.executable for r in group if r.executable is not None]
    sizes = {name: value for executable in linked for name, value in executable.sizes.items()}
    levels = tuple(_levels(group, sizes))
    captured = number(first.bytes_captured, sizes)
    calls: dict[str, int] = {}
    for record in group:
        for name, count in record.calls.items():
            calls[name] = calls.get(name, 0) + count
    stages: dict[str, float] = {}
    for record in group:
        for stage, seconds in record.seconds.items():
            stages[stage] = max(stages.get(stage, 0.0), seconds)  # both halves note the loading of the pair
    return Compiled(
        name=first.name,
        programs=len(group),
        captured=captured,
        moved=levels[-1].after if levels else captured,
        flops=number(_sum(r.flops for r in group), sizes),
        levels=levels,
        passes=tuple(_passes(group, sizes)),
        kernels=sum(r.kernels for r in group),
        distinct_kernels=sum(r.distinct_kernels for r in group),
        calls=dict(sorted(calls.items())),
        fallbacks=tuple(dict.fromkeys(fallback for record in group for fallback in record.fallbacks)),
        stages=stages,
        warm=first.warm,
        arena=max((executable.arena.capacity for executable in linked), default=0),
        sizes=sizes,
    )


def _passes(group: Sequence[Record], sizes: Mapping[str, int]) -> Iterator[tuple[str, Change]]:
    """Level and change of each pass; forward and backward pass go through the same ones and are added up."""
    for level in LEVELS:
        of_level = [[p for p in record.passes if p.level == level] for record in group]
        for same in zip(*(ps for ps in of_level if ps), strict=True):
            yield level, _change(same[0].name, same, same, sizes)


def _levels(group: Sequence[Record], sizes: Mapping[str, int]) -> Iterator[Change]:
    """One change per level; of the levels behind the cut, forward and backward pass are added up."""
    before: Sequence[PassRecord] = ()
    for level in _BEHIND:
        of_level = [[p for p in record.passes if p.level == level] for record in group]
        starts, ends = [ps[0] for ps in of_level if ps], [ps[-1] for ps in of_level if ps]
        if not starts:
            continue
        if len(before) == 1 and len(starts) == 2:
            yield _cut(before[0], starts, sizes)
        change = _change(level, starts, ends, sizes)
        yield dataclasses.replace(change, seconds=sum(p.seconds for ps in of_level for p in ps))
        before = ends


def _cut(joint: PassRecord, halves: Sequence[PassRecord], sizes: Mapping[str, int]) -> Change:
    after = number(_sum(p.bytes_before for p in halves), sizes)
    operators = joint.operators_after, sum(p.operators_before for p in halves)
    return Change("cut into forward and backward", number(joint.bytes_after, sizes), after, operators, 0.0)


def _change(
    name: str, starts: Sequence[PassRecord], ends: Sequence[PassRecord], sizes: Mapping[str, int]
) -> Change:
    before = number(_sum(p.bytes_before for p in starts), sizes)
    after = number(_sum(p.bytes_after for p in ends), sizes)
    operators = sum(p.operators_before for p in starts), sum(p.operators_after for p in ends)
    return Change(name, before, after, operators, sum(p.seconds for p in ends))


def _sum(sizes: Iterator[Dim] | Sequence[Dim]) -> Dim:
    total: Dim = 0
    for size in sizes:
        total = total + size
    return total


# ---- numbers --------------------------------------------------------------------------------------------------------
def number(size: Dim, sizes: Mapping[str, int]) -> int | str:
    """A size as a number where all its symbols have values, else as a text."""
    if not isinstance(size, int):
        size = size.subs({s: sizes[str(s)] for s in size.free_symbols if str(s) in sizes})
    return str(size) if getattr(size, "free_symbols", None) else int(size)


def share(before: int | str, after: int | str) -> float | None:
    """The share of `before` that `after` saves; None where they are not numbers, or there was nothing."""
    if isinstance(before, str) or isinstance(after, str) or not before:
        return None
    return 1 - after / before


def bytes_text(count: int | str) -> str:
    """A number of bytes with its unit: `38.4 MB`."""
    if isinstance(count, str):
        return f"{count} B"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def _percent(saved: float | None) -> str:
    return "" if saved is None else f"{100 * saved:.1f} %"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"


# ---- text -----------------------------------------------------------------------------------------------------------
def _lines(made: Report) -> Iterator[str]:
    yield f"{made.kind} of {made.name}"
    if not made.functions and not made.breaks:
        yield "nothing is compiled yet: the first call compiles"
    for place, function in enumerate(made.functions, 1):
        if len(made.functions) > 1:
            yield f"\n[{place}]"
        yield from _function_lines(function)
    if made.breaks:
        yield "\nruns in PyTorch, because"
        yield from (f"  {reason}" for reason in made.breaks)


def _function_lines(function: Compiled) -> Iterator[str]:
    if function.sizes:
        yield "at the sizes last used, " + ", ".join(f"{n} = {v}" for n, v in function.sizes.items())
    rows = [("bytes moved", "", "saved", "operators", "seconds")]
    rows.append(("one kernel or call per operator", bytes_text(function.captured), "", "", ""))
    for level in function.levels:
        rows.append((f"after {level.name}", bytes_text(level.after), *_columns(level)))
        passes = [change for of, change in function.passes if of == level.name and _matters(change)]
        rows += [(f"  {change.name}", "", *_columns(change)) for change in passes]
    rows.append(("in all", bytes_text(function.moved), _percent(function.saved), "", ""))
    yield from _aligned(rows)
    yield ", ".join(_facts(function))
    if function.calls:
        yield "library calls: " + ", ".join(f"{name} x {count}" for name, count in function.calls.items())
    for operator, line in function.fallbacks:
        yield f"without a rule of ours, run by PyTorch: {operator}{f' at {line}' if line else ''}"
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in function.stages.items())
    yield f"{'found in the cache' if function.warm else 'compiled'}: {stages}"


def _columns(change: Change) -> tuple[str, str, str]:
    before, after = change.operators
    operators = str(after) if before == after else f"{before} -> {after}"
    return _percent(change.saved), operators, f"{change.seconds:.2f}" if change.seconds else ""


def _matters(change: Change) -> bool:
    return change.before != change.after or change.operators[0] != change.operators[1]


def _facts(function: Compiled) -> Iterator[str]:
    yield _counted(function.programs, "program")
    yield f"{_counted(function.kernels, 'kernel')} ({function.distinct_kernels} distinct)"
    yield _counted(sum(function.calls.values()), "library call")
    if isinstance(function.flops, int):
        yield f"{function.flops / 1e9:.3g} GFLOP"
    yield f"arena {bytes_text(function.arena)}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        first, *others = (cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in _cells(row, widths))
        yield "  ".join((first, *others)).rstrip()


def _cells(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    return enumerate(zip(row, widths, strict=True))


# ---- HTML -----------------------------------------------------------------------------------------------------------
_CELL = "padding:2px 10px;text-align:right;border:0"
_FIRST = "padding:2px 10px 2px 0;text-align:left;border:0"


def _html(made: Report) -> str:
    parts = [f"<b>{html.escape(made.kind)} of {html.escape(made.name)}</b>"]
    if not made.functions and not made.breaks:
        parts.append("<p>nothing is compiled yet: the first call compiles</p>")
    for function in made.functions:
        parts.append(_html_function(function))
    if made.breaks:
        reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in made.breaks)
        parts.append(f"<p>runs in PyTorch, because</p><ul>{reasons}</ul>")
    return f'<div style="font-size:90%">{"".join(parts)}</div>'


def _html_function(function: Compiled) -> str:
    rows = [_html_row(("one kernel or call per operator", bytes_text(function.captured), ""), 1.0)]
    for level in function.levels:
        kept = share(function.captured, level.after)
        cells = (f"after {level.name}", bytes_text(level.after), _percent(level.saved))
        rows.append(_html_row(cells, None if kept is None else 1 - kept))
    facts = [", ".join(_facts(function))]
    facts += [f"without a rule of ours, run by PyTorch: {op} {line}" for op, line in function.fallbacks]
    told = "<br>".join(html.escape(fact) for fact in facts)
    return f'<table style="border-collapse:collapse">{"".join(rows)}</table><p>{told}</p>'


def _html_row(cells: Sequence[str], filled: float | None) -> str:
    shown = f"<td style='{_FIRST}'>{html.escape(cells[0])}</td>"
    shown += "".join(f"<td style='{_CELL}'>{html.escape(cell)}</td>" for cell in cells[1:])
    width = 0 if filled is None else round(200 * min(filled, 1.0))
    bar = f"<div style='width:{width}px;height:10px;background:#0072b2'></div>"
    return f"<tr>{shown}<td style='{_FIRST}'>{bar}</td></tr>"
