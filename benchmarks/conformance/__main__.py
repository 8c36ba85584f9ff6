"""PyTorch's own operator samples, through capture and through `optimize`, against eager execution.

    python -m benchmarks.conformance                      # everything, about an hour on one core
    python -m benchmarks.conformance --share 0.1          # a random tenth of the entries
    python -m benchmarks.conformance --shard 0/2          # the first of two halves, for two processes
    python -m benchmarks.conformance --only exp --stage compiled

What a run finds goes to a file as it goes on, and a run that is started again skips what is there; a complete sweep
(or the last of its shards) also writes the page docs/results/conformance.md. Exits with 1 if a sample is wrong or
raises.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.conformance import report
from benchmarks.conformance.outcome import FAILURES, Row
from benchmarks.conformance.samples import label
from benchmarks.conformance.stages import STAGES, Stage, work


def main() -> int:
    """Run, print; 1 if anything is wrong or raises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="an entry's name; may be repeated")
    parser.add_argument("--stage", action="append", choices=[s.name for s in STAGES], help="may be repeated")
    parser.add_argument("--share", type=float, default=1.0, help="a random share of the entries")
    parser.add_argument("--seed", type=int, default=0, help="which share")
    parser.add_argument("--shard", default="0/1", help="i/n: the i-th of n parts of the work")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run found")
    parser.add_argument("--results", type=Path, help="the file for what is found; by default in benchmarks/results")
    parser.add_argument("--page", action="store_true", help="only write the page, from what has been found so far")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 140)
    part, parts = map(int, options.shard.split("/"))
    partial = bool(options.only or options.stage or options.share < 1)
    final = options.results or (Path(tempfile.gettempdir()) / "conformance.jsonl" if partial else report.RESULTS)
    if options.page:
        found = report.read([final, *sorted(final.parent.glob(f"{final.stem}.*-of-*.jsonl"))])
        report.write(final, found)
        report.PAGE.write_text(report.page(found))
        return 0
    todo = _work(options)[part::parts]
    if not todo:
        parser.error("no entry is chosen")
    file = final.with_suffix(f".{part}-of-{parts}.jsonl")
    if options.fresh or (partial and not options.results):
        file.unlink(missing_ok=True)
    rows = _run(todo, file, console)
    shards = [final.with_suffix(f".{i}-of-{parts}.jsonl") for i in range(parts)]
    if not partial and len(everything := report.read(shards)) == len(_work(options)):
        report.write(final, everything)
        report.PAGE.write_text(report.page(everything))
        for shard in shards:
            shard.unlink()
    console.print(report.summary(rows))
    return int(any(row.counts.get(kind) for row in rows for kind in FAILURES))


def _work(options: argparse.Namespace) -> list[tuple[Stage, Any]]:
    """What the options choose."""
    only, stages = set(options.only or ()), options.stage or [s.name for s in STAGES]
    names = sorted({label(op) for stage in STAGES for op in stage.entries()})
    share = set(random.Random(options.seed).sample(names, max(1, round(options.share * len(names)))))
    return work(
        lambda stage, op: (
            stage.name in stages and label(op) in share and (not only or bool({op.name, label(op)} & only))
        )
    )


def _run(todo: list[tuple[Stage, Any]], file: Path, console: Console) -> list[Row]:
    """Run what is not in the file yet; all rows of the work."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = {(row.stage, row.entry): row for row in report.read([file])}
    columns = (TextColumn("{task.description:40}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    folder = tempfile.TemporaryDirectory(prefix="daceml_train-conformance-")
    with folder as cache, Progress(*columns, console=console) as progress, file.open("a") as out:
        task = progress.add_task("", total=len(todo))
        for stage, op in todo:
            progress.update(task, description=f"{stage.name} {label(op)}")
            if (stage.name, label(op)) not in rows:
                result = rows[stage.name, label(op)] = stage.run(op, cache)
                print(report.text(result), file=out, flush=True)
                for message in result.failures:
                    progress.console.print(f"{stage.name} {label(op)} {message}", markup=False, highlight=False)
            progress.advance(task)
    return [rows[stage.name, label(op)] for stage, op in todo]


if __name__ == "__main__":
    sys.exit(main())
