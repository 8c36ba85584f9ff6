"""The libraries that people use, each in its own environment: `python -m benchmarks.clients [CLIENT ...]`.

Each program of `benchmarks/clients/` runs twice, as it is written for PyTorch and with the lines that compile it.
Losses, metrics and parameters must be the same. Without names all clients run, and the results go to
`benchmarks/results/clients.json` and `docs/results/clients.md`; `--update` replaces the rows of those named. Models
have random weights, and nothing but packages is downloaded. Exits with 1 where a program is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

from benchmarks.clients.environment import ROOT, environment

CLIENTS = {
    "trainer": ("accelerate",),
    "accelerated": ("accelerate",),
    "lightning_module": ("lightning",),
    "adapters": ("peft",),
    "metrics": ("torchmetrics",),
    "vision": ("torchvision",),
    "timm_models": ("torchvision", "timm"),
    "geometric": ("torch_geometric",),
    "skorch_net": ("skorch",),
    "keras_model": ("keras",),
}
"""The modules of this folder, and the packages that each needs besides the project's own."""
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "clients.json", ROOT / "docs" / "results" / "clients.md"
MARKS = "<!-- figures: begin -->", "<!-- figures: end -->"


def rows_of(client: str, programs: list[str]) -> list[dict[str, Any]]:
    """Run a client in its environment."""
    folder = "-".join(CLIENTS[client])
    python = environment(folder, CLIENTS[client])
    target = python.parents[1] / f"{client}.json"
    target.unlink(missing_ok=True)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    offline = {"HF_HUB_OFFLINE": "1", "KERAS_BACKEND": "torch", "PYTHONPATH": paths}
    command = [str(python), "-m", "benchmarks.clients.worker", client, str(target), *programs]
    code = subprocess.run(command, cwd=ROOT, env={**os.environ, **offline}, check=False).returncode
    rows: list[dict[str, Any]] = json.loads(target.read_text()) if target.exists() else []
    if code:
        message = f"the process of this client ended with {code}"
        row = {"client": client, "program": "", "version": "", "changed": 0, "kind": "wrong", "said": message}
        rows.append({**row, "seconds": 0.0})
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """The part of the documentation that a run writes."""
    counts = Counter(row["kind"] for row in rows)
    most = max(row["changed"] for row in rows)
    lines = [f"{len(rows)} programs: {counts['same']} the same and compiled, {counts['fallback']} the same with a"]
    lines += [f"fallback, {counts['wrong']} wrong. At most {most} lines are changed, with the import.", ""]
    lines += ["| client | version | program | changed lines | result |", "|---|---|---|---|---|"]
    for row in rows:
        cells = row["client"].replace("_", " "), row["version"], row["program"], str(row["changed"]), row["kind"]
        lines.append(f"| {' | '.join(cells)} |")
    messages = [f"- {row['client']}, {row['program']}: {row['said'][:300]}" for row in rows if row["said"]]
    return "\n".join([*lines, *([""] if messages else []), *messages])


def write(rows: list[dict[str, Any]]) -> None:
    """Write the results and the table of the documentation."""
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n{page(rows)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def main() -> int:
    """Run; 1 if a program is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="programs with this in their name")
    parser.add_argument("--update", action="store_true", help="rows of the clients named replace the stored ones")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(CLIENTS):
        parser.error(f"no client {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    rows: list[dict[str, Any]] = []
    for client in options.clients or CLIENTS:
        rows += rows_of(client, options.only)
    print(dict(Counter(row["kind"] for row in rows)))
    wrong = any(row["kind"] == "wrong" for row in rows)
    if options.update:
        fresh = {(row["client"], row["program"]) for row in rows}
        stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        rows += [row for row in stored if (row["client"], row["program"]) not in fresh]
        rows = [row for client in CLIENTS for row in rows if row["client"] == client]
    if options.update or not (options.clients or options.only):
        write(rows)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
