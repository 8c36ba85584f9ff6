"""Whether predicted bytes are moved bytes: memory-bound kernels out of cache, measured time against prediction.

    python -m benchmarks.predicted [--only NAME] [--seconds 2] [--json FILE]

A kernel that is bound by memory takes its bytes divided by the bandwidth. The bandwidth is that of a generated copy
kernel of the same size, run in turns with each kernel, so that a busy machine slows both; the least times count.
`ratio` is measured time x bandwidth / predicted bytes. Exits with 1 where it is not within 25 % of 1: run it on a
quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.train import ROOT, surroundings
from daceml_train.analysis.traffic import traffic
from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.codegen.cpu.launch import generate
from daceml_train.graph.graph import Graph
from daceml_train.ops.kernel import Kernel
from tests.codegen import groups
from tests.codegen.running import bind, describe, kernel_of, layout

FOLDER = ROOT / "build" / "benchmark-kernels"
RESULTS = ROOT / "benchmarks" / "results" / "predicted.json"
TOLERANCE = 0.25
ROWS, LANES = 8192, 8192


@dataclass
class Case:
    """A kernel's body, its operands and its results; arrays are far larger than caches."""

    name: str
    body: Callable[..., Any]
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]


def cases(rows: int, lanes: int) -> Iterator[Case]:
    """Kernels of a few operations per element, of different shares of reading and writing."""
    x, y = torch.randn(rows, lanes), torch.randn(rows, lanes)
    row, column, out = torch.randn(lanes), torch.randn(rows, 1), torch.empty(rows, lanes)
    yield Case("add", lambda a, b: a + b, [x, y], [out])
    yield Case("scale and shift by rows", lambda a, b, c: a * b + c, [x, row, column], [out])
    yield Case("add and multiply, two results", lambda a, b: (a + b, a * b), [x, y], [out, torch.empty_like(out)])
    yield Case("maximum of rows", lambda a: a.reduce("max", (1,)), [x], [torch.empty(rows)])
    yield Case("sum of columns", lambda a: a.sum((0,)), [x], [torch.empty(lanes)])
    yield Case("strided half", lambda a: a.slice(1, 0, lanes // 2) * 2.0, [x], [torch.empty(rows, lanes // 2)])
    yield Case("softmax", groups.softmax, [x], [out])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predicted", description=__doc__)
    parser.add_argument("--only", default="", help="kernels whose names contain this")
    parser.add_argument("--seconds", type=float, default=2.0, help="per kernel (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of 8192 numbers (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"the page's: {RESULTS}")
    options = parser.parse_args(arguments)
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    x = torch.randn(options.rows, LANES)
    copied, copy = prepared(Case("copy", lambda a: a * 1.0, [x], [torch.empty_like(x)]))
    rows: dict[str, dict[str, float]] = {}
    for case in cases(options.rows, LANES):
        if options.only not in case.name:
            continue
        predicted, call = prepared(case)
        own, theirs = least(call, copy, options.seconds)
        bandwidth = copied / theirs
        ratio = own * bandwidth / predicted
        rows[case.name] = {"predicted": predicted, "seconds": own, "bandwidth": bandwidth, "ratio": ratio}
        verdict = "" if abs(ratio - 1) <= TOLERANCE else "  off by more than 25 %"
        message = f"{case.name:32} {predicted / 1e6:8.1f} MB {1e3 * own:8.2f} ms {bandwidth / 1e9:6.1f} GB/s"
        print(f"{message}  ratio {ratio:.2f}{verdict}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(surroundings() | {"kernels": rows}, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(row["ratio"] - 1) > TOLERANCE for row in rows.values()))


def prepared(case: Case) -> tuple[int, Callable[[], object]]:
    """The bytes that the model predicts, and the compiled kernel."""
    kernel = kernel_of(case.body, *map(describe, case.inputs))
    code = generate(kernel, [*map(layout, case.inputs)], [*map(layout, case.outputs)])
    path = compile_kernels([code], FOLDER)[code.key]
    call = bind(code, load(path, code.key), kernel, case.inputs, case.outputs, threads=torch.get_num_threads())
    return bytes_of(kernel, case.inputs), call


def bytes_of(kernel: Kernel, inputs: Sequence[torch.Tensor]) -> int:
    """What `analysis.traffic` says of the kernel alone."""
    graph = Graph()
    operands = [graph.input(f"x{i}", describe(tensor)) for i, tensor in enumerate(inputs)]
    graph.output(*graph.emit(kernel, *operands))
    return int(traffic(graph).bytes)


def least(one: Callable[[], object], other: Callable[[], object], seconds: float) -> tuple[float, float]:
    """The least seconds of two calls, run in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < 5:
        for call, kept in zip((one, other), times, strict=True):
            start = time.perf_counter()
            call()
            kept.append(time.perf_counter() - start)
    return min(times[0]), min(times[1])


if __name__ == "__main__":
    sys.exit(main())
