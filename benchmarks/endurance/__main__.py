"""Train for long in one process: `make endurance`. Memory may not grow by 1 % after warm-up, losses are eager's.

python -m benchmarks.endurance [--scale 1.0] [--only steps [--update]] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.endurance import runs
from benchmarks.provenance import commit

RESULTS = Path(__file__).parents[1] / "results" / "endurance.json"
GROWTH = 0.01
RUNS: dict[str, tuple[Callable[..., dict[str, Any]], int]] = {
    "processes": (runs.processes, 5),  # first: a child of a process with many threads may wait for one for ever
    "steps": (runs.steps, 20000),
    "shapes": (runs.shapes, 2000),
    "models": (runs.models, 300),
    "dropped": (runs.dropped, 300),
    "threads": (runs.threads, 500),
}


def main() -> None:
    """Do what is asked for; the exit status is 1 if memory grew or a loss differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the steps, models and shapes")
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--update", action="store_true", help="keep the other parts of the results")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS.name} in benchmarks/results for a full run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    complete = options.update or (options.only is None and options.scale == 1)
    path = options.results or (RESULTS if complete else None)
    found: dict[str, Any] = json.loads(path.read_text()) if options.update and path and path.exists() else {}
    with tempfile.TemporaryDirectory(prefix="daceml_train-endurance-") as folder:
        for name, (run, count) in RUNS.items():
            if options.only in (None, name):
                start = time.monotonic()
                found[name] = {"commit": commit(), **run(max(1, int(count * options.scale)), Path(folder), say)}
                found[name]["seconds"] = round(time.monotonic() - start, 1)
                say(f"{name}: {found[name]['seconds']:.0f} s, {'well' if well(found[name]) else 'WRONG'}")
                if path:  # what was measured stays if a later run is stopped
                    path.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(0 if well(found) else 1)


def well(told: dict[str, Any]) -> bool:
    """Whether memory stayed and losses are eager's, here and in what is nested."""
    inner = all(well(value) for value in told.values() if isinstance(value, dict))
    grown = told.get("growth", 0.0) >= GROWTH
    right = told.get("difference", 0.0) <= runs.BOUND
    return inner and right and not grown and not told.get("failures") and not told.get("breaks")


def say(line: str) -> None:
    """One line of progress."""
    print(line, flush=True)


if __name__ == "__main__":
    main()
