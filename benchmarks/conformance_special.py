"""NaN, infinities, zeros of both signs, subnormal numbers and the ends of each type, in operands and in attributes.

    python -m benchmarks.conformance_special                      # everything
    python -m benchmarks.conformance_special --only clamp --stage compiled-float32

The operators are those of PyTorch's database that compute element by element, reduce, pool, sort, normalize or move.
Values and gradients have to be eager's, bit for bit, except for the operators that `special_limits` names. What a run
finds goes to a file as it goes on, and a run that is started again skips what is there; a complete sweep writes the
page. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.conformance import special_report as report
from benchmarks.conformance.samples import label
from benchmarks.conformance.special import entries
from benchmarks.conformance.special_isolated import results
from benchmarks.conformance.special_run import STAGES, Found, Stage


def main() -> int:
    """Sweep, print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="an entry's name; may be repeated")
    parser.add_argument("--stage", action="append", choices=[s.name for s in STAGES], help="may be repeated")
    parser.add_argument("--results", type=Path, help="the file for what is found")
    parser.add_argument("--fresh", action="store_true", help="forget what an earlier run found")
    parser.add_argument("--page", action="store_true", help="only write the page, from the results there are")
    options = parser.parse_args()
    if options.page:
        report.PAGE.write_text(report.page(report.read(report.RESULTS)))
        return 0
    partial = bool(options.only or options.stage)
    file = options.results or (Path(tempfile.gettempdir()) / "conformance_special.jsonl" if partial else report.RESULTS)
    if options.fresh or (partial and not options.results):
        file.unlink(missing_ok=True)
    found = _run(_work(options.stage, options.only), file)
    if not partial:
        report.PAGE.write_text(report.page(found))
    print(report.summary(found))
    return int(any(f.wrong for f in found))


def _work(stages: list[str] | None, only: list[str] | None) -> list[tuple[Stage, Any]]:
    """What the options choose."""
    return [
        (stage, op)
        for stage in STAGES
        if not stages or stage.name in stages
        for op in entries(stage.dtype)
        if not only or op.name in only or label(op) in only
    ]


def _run(work: list[tuple[Stage, Any]], file: Path) -> list[Found]:
    """Run what is not in the file yet; everything that has been found for the work."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    console = Console(width=200)
    found = {(f.stage, f.entry): f for f in (report.read(file) if file.exists() else [])}
    todo = [(stage, op) for stage, op in work if (stage.name, label(op)) not in found]
    with tempfile.TemporaryDirectory(prefix="daceml_train-special-") as cache, file.open("a") as out:
        for result in results(todo, cache):
            found[result.stage, result.entry] = result
            print(report.text(result), file=out, flush=True)
            for message in result.wrong:
                console.print(f"{result.stage} {result.entry} {message}", markup=False, highlight=False)
    return [found[stage.name, label(op)] for stage, op in work]


if __name__ == "__main__":
    sys.exit(main())
