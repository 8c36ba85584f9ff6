"""Memory-bound operators, forward and backward: this compiler's and torch.compile's, as shares of copy bandwidth."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from benchmarks.gpu.clock import DEVICE, copies, milliseconds

ROWS, WIDTH = (131072, 1024) if DEVICE == "cuda" else (16, 32)


IMAGES = (256, 256, 56, 56) if DEVICE == "cuda" else (2, 8, 4, 4)
"""Sizes at which a kernel takes longer than it takes to launch it."""


class BiasGelu(nn.Module):
    """Bias and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Over rows."""
        return F.gelu(x + self.bias)


class CrossEntropy(nn.Module):
    """Cross-entropy with classes drawn once."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("classes", torch.randint(0, 4 * WIDTH, (ROWS // 2,)))

    def forward(self, x: Tensor) -> Tensor:
        """The mean over rows."""
        return F.cross_entropy(x, self.classes)  # type: ignore[arg-type]


class Softmax(nn.Module):
    """Softmax over rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Over rows."""
        return x.softmax(-1)


@dataclass(frozen=True)
class Row:
    """A table row: microseconds and bytes at least moved; `share` is of the copy's bandwidth."""

    name: str
    dtype: str
    direction: str
    bytes: int
    ours: float
    eager: float
    compiled: float = math.nan


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bias+GELU": (BiasGelu, (ROWS // 2, 4 * WIDTH)),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), (ROWS, WIDTH)),
    "BatchNorm+ReLU": (lambda: nn.Sequential(nn.BatchNorm2d(IMAGES[1]), nn.ReLU()), IMAGES),
    "softmax": (Softmax, (ROWS, 2 * WIDTH)),
    "cross-entropy": (CrossEntropy, (ROWS // 2, 4 * WIDTH)),
}


def prepared(name: str, kind: str) -> Callable[[], dict[str, Any]]:
    """A case in all variants, compiled; measuring returns its two rows."""
    (make, shape), dtype = CASES[name], getattr(torch, kind)
    module = make().to(DEVICE).to(dtype)
    scalar = name == "cross-entropy"
    one = torch.empty(shape, dtype=dtype).nbytes
    sets = copies(2 * one)
    inputs = [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(sets)]
    faces: dict[str, Any] = {"ours": dt.optimize(copy.deepcopy(module)), "eager": module}
    if DEVICE == "cuda":
        faces["compiled"] = torch.compile(copy.deepcopy(module))
    for called in faces.values():
        called(inputs[0]).sum().backward()
    reads = 2 if name == "BatchNorm+ReLU" else 1  # statistics first
    moved = {"forward": one * (1 if scalar else 1 + reads), "backward": one * (2 if scalar else 1 + 2 * reads)}

    def measure() -> dict[str, Any]:
        found = {face: _times(called, inputs) for face, called in faces.items()}
        rows = []
        for position, (direction, least) in enumerate(moved.items()):
            times = {face: 1e3 * pair[position] for face, pair in found.items()}
            rows.append(dataclasses.asdict(Row(name, kind, direction, least, **times)))
        return {"rows": rows}

    return measure


def _times(called: Any, inputs: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward pass."""
    forward = milliseconds([lambda x=x: called(x) for x in inputs])  # type: ignore[misc]
    results = [called(x) for x in inputs]
    grads = [torch.randn_like(y) for y in results]
    own = [p for p in called.parameters() if p.requires_grad]

    def backward(x: Tensor, y: Tensor, g: Tensor) -> object:
        return torch.autograd.grad(y, [x, *own], g, retain_graph=True)

    sets = zip(inputs, results, grads, strict=True)
    return forward, milliseconds([lambda x=x, y=y, g=g: backward(x, y, g) for x, y, g in sets])  # type: ignore[misc]


def adam() -> Callable[[], dict[str, Any]]:
    """One parameter, whose gradient is a product that costs next to nothing compared with the update."""
    count = 1 << (26 if DEVICE == "cuda" else 12)
    steps: dict[str, Callable[[], object]] = {}
    for face in ("ours", "eager", "compiled"):
        parameter = nn.Parameter(torch.randn(count, device=DEVICE))
        gradient = torch.randn(count, device=DEVICE)
        optimizer = torch.optim.Adam([parameter], lr=1e-4, fused=face == "eager")
        parameter.grad = gradient
        if face == "ours":
            step = dt.training_step(_Dot(parameter), lambda y: y, optimizer)
            steps[face] = lambda step=step, gradient=gradient: step(gradient)  # type: ignore[misc]
        elif face == "eager" or DEVICE == "cuda":
            steps[face] = torch.compile(optimizer.step) if face == "compiled" else optimizer.step
    for call in steps.values():
        for _ in range(3):
            call()

    def measure() -> dict[str, Any]:
        times = {face: 1e3 * milliseconds([call]) for face, call in steps.items()}
        return {"rows": [dataclasses.asdict(Row("Adam", "float32", "update", 7 * 4 * count, **times))]}

    return measure


class _Dot(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Their product, which the step reads once more than the update alone would."""
        return (self.weight * x).sum()
