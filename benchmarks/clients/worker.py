"""One client in its environment: `python -m benchmarks.clients.worker CLIENT ROWS.json [PROGRAM ...]`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from benchmarks.clients.way import Program, Way, changed_lines, quiet
from benchmarks.recipes.__main__ import differs


@dataclasses.dataclass
class Row:
    """What came of a program: `kind` is same, fallback or wrong; `said` is the first difference or the reasons."""

    client: str
    program: str
    version: str
    changed: int
    kind: str
    said: str
    seconds: float


def run(client: str, version: str, name: str, program: Program) -> Row:
    """The row of one program."""
    started = time.perf_counter()
    kind, message = _compared(program)
    return Row(client, name, version, changed_lines(program), kind, message, round(time.perf_counter() - started, 1))


def _compared(program: Program) -> tuple[str, str]:
    ways = Way(ours=False), Way(ours=True)
    for way in ways:
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            with tempfile.TemporaryDirectory() as way.folder, way.watching():
                program(way)
        except Exception as error:  # each is a finding
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            which = "raises" if way.ours else "the program itself raises"
            return "wrong", f"{which} {type(error).__name__}: {str(error)[:300]} ({place})"
    eager, ours = ways
    if ours.seen.keys() != eager.seen.keys() or not eager.seen:
        return "wrong", f"records {sorted(ours.seen.keys() ^ eager.seen.keys())[:3]} in one way alone"
    found = (differs(key, value, eager.seen[key], ours.loose, narrow=True) for key, value in ours.seen.items())
    if message := next(filter(None, found), ""):
        return "wrong", message
    surprises = ours.surprises()
    return ("fallback", "; ".join(surprises)) if surprises else ("same", "")


def main() -> None:
    """Run the programs of one client, and write their rows after each."""
    client, target, *names = sys.argv[1:]
    quiet()
    torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.clients.{client}")
    version = importlib.metadata.version(module.PACKAGE)
    rows: list[Row] = []
    for name, program in module.PROGRAMS.items():
        if names and not any(part in name for part in names):
            continue
        rows.append(run(client, version, name, program))
        row = rows[-1]
        print(f"{client}, {name}: {row.kind}, {row.changed} lines, {row.seconds} s  {row.said}", flush=True)
        Path(target).write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
