"""Imperative programs against eager PyTorch: `python -m benchmarks.programs [NAME ...] [--steps 24] [--update]`.

Each program runs in a process of its own with one thread; its ways take turns step by step. Without names all of them
run. Results are written after each program to `benchmarks/results/programs.json` and `docs/results/programs.md`. Exits
with 1 where a program differs from eager execution or fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.programs import flow, host, page, schedules, state, structures
from benchmarks.programs.compared import step_differs, updates_differ
from benchmarks.programs.program import PROGRAMS
from benchmarks.programs.way import OURS, WAYS, Way

MODULES = (state, schedules, flow, host, structures)
"""Importing them registers the programs."""
STEPS, SECONDS = 24, 60.0
"""Steps of each way, and seconds after which a way takes no further step."""
EARLY = 6
"""Programs compiled after so many steps are late."""


@dataclass
class Row:
    """What came of a program in one way."""

    program: str
    way: str
    mode: str = ""
    steps: int = 0
    differs: dict[str, str] = field(default_factory=dict)
    """What differs from eager execution first: losses, updates, effects, random, or an error that was raised."""
    programs: int = 0
    late: int = 0
    eager_ms: float | None = None
    ms: float | None = None
    """None where the way ran out of time before the last third."""
    reasons: list[str] = field(default_factory=list)
    """Why not all of it is one program."""


def run(
    name: str,
    kinds: Sequence[str] = WAYS[1:],
    steps: int = STEPS,
    seconds: float = SECONDS,
) -> list[Row]:
    """The rows of one program."""
    torch._dynamo.reset()
    eager = Way(name, "eager")
    ways = {kind: Way(name, kind) for kind in kinds}
    rows = {kind: Row(name, kind) for kind in kinds}
    for number in range(steps):
        eager.step(number)
        for kind, way in ways.items():
            row = rows[kind]
            if way.wall > seconds or "error" in row.differs:
                continue
            try:
                way.step(number)
            except Exception as error:  # each is a finding
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                row.differs["error"] = f"step {number}: {type(error).__name__}: {error} ({where})"[:600]
                continue
            row.steps = number + 1
            if kind in OURS:
                for what, message in step_differs(way, eager).items():
                    row.differs.setdefault(what, f"step {number}: {message}")
    for kind, way in ways.items():
        _finish(rows[kind], way, eager, steps)
    return list(rows.values())


def _finish(row: Row, way: Way, eager: Way, steps: int) -> None:
    last = steps - max(1, steps // 3)
    row.mode, row.reasons = way.mode, [reason[:300] for reason in way.reasons()][:3]
    if way.counts and row.way in OURS:
        row.programs, row.late = way.counts[-1], max(0, way.counts[-1] - way.counts[min(EARLY, len(way.counts)) - 1])
    row.eager_ms = statistics.median(eager.times[last:])
    if row.steps > last:
        row.ms = statistics.median(way.times[last:])
    if row.way in OURS and row.steps == steps and (message := updates_differ(way, eager)):
        row.differs["updates"] = message


def in_a_process(name: str, kinds: Sequence[str], steps: int, seconds: float) -> list[Row]:
    """The rows of one program that runs in a process of its own; it is ended if it hangs."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.programs", name, "--alone", str(out)]
        command += ["--steps", str(steps), "--seconds", str(seconds), "--ways", *kinds]
        threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        try:
            done = subprocess.run(
                command, timeout=4 * seconds + 60, capture_output=True, text=True, env=os.environ | threads
            )
            message = f"exit code {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired:
            message = f"not done after {4 * seconds + 60:.0f} s"
        if out.exists():
            return [Row(**row) for row in json.loads(out.read_text())]
    return [Row(name, kind, differs={"error": message}) for kind in kinds]


def main() -> int:
    """Run; 1 if a program differs from eager execution."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: all")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of each way (default: %(default)s)")
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME", help="leave out these parts of names")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="a way ends after them (default: %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:], help="(default: all)")
    parser.add_argument("--update", action="store_true", help="rows of the programs named replace the stored ones")
    parser.add_argument("--page", action="store_true", help="write the page from the stored rows, and run nothing")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.alone:
        rows = run(options.names[0], options.ways, steps=options.steps, seconds=options.seconds)
        options.alone.write_text(json.dumps([asdict(row) for row in rows]))
        return 0
    if options.page:
        page.write(page.stored())
        return 0
    names = [name for name in PROGRAMS if not options.names or any(part in name for part in options.names)]
    names = [name for name in names if not any(part in name for part in options.skip)]
    wrong = False
    for name in names:
        rows = in_a_process(name, options.ways, options.steps, options.seconds)
        for row in rows:
            time = "-" if row.ms is None else f"{row.ms:.2f} ms ({(row.eager_ms or 0) / row.ms:.2f}x)"
            print(f"{name}, {row.way}: {row.mode} {row.programs} ({row.late}) {time} {row.differs or ''}", flush=True)
        wrong |= any(row.differs for row in rows if row.way in OURS)
        if options.update or not options.names:
            page.write(page.replaced(page.stored(), name, [asdict(row) for row in rows], list(PROGRAMS)))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
