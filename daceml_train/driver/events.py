"""Who hears of passes and kernels: records, dumps, callbacks, and the logs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from daceml_train import logs
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.graph.graph import Graph
from daceml_train.lowering.program import KernelLaunch, Program
from daceml_train.passes.pipeline import Step, Watcher

LINES = 3
"""Of the user's lines that a pass changed, how many are named."""


def watcher(record: Record, options: Settings, graph: Graph) -> Watcher:
    """Records passes, the first of which sees `graph`, in `record`, and calls the other listeners."""
    before = graph

    def watch(step: Step) -> None:
        nonlocal before
        record.passes.append(step.record)
        if step.graph is not None and options.dump:
            options.dump.graph(record.name, step.level, step.transformation.name, step.graph)
        if step.graph is not None and logs.speaks(logs.PASSES):
            logs.event(logs.PASSES, _pass_line(record.name, step, _changed(before, step.graph)))
            before = step.graph
        if options.pass_callback is not None:
            options.pass_callback(step)

    return watch


def _pass_line(name: str, step: Step, lines: Sequence[str]) -> str:
    matches = f"{step.matches} match{'' if step.matches == 1 else 'es'}"
    operators = f"{step.operators_before} -> {step.operators_after} operators"
    moved = f"{step.bytes_before} -> {step.bytes_after} bytes"
    more = f" and {len(lines) - LINES} more" if len(lines) > LINES else ""
    where = f" (at {', '.join(lines[:LINES])}{more})" if lines else ""
    return f"{name}: {step.level}: {step.transformation}: {matches}, {operators}, {moved}, {step.seconds:.3f} s{where}"


def _changed(before: Graph, after: Graph) -> list[str]:
    """The user's lines of the operators that a pass made."""
    known = {id(node) for node in before.nodes}
    lines = (node.origin.source for node in after.nodes if id(node) not in known)
    return [] if after is before else [line for line in dict.fromkeys(lines) if line]


def log_kernels(
    programs: Sequence[Program], records: Sequence[Record], paths: Mapping[str, Path], began: float
) -> None:
    """Say for each kernel, once, what it computes first, and whether it was compiled since `began`."""
    if not logs.speaks(logs.KERNELS):
        return
    messages = set()
    for program, record in zip(programs, records, strict=True):
        for key, what in _kernels(program, record):
            if key in messages:
                continue
            messages.add(key)
            path = paths.get(key)
            new = path is not None and os.path.exists(path) and path.stat().st_mtime >= began
            how = f"compiled in {time.time() - began:.2f} s with the others" if new else "on disk already"
            logs.event(logs.KERNELS, f"{record.name}: kernel_{key}: {what}, {how}")


def _kernels(program: Program, record: Record) -> Iterator[tuple[str, str]]:
    """Key of each kernel, and what it computes, of a program and of the bodies in it."""
    for each in program.all:
        for index, launch in enumerate(each.launches):
            if isinstance(launch, KernelLaunch):
                key = each.codes[launch.code].key
                known = each is program and index < len(record.costs)
                yield key, _what(record, index) if known else launch.origin or "in a loop or branch"


def _what(record: Record, index: int) -> str:
    cost = record.costs[index]
    where = f" (at {cost.source})" if cost.source else ""
    return f"{cost.name or 'operand'} [{cost.operators}]{where}"


def first_line(graph: Graph) -> str:
    """The user's first line of a graph, for messages."""
    return next((node.origin.source for node in graph.nodes if node.origin.source), graph.name)


SIZES = re.compile(r".*?([\w.\[\]'\"()]*?)(?:' size mismatch|\.size\(\)\[| size mismatch).*", re.DOTALL)
"""A condition on the size of a tensor: a mismatch, or how sizes of it and of others compare."""


def subject_of(changed: str) -> str:
    """What a condition is about, without numbers and values: the sizes of the tensors in a list are one subject."""
    sized = SIZES.fullmatch(changed)
    return re.sub(r"[\d.]+", "0", f"size of {sized[1]}" if sized else changed.partition(" == ")[0])
