"""Predicted training steps of the twelve networks on GPUs that are not there, beside predicted eager PyTorch.

    python -m benchmarks.gpu_prediction [NETWORK...] [--device h100] [--precision tf32|bfloat16|float32] [--json FILE]

Nothing runs on a device. Our program is lowered for it, PyTorch's kernels are counted on tensors without memory, and
both are timed by the same figures of the device (`analysis.device_model`, `lowering.device_time`).
`python -m benchmarks.gpu_prediction --page > docs/results/gpu-prediction.md` prints the page from the JSON file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch._dynamo

import daceml_train as dt
from benchmarks.networks import TWELVE
from benchmarks.networks.network import Network, Problem
from benchmarks.train import ROOT, surroundings
from daceml_train.analysis.device_model import DEVICES, device_model
from daceml_train.frontends.torch.capture.eager_operations import prepared, with_foreach
from daceml_train.frontends.torch.capture.eager_traffic import fake
from daceml_train.reporting.prediction import Prediction, predict

RESULTS = ROOT / "benchmarks" / "results" / "gpu_prediction.json"
PRECISIONS = ("tf32", "bfloat16", "float32")
LEAST, MEAN = 1.3, 1.6
"""The goals: times as fast as predicted eager PyTorch, in each network and in the geometric mean."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict and print, or print the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_prediction", description=__doc__)
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"of {', '.join(TWELVE)} (default: all)")
    parser.add_argument("--device", action="append", choices=tuple(DEVICES), help="default: h100")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="default: tf32 and bfloat16")
    parser.add_argument("--small", action="store_true", help="the networks' small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"put the tables there; the page's: {RESULTS}")
    parser.add_argument("--show", action="store_true", help="show the most expensive launches")
    parser.add_argument("--page", action="store_true", help="print the page from the figures that are there")
    options = parser.parse_args(arguments)
    if options.page:
        print("\n".join(page(json.loads(RESULTS.read_text(encoding="utf-8")))))
        return 0
    if unknown := [name for name in options.networks if name not in TWELVE]:
        parser.error(f"no network is called {unknown[0]!r}; known: {', '.join(TWELVE)}")
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for device in options.device or ("h100",):
        for precision in options.precision or ("tf32", "bfloat16"):
            for name in options.networks or TWELVE:
                prediction = predicted(TWELVE[name], device, precision, options.small)
                rows.append(row(name, device, precision, prediction))
                print(line(rows[-1]), flush=True)
                if options.show:
                    print(prediction, flush=True)
                if options.json:
                    write(options.json, rows)
    for title, group in grouped(rows).items():
        print(f"{title}: geometric mean {mean(r['speedup'] for r in group):.2f}")
    return 0


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Store tables; those of other devices and precisions stay."""
    tables = {(r["device"], r["precision"]) for r in rows}
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    others = [r for r in before if (r["device"], r["precision"]) not in tables]
    found = {k: v for k, v in surroundings().items() if k in ("date", "versions")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found | {"rows": [*others, *rows]}, indent=1) + "\n", encoding="utf-8")


def predicted(network: Network, device: str, precision: str, small: bool = False) -> Prediction:
    """The prediction for the second step of a network, whose optimizer has its state."""
    torch._dynamo.reset()
    problem = _problem(network, precision, small)
    prepared(problem.optimizer)
    with TemporaryDirectory() as folder:
        step = dt.training_step(problem.model, problem.loss, problem.optimizer, cache=folder)
        return predict(
            lambda: step(problem.inputs, problem.targets),
            device_model(device),
            lambda run: _eager(network, precision, small, run),
            tf32=precision == "tf32",
        )


def _problem(network: Network, precision: str, small: bool) -> Problem:
    problem = network.build(small=small)
    return problem.autocast() if precision == "bfloat16" else problem


def _eager(network: Network, precision: str, small: bool, run: Callable[[Callable[[], object]], Any]) -> Any:
    """Apply `run` to PyTorch's step, which was run once; with memory only where sizes depend on numbers."""
    with fake():
        problem = _problem(network, precision, small)
        if not any(getattr(module, "sparse", False) for module in problem.model.modules()):
            return _watched(problem, run)
    return _watched(_problem(network, precision, small), run)


def _watched(problem: Problem, run: Callable[[Callable[[], object]], Any]) -> Any:
    with_foreach(problem.optimizer)
    problem.step()
    return run(problem.step)


def row(name: str, device: str, precision: str, prediction: Prediction) -> dict[str, Any]:
    """The figures of a prediction as plain data."""
    eager = prediction.eager
    assert eager is not None
    longest = [(t.operation.name, t.seconds, t.bound) for t in prediction.longest(3)]
    return {
        "network": name,
        "device": device,
        "precision": precision,
        "seconds": prediction.seconds,
        "alone": prediction.alone,
        "streams": prediction.streams,
        "launches": len(prediction.launches),
        "bounds": prediction.bounds(),
        "eager_seconds": eager.seconds,
        "eager_device_seconds": eager.device_seconds,
        "eager_host_seconds": eager.host_seconds,
        "eager_kernels": eager.kernels,
        "speedup": prediction.speedup,
        "device_speedup": prediction.device_speedup,
        "longest": longest,
    }


def line(row: Mapping[str, Any]) -> str:
    """One prediction in one line."""
    bounds = ", ".join(f"{bound} {seconds * 1e3:.2f}" for bound, seconds in row["bounds"].items())
    ours = f"{row['seconds'] * 1e3:8.2f} ms ({row['alone'] * 1e3:.2f} on one of {row['streams']} streams)"
    device, host = (row[f"eager_{part}_seconds"] * 1e3 for part in ("device", "host"))
    eager = f"eager {row['eager_seconds'] * 1e3:8.2f} ms (device {device:.2f}, host {host:.2f})"
    return (
        f"{row['network']:16} {row['device']:8} {row['precision']:8} {ours}, {row['launches']:5} launches ({bounds}); "
        f"{eager}; {row['speedup']:.2f} x, device alone {row['device_speedup']:.2f} x"
    )


def mean(values: Any) -> float:
    """The geometric mean."""
    numbers = list(values)
    return math.exp(sum(map(math.log, numbers)) / len(numbers))


def grouped(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by device and precision."""
    found: dict[str, list[dict[str, Any]]] = {}
    for each in rows:
        found.setdefault(f"{device_model(each['device']).title}, {each['precision']}", []).append(each)
    return found


HEAD = f"""# Predicted steps on GPUs

Generated; do not edit. To predict again:

    .venv/bin/python -m benchmarks.gpu_prediction --json benchmarks/results/gpu_prediction.json
    .venv/bin/python -m benchmarks.gpu_prediction --page > docs/results/gpu-prediction.md

**These are predictions. Nothing on this page has run on a GPU.** Each network's program is lowered for the device, and
PyTorch's kernels are counted on tensors without memory. Both are timed by the same rules
(`daceml_train/lowering/device_time.py`): a launch takes the time of its bytes (from memory, or from the L2 where
another launch left them) or of its arithmetic, whichever is longer, and at least 2 µs. Our step is one CUDA graph.
Eager PyTorch takes the time of its kernels or 5 µs of the host per operator, whichever is longer in total. *Device
alone* compares with the kernels of eager PyTorch as if its host cost nothing, the case that favors PyTorch most.
`tf32` means that float32 matmuls may multiply in TF32, as convolutions do by default.

The goals are {LEAST} times in each network and {MEAN} times in the geometric mean.
"""


def page(results: Mapping[str, Any]) -> Iterator[str]:
    """The page line by line."""
    yield HEAD
    for title, rows in grouped(results["rows"]).items():
        yield f"## {title}\n"
        yield "| network | ours | launches | bound by | eager | its kernels | its host | times as fast | device alone |"
        yield "|---|---|---|---|---|---|---|---|---|"
        for r in rows:
            bound, seconds = next(iter(r["bounds"].items()))
            ours, eager, kernels, host = (
                f"{r[key] * 1e3:.2f} ms"
                for key in ("seconds", "eager_seconds", "eager_device_seconds", "eager_host_seconds")
            )
            share = f"{bound} {100 * seconds / sum(r['bounds'].values()):.0f} %"
            yield (
                f"| {r['network']} | {ours} | {r['launches']} | {share} | {eager} | {kernels} | {host} "
                f"| {r['speedup']:.2f} | {r['device_speedup']:.2f} |"
            )
        whole, device = mean(r["speedup"] for r in rows), mean(r["device_speedup"] for r in rows)
        below = [r["network"] for r in rows if r["speedup"] < LEAST]
        yield f"\nGeometric mean: **{whole:.2f}** (device alone {device:.2f}). "
        yield f"Below {LEAST}: {', '.join(below)}." if below else f"None is below {LEAST}."
        yield ""
    yield f"Predicted {results['date']}."


if __name__ == "__main__":
    sys.exit(main())
