"""Figures of `benchmarks.train` as a page: `python -m benchmarks.render RESULTS.json > docs/performance.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.variants import VARIANTS
from daceml_train.reporting import bytes_text

HEAD = """# Performance

Generated; do not edit. To measure again:

    make bench
    .venv/bin/python -m benchmarks.render benchmarks/results/train.json > docs/performance.md

A figure is the time of one full training step: forward pass, loss, backward pass and update, float32. Before anything
is timed, loss, gradients, buffers and the updated parameters are compared with eager execution's against float64. All
variants of a network are visited in turn within one process; visits during which other processes used more than a
tenth of a core do not count (* marks rows where too few were left, and the quieter half stands in). The ratio divides
by the best of PyTorch's own variants, which may use the fused optimizer: below 1 is faster than PyTorch.
Cold is the time that a first step takes longer than later ones in a fresh process with empty caches (the native
executor, which is compiled once per PyTorch version, apart), warm the same with the caches filled.
"""


def main(path: str) -> None:
    """Print the page."""
    print("\n".join(page(json.loads(Path(path).read_text(encoding="utf-8")))))


def page(results: dict[str, Any]) -> Iterator[str]:
    """The page line by line."""
    yield HEAD
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    malloc = "" if results["malloc"] == "stock" else ", glibc told to keep memory"
    yield f"Measured {results['date']} on {results['cores']} cores of {results['processor']}{malloc}; {versions}.\n"
    yield "| network | best PyTorch, ms | training_step, ms | ratio | optimize, ms | ratio |"
    yield "|---|---|---|---|---|---|"
    for found in results["networks"].values():
        yield _line(found)
    for found in results["networks"].values():
        yield from _section(found)


def _line(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"| {found['title']} | not measured | | | | |"
    best, rows = found["best_pytorch_ms"], found["variants"]
    cells = [found["title"], f"{best:.1f}" if best else ""]
    for name in ("step", "module"):
        row = rows.get(name)
        cells += [f"{row['median']:.1f}" if row else "", f"{row['median'] / best:.2f}" if row and best else ""]
    return f"| {' | '.join(cells)} |"


def _section(found: dict[str, Any]) -> Iterator[str]:
    yield f"\n## {found['title']}\n"
    if "error" in found:
        yield f"Not measured: {found['error'].splitlines()[-1]}"
        return
    best = found["best_pytorch_ms"]
    yield "| variant | ms a step | quartiles | ÷ best PyTorch | page faults | peak memory | cold s | warm s |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in found["variants"].items():
        cold, warm = row.get("cold"), row.get("warm")
        cells = (
            VARIANTS[name].title,
            f"{row['median']:.2f}{' *' if row['disturbed'] else ''}",
            f"{row['lower']:.2f}-{row['upper']:.2f}",
            f"{row['median'] / best:.2f}" if best else "",
            f"{row['faults']:.0f}",
            bytes_text(warm["peak_bytes"]) if warm else "",
            f"{cold['seconds']:.1f}" if cold else "",
            f"{warm['seconds']:.1f}" if warm else "",
        )
        yield f"| {' | '.join(cells)} |"
    yield from _compilation(found["variants"].get("step", {}))


def _compilation(row: dict[str, Any]) -> Iterator[str]:
    """Bytes per level and seconds per stage of the whole step."""
    for function in row.get("report", {}).get("functions", ())[:1]:
        levels = ", ".join(f"{bytes_text(v['after'])} after {v['name'].replace('_', ' ')}" for v in function["levels"])
        yield f"\nBytes that a step moves: {bytes_text(function['captured'])} as captured, {levels}. "
        yield f"{function['kernels']} kernels ({function['distinct_kernels']} distinct) and "
        yield f"{sum(function['calls'].values())} library calls."
    for kind in ("cold", "warm"):
        if stages := row.get(kind, {}).get("stages"):
            yield f"\n{kind.capitalize()} start: {', '.join(f'{name} {s:.1f} s' for name, s in stages.items())}."


if __name__ == "__main__":
    main(*sys.argv[1:])
