"""Figures of traffic, pass time and prediction: `python -m benchmarks.traffic_page > docs/results/traffic.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import pass_time, predicted, traffic
from benchmarks.networks import NETWORKS
from daceml_train.passes.base import LEVELS
from daceml_train.reporting.numbers import bytes_text

HEAD = """# Bytes

Generated; do not edit. To count again:

    .venv/bin/python -m benchmarks.traffic --json benchmarks/results/traffic.json
    .venv/bin/python -m benchmarks.pass_time --json benchmarks/results/pass_time.json \\
        --picture docs/results/pass_time.png
    .venv/bin/python -m benchmarks.predicted --json benchmarks/results/predicted.json
    .venv/bin/python -m benchmarks.traffic_page > docs/results/traffic.md

The bytes of one training step, float32, as `analysis.traffic` and `frontends.torch.capture.eager_traffic` count them:
every kernel and every library call reads each distinct operand once and writes its results, and moves what its
library reorders. Eager is PyTorch as it runs: one ATen kernel after another, the optimizer's included; views cost
nothing. *Captured* is our graph with one kernel per leaf operator, which is more, since a softmax or an Adam update
consists of several leaves. Within the last level, `RematerializeCheap` computes arrays again where that lowers peak
memory for little time, so this level may add bytes.
"""


def main() -> int:
    """Print the page from the figures that are there."""
    print("\n".join(page()))
    return 0


def page() -> Iterator[str]:
    """The page line by line."""
    yield HEAD
    yield from _traffic(_read(traffic.RESULTS))
    if pass_time.RESULTS.exists():
        yield from _pass_time(_read(pass_time.RESULTS))
    if predicted.RESULTS.exists():
        yield from _predicted(_read(predicted.RESULTS))


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _traffic(results: dict[str, Any]) -> Iterator[str]:
    kept = [level for level in LEVELS if level != "distribution"]  # moves nothing within one process
    levels = [level.replace("_", " ") for level in kept]
    yield f"| network | eager | captured | {' | '.join(levels)} | share |"
    yield f"|---|---|---|{'---|' * len(levels)}---|"
    for name, row in results["networks"].items():
        title = NETWORKS[name].title if name in NETWORKS else row["title"]
        stages = " | ".join(bytes_text(row["stages"][level]) for level in ("captured", *kept))
        yield f"| {title} | {bytes_text(row['eager'])} | {stages} | {row['share']:.2f} |"
    yield f"\nGeometric mean over the networks: **{results['geometric_mean']:.2f}**. Counted {results['date']}.\n"
    layer = results["networks"].get(traffic.LAYER)
    if layer:
        yield f"BERT-large's encoder layer moves {100 * (1 - layer['share']):.1f} % less than in eager execution;"
        yield "Ivanov et al., *Data Movement Is All You Need*, 2021, report 22.91 % by hand.\n"
    yield "## What still moves\n"
    yield "| network | the largest operators of ours |"
    yield "|---|---|"
    for name, row in results["networks"].items():
        largest = list(row["ours_by_operator"].items())[:5]
        yield f"| {name} | {', '.join(f'{label} {bytes_text(size)}' for label, size in largest)} |"


def _pass_time(results: dict[str, Any]) -> Iterator[str]:
    last = results["points"][-1]
    yield "\n## Pass time\n"
    yield f"BERT with {last['layers']} layers, {last['operators']} operators after differentiation: all passes and"
    yield f"their verification take {last['seconds']:.1f} s of one core. Time grows with the number of"
    yield f"operators to the power {results['exponent']:.2f}.\n"
    yield "![pass time](pass_time.png)"


def _predicted(results: dict[str, Any]) -> Iterator[str]:
    yield "\n## Predicted against measured\n"
    yield "Memory-bound kernels out of cache: measured time × the bandwidth of a copy kernel, over predicted bytes.\n"
    yield "| kernel | predicted | time | ratio |"
    yield "|---|---|---|---|"
    for name, row in results["kernels"].items():
        yield f"| {name} | {bytes_text(int(row['predicted']))} | {1e3 * row['seconds']:.1f} ms | {row['ratio']:.2f} |"


if __name__ == "__main__":
    sys.exit(main())
