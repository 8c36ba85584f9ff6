"""Seconds that all passes take together, on BERT's training graph of one to twelve layers.

    python -m benchmarks.pass_time [--layers 1,2,4,8,12] [--repeats 3] [--json FILE] [--picture FILE]

The graph does not depend on the width, so narrow layers stand for BERT-base's. Times are processor seconds of this
process, the least of some repeats; verification after each pass is part of them. `exponent` is the slope of the line
through the points in logarithms: 1 is linear. Exits with 1 above `LIMIT` seconds for the largest graph.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.nn import functional as F

import daceml_train as dt
from benchmarks.networks.table import sentences
from benchmarks.networks.transformer import Bert
from benchmarks.train import ROOT, surroundings
from daceml_train.graph.graph import Graph
from daceml_train.passes.base import LEVELS

RESULTS = ROOT / "benchmarks" / "results" / "pass_time.json"
PICTURE = ROOT / "docs" / "results" / "pass_time.png"
LIMIT = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pass_time", description=__doc__)
    parser.add_argument("--layers", default="1,2,4,8,12", help="comma-separated (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="the least of these counts (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"the page's: {RESULTS}")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"the page's: {PICTURE}")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    points = []
    for layers in map(int, options.layers.split(",")):
        points.append(measured(layers, options.repeats))
        row = points[-1]
        levels = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row["levels"].items())
        print(f"{layers:3} layers {row['operators']:6} operators {row['seconds']:7.2f} s ({levels})", flush=True)
    found = surroundings() | {"points": points, "exponent": exponent(points)}
    print(f"grows with the number of operators to the power {found['exponent']:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(points, options.picture)
    return int(points[-1]["seconds"] > LIMIT)


def bert_graph(layers: int) -> Graph:
    """A training step of BERT with Adam after differentiation, with only the passes before it applied."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Bert(100, 96, 4, layers, 32).train()
    inputs, targets = sentences(2, 16, 100, 2)
    step = dt.training_step(model, F.cross_entropy, torch.optim.Adam(model.parameters()))
    return step.graph(inputs, targets, forward=dt.TRAINING)


def measured(layers: int, repeats: int) -> dict[str, Any]:
    """Operators before the passes, and the seconds that each level takes."""
    graph = bert_graph(layers)
    best: dict[str, float] = {}
    for _ in range(repeats):
        now, spent = graph, {}
        for level in LEVELS[1:]:
            start = time.process_time()
            now = dt.TRAINING.run(now, (level,))
            spent[level] = time.process_time() - start
        if not best or sum(spent.values()) < sum(best.values()):
            best = spent
    return {"layers": layers, "operators": len(graph.nodes), "seconds": sum(best.values()), "levels": best}


def exponent(points: Sequence[dict[str, Any]]) -> float:
    """The slope of the straight line through (log operators, log seconds); 1 for a single point."""
    if len(points) < 2:
        return 1.0
    xs, ys = ([math.log(p[key]) for p in points] for key in ("operators", "seconds"))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)


def draw(points: Sequence[dict[str, Any]], path: Path) -> None:
    """The points, and the line that would be linear through the last one."""
    from benchmarks.figures import BLUE, GREY, STYLE, pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
        xs, ys = [p["operators"] for p in points], [p["seconds"] for p in points]
        axes.plot([0, xs[-1]], [0, ys[-1]], color=GREY, linewidth=2, label="linear")
        axes.plot(xs, ys, "o-", color=BLUE, label="all passes and their verification")
        axes.set(
            title="Pass time, BERT's training graph of 1 to 12 layers",
            xlabel="operators after differentiation",
            ylabel="processor seconds",
            xlim=(0, None),
            ylim=(0, None),
        )
        axes.grid(axis="y", color="#E6E9EC", linewidth=0.8)
        axes.legend(loc="upper left")
        figure.savefig(path)
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
