"""`python -m benchmarks.fuzz --views`: random programs of views and changes in place, held to eager execution."""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Iterator

import torch
from rich.console import Console

from benchmarks.fuzz.checking import Rejected
from benchmarks.fuzz.sweep import Outcome, Run, read, set_flags, write
from benchmarks.fuzz.view_checking import check, shrunk
from benchmarks.fuzz.view_programs import ViewProgram, random_program
from benchmarks.fuzz.view_steps import random_step
from benchmarks.provenance import commit


def way_of(seed: int) -> str:
    """How a seed's program runs: most without a compiler, which takes most of the time."""
    if seed % 10 == 3:
        return "step"
    return "optimize" if seed % 50 in (0, 4) else "compiled" if seed % 50 == 25 else "interpreted"


def program_of(seed: int, statements: int) -> ViewProgram:
    """The program of a seed: every tenth and some others are training steps, of which a few run around a module."""
    return random_step(seed, statements) if seed % 10 == 3 or seed % 50 == 4 else random_program(seed, statements)


def examined(seed: int, statements: int) -> Outcome:
    """Make and check the program of a seed."""
    set_flags("O3" if seed // 50 % 4 == 0 else "O0")  # what is compared is the road to kernels, not their vectors
    before = sum(os.times()[:4])
    try:
        verdict = check(program_of(seed, statements), way_of(seed))
    except Rejected:
        return Outcome(seed, "rejected", seconds=sum(os.times()[:4]) - before)
    breaks = tuple({reason.split("\n", maxsplit=1)[0][:120] for reason in verdict.breaks})
    kind = "wrong" if verdict.wrong else "partly" if breaks else "compiled"
    return Outcome(seed, kind, verdict.wrong, breaks, sum(os.times()[:4]) - before)


def run_views(arguments: argparse.Namespace, console: Console) -> list[Run]:
    """Check programs until there are as many as asked for, in all runs of the file of results."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    runs = read(arguments.results)
    first = max((run.next for run in runs), default=arguments.seed)
    wanted = arguments.models - sum(run.accepted for run in runs)
    given = {"views": True, "models": arguments.models, "layers": arguments.layers}
    run = Run(given, {"torch": torch.__version__, "commit": commit()}, first, first)
    start = time.perf_counter()
    for outcome in _outcomes(first, wanted, arguments.layers, start + arguments.seconds):
        run.add(outcome)
        run.seconds = round(time.perf_counter() - start, 1)
        if outcome.kind == "wrong":
            _report(console, outcome, arguments)
        if arguments.results is not None and (outcome.kind == "wrong" or outcome.seed % 50 == 0):
            write(arguments.results, [*runs, run])
    if arguments.results is not None:
        write(arguments.results, [*runs, run])
    return [*runs, run]


def _outcomes(first: int, wanted: int, statements: int, end: float) -> Iterator[Outcome]:
    accepted, seed = 0, first
    while accepted < wanted and time.perf_counter() < end:
        outcome = examined(seed, statements)
        accepted, seed = accepted + (outcome.kind != "rejected"), seed + 1
        yield outcome


def _report(console: Console, outcome: Outcome, arguments: argparse.Namespace) -> None:
    console.rule(f"seed {outcome.seed}, {way_of(outcome.seed)}")
    console.print(outcome.wrong, markup=False, soft_wrap=True)
    program = program_of(outcome.seed, arguments.layers)
    if arguments.shrink:
        program = shrunk(program, way_of(outcome.seed))
        console.print(f"shrunk: {check(program, way_of(outcome.seed)).wrong}", markup=False, soft_wrap=True)
    console.print(f"# shape {program.shape}, x and y {program.layouts}", markup=False)
    console.print(program.source(), markup=False, soft_wrap=True, highlight=False)
