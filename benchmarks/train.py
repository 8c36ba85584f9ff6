"""`make bench`: full training steps against PyTorch's own ways to run them, network by network.

Each network runs in a process of its own, which first compares gradients, buffers and update with PyTorch's and then
visits all variants in turn. Further processes measure cold and warm starts. Times are medians of undisturbed visits;
the ratio compares with the best of PyTorch's variants.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "train.json"
TUNED = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
"""glibc told to keep memory: what a user can do against page faults without any compiler."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write JSON; 1 if a network disagrees or fails."""
    from benchmarks.networks import NETWORKS
    from benchmarks.variants import VARIANTS

    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)} (default: all)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="undisturbed steps per variant at least")
    parser.add_argument("--malloc", choices=("stock", "tuned"), default="stock", help="glibc's settings, for all")
    parser.add_argument("--no-starts", action="store_true", help="leave cold and warm starts out")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in options.networks:
        if name not in NETWORKS:
            parser.error(f"no network is called {name!r}; known: {', '.join(NETWORKS)}")
    variants = options.variants.split(",")
    for name in variants:
        if name not in VARIANTS:
            parser.error(f"no variant is called {name!r}; known: {', '.join(VARIANTS)}")
    environment = dict(os.environ) | (TUNED if options.malloc == "tuned" else {})
    console = Console(width=None if sys.stdout.isatty() else 130)
    results = surroundings() | {"malloc": options.malloc, "networks": {}}
    failed = False
    for name in options.networks or NETWORKS:
        network = NETWORKS[name]
        chosen = [v for v in variants if network.images or not VARIANTS[v].channels_last]
        with bar(console, name) as advance:
            found = measured(name, chosen, options.steps, environment, advance)
            if "error" not in found and not options.no_starts:
                for place, variant in enumerate(chosen):
                    advance(place / len(chosen), f"starts of {variant}")
                    found["variants"][variant] |= starts(name, variant, environment)
        results["networks"][name] = {"title": network.title} | found
        if "error" in found:
            failed = True
            console.print(f"[bold]{network.title}[/bold]\n[red]{found['error']}[/red]")
        else:
            console.print(table(network.title, found))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(f"figures: {options.json}")
    return int(failed)


def surroundings() -> dict[str, Any]:
    """Date, processor and versions."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    versions = {name: version(name) for name in ("torch", "dace", "daceml_train")}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions | {"python": platform.python_version()},
    }


@contextmanager
def bar(console: Console, name: str) -> Iterator[Any]:
    """A progress bar that vanishes; its function takes the share done and what is being done."""
    said = [TextColumn(f"{{task.fields[{field}]}}") for field in ("network", "now")]
    with Progress(said[0], BarColumn(), TimeElapsedColumn(), said[1], console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0, network=name, now="starting")
        yield lambda done, now: progress.update(task, completed=done, now=now)


def measured(
    name: str, variants: Sequence[str], steps: int, environment: dict[str, str], advance: Any
) -> dict[str, Any]:
    """The figures of one network from a process of its own, or its `error`."""
    command = [sys.executable, "-m", "benchmarks.visit", name, str(steps), *variants]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
        )
        assert process.stdout is not None
        found: dict[str, Any] = {}
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            said = json.loads(line)
            if "done" in said:
                advance(said["done"], said["now"])
            else:
                found = said
        if process.wait() != 0 and "error" not in found:
            errors.seek(0)
            found = {"error": errors.read()[-4000:].strip() or f"ended with status {process.returncode}"}
    return found


def starts(name: str, variant: str, environment: dict[str, str]) -> dict[str, Any]:
    """Cold and warm start of a variant: two fresh processes after one another with one cache folder."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="daceml_train-bench-") as folder:
        for kind in ("cold", "warm"):
            command = [sys.executable, "-m", "benchmarks.start", name, variant, folder]
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if ended.returncode != 0:
                return {"start_error": ended.stderr[-4000:].strip()}
            found[kind] = json.loads(ended.stdout.splitlines()[-1])
    return found


def table(title: str, found: dict[str, Any]) -> Table:
    """The figures of one network; the ratio is to the best of PyTorch's variants."""
    from benchmarks.variants import VARIANTS

    made = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    made.add_column("variant", no_wrap=True)
    for heading in ("ms a step", "quartiles", "÷ best", "faults", "peak GB", "cold s", "warm s"):
        made.add_column(heading, justify="right", no_wrap=True)
    best = found["best_pytorch_ms"]
    for name, row in found["variants"].items():
        warm, cold = row.get("warm"), row.get("cold")
        ratio = row["median"] / best if best else None
        made.add_row(
            VARIANTS[name].title,
            f"{row['median']:.2f}",
            f"{row['lower']:.2f}-{row['upper']:.2f}{' *' if row['disturbed'] else ''}",
            f"{ratio:.2f}" if ratio else "",
            f"{row['faults']:.0f}",
            f"{warm['peak_bytes'] / 1e9:.2f}" if warm else "",
            f"{cold['seconds']:.1f}" if cold else "",
            f"{warm['seconds']:.1f}" if warm else "",
            style="bold" if VARIANTS[name].ours else "",
        )
    notes = []
    if any(row["disturbed"] for row in found["variants"].values()):
        notes.append("* other processes were busy most of the time: the quieter half of the visits")
    for name, row in found["variants"].items():
        if "start_error" in row:
            notes.append(f"{name} does not start alone: {row['start_error'].splitlines()[-1]}")
        notes += [f"{name} runs partly in PyTorch: {reason}" for reason in row.get("report", {}).get("breaks", ())]
    made.caption = "\n".join(notes)
    return made


if __name__ == "__main__":
    sys.exit(main())
