"""`make bench-gpu`: tables of a CUDA device, into gpu_results/results.json, results.md and a picture.

--only kernels small streams networks bytes    parts of it
--modes default reduce-overhead max-autotune   of torch.compile
--minutes 7.2                                  nothing new is begun after that; the next call goes on
--again                                        measure what is there a second time
--dry                                          without a device: tries the measurements themselves, on tiny sizes

Each measurement is a process of its own (`benchmarks.gpu.worker`); several get ready at the same time, since most of
the time is compiling, and are measured one by one. The tables are written after each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import dram, kernels, networks
from benchmarks.gpu.pool import Item, Limits, measure

PARTS = ("kernels", "small", "streams", "networks", "bytes")
WORKER = (sys.executable, "-m", "benchmarks.gpu.worker")
DTYPES = ("float32", "bfloat16")


def main() -> int:
    """Measure what is not there yet, and write what is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--modes", nargs="*", default=["default", "reduce-overhead"])
    parser.add_argument("--precisions", nargs="*", choices=("bf16", "tf32"), default=["bf16", "tf32"])
    parser.add_argument("--cases", nargs="*", choices=tuple(kernels.CASES), default=tuple(kernels.CASES))
    parser.add_argument("--minutes", type=float, default=7.2)
    parser.add_argument("--workers", type=int, default=max(1, min(12, os.cpu_count() or 1)))
    parser.add_argument("--folder", type=Path, default=Path("gpu_results"))
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry:
        print("no CUDA device: nothing was run")
        return 3
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "results.json"
    results = json.loads(path.read_text()) if path.exists() and not options.again else {}
    results["machine"], rows = machine(), results.setdefault("rows", {})
    wanted = [item for item in items(options) if item.key not in rows]

    def done(key: str, row: dict[str, Any]) -> None:
        rows[key] = row
        print(f"{key}: {json.dumps(row)[:300]}", flush=True)
        path.write_text(json.dumps(results, indent=1))
        (options.folder / "results.md").write_text(page(results))

    limits = Limits(options.workers)
    if torch.cuda.is_available():
        limits.gib = 0.8 * torch.cuda.get_device_properties(0).total_memory / 2**30
    left = measure(wanted, limits, time.monotonic() + 60 * options.minutes, done)
    text = page(results)
    print(text)
    picture(results, options.folder / "results.png")
    print(f"{len(left)} left for the next call" if left else "all measured", f"; results are in {options.folder}")
    return 0


def machine() -> dict[str, Any]:
    """What was measured on, and when."""
    there = torch.cuda.is_available()
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_properties(0).name if there else "no device, a trial",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def items(options: argparse.Namespace) -> list[Item]:
    """What there is to measure, the most telling first."""
    results: list[Item] = []

    def add(*words: str, gib: float = 4.0) -> None:
        results.append(Item(" | ".join(words), (*WORKER, *words), gib))

    modes = () if options.dry else tuple(options.modes)
    small, large, branchy = networks.SMALL, networks.LARGE, networks.BRANCHY
    if options.dry:
        small = large = branchy = networks.TINY
    add("copy")
    if "kernels" in options.only:
        for name in options.cases:
            for dtype in DTYPES:
                add("kernel", name, dtype, gib=10.0)
        add("adam", gib=6.0)
    if "small" in options.only:
        for name, network in small.items():
            for variant in networks.variants(network, modes):
                add("network", name, "tf32", variant)
    if "streams" in options.only:
        for name in branchy:
            for variant in ("ours", "one stream"):
                add("network", name, "tf32", variant)
    if "networks" in options.only:
        for precision in options.precisions:
            for name, network in large.items():
                for variant in networks.variants(network, modes):
                    add("network", name, precision, variant, gib=networks.GIB.get(name, 9.0))
    if "bytes" in options.only:
        for name in options.cases:
            for direction in dram.DIRECTIONS:
                add("bytes", name, direction, gib=8.0)
    return list({item.key: item for item in results}.values())


def steps(rows: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Training steps by network and precision: milliseconds and peak bytes by variant, and details."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for key, row in rows.items():
        kind, *names = key.split(" | ")
        if kind == "network":
            name, precision, variant = names
            new: dict[str, Any] = {"milliseconds": {}, "peak": {}, "notes": [], "launches": "", "streams": ""}
            entry = found.setdefault((name, precision), new)
            if "error" in row:
                entry["notes"].append(f"{variant}: {row['error']}")
                continue
            entry["milliseconds"][variant], entry["peak"][variant] = row["milliseconds"], row["peak"]
            entry["notes"] += row["notes"]
            if variant == "ours":
                entry |= {"launches": row["launches"], "streams": row["streams"]}
    return found


def page(results: dict[str, Any]) -> str:
    """The tables as Markdown."""
    facts, rows = results["machine"], results.get("rows", {})
    lines = [f"# {facts['device']}, {facts['date']}", "", ", ".join(f"{k} {v}" for k, v in facts.items()), ""]
    roof = rows.get("copy", {}).get("bandwidth", math.nan)
    lines += [f"A copy on the device moves {roof / 1e12:.2f} TB/s.", ""]
    found = [r for row in rows.values() for r in row.get("rows", ())]
    if found:
        lines.append("| kernel | | | µs | of the copy | over eager | over torch.compile |")
        lines.append("|---|---|---|---|---|---|---|")
        for r in found:
            share, own = r["bytes"] / (r["ours"] * 1e-6) / roof, r["ours"]
            times = f"{own:.0f} | {share:.0%} | {r['eager'] / own:.2f} | {r['compiled'] / own:.2f}"
            lines.append(f"| {r['name']} | {r['dtype']} | {r['direction']} | {times} |")
        lines.append("")
    lines += ["| step | | ours, ms | over eager | over torch.compile | peak of torch.compile's | launches | |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    over: dict[str, list[float]] = {"eager": [], "compile": []}
    for (name, precision), r in steps(rows).items():
        own = r["milliseconds"].get("ours", math.nan)
        best = {start: _least(r["milliseconds"], start) for start in over}
        peak = r["peak"].get("ours", math.nan) / _least(r["peak"], "compile")
        if name in networks.LARGE:
            for start, ratios in over.items():
                ratios.append(best[start] / own)
        shown = f"{own:.2f} | {best['eager'] / own:.2f} | {best['compile'] / own:.2f} | {peak:.2f} | {r['launches']}"
        lines.append(f"| {name} | {precision} | {shown} | {'; '.join(r['notes'])} |")
        if one := r["milliseconds"].get("one stream"):
            gain = f"{one / own:.2f} times as fast as one"
            lines.append(f"| {name}, {r['streams']} streams | {precision} | | | | | | {gain} |")
    if over["eager"]:
        mean = {start: _mean(ratios) for start, ratios in over.items()}
        lines += [
            "",
            f"Networks, geometric mean of what is measured: {mean['eager']:.2f} over eager, "
            f"{mean['compile']:.2f} over the best of torch.compile.",
        ]
    lines += _bytes(rows, roof)
    failed = [f"- {key}: {row['error']}" for key, row in rows.items() if "error" in row and "network" not in key]
    return "\n".join([*lines, *(["", *failed] if failed else [])]) + "\n"


def _bytes(rows: dict[str, Any], roof: float) -> list[str]:
    """The table of bytes."""
    found = [row for key, row in rows.items() if key.startswith("bytes") and "modelled" in row]
    lines = ["", "| kernel | bytes by the model | by ncu |", "|---|---|---|"] if found else []
    for r in found:
        by = (
            f"{r['measured'] / r['modelled']:.2f} of it"
            if "measured" in r
            else (f"{r['note']}: {r['bandwidth'] / roof:.0%} of a copy's bandwidth")
        )
        lines.append(f"| {r['name']} | {r['modelled']:,} | {by} |")
    return lines


def _least(values: dict[str, float], start: str) -> float:
    """The smallest of the variants that begin so."""
    return min((v for name, v in values.items() if name.startswith(start)), default=math.nan)


def _mean(ratios: list[float]) -> float:
    known = [r for r in ratios if r == r]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else math.nan


def picture(results: dict[str, Any], path: Path) -> None:
    """Speed-ups as bars, where matplotlib is there."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    every = steps(results.get("rows", {}))
    rows = [(f"{name} {precision}", r["milliseconds"]) for (name, precision), r in every.items()]
    rows = [(name, times) for name, times in rows if "ours" in times]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(8, 0.4 * len(rows) + 1))
    for position, (_, times) in enumerate(rows):
        for offset, start, color in ((-0.2, "eager", "C0"), (0.2, "compile", "C1")):
            axes.barh(position + offset, _least(times, start) / times["ours"], 0.38, color=color)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("times as fast as eager (blue) and as the best of torch.compile (orange)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
