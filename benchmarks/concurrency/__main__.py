"""How launches share the cores of a CPU: `python -m benchmarks.concurrency [tiny|lanes|busy|threads|simulate ...]`.

    tiny        microseconds a call of tiny steps, beside C written by hand
    lanes       networks with branches: launches side by side, against launches in order
    busy        steps beside a process that keeps one core busy
    threads     the chosen threads of each launch, against the best of one and two
    simulate    steps on 68 cores, from their launches on one thread

Without a name, all of them are measured, in this order; `--page` writes the results and their page. The machine
should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.concurrency import rows
from benchmarks.concurrency.page import page
from benchmarks.provenance import commit
from benchmarks.train import ROOT, surroundings
from daceml_train.runtime.machine_load import Load

RESULTS = ROOT / "benchmarks" / "results" / "concurrency.json"
PAGE = ROOT / "docs" / "results" / "concurrency.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.concurrency", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure")
    parser.add_argument("--seconds", type=float, default=4.0, help="per network (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help=f"write {RESULTS.name} and {PAGE.name}")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    measurements: dict[str, Callable[[], list[rows.Row]]] = {
        "tiny": lambda: rows.tiny(options.seconds),
        "lanes": lambda: rows.lanes(options.seconds),
        "busy": lambda: rows.busy(options.seconds),
        "threads": lambda: rows.chosen(options.seconds),
        "simulate": lambda: rows.many_cores(20),
    }
    unknown = [name for name in options.names if name not in measurements]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(measurements)}")
    found: dict[str, Any] = surroundings() | {"commit": commit()}
    for name in options.names or measurements:
        load = Load()
        found[name] = measurements[name]()
        found[f"{name} under load"] = load.high() and name != "busy"
        for row in found[name]:
            print(name, json.dumps(row), flush=True)
        if options.page:
            RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(page(found), encoding="utf-8")
    return 0


def written() -> str:
    """The page of the stored results."""
    return page(json.loads(Path(RESULTS).read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(main())
