"""Passes in any order: `python -m benchmarks.orders [NETWORK...] [--orders 200] [--json FILE]`.

The training step of each small network goes through every prefix of the pipeline, and through random pipelines: of each
level a random subset of the passes in a random order. After each, the interpreter's loss, gradients and buffers in
float64 must equal those of the graph before any pass, and the verifier must accept the graph.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.networks.table import TWELVE
from daceml_train.analysis.interpret import interpret
from daceml_train.autodiff.reverse import differentiate
from daceml_train.frontends.torch.capture.capture import capture
from daceml_train.graph.graph import Graph, Role
from daceml_train.passes.pipeline import Pipeline
from daceml_train.tensor import DType
from daceml_train.transformations.pipelines import TRAINING

TOLERANCE = 1e-8
"""Largest difference in units of the largest element of an array: sums in another order, in float64."""
FLOOR = 1e-3
"""Least unit: a shift before a normalization has a gradient of zero, of which only rounding is left."""


def loss_graph(name: str) -> tuple[Graph, dict[str, np.ndarray]]:
    """The captured model and loss of a small network, and numbers for its inputs."""
    problem = TWELVE[name].build(small=True, double=True)
    for module in problem.model.modules():
        if hasattr(module, "sparse"):  # the storage of a gradient changes no number
            module.sparse = False
    found: list[tuple[Any, Sequence[Any]]] = []

    def backend(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
        captured = capture(gm, examples)
        found.append((captured, examples))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(problem.objective, backend=backend, fullgraph=True, dynamic=False)()
    ((captured, examples),) = found
    values = {}
    for entry in captured.inputs:
        if entry.name:
            given = entry.value if entry.position is None else examples[entry.position]
            values[entry.name] = given.detach().numpy().copy()
    values |= {n: np.array(5) for n in captured.graph.inputs if n not in values}
    return captured.graph, values


def run(graph: Graph, pipeline: Pipeline) -> Graph:
    """The step after a pipeline: loss, gradients of all parameters, and a plain update, through all levels."""
    graph = pipeline.run(graph, ("forward",)).copy()
    loss = graph.value(graph.outputs[0])
    parameters = [
        n for n, entry in graph.inputs.items() if entry.role is Role.parameter and entry.tensor.dtype is DType.float64
    ]
    for name, gradient in differentiate(graph, {loss.name: loss.constant(1.0)}, parameters).items():
        if gradient is not None:
            graph.write(name, graph.value(name) - gradient * 0.1)
    return pipeline.run(graph, tuple(level for level, _ in pipeline.passes if level != "forward"))


def difference(expected: Graph, given: Graph, values: dict[str, np.ndarray]) -> float:
    """The largest difference of results and written values, in units of each array's largest element."""
    a, b = interpret(expected, dict(values)), interpret(given, dict(values))
    pairs = [*zip(a.outputs, b.outputs, strict=True)]
    pairs += [(value, b.writes.get(name, values.get(name))) for name, value in a.writes.items()]
    assert len(pairs) > 1, "nothing but a loss to compare"
    worst = 0.0
    for x, y in pairs:
        if x.size:
            scale = max(float(np.abs(x).max()), FLOOR)
            found = float(np.abs(np.asarray(x, float) - y).max()) / scale
            if math.isnan(found):
                return found
            worst = max(worst, found)
    return worst


def prefixes() -> Iterator[Pipeline]:
    """The pipeline up to each of its passes."""
    count = sum(len(passes) for _, passes in TRAINING.passes)
    for length in range(1, count + 1):
        left, levels = length, {}
        for level, passes in TRAINING.passes:
            levels[level] = passes[: max(left, 0)]
            left -= len(passes)
        yield Pipeline(**levels)


def shuffled(seed: int) -> Pipeline:
    """A random subset of each level's passes in a random order."""
    draw = random.Random(seed)
    levels = {}
    for level, passes in TRAINING.passes:
        chosen = [p for p in passes if draw.random() < 0.7]
        draw.shuffle(chosen)
        levels[level] = tuple(chosen)
    return Pipeline(**levels)


def check(name: str, pipelines: Sequence[Pipeline]) -> dict[str, Any]:
    """What became of one network: pipelines tried, the largest difference, and those that failed."""
    graph, values = loss_graph(name)
    expected = run(graph, Pipeline())
    worst, failures = 0.0, []
    for pipeline in pipelines:
        try:
            found = difference(expected, run(graph, pipeline), values)
        except Exception as error:  # each is a finding
            failures.append({"pipeline": str(pipeline), "error": f"{type(error).__name__}: {error}"})
            continue
        worst = max(worst, found)
        if not found <= TOLERANCE:
            failures.append({"pipeline": str(pipeline), "difference": found})
    return {"pipelines": len(pipelines), "largest difference": worst, "failures": failures}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a pipeline changed a number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(TWELVE), metavar="NETWORK", help="default: all")
    parser.add_argument("--orders", type=int, default=200, help="random pipelines, dealt out to the networks in turn")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    for position, name in enumerate(options.networks):
        start = time.perf_counter()
        orders = [shuffled(seed) for seed in range(position, options.orders, len(options.networks))]
        results[name] = check(name, [*prefixes(), *orders])
        told, failed = results[name], len(results[name]["failures"])
        seconds = time.perf_counter() - start
        line = f"{name:16} {told['pipelines']} pipelines, largest difference {told['largest difference']:.1e}"
        print(f"{line}, {failed} failed ({seconds:.0f} s)", flush=True)
        for failure in told["failures"]:
            print(f"  {failure.get('error', failure.get('difference'))}\n{failure['pipeline']}")
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return int(any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
