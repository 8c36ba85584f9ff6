"""Random models trained by compiled steps and compiled modules, held to eager execution and to float64.

    python -m benchmarks.fuzz [--models 50] [--seed 0] [--layers 7] [--jobs 1] [--results FILE]

A number is wrong if it is further from float64 than three times eager execution is, with and without noise in the last
bit of every operator's result, and than 1e-5 of the largest. What fails is shrunk and printed as a script that runs.
With `--results`, a run goes on after the seeds of the runs that the file has, until there are `--models` in all.
With `--views`, programs of views and changes in place take the place of models; `--layers` bounds their statements.
"""

from __future__ import annotations

import argparse
import collections
import math
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.fuzz.checking import check
from benchmarks.fuzz.generate import random_case
from benchmarks.fuzz.shrink import shrunk
from benchmarks.fuzz.sweep import Outcome, Run, outcomes, read, write
from benchmarks.fuzz.view_sweep import run_views
from benchmarks.provenance import commit

KINDS = {
    "compiled": "compiled",
    "partly": "in pieces or partly PyTorch",
    "wrong": "wrong",
    "rejected": "rejected by PyTorch",
}


def main() -> int:
    """Run; the number of failures decides the exit code."""
    arguments = parsed()
    warnings.simplefilter("ignore")
    console = Console()
    if arguments.views:
        return summary(console, run_views(arguments, console))
    runs = read(arguments.results)
    before = sum(run.accepted for run in runs)
    first = max((run.next for run in runs), default=arguments.seed)
    given = {name: getattr(arguments, name) for name in ("models", "layers", "kernels", "jobs")}
    run = Run(given, {"torch": torch.__version__, "commit": commit()}, first, first)
    start, models = time.perf_counter(), max(arguments.models - before, 0)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("models", total=arguments.models, completed=before)
        for outcome in outcomes(first, models, arguments.layers, arguments.kernels, arguments.jobs, arguments.seconds):
            run.add(outcome)
            run.seconds = round(time.perf_counter() - start, 1)
            progress.advance(task, outcome.kind != "rejected")
            if outcome.kind == "wrong":
                report(console, outcome, arguments)
            elif outcome.wrong:
                console.print(f"seed {outcome.seed}: {outcome.wrong}", markup=False)
            if arguments.results is not None:
                write(arguments.results, [*runs, run])
    return summary(console, [*runs, run])


def parsed() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(prog="fuzz", description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--models", type=int, default=50, help="models that PyTorch takes")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--layers", type=int, default=7, help="most layers of a model")
    parser.add_argument("--views", action="store_true", help="programs of views and changes in place instead of models")
    levels = "optimization of kernels; mixed: every tenth model at O3, others at O0"
    parser.add_argument("--kernels", default="mixed", help=levels)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no model starts after this time")
    parser.add_argument("--shrink", type=float, default=60, help="seconds for shrinking one failure")
    parser.add_argument("--results", type=Path, help="a JSON file for the figures; later runs go on from it")
    return parser.parse_args()


def report(console: Console, outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Print a failure and a script that shows it, as small as it gets."""
    console.rule(f"seed {outcome.seed}")
    console.print(outcome.wrong, markup=False, soft_wrap=True)
    case = random_case(outcome.seed, arguments.layers)
    if arguments.shrink and "died" not in outcome.wrong:
        case = shrunk(case, arguments.shrink)
        console.print(f"shrunk: {check(case).wrong}", markup=False, soft_wrap=True)
    console.print(case.script(), markup=False, soft_wrap=True, highlight=False)


def summary(console: Console, runs: list[Run]) -> int:
    """Print the totals of all runs; 1 if a number was wrong."""
    console.rule("summary")
    counts: collections.Counter[str] = collections.Counter()
    breaks: collections.Counter[str] = collections.Counter()
    first: dict[str, int] = {}
    for run in runs:
        counts.update(run.outcomes)
        breaks.update(run.breaks)
        first = {**run.seed_of, **first}
    for kind, name in KINDS.items():
        console.print(f"{counts[kind]:5} {name}")
    for reason, count in breaks.most_common():
        example = f" (seed {first[reason]})" if reason in first else ""
        console.print(f"{count:5} x {reason}{example}", markup=False)
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
