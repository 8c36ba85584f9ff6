"""Training steps of networks: this compiler's, eager PyTorch's, and torch.compile's in its modes."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from benchmarks.gpu.clock import DEVICE, milliseconds, wait
from benchmarks.networks.dlrm import DLRM
from benchmarks.networks.fcn import FCN8s
from benchmarks.networks.inverted_residual import efficientnet_b0, mobilenet_v2
from benchmarks.networks.lstm import LoopLSTM
from benchmarks.networks.mixer import Mixer
from benchmarks.networks.network import Network
from benchmarks.networks.resnet import ResNet50
from benchmarks.networks.table import clicks, images, segments, tokens
from benchmarks.networks.transformer import GPT2, Block, VisionTransformer, token_loss

_SGD = torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}
_ADAM = torch.optim.Adam, {"lr": 1e-4}
_PLAIN = torch.optim.SGD, {"lr": 1e-3}
partial = functools.partial


class BertLayers(nn.Module):
    """Encoder layers of BERT-large, on what comes out of an embedding."""

    def __init__(self, layers: int = 8, width: int = 1024, heads: int = 16, dropout: float = 0.1) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block(width, heads, before=False, dropout=dropout) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        """Of the same sizes."""
        return self.layers(x)


def hidden(batch: int, length: int, width: int) -> tuple[Tensor, Tensor]:
    """A plausible output of an embedding, and targets for a layer stack."""
    return torch.randn(batch, length, width), torch.randn(batch, length, width)


class Branchy(nn.Module):
    """Cells of six independent small branches, as in Inception and NASNet."""

    def __init__(self, cells: int = 8, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.cells = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Conv2d(width, width, k, padding=k // 2, bias=False), nn.BatchNorm2d(width), nn.ReLU())
                for k in (1, 3, 5, 1, 3, 5)
            )
            for _ in range(cells)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        x = self.stem(x)
        for cell in self.cells:
            x = sum(branch(x) for branch in cell) / 6  # type: ignore[attr-defined,operator,assignment]
        return self.head(x.mean((2, 3)))


LARGE: dict[str, Network] = {
    "ResNet-50": Network("64", ResNet50, partial(images, 64, 224, 1000), F.cross_entropy, *_SGD, images=True),
    "ViT": Network(
        "32",
        partial(VisionTransformer, width=768, heads=12),
        partial(images, 32, 224, 1000),
        F.cross_entropy,
        *_ADAM,
    ),
    "GPT-2": Network("4 x 1024", partial(GPT2, layers=12), partial(tokens, 4, 1024, 50257), token_loss, *_ADAM),
    "BERT-large, 8 layers": Network("8 x 512", BertLayers, partial(hidden, 8, 512, 1024), F.mse_loss, *_ADAM),
    "MobileNetV2": Network("64", mobilenet_v2, partial(images, 64, 224, 1000), F.cross_entropy, *_SGD, images=True),
    "EfficientNet-B0": Network(
        "64", efficientnet_b0, partial(images, 64, 224, 1000), F.cross_entropy, *_SGD, images=True
    ),
    "WRN-50-2": Network(
        "32", partial(ResNet50, wide=2), partial(images, 32, 224, 1000), F.cross_entropy, *_SGD, images=True
    ),
    "Mixer": Network("64", Mixer, partial(images, 64, 224, 1000), F.cross_entropy, *_SGD),
    "FCN-8s": Network("8", FCN8s, partial(segments, 8, 224, 21), F.cross_entropy, *_SGD, images=True),
    "DLRM": Network(
        "8192", DLRM, partial(clicks, 8192, 13, 26, 100_000, 4), F.binary_cross_entropy_with_logits, *_PLAIN
    ),
}
"""The ten networks of the table."""

SMALL: dict[str, Network] = {
    "MobileNetV2, 32 x 32": Network(
        "32", partial(mobilenet_v2, classes=10), partial(images, 32, 32, 10), F.cross_entropy, *_SGD, images=True
    ),
    "EfficientNet-B0, 32 x 32": Network(
        "32", partial(efficientnet_b0, classes=10), partial(images, 32, 32, 10), F.cross_entropy, *_SGD, images=True
    ),
    "LSTM": Network("16 x 64", partial(LoopLSTM, 1000), partial(tokens, 16, 64, 1000), token_loss, *_SGD),
}
"""Steps whose time is that of launching."""

BRANCHY: dict[str, Network] = {
    "branches": Network("8", Branchy, partial(images, 8, 32, 10), F.cross_entropy, *_SGD, images=True)
}
TINY: dict[str, Network] = {
    "tiny": Network("4", partial(Branchy, 1, 8), partial(images, 4, 8, 10), F.cross_entropy, *_SGD, images=True)
}
"""For trying the measurements themselves."""
GIB = {"FCN-8s": 10.0, "MobileNetV2": 10.0, "EfficientNet-B0": 12.0, "GPT-2": 12.0, "DLRM": 6.0}
"""Memory of the device that a step takes, about, where it is not some 9: sizes let several compile at once."""


@dataclass
class Row:
    """Milliseconds per step and peak bytes of a variant; `launches` are CUDA launches of a step in a CUDA graph."""

    milliseconds: float = 0.0
    peak: int = 0
    launches: int = -1
    streams: int = 1
    notes: list[str] = field(default_factory=list)


def variants(network: Network, modes: tuple[str, ...]) -> list[str]:
    """Ours, PyTorch's own, and torch.compile's."""
    layouts = ["eager", "eager, channels-last"] if network.images else ["eager"]
    return ["ours", *layouts, *(f"compile {mode}" for mode in modes)]


def prepared(name: str, precision: str, variant: str) -> Callable[[], dict[str, Any]]:
    """A step in a variant (`one stream` is one, too), compiled and warm. `precision`: bf16 (autocast) or tf32."""
    network = (LARGE | SMALL | BRANCHY | TINY)[name]
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if torch.cuda.is_available():
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
    problem, result = network.build(fused=True), Row()
    if variant in ("ours", "one stream"):
        if variant == "one stream":
            on_one_stream()
        step = ours(problem, precision, result)
    else:
        kind, _, mode = variant.partition(" ")
        last = network.images and variant != "eager"
        step = eager(problem, "channels-last" if last else "rows", precision, mode if kind == "compile" else None)
    for _ in range(4):
        step()
    wait()

    def measure() -> dict[str, Any]:
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        result.milliseconds = milliseconds([step], 1.0)
        if DEVICE == "cuda":
            result.peak = torch.cuda.max_memory_allocated()
            if variant == "ours":
                result.launches = launches(step)
        return dataclasses.asdict(result)

    return measure


def on_one_stream() -> None:
    """Let CUDA graphs in this process use one stream from here on."""
    from daceml_train.lowering import streams
    from daceml_train.runtime.gpu import cuda_graph

    cuda_graph.schedule_of = lambda plan, model: streams.one_stream(len(plan.program.launches))


def _moved(problem: Any, layout: str) -> tuple[nn.Module, list[Tensor], Tensor, torch.optim.Optimizer]:
    model = copy.deepcopy(problem.model).to(DEVICE)
    inputs = [t.to(DEVICE) for t in (problem.inputs if isinstance(problem.inputs, tuple) else (problem.inputs,))]
    if layout == "channels-last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = [t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for t in inputs]
    options = {k: v for k, v in problem.optimizer.defaults.items() if k in ("lr", "momentum", "fused") and v}
    return model, inputs, problem.targets.to(DEVICE), type(problem.optimizer)(model.parameters(), **options)


def _precision(precision: str) -> Any:
    return torch.autocast(DEVICE, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def eager(problem: Any, layout: str, precision: str, mode: str | None = None) -> Callable[[], object]:
    """PyTorch's step, with the model compiled in this mode if one is given."""
    model, inputs, targets, optimizer = _moved(problem, layout)
    called: Any = model if mode is None else torch.compile(model, mode=None if mode == "default" else mode)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _precision(precision):
            loss = problem.loss(called(*inputs), targets)
        loss.backward()
        optimizer.step()

    return step


def ours(problem: Any, precision: str, result: Row) -> Callable[[], object]:
    """The compiled step."""
    model, inputs, targets, optimizer = _moved(problem, "rows")
    step = dt.training_step(model, problem.loss, optimizer)
    given = tuple(inputs) if len(inputs) > 1 else inputs[0]

    def call() -> None:
        with _precision(precision):
            step(given, targets)

    for _ in range(3):
        call()
    result.notes += step.breaks
    for graphs in step.cuda_graphs.values():
        result.notes += graphs.reasons
        result.streams = max([result.streams, *(r.schedule.streams for r in graphs.graphs.values())])
    return call


def launches(step: Callable[[], object]) -> int:
    """Calls that launch kernels or graphs, of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
        torch.cuda.synchronize()
    return sum("Launch" in event.name for event in profile.events())
