"""ONNX conformance.

    python -m benchmarks.onnx cases                  # the official cases, about ten minutes on one core
    python -m benchmarks.onnx cases --only resize    # those whose name contains a text
    python -m benchmarks.onnx models [NAME...]       # round trips: export, import, train, save, run in ONNX Runtime
    python -m benchmarks.onnx mutations --count 20000
    python -m benchmarks.onnx speed [NETWORK...]     # inference against ONNX Runtime, one and sixteen examples
    python -m benchmarks.onnx import                 # how long importing takes
    python -m benchmarks.onnx page                   # docs/results/onnx-conformance.md from the results

Each writes its results to benchmarks/results/onnx-*.json if it ran whole, and exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.networks import TWELVE
from benchmarks.onnx import cases, importing, models, mutations, report, speed
from benchmarks.onnx.report import CASES, IMPORTS, MODELS, MUTATIONS, PAGE, SPEEDS
from daceml_train.codegen.cpu import compile as kernels


def main() -> int:
    """Run what the command line says; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    official = commands.add_parser("cases", help="the official backend cases")
    official.add_argument("--only", default="", help="a part of the names")
    official.add_argument("--suite", action="append", choices=("node", "simple", "light"))
    official.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts; the last one to end joins them")
    official.add_argument("--kernels", default="O3", help="optimization of kernels; O0 compiles faster")
    official.set_defaults(run=_cases)
    trips = commands.add_parser("models", help="round trips of networks and transformers models")
    trips.add_argument("names", nargs="*", help="default: all")
    trips.set_defaults(run=_models)
    damaged = commands.add_parser("mutations", help="damaged models")
    damaged.add_argument("--count", type=int, default=20_000)
    damaged.add_argument("--seed", type=int, default=0)
    damaged.set_defaults(run=_mutations)
    raced = commands.add_parser("speed", help="inference against ONNX Runtime")
    raced.add_argument("names", nargs="*", help="default: the twelve networks")
    raced.set_defaults(run=_speed)
    timed = commands.add_parser("import", help="how long importing takes")
    timed.set_defaults(run=_import)
    commands.add_parser("page", help="write the page").set_defaults(run=lambda _: _page())
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    status: int = options.run(options)
    return status


def _cases(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    kernels.FLAGS = tuple(f"-{options.kernels}" if flag == "-O3" else flag for flag in kernels.FLAGS)
    part, parts = map(int, options.shard.split("/"))
    suites = options.suite or ["node", "simple", "light"]
    todo = [(case, suite) for suite in suites for case in cases.cases(suite) if options.only in case.name]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="daceml_train-onnx-") as cache, _progress() as progress:
        task = progress.add_task("", total=len(todo[part::parts]))
        for case, suite in todo[part::parts]:
            progress.update(task, description=case.name)
            outcome = cases.run(case, suite, cache)
            outcomes.append(outcome)
            if outcome.kind in (cases.WRONG, cases.RAISED):
                progress.console.print(f"{case.name}: {outcome.kind}, {outcome.why}", markup=False, highlight=False)
            progress.advance(task)
    counts = Counter(outcome.kind for outcome in outcomes)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()), f"of {len(outcomes)} cases")
    if not options.only and not options.suite:
        _join(outcomes, part, parts, len(todo))
    return int(bool(counts[cases.WRONG] or counts[cases.RAISED]))


def _join(outcomes: list[cases.Outcome], part: int, parts: int, total: int) -> None:
    """Keep this part, and write results and page once all parts are there."""
    shards = [CASES.with_suffix(f".{i}-of-{parts}.json") for i in range(parts)]
    shards[part].write_text(json.dumps([dataclasses.asdict(o) for o in outcomes], indent=0) + "\n")
    found = [row for shard in shards if shard.is_file() for row in json.loads(shard.read_text())]
    if len(found) == total:
        found.sort(key=lambda row: (row["suite"], row["case"]))
        CASES.write_text(json.dumps(found, indent=0) + "\n")
        for shard in shards:
            shard.unlink()
        _page()


def _models(options: argparse.Namespace) -> int:
    names = options.names or list(models.MODELS)
    if unknown := sorted(set(names) - set(models.MODELS)):
        print(f"unknown: {unknown[0]}; known: {', '.join(models.MODELS)}", file=sys.stderr)
        return 2
    rows = []
    with _progress() as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            row = models.run(name)
            rows.append(row)
            progress.console.print(f"{name:18} {models.text(row)}", markup=False, highlight=False)
            progress.advance(task)
    if not options.names:
        MODELS.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
        _page()
    return int(any(row.wrong for row in rows))


def _speed(options: argparse.Namespace) -> int:
    rows = []
    with _progress() as progress:
        todo = [(name, batch) for name in options.names or TWELVE for batch in speed.BATCHES]
        task = progress.add_task("", total=len(todo))
        for name, batch in todo:
            progress.update(task, description=f"{name} {batch}")
            row = speed.run(name, batch)
            rows.append(row)
            message = row.wrong or f"{row.ours:.2f} ms, ONNX Runtime {row.theirs:.2f} ms, ratio {row.ratio:.2f}"
            progress.console.print(f"{name:18} {batch:3} {message}", markup=False, highlight=False)
            progress.advance(task)
    if not options.names:
        SPEEDS.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
        _page()
    return int(any(row.wrong for row in rows))


def _mutations(options: argparse.Namespace) -> int:
    with _progress() as progress:
        task = progress.add_task("mutations", total=options.count)
        result = mutations.run(options.count, options.seed, lambda: progress.advance(task))
    print(json.dumps(result, indent=1))
    if options.count >= 20_000:
        MUTATIONS.write_text(json.dumps(result, indent=1) + "\n")
        _page()
    return int(bool(result["crashes"] or result["hangs"] or result["unexpected"]))


def _import(options: argparse.Namespace) -> int:
    rows = importing.run()
    print(importing.text(rows))
    IMPORTS.write_text(json.dumps(rows, indent=1) + "\n")
    return _page()


def _page() -> int:
    PAGE.write_text(report.page())
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
    return 0


def _progress() -> Progress:
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


if __name__ == "__main__":
    sys.exit(main())
