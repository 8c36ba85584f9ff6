"""Memory-bound operators, forward and backward: this compiler's and torch.compile's, as shares of copy bandwidth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from benchmarks.gpu.clock import copies, milliseconds

ROWS, WIDTH = 16384, 1024


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
    compiled: float


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bias+GELU": (BiasGelu, (ROWS // 2, 4 * WIDTH)),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), (ROWS, WIDTH)),
    "BatchNorm+ReLU": (lambda: nn.Sequential(nn.BatchNorm2d(256), nn.ReLU()), (64, 256, 56, 56)),
    "softmax": (Softmax, (ROWS, 2 * WIDTH)),
    "cross-entropy": (CrossEntropy, (ROWS // 2, 4 * WIDTH)),
}


def rows() -> Iterator[Row]:
    """Each case in float32 and bfloat16, forward and backward, then the update of Adam."""
    for name, (make, shape) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            yield from _case(name, make, shape, dtype)
            torch.cuda.empty_cache()
            torch._dynamo.reset()
    yield _adam()


def _case(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Row]:
    module = make().cuda().to(dtype)
    scalar = name == "cross-entropy"
    one = torch.empty(shape, dtype=dtype).nbytes
    sets = copies(2 * one)
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(sets)]
    found: dict[str, tuple[float, float]] = {}
    faces: dict[str, Any] = {
        "ours": dt.optimize(copy.deepcopy(module)), "eager": module, "compiled": torch.compile(copy.deepcopy(module)),
    }  # fmt: skip
    for face, called in faces.items():
        forward = milliseconds([lambda x=x, f=called: f(x) for x in inputs])  # type: ignore[misc]
        results = [called(x) for x in inputs]
        grads = [torch.randn_like(y) for y in results]

        def backward(x: Tensor, y: Tensor, g: Tensor, parameters: list[Tensor]) -> object:
            return torch.autograd.grad(y, [x, *parameters], g, retain_graph=True)

        own = [p for p in called.parameters() if p.requires_grad]
        calls = [
            lambda x=x, y=y, g=g, p=own: backward(x, y, g, p)  # type: ignore[misc]
            for x, y, g in zip(inputs, results, grads, strict=True)
        ]
        found[face] = forward, milliseconds(calls)
        del results, grads
    kind = str(dtype).removeprefix("torch.")
    reads = 2 if name == "BatchNorm+ReLU" else 1  # statistics first
    forward_bytes = one * (1 if scalar else 1 + reads)
    backward_bytes = one * (2 if scalar else 1 + 2 * reads)
    for position, (direction, moved) in enumerate((("forward", forward_bytes), ("backward", backward_bytes))):
        times = {face: 1e3 * pair[position] for face, pair in found.items()}
        yield Row(name, kind, direction, moved, **times)


def _adam() -> Row:
    """One parameter, whose gradient is a product that costs next to nothing beside the update."""
    count = 1 << 26
    times = {}
    for face in ("ours", "eager", "compiled"):
        parameter = nn.Parameter(torch.randn(count, device="cuda"))
        gradient = torch.randn(count, device="cuda")
        optimizer = torch.optim.Adam([parameter], lr=1e-4, fused=face == "eager")
        parameter.grad = gradient
        if face == "ours":
            step = dt.training_step(_Dot(parameter), lambda y: y, optimizer)
            times[face] = 1e3 * milliseconds([lambda s=step, g=gradient: s(g)])  # type: ignore[misc]
        elif face == "compiled":
            compiled = torch.compile(optimizer.step)
            times[face] = 1e3 * milliseconds([compiled])
        else:
            times[face] = 1e3 * milliseconds([optimizer.step])
    return Row("Adam", "float32", "update", 7 * 4 * count, **times)


class _Dot(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Their product, which the step reads once more than the update alone would."""
        return (self.weight * x).sum()
