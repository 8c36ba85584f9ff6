"""`make bench`: full training steps against PyTorch's own ways to run them, network by network.

    python -m benchmarks.train                       # the twelve networks, all variants
    python -m benchmarks.train resnet50 --update     # replace this one's row; the others' stay
    python -m benchmarks.train gpt2 --variants eager-fused,step --no-starts --json figures.json

Gradients, buffers and update are compared with PyTorch's first. Then each variant runs in a process of its own, since
what one leaves in the allocator speeds up another, and all are visited in turn: PyTorch's with glibc's settings and
with tuned ones. Times are medians of undisturbed visits; the ratios compare with the best of PyTorch's variants. Cold
and warm starts are fresh processes, with an empty cache and with a filled one. Figures are written after each network,
for the processor at hand; those of other processors stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.measure import Visit, timing, visits
from daceml_train.processor import described

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "train.json"
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Settings with which glibc keeps memory and requests huge pages: a remedy for page faults without any compiler."""
Advance = Callable[[float, str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write JSON and page; 1 if a network disagrees or fails."""
    from benchmarks import render
    from benchmarks.networks import NETWORKS, TWELVE
    from benchmarks.variants import VARIANTS

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(NETWORKS)} (default: twelve)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="undisturbed steps per variant at least")
    parser.add_argument("--no-tuned", action="store_true", help="leave tuned memory allocation out")
    parser.add_argument("--no-starts", action="store_true", help="leave warm starts out")
    parser.add_argument("--update", action="store_true", help="keep other networks and variants of the file")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in options.networks:
        if name not in NETWORKS:
            parser.error(f"no network is called {name!r}; known: {', '.join(NETWORKS)}")
    variants = options.variants.split(",")
    for name in variants:
        if name not in VARIANTS:
            parser.error(f"no variant is called {name!r}; known: {', '.join(VARIANTS)}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    everything: dict[str, Any] = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    about = surroundings()
    results: dict[str, Any] = everything.get(described(), {}) if options.update else {}
    everything[described()] = results = {"networks": {}} | results | about
    failed = False
    for name in options.networks or TWELVE:
        network = NETWORKS[name]
        chosen = [v for v in variants if VARIANTS[v].suits(network)]
        with bar(console, name) as advance:
            try:
                found = measured(name, chosen, options.steps, advance, not options.no_tuned, not options.no_starts)
            except Failure as error:
                found = {"error": str(error)}
        before = results["networks"].get(name, {})
        if "variants" in found and "variants" in before:  # those that were not measured now
            found = before | found | {"variants": before["variants"] | found["variants"]}
        results["networks"][name] = {"title": network.title} | found | {"date": surroundings()["date"]}
        if "error" in found:
            failed = True
            console.print(f"[bold]{network.title}[/bold]\n[red]{found['error']}[/red]")
        else:
            console.print(table(network.title, found))
        order = list(NETWORKS)
        results["networks"] = dict(sorted(results["networks"].items(), key=lambda pair: order.index(pair[0])))
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    if options.json == RESULTS:
        render.write(everything)
    console.print(f"figures: {options.json}")
    return int(failed)


def surroundings() -> dict[str, Any]:
    """Date, processor and versions."""
    versions = {name: version(name) for name in ("torch", "dace", "daceml_train")}
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": described(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions | {"python": platform.python_version()},
    }


@contextmanager
def bar(console: Console, name: str) -> Iterator[Advance]:
    """A progress bar that vanishes; its function takes the share done and what is being done."""
    messages = [TextColumn(f"{{task.fields[{field}]}}") for field in ("network", "now")]
    with Progress(
        messages[0], BarColumn(), TimeElapsedColumn(), messages[1], console=console, transient=True
    ) as progress:
        task = progress.add_task("", total=1.0, network=name, now="starting")
        yield lambda done, now: progress.update(task, completed=done, now=now)


class Failure(Exception):
    """A process ended with an error; its last words."""


class Worker:
    """A variant in a separate process (`benchmarks.visit`); `start` are the seconds of the start, calls are visits."""

    def __init__(self, network: str, variant: str, folder: str, environment: Mapping[str, str] = MappingProxyType({})):
        command = [sys.executable, "-m", "benchmarks.visit", network, variant, folder]
        self.variant, self.errors = variant, Path(folder) / "errors"
        self.errors.parent.mkdir(exist_ok=True)
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self.start: dict[str, Any] = self._told("start")

    def __call__(self, steps: int) -> Visit:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        return Visit(**self._told("visit"))

    def report(self) -> dict[str, Any]:
        """What the compiler reports; the process ends."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        report: dict[str, Any] = self._told("report")
        self.process.wait()
        return report

    def kill(self) -> None:
        """End the process whatever it does."""
        self.process.kill()
        self.process.wait()

    def _told(self, what: str) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and what in (messages := json.loads(line)):
                return messages[what]
        messages = self.errors.read_text()[-4000:].strip() or f"ended with status {self.process.wait()}"
        raise Failure(f"{self.variant}: {messages}")


def measured(
    name: str, variants: Sequence[str], steps: int, advance: Advance, tuned: bool = True, starts: bool = True
) -> dict[str, Any]:
    """The figures of one network. Raises `Failure`."""
    from benchmarks.variants import VARIANTS

    found: dict[str, Any] = {"variants": {variant: {} for variant in variants}}
    for mixed in (False, True):
        if any(VARIANTS[v].ours and VARIANTS[v].mixed is mixed for v in variants):
            advance(0.0, "comparing gradients")
            found["mixed_agreement" if mixed else "agreement"] = agreed(name, mixed)
    workers: dict[tuple[str, str], Worker] = {}
    with tempfile.TemporaryDirectory(prefix="daceml_train-bench-") as folder:
        try:
            for variant in variants:
                advance(0.0, f"cold start of {variant}")
                workers[variant, "stock"] = Worker(name, variant, f"{folder}/{variant}")
                row, cold = found["variants"][variant], workers[variant, "stock"].start
                row["cold"] = cold
                if not VARIANTS[variant].compiled:
                    row["warm"] = cold
                elif starts:
                    advance(0.0, f"warm start of {variant}")
                    again = Worker(name, variant, f"{folder}/{variant}")
                    row["warm"] = again.start
                    again.report()
                if tuned and not VARIANTS[variant].ours:
                    workers[variant, "tuned"] = Worker(name, variant, f"{folder}/{variant}", TUNED)
            seen: dict[tuple[str, str], list[Visit]] = {key: [] for key in workers}
            for key, visit, done in visits(workers, steps):
                seen[key].append(visit)
                advance(done, key[0])
            for (variant, malloc), worker in workers.items():
                row = found["variants"][variant]
                row[malloc] = dataclasses.asdict(timing(seen[variant, malloc]))
                if report := worker.report():
                    row["report"] = report
        finally:
            for worker in workers.values():
                worker.kill()
    return found


def agreed(name: str, mixed: bool) -> float:
    """The largest difference from PyTorch in the sizes that are measured, as a share of what is allowed."""
    command = [sys.executable, "-m", "benchmarks.agreement", "--full", name, *["--mixed"] * mixed]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        message = ended.stdout.strip() or ended.stderr[-4000:].strip()
        raise Failure(f"results differ from PyTorch's, so nothing is timed: {message}")
    return float(ended.stdout.partition("agrees:")[2].split()[0])


def best(found: Mapping[str, Any], malloc: str = "stock", mixed: bool = False) -> tuple[str, float] | None:
    """The fastest of PyTorch's variants, in float32 or `mixed` precision, and its milliseconds; None without any."""
    from benchmarks.variants import VARIANTS

    rows = {n: row for n, row in found["variants"].items() if not VARIANTS[n].ours and VARIANTS[n].mixed is mixed}
    theirs = {name: row[malloc]["median"] for name, row in rows.items() if malloc in row}
    return min(theirs.items(), key=lambda pair: pair[1]) if theirs else None


def table(title: str, found: dict[str, Any]) -> Table:
    """The figures of one network; the ratios are to the best of PyTorch's variants."""
    from benchmarks.variants import VARIANTS

    result = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    result.add_column("variant", no_wrap=True)
    for heading in ("ms a step", "quartiles", "best ÷ it", "tuned ms", "faults", "peak GB", "cold s", "warm s"):
        result.add_column(heading, justify="right", no_wrap=True)
    notes = []
    for name, row in found["variants"].items():
        fastest = best(found, mixed=VARIANTS[name].mixed)
        stock, tuned = row["stock"], row.get("tuned")
        result.add_row(
            VARIANTS[name].title,
            f"{stock['median']:.2f}",
            f"{stock['lower']:.2f}-{stock['upper']:.2f}{' *' if stock['disturbed'] else ''}",
            f"{fastest[1] / stock['median']:.2f}" if fastest else "",
            f"{tuned['median']:.2f}{' *' if tuned['disturbed'] else ''}" if tuned else "",
            f"{stock['faults']:.0f}",
            f"{row['warm']['peak_bytes'] / 1e9:.2f}" if "warm" in row else "",
            f"{row['cold']['seconds']:.1f}",
            f"{row['warm']['seconds']:.1f}" if "warm" in row else "",
            style="bold" if VARIANTS[name].ours else "",
        )
        notes += [f"{name} runs partly in PyTorch: {reason}" for reason in row.get("report", {}).get("breaks", ())]
    if any(row[kind]["disturbed"] for row in found["variants"].values() for kind in ("stock", "tuned") if kind in row):
        notes.append("* other processes were busy most of the time: the quieter half of the visits")
    result.caption = "\n".join(notes)
    return result


if __name__ == "__main__":
    sys.exit(main())
