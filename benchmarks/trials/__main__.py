"""Searches by stages beside separate trials: `python -m benchmarks.trials [ROW ...] [--kills N] [--page]`.

Rows: late, optuna, residual, programs, stacked, together, simulated, kills; all by default. Results are written after
each row to `benchmarks/results/trials.json` and `docs/results/trials.md`. Exits with 1 where a search by stages differs
from separate trials in a single bit, and where a value compiles a program.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.provenance import commit
from benchmarks.train import ROOT, surroundings
from benchmarks.trials import page, rows

RESULTS = ROOT / "benchmarks" / "results" / "trials.json"
PAGE = ROOT / "docs" / "results" / "trials.md"


def main() -> int:
    """Measure rows, and write them and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trials", description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[*rows.ROWS, []], help="which rows")
    parser.add_argument("--kills", type=int, default=100, help="how many times a process is killed")
    parser.add_argument("--page", action="store_true", help="write the page from the results alone")
    given = parser.parse_args()
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    for name in [] if given.page else given.rows or rows.ROWS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        row = rows.ROWS[name](given.kills)
        found["rows"][name] = {**row, "commit": commit()}
        found["surroundings"] = surroundings()
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(row), file=sys.stderr, flush=True)
    write(found, PAGE)
    entries = [entry for row in found["rows"].values() for entry in row["searches"]]
    return int(any(not entry.get("equal", True) or entry.get("by a value") for entry in entries))


def write(found: dict[str, object], path: Path) -> None:
    """The page."""
    path.write_text("\n".join(page.lines(found)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
