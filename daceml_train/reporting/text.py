"""The report as a table for terminals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from daceml_train.reporting.model import Change, Compiled, Contents, grouped
from daceml_train.reporting.numbers import bytes_text, counted, percent, seconds_text, share


def lines(report: Contents) -> Iterator[str]:
    """The report line by line."""
    yield f"{report.kind} of {report.name}"
    yield from headline(report)
    yield from report.background
    if report.empty and not report.background:
        yield "nothing is compiled yet: the first call compiles"
    for place, function in enumerate(report.functions, 1):
        if len(report.functions) > 1:
            yield f"\n[{place}] {title(function)}"
        yield from _function_lines(function)
    yield from report.cuda_graphs
    if report.paths:
        yield "\nPython runs the model, and programs compute"
        yield from (f"  {line}" for line in report.paths)
    if report.breaks:
        yield "\nnot one graph, because" if report.paths else "\nruns in PyTorch, because"
        yield from (f"  {reason}" for reason in report.breaks)
    if report.graph_breaks:
        yield "\nseveral graphs, between which Python runs, because"
        yield from (f"  {reason}" for reason in report.graph_breaks)


def title(function: Compiled) -> str:
    """The name of a function of a report that has several, and what tells it from the others."""
    if function.name.endswith("_parameters"):
        return f"{function.name}: computed once, from the parameters alone"
    return f"{function.name}, with gradients" if function.programs > 1 else function.name


def headline(report: Contents) -> Iterator[str]:
    """What eager execution moves, what is moved here, and by what: the levels below begin elsewhere."""
    if report.eager is None or report.empty:
        return
    theirs = report.eager.bytes
    yield f"PyTorch's own kernels move {bytes_text(theirs)} for the same"
    if len(report.functions) != 1 or not isinstance(moved := report.functions[0].moved, int) or not theirs:
        return
    yield f"moved here: {bytes_text(moved)}, {100 * moved / theirs:.1f} % of that"
    launches = report.functions[0].launches
    whole = sum(launch.bytes for launch in launches)
    if whole:
        calls = sum(launch.bytes for launch in launches if launch.kind == "call" and launch.phase != "update")
        updates = sum(launch.bytes for launch in launches if launch.phase == "update")
        yield (
            f"of these, {percent(calls / whole)} are operands and results of library calls, {percent(updates / whole)} "
            f"parameters, gradients, and optimizer state, {percent((whole - calls - updates) / whole)} those of kernels"
        )


def _function_lines(function: Compiled) -> Iterator[str]:
    if function.sizes:
        yield "at the sizes last used, " + ", ".join(f"{n} = {v}" for n, v in function.sizes.items())
    rows = [("bytes moved", "", "saved", "operators", "seconds")]
    rows.append(("one kernel or call per operator", bytes_text(function.captured), "", "", ""))
    for level in function.levels:
        rows.append((f"after {level.name}", bytes_text(level.after), *_columns(level)))
        passes = [change for of, change in function.passes if of == level.name and _matters(change)]
        rows += [(f"  {change.name}", "", *_columns(change)) for change in passes]
    rows.append(("total", bytes_text(function.moved), percent(function.saved), "", ""))
    yield from _aligned(rows)
    yield from _aligned([*_sent(function)])
    yield ", ".join(facts(function))
    if (spent := function.seconds) is not None:
        yield f"measured: {seconds_text(spent)} in the launches of one call"
    if function.device != "cpu":
        yield ", ".join(on_device(function))
    if threads := shared_out(function):
        yield threads
    if function.launches:
        yield "largest movers:"
        yield from _aligned([*_movers(function)])
        yield "largest launches:"
        yield from _aligned([*_largest(function)])
    if function.calls:
        yield "library calls: " + ", ".join(f"{name} x {count}" for name, count in function.calls.items())
    for operator, line in function.fallbacks:
        yield f"run by PyTorch for lack of a rule: {operator}{f' at {line}' if line else ''}"
    yield from function.constant_sizes
    yield from function.notes
    if function.needs_python:
        yield f"{THROUGH_PYTHON}{function.needs_python}"
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in function.stages.items())
    yield f"{'found in the cache' if function.warm else 'compiled'}: {stages}"


def _sent(function: Compiled) -> Iterator[tuple[str, ...]]:
    """Network bytes, pass by pass of the level that says how sums over the ranks travel."""
    changes = [change for level, change in function.passes if level == "distribution"]
    for number, change in enumerate(changes):
        if not number:
            yield "bytes sent by each rank", "", "saved", "collectives"
            yield "a message per sum", bytes_text(change.network[0]), "", str(change.messages[0])
        before, after = change.messages
        count = str(after) if before == after else f"{before} -> {after}"
        yield f"  {change.name}", bytes_text(change.network[1]), percent(share(*change.network)), count


def _columns(change: Change) -> tuple[str, str, str]:
    before, after = change.operators
    operators = str(after) if before == after else f"{before} -> {after}"
    return percent(change.saved), operators, f"{change.seconds:.2f}" if change.seconds else ""


def _matters(change: Change) -> bool:
    return change.before != change.after or change.operators[0] != change.operators[1]


def _movers(function: Compiled, count: int = 6) -> Iterator[tuple[str, ...]]:
    whole = sum(launch.bytes for launch in function.launches) or 1
    for group in grouped(function.launches, lambda x: x.operators)[:count]:
        spent = "" if group.seconds is None else seconds_text(group.seconds)
        name = group.name if len(group.name) <= 60 else f"{group.name[:57]}..."
        yield f"  {name}", f"x {group.count}", bytes_text(group.bytes), percent(group.bytes / whole), spent


def _largest(function: Compiled, count: int = 4) -> Iterator[tuple[str, ...]]:
    for launch in sorted(function.launches, key=lambda x: -x.bytes)[:count]:
        name = launch.name or launch.operators
        spent = "" if launch.seconds is None else seconds_text(launch.seconds)
        yield f"  {name if len(name) <= 60 else f'{name[:57]}...'}", launch.source, bytes_text(launch.bytes), spent


THROUGH_PYTHON = "each call runs through Python: "
"""What begins the line that says why later calls are not calls of a native function."""


def facts(function: Compiled) -> Iterator[str]:
    """Counts of programs, kernels, calls, operations and bytes."""
    yield counted(function.programs, "program")
    yield f"{counted(function.kernels, 'kernel')} ({function.distinct_kernels} distinct)"
    yield counted(sum(function.calls.values()), "library call")
    if function.network[0]:
        count, sent = function.network
        yield f"{counted(count, 'collective')}, in which each rank sends {bytes_text(sent)}"
    if isinstance(function.flops, int):
        yield f"{function.flops / 1e9:.3g} GFLOP"
    yield f"arena {bytes_text(function.arena)}"
    if function.memory:
        yield f"peak memory {bytes_text(function.peak)}"


def shared_out(function: Compiled) -> str:
    """How launches share the cores of a CPU; empty if each takes all threads, in order."""
    counts = Counter(launch.threads for launch in function.launches if launch.threads)
    if len(counts) < 2 and not any(launch.place for launch in function.launches):
        return ""
    threads = [f"launches on {counted(many, 'thread')}: {n}" for many, n in sorted(counts.items())]
    lanes = Counter((x.program, x.place[0], x.place[1]) for x in function.launches if x.place)
    side = [n for (program, segment, _), n in lanes.items() if (program, segment, 1) in lanes]
    if side:
        most = 1 + max(lane for _, _, lane in lanes)
        threads.append(f"side by side in up to {most} lanes: {sum(side)}")
    return ", ".join(threads)


def on_device(function: Compiled) -> Iterator[str]:
    """The device, and the launch configurations of the kernels."""
    yield f"on {function.device}"
    blocks = sorted({int(x.shape.split()[0]) for x in function.launches if x.shape})
    if blocks:
        yield f"blocks of {' and '.join(map(str, blocks))} threads"
    measured, changed = function.autotuned
    if measured:
        yield f"{counted(measured, 'kernel')} autotuned, {changed} changed"
    if function.left_out:
        yield f"without passes that are not for it: {', '.join(function.left_out)}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        first, *others = (cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in _cells(row, widths))
        yield "  ".join((first, *others)).rstrip()


def _cells(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[int, tuple[str, int]]]:
    return enumerate(zip(row, widths, strict=True))
