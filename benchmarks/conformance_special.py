"""NaN, infinities, zeros of both signs, subnormal numbers and the ends of each type, in operands and in attributes.

    python -m benchmarks.conformance_special                      # everything
    python -m benchmarks.conformance_special --only clamp --stage compiled-float32

The operators are those of PyTorch's database that compute element by element, reduce, pool, sort, normalize or move.
Values and gradients have to be eager's, bit for bit, except for the operators that `LIMITS` names. A complete sweep
writes docs/results/conformance-special.md and benchmarks/results/conformance_special.jsonl. Exits with 1 if anything is
wrong.
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
from benchmarks.conformance.special_run import STAGES, Found, swept


def main() -> int:
    """Sweep, print what is wrong; 1 if anything is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="an entry's name; may be repeated")
    parser.add_argument("--stage", action="append", choices=[s.name for s in STAGES], help="may be repeated")
    parser.add_argument("--results", type=Path, help="the file for what is found")
    parser.add_argument("--page", action="store_true", help="only write the page, from the results there are")
    options = parser.parse_args()
    if options.page:
        report.PAGE.write_text(report.page(report.read(report.RESULTS)))
        return 0
    console = Console(width=200)
    partial = bool(options.only or options.stage)
    file = options.results or (Path(tempfile.gettempdir()) / "conformance_special.jsonl" if partial else report.RESULTS)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="daceml_train-special-") as cache, file.open("w") as out:
        found: list[Found] = []
        for stage in STAGES:
            if not options.stage or stage.name in options.stage:
                for op in _chosen(entries(stage.dtype), options.only):
                    made = swept(stage, op, cache)
                    found.append(made)
                    print(report.text(made), file=out, flush=True)
                    for said in made.wrong:
                        console.print(f"{stage.name} {made.entry} {said}", markup=False, highlight=False)
    if not partial:
        report.PAGE.write_text(report.page(found))
    console.print(report.summary(found))
    return int(any(f.wrong for f in found))


def _chosen(ops: list[Any], only: list[str] | None) -> list[Any]:
    return [op for op in ops if not only or op.name in only or label(op) in only]


if __name__ == "__main__":
    sys.exit(main())
