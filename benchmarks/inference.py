"""Inference of the benchmarked networks against the best of PyTorch and ONNX Runtime.

    python -m benchmarks.inference                   # all twelve, batches of 1 and 16; what is measured already is kept
    python -m benchmarks.inference resnet50 --batch 1
    python -m benchmarks.inference --again           # measure again
    python -m benchmarks.inference --page            # docs/results/inference.md from the results alone

Each network and batch runs in a process of its own, which compares outputs with eager execution first and then visits
the variants in turn; see `benchmarks.measure`. Results are written after each, so that a run may be broken off and
goes on where it was.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import daceml_train as dt
from benchmarks.measure import Visit, timing, visit, visits
from benchmarks.networks import NETWORKS, TWELVE
from benchmarks.onnx.speed import cut
from benchmarks.train import ROOT, surroundings

RESULTS = ROOT / "benchmarks" / "results" / "inference.json"
PAGE = ROOT / "docs" / "results" / "inference.md"
BATCHES = (1, 16)
TOLERANCE = 2e-3
"""Of outputs, relative to the greatest element: networks of full depth with random weights."""
OURS = "ours"
REST = 0.3
"""Seconds between visits."""
Run = Callable[[], Any]

HEAD = """# Inference

`dt.optimize(model)` compiles calls without gradients (`torch.no_grad`, `torch.inference_mode`) with their own
pipeline, `INFERENCE`, on the CPU:

- There is no backward pass, so nothing is saved for one, and operators that only stop gradients are dropped.
- `fold_batch_norm` folds normalization by known statistics into the weights and bias of the preceding convolution or
  matmul. This is exact algebra; results differ by rounding.
- The weights-only subgraph (folded weights, their layouts, position embeddings) depends only on parameters and
  buffers. It is a program of its own, which runs at the first call and whenever one of them has changed
  (`analysis.weights_only`, `driver.prepacked`). Parameters stay the module's own. The results of that program take
  memory: the size of the parameters, or 1.8 times that for filters of 3x3 in tiles.
- Matmuls and convolutions of images with constant weights run in kernels of our own (`pack_weights`,
  `codegen/library/native/matmul.h`). 12 rows times 32 columns are summed in registers. The weight is in panels of 32
  columns that were laid out once, and the next panel is prefetched while one is in use, so weights stream from
  memory. Windows of convolutions are addresses of pixels; nothing is copied. Depthwise convolutions have a kernel,
  too.
- Elementwise operators on a result (bias, activation, residual) are generated into the kernel and run while its rows
  are in cache (`fuse_matmul_epilogue`). NaN stays NaN in a ReLU, unlike in oneDNN's.
- 3x3 convolutions with stride 1 multiply 2.25 times less, in tiles of 2x2 results (F(2x2, 3x3), Lavin and Gray,
  2016), if there are at least 96 pixels; the option `tiled` of `pack_weights` is that number. Errors stay within a
  few units in the last place of the sums (the column *differs by*). An infinity or NaN spreads to its tiles.
- Weights of the remaining oneDNN calls are prepacked (`runtime.prepack`) instead of being reordered in every call.
  That takes their size once more, as packed panels do. A weight that several operators read is not prepacked.

Before each call, changes of weights are detected by address, by version counter, and by content: all numbers of a
tensor up to 512, and 8 numbers of a larger one. This detects writes that do not change the version counter
(`p.data.mul_(2)`, NumPy) if they change one of these numbers. A write through `.data` that changes a few numbers of a
large tensor may not be detected; `with torch.no_grad(): p[0] = 1` always is. Parameters that were created in
inference mode have no version, so their weights are computed at every call.

## Measured

`python -m benchmarks.inference`, float32, full-size networks of `benchmarks/networks`: medians over visits in turn,
in milliseconds, after outputs were compared. *frozen* is `torch.compile` with Inductor's `freezing`, *cl* with
weights and images in channels-last order. The ratio is the best other variant's time divided by ours: above 1 is
faster. \\* marks rows during which other processes were busy; do not rely on those figures.
"""


def variants(name: str, batch: int, folder: Path) -> dict[str, Run]:
    """How the network's forward pass is run, by name; gradients are off."""
    import onnxruntime
    import torch._inductor.config as inductor

    network = NETWORKS[name]
    problem = network.build(dropout=False)
    given = problem.inputs if isinstance(problem.inputs, tuple) else (problem.inputs,)
    inputs = tuple(cut(x, given[0].shape[0], batch) for x in given)
    model = problem.model.eval()
    inductor.freezing = True

    def last(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x

    def called(module: Callable[..., Any], arguments: Sequence[Tensor]) -> Run:
        return lambda: module(*arguments)

    file = folder / "model.onnx"
    torch.onnx.export(model, inputs, file, dynamo=True, verbose=False)
    onnxruntime.set_default_logger_severity(3)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    results: dict[str, Run] = {
        "eager": called(model, inputs),
        "frozen": called(torch.compile(copy.deepcopy(model)), inputs),
        "onnxruntime": lambda: session.run(None, feed)[0],
        OURS: called(dt.optimize(model), inputs),
    }
    if network.images:
        images = copy.deepcopy(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        arguments = tuple(map(last, inputs))
        results["eager cl"] = called(images, arguments)
        results["frozen cl"] = called(torch.compile(copy.deepcopy(images)), arguments)
    return results


def measure(name: str, batch: int, turns: int) -> dict[str, Any]:
    """The figures of one network and batch: per variant a timing and how far its output is from eager execution's."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {"load": os.getloadavg()[0], "variants": {}}
    with tempfile.TemporaryDirectory(prefix="daceml_train-inference-") as folder, ExitStack() as within:
        results = variants(name, batch, Path(folder))  # parameters created in inference mode have no versions
        within.enter_context(torch.inference_mode())
        want = results["eager"]().double()
        scale = max(float(want.abs().max()), 1e-6)
        for variant, run in results.items():
            result = run()
            got = torch.from_numpy(result) if isinstance(result, np.ndarray) else result
            difference = float((got.double() - want).abs().max()) / scale
            if difference > TOLERANCE:
                return {"error": f"the output of {variant} differs by {difference:.2g}"}
            found["variants"][variant] = {"difference": difference}
        seen: dict[str, list[Visit]] = {variant: [] for variant in results}
        for variant, seen_now, _ in visits({v: partial(rested, run) for v, run in results.items()}, turns):
            seen[variant].append(seen_now)
    for variant, of in seen.items():
        found["variants"][variant] |= dataclasses.asdict(timing(of))
    return found


def rested(run: Run, steps: int) -> Visit:
    """A visit after a pause, since ONNX Runtime's threads keep spinning for a while."""
    time.sleep(REST)
    return visit(run, steps)


def ratio(found: dict[str, Any]) -> float:
    """How many times as fast as the best other variant."""
    others = [row["median"] for variant, row in found["variants"].items() if variant != OURS]
    return float(min(others) / found["variants"][OURS]["median"])


def page(results: dict[str, Any]) -> str:
    """The documentation with the figures."""
    columns = ("eager", "eager cl", "frozen", "frozen cl", "onnxruntime", OURS)
    lines = [HEAD]
    lines += [f"| network | batch | {' | '.join(columns)} | ratio | differs by |", "|---|---|" + "---|" * 8]
    for key, found in results.get("runs", {}).items():
        name, batch = key.split()
        if "error" in found:
            lines.append(f"| {name} | {batch} | {found['error']} |" + " |" * 7)
            continue
        rows = found["variants"]
        times = " | ".join(f"{rows[c]['median']:.2f}" if c in rows else "" for c in columns)
        mark = " \\*" if any(row["disturbed"] for row in rows.values()) else ""
        lines.append(f"| {name} | {batch} | {times} | {ratio(found):.2f}{mark} | {rows[OURS]['difference']:.1e} |")
    found = {key: ratio(row) for key, row in results.get("runs", {}).items() if "error" not in row}
    if found:
        groups = {batch: [r for key, r in found.items() if key.endswith(f" {batch}")] for batch in BATCHES}
        apart = ", ".join(f"batch {batch} **{geometric_mean(g):.2f}**" for batch, g in groups.items() if g)
        lines += ["", f"Geometric mean of the ratios **{geometric_mean(list(found.values())):.2f}**; {apart}."]
    if "surroundings" in results:
        about = results["surroundings"]
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines += ["", f"{about['processor']}, {about['cores']} cores, {versions}, {about['date']}."]
    else:
        lines += ["", "Not measured yet."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; 1 if outputs differ or a process fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="default: the twelve networks")
    parser.add_argument("--batch", type=int, action="append", help=f"default: {', '.join(map(str, BATCHES))}")
    parser.add_argument("--steps", type=int, default=20, help="undisturbed calls per variant at least")
    parser.add_argument("--again", action="store_true", help="measure what there are results for")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--one", action="store_true", help="measure one network and batch here, and print JSON")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.networks) - set(NETWORKS)):
        parser.error(f"no network is called {unknown[0]!r}; known: {', '.join(NETWORKS)}")
    if options.one:
        print(json.dumps(measure(options.networks[0], options.batch[0], options.steps)))
        return 0
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {"runs": {}}
    todo = [(name, batch) for name in options.networks or TWELVE for batch in options.batch or BATCHES]
    for name, batch in [] if options.page else todo:
        if f"{name} {batch}" in results["runs"] and not options.again:
            continue
        found = _apart(name, batch, options.steps)
        results["runs"][f"{name} {batch}"], results["surroundings"] = found, surroundings()
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name:18} {batch:3}", found.get("error") or f"ratio {ratio(found):.2f}", flush=True)
    if options.json == RESULTS:
        PAGE.write_text(page(results))
    return int(any("error" in found for found in results["runs"].values()))


def _apart(name: str, batch: int, steps: int) -> dict[str, Any]:
    """The figures from a process of its own, or its error."""
    chosen = [name, "--batch", str(batch), "--steps", str(steps), "--one"]
    command = [sys.executable, "-m", "benchmarks.inference", *chosen]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode != 0 or not lines:
        return {"error": f"{ended.stderr.strip()[-300:] or 'no result'}".replace("\n", " ")}
    results: dict[str, Any] = json.loads(lines[-1])
    return results


if __name__ == "__main__":
    sys.exit(main())
