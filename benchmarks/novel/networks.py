"""Measure networks whose layers are expressions: whole training steps, beside the same in PyTorch.

`python -m benchmarks.novel.networks [network ...] [--no-inductor] [--save]`: milliseconds of processor time per
step on one thread, medians of interleaved visits. The losses of the first steps are compared. `--save` writes
`benchmarks/results/novel_networks.json` and `docs/results/novel_networks.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from benchmarks.novel import compositions, operators
from benchmarks.novel.__main__ import timed
from benchmarks.provenance import commit, origin
from daceml_train.processor import described

BATCH = 64
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "novel_networks.json"
PAGE = ROOT / "docs" / "results" / "novel_networks.md"


class Cell(nn.Module):
    """One step of a recurrent cell, and a classifier of its state."""

    def __init__(self, layers: Any, cell: str, sizes: tuple[int, ...], states: tuple[int, ...]) -> None:
        super().__init__()
        self.function = getattr(layers, cell)
        self.own = nn.ParameterList(
            nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1])) for shape in _shapes(cell, *sizes)
        )
        for number, size in enumerate(states):
            self.register_buffer(f"state{number}", torch.randn(BATCH, size))
        self.states = len(states)
        self.head = nn.Linear(states[0], 10)

    def forward(self, x: Tensor) -> Tensor:
        states = [getattr(self, f"state{number}") for number in range(self.states)]
        return self.head(self.function(x, *states, *self.own)[0])


def _shapes(cell: str, inputs: int, hidden: int, context: int = 0) -> list[tuple[int, ...]]:
    """The shapes of a cell's parameters."""
    if cell == "scrnn":
        return [(context, inputs), (hidden, context), (hidden, inputs), (hidden, hidden)]
    gates = {"lltm": 3, "mi_lstm": 4, "sub_lstm": 4}[cell]
    biases = 4 if cell == "mi_lstm" else 1
    return [(gates, hidden, inputs), (gates, hidden, hidden), *[(gates, hidden)] * biases]


class Capsules(nn.Module):
    """A convolution of capsules, and routing to a capsule for each class."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers
        self.stem = nn.Conv2d(1, 8 * 16, 5, 2)
        self.poses = nn.Parameter(torch.randn(8, 8, 3, 3, 4, 4) * 0.1)
        self.votes = nn.Parameter(torch.randn(8 * 36, 10, 16, 16) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        poses = self.stem(x).relu().unflatten(1, (8, 4, 4)).permute(0, 1, 4, 5, 2, 3)
        poses = self.layers.capsule(poses, self.poses).flatten(1, 3).flatten(2)
        votes = torch.einsum("bid,iode->bioe", poses, self.votes)
        return self.layers.routing(votes).norm(dim=-1) * 4


class Shuffled(nn.Module):
    """Units of grouped convolutions whose channels are shuffled and shifted."""

    def __init__(self, layers: Any, units: int = 3) -> None:
        super().__init__()
        self.layers = layers
        self.stem = nn.Conv2d(3, 64, 3, 2, 1)
        self.first = nn.ModuleList(nn.Conv2d(64, 64, 1, groups=4) for _ in range(units))
        self.norms = nn.ModuleList(nn.BatchNorm2d(64) for _ in range(units))
        self.last = nn.ModuleList(nn.Conv2d(64, 64, 1, groups=4) for _ in range(units))
        self.register_buffer("dy", torch.randint(-1, 2, (64,)))
        self.register_buffer("dx", torch.randint(-1, 2, (64,)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, norm, last in zip(self.first, self.norms, self.last, strict=True):
            y = self.layers.channel_shuffle(norm(first(x)).relu())
            x = (x + last(self.layers.shift(y, self.dy, self.dx))).relu()
        return self.head(x.mean((2, 3)))


def _vectors() -> Tensor:
    return torch.randn(BATCH, 784)


NETWORKS: dict[str, tuple[Callable[[Any], nn.Module], Callable[[], Tensor]]] = {
    "lltm": (lambda layers: Cell(layers, "lltm", (784, 128), (128, 128)), _vectors),
    "mi_lstm": (lambda layers: Cell(layers, "mi_lstm", (784, 1024), (1024, 1024)), _vectors),
    "scrnn": (lambda layers: Cell(layers, "scrnn", (784, 128, 64), (128, 64)), _vectors),
    "sub_lstm": (lambda layers: Cell(layers, "sub_lstm", (784, 128), (128, 128)), _vectors),
    "capsnet": (Capsules, lambda: torch.randn(8, 1, 28, 28)),
    "shufflenet": (Shuffled, lambda: torch.randn(8, 3, 56, 56)),
}
"""Network -> the model with these layers (`operators` or `compositions`), and its inputs."""


def pair(name: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """A network of expressions and the same of PyTorch's operators, with equal parameters, and a batch."""
    torch.manual_seed(0)
    make, draw = NETWORKS[name]
    ours = make(operators)
    torch.manual_seed(0)
    theirs = make(compositions)
    inputs = draw()
    return ours, theirs, inputs, torch.randint(0, 10, (len(inputs),))


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def _eager(model: nn.Module, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    optimizer, forward = _optimizer(model), torch.compile(model) if compiled else model

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(forward(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def measured(name: str, inductor: bool, visits: int) -> dict[str, float]:
    """Variant -> milliseconds of a training step."""
    ours, theirs, inputs, targets = pair(name)
    steps: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"eager": _eager(theirs, False)}
    if inductor:
        steps["compile"] = _eager(pair(name)[1], True)
    steps["ours"] = dt.training_step(ours, F.cross_entropy, _optimizer(ours))
    losses = {label: torch.stack([step(inputs, targets) for _ in range(5)]) for label, step in steps.items()}
    apart = max(float((found - losses["eager"]).abs().max()) for found in losses.values())
    took: dict[str, list[float]] = {label: [] for label in steps}
    for _ in range(visits):
        for label, step in steps.items():
            took[label].append(timed(lambda step=step: step(inputs, targets)) * 1e3)  # type: ignore[misc]
    return {label: statistics.median(values) for label, values in took.items()} | {"apart": apart}


def main() -> None:
    """Print a row per network, and the geometric means."""
    parser = argparse.ArgumentParser(prog="benchmarks.novel.networks")
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--visits", type=int, default=7)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    for name in options.names:
        torch._dynamo.reset()
        rows[name] = {**measured(name, not options.no_inductor, options.visits), "commit": commit()}
        when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        text = page(rows, when)
        print(text.splitlines()[13 + len(rows)], flush=True)
        if options.save:
            RESULTS.write_text(json.dumps({"when": when, "rows": rows}, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(text, encoding="utf-8")
    print(text.splitlines()[-1])


def page(rows: dict[str, dict[str, Any]], when: str) -> str:
    """The page of the results."""
    lines = [
        "# Networks of expressions",
        "",
        "Generated; do not edit. To measure again:",
        "",
        "    .venv/bin/python -m benchmarks.novel.networks --save",
        "",
        "Whole training steps, with SGD and momentum, of six networks whose new layers are expressions, beside the",
        "same of PyTorch's operators: milliseconds of processor time on one thread, medians of interleaved visits.",
        "Losses are those of the first five steps; *apart* is their largest difference.",
        "",
        f"Measured {when} on one core of {described()}. {origin(str(row['commit']) for row in rows.values())}",
        "",
        "| network | eager | torch.compile | daceml_train | against eager | against the best of PyTorch | apart |",
        "|---|---|---|---|---|---|---|",
    ]
    ratios: list[tuple[float, float]] = []
    for name, row in rows.items():
        best = min(row[way] for way in ("eager", "compile") if way in row)
        ratios.append((row["eager"] / row["ours"], best / row["ours"]))
        cells = [f"{row[way]:.2f}" if way in row else "" for way in ("eager", "compile", "ours")]
        apart = f"{row['apart']:.0e}"
        both = [f"{ratio:.2f} ×" for ratio in ratios[-1]]
        lines.append(f"| {' | '.join([name, *cells, *both, apart])} |")
    means = [math.exp(statistics.fmean(math.log(ratio[i]) for ratio in ratios)) for i in (0, 1)]
    lines += ["", f"Geometric means: {means[0]:.2f} × against eager, {means[1]:.2f} × against the best of PyTorch."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
