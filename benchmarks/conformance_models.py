"""Whole models through the compiler: loss, gradients and buffers over three optimizer steps against eager execution.

    python -m benchmarks.conformance_models [NAME ...] [--update] [--all] [--fresh] [--list] [--timeout 600]
                                           [--json FILE]

Each model trains in a process of its own: eagerly, through `optimize`, through `training_step`, and through `optimize`
with `dynamic=True`, returning its loss and results that nobody uses. The last step is on a batch of another size.
Dropout is off in all of them. What may differ is said in `benchmarks.models.training`. Without names: the models that
the project promises (`--all`: every one there is), and the results go to `benchmarks/results/` and into
`docs/results/models.md` as they come. A run that is started again skips the models that were right on this commit, but
for `--fresh`. Exits with 1 if a model is wrong, raises or takes too long, or if less than 95 % of its operators run
inside graphs although its control flow does not depend on data.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.models.outcome import Outcome
from benchmarks.provenance import commit, origin

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "models.json", ROOT / "docs" / "results" / "models.md"
ENOUGH = 0.95
_MARKS = "<!-- figures: begin -->", "<!-- figures: end -->"


def isolated(name: str, cache: Path | None, limit: float) -> Outcome:
    """The outcome of one model, from a process of its own; a crash and a time-out are outcomes, too."""
    with tempfile.TemporaryDirectory(prefix="daceml_train-models-") as folder:
        told = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "benchmarks.conformance_models", "--one", name, "--json", str(told)]
        command += ["--cache", str(cache or Path(folder) / "cache")]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TRANSFORMERS_VERBOSITY": "critical"}
        try:
            ran = subprocess.run(command, timeout=limit, capture_output=True, text=True, env=environment, check=False)
        except subprocess.TimeoutExpired:
            return Outcome(name, "timed out", f"after {limit:.0f} s")
        if not told.exists():
            last = (ran.stderr.strip().splitlines() or [""])[-1]
            return Outcome(name, "raised", f"the process ended with {ran.returncode}: {last}")
        return Outcome(**json.loads(told.read_text()))


def one(name: str, cache: Path, told: Path) -> int:
    """What the process of one model does."""
    from benchmarks.models.table import MODELS
    from benchmarks.models.worker import outcome

    warnings.simplefilter("ignore")
    told.write_text(json.dumps(dataclasses.asdict(outcome(MODELS[name], cache))))
    return 0


def failed(outcome: Outcome) -> bool:
    """Whether the promise is broken."""
    return outcome.kind != "right" or (outcome.share < ENOUGH and not outcome.control_flow)


# ---- report ---------------------------------------------------------------------------------------------------------
_MEASURED = ("graphs", "breaks", "operators", "in graphs", "native", "step", "Dynamo s", "ours s")
COLUMNS = ("model", "result", "batches", *_MEASURED)


def cells(outcome: Outcome) -> tuple[str, ...]:
    """One row of the table."""
    if outcome.kind in ("raised", "timed out"):
        return outcome.name, outcome.kind, *[""] * (len(COLUMNS) - 2)
    ours = sum(seconds for stage, seconds in outcome.seconds.items() if stage != "Dynamo")
    return (
        outcome.name,
        outcome.kind,
        outcome.sizes,
        str(outcome.graphs),
        str(len(outcome.breaks)),
        str(outcome.operators),
        f"{100 * outcome.share:.1f} %",
        f"{100 * outcome.native:.1f} %",
        "in pieces" if outcome.whole else "one program",
        f"{outcome.seconds.get('Dynamo', 0):.1f}",
        f"{ours:.1f}",
    )


def summary(found: Sequence[Outcome]) -> Table:
    """All rows, failures in red."""
    result = Table(title="Models through optimize and training_step", title_justify="left", box=SIMPLE_HEAD)
    for place, name in enumerate(COLUMNS):
        result.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    for outcome in found:
        result.add_row(*cells(outcome), style="bold red" if failed(outcome) else "")
    return result


def page(found: Sequence[Outcome]) -> str:
    """The part of the documentation's page that a complete run writes."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(outcome)) + " |" for outcome in found]
    reasons = [line for outcome in found for line in _reasons(outcome)]
    right = sum(not failed(outcome) for outcome in found)
    head = f"{right} of {len(found)} models hold the promise, {sum(not o.whole for o in found)} as one program."
    head += f"\n{origin((o.commit for o in found), 'models')}"
    return "\n".join([head, "", *lines, *(["", "What is to be said:", "", *reasons] if reasons else [])])


def _reasons(outcome: Outcome) -> Iterator[str]:
    told = ([outcome.detail] if failed(outcome) and outcome.detail else []) + outcome.breaks
    told += [f"the training step: {outcome.whole}"] if outcome.whole else []
    told += [f"with dynamic=True: {outcome.dynamic}"] if outcome.dynamic else []
    if outcome.noise and not failed(outcome):
        told.append(f"right, but not by plain eager runs alone: {outcome.noise}")
    for reason in told:
        yield f"- {outcome.name}: {' '.join(reason.split())[:300]}"


def write_page(found: Sequence[Outcome], path: Path = PAGE) -> None:
    """Replace the figures in the documentation's page."""
    before, _, rest = path.read_text().partition(_MARKS[0])
    _, _, after = rest.partition(_MARKS[1])
    path.write_text(f"{before}{_MARKS[0]}\n{page(found)}\n{_MARKS[1]}{after}")


def _text(found: Iterable[Outcome]) -> str:
    return json.dumps([dataclasses.asdict(outcome) for outcome in found], indent=1) + "\n"


def stored() -> list[Outcome]:
    """The results of earlier runs."""
    return [Outcome(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def _right_on(revision: str) -> dict[str, Outcome]:
    """The models that were right on a commit; none on one with changes of its own."""
    if not revision or revision.endswith("-dirty"):
        return {}
    return {row.name: row for row in stored() if row.commit == revision and not failed(row)}


def write(found: Iterable[Outcome]) -> None:
    """Write results and page, in the order of the tables."""
    from benchmarks.models.table import MODELS

    order = list(MODELS)
    rows = sorted(found, key=lambda outcome: order.index(outcome.name))
    RESULTS.write_text(_text(rows))
    write_page(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models, or beginnings of their names")
    parser.add_argument("--all", action="store_true", help="every model in the tables")
    parser.add_argument("--list", action="store_true", help="print the names")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per model")
    parser.add_argument("--cache", type=Path, help="a folder to keep; without it each model compiles everything")
    parser.add_argument("--fresh", action="store_true", help="also run the models that were right on this commit")
    parser.add_argument("--json", type=Path, help="a file for the outcomes, written after each model")
    replaced = "named models replace their rows in the results and the page"
    parser.add_argument("--update", action="store_true", help=replaced)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        return one(options.one, options.cache, options.json)
    from benchmarks.models.table import MODELS, PROMISED

    chosen = list(MODELS) if options.all or options.list else [row.name for row in PROMISED]
    if options.names:
        chosen = [name for name in MODELS if name.startswith(tuple(options.names))]
        if not chosen:
            parser.error(f"no model's name begins with {' or '.join(options.names)}")
    if options.list:
        print("\n".join(chosen))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 140)
    found: list[Outcome] = []
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(chosen))
        earlier = {} if options.names or options.fresh else _right_on(commit())
        for name in chosen:
            progress.update(task, description=name)
            result = earlier.get(name)
            if result is None:
                result = dataclasses.replace(isolated(name, options.cache, options.timeout), commit=commit())
            found.append(result)
            if options.update or not options.names:  # a run that is interrupted keeps what it found
                write({outcome.name: outcome for outcome in (*stored(), *found)}.values())
            if failed(result):
                progress.console.print(f"{name}: {result.kind}, {result.detail}", markup=False, highlight=False)
            progress.advance(task)
            if options.json:
                options.json.write_text(_text(found))
    console.print(summary(found))
    if not options.names:
        write(found)
    return int(any(map(failed, found)))


if __name__ == "__main__":
    sys.exit(main())
