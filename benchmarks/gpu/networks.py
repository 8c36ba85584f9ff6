"""Training steps of networks: this compiler's, eager PyTorch's, and torch.compile's in its modes."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from benchmarks.gpu.clock import milliseconds
from benchmarks.networks.dlrm import DLRM
from benchmarks.networks.fcn import FCN8s
from benchmarks.networks.inverted_residual import efficientnet_b0, mobilenet_v2
from benchmarks.networks.lstm import LoopLSTM
from benchmarks.networks.mixer import Mixer
from benchmarks.networks.network import Network
from benchmarks.networks.resnet import ResNet50
from benchmarks.networks.table import clicks, images, segments, sentences, tokens
from benchmarks.networks.transformer import GPT2, Bert, VisionTransformer, token_loss

_SGD = torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}
_ADAM = torch.optim.Adam, {"lr": 1e-4}
_PLAIN = torch.optim.SGD, {"lr": 1e-3}
partial = functools.partial


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
            x = sum(branch(x) for branch in cell) / 6  # type: ignore[attr-defined,operator]
        return self.head(x.mean((2, 3)))


LARGE: dict[str, Network] = {
    "ResNet-50": Network("128", ResNet50, partial(images, 128, 224, 1000), F.cross_entropy, *_SGD, images=True),
    "WRN-50-2": Network(
        "64", partial(ResNet50, wide=2), partial(images, 64, 224, 1000), F.cross_entropy, *_SGD, images=True
    ),
    "MobileNetV2": Network("128", mobilenet_v2, partial(images, 128, 224, 1000), F.cross_entropy, *_SGD, images=True),
    "EfficientNet-B0": Network(
        "128", efficientnet_b0, partial(images, 128, 224, 1000), F.cross_entropy, *_SGD, images=True
    ),
    "FCN-8s": Network("16", FCN8s, partial(segments, 16, 224, 21), F.cross_entropy, *_SGD, images=True),
    "Mixer": Network("128", Mixer, partial(images, 128, 224, 1000), F.cross_entropy, *_SGD),
    "ViT-S": Network("128", VisionTransformer, partial(images, 128, 224, 1000), F.cross_entropy, *_ADAM),
    "BERT": Network("32 x 128", Bert, partial(sentences, 32, 128, 30522, 2), F.cross_entropy, *_ADAM),
    "GPT-2": Network("8 x 512", GPT2, partial(tokens, 8, 512, 50257), token_loss, *_ADAM),
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
MODES = ("default", "reduce-overhead", "max-autotune")


@dataclass
class Row:
    """Milliseconds per step and peak bytes, by variant; `launches` are CUDA launches of one recorded step of ours."""

    network: str
    batch: str
    precision: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)
    launches: int = -1
    streams: int = 1
    notes: list[str] = field(default_factory=list)


def row(name: str, network: Network, precision: str, modes: tuple[str, ...] = MODES, **options: Any) -> Row:
    """Measure a network in all variants. `precision` is bf16 (autocast) or tf32."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    made = Row(name, network.title, precision)
    problem = network.build(fused=True)
    layouts = ("channels-first", "channels-last") if network.images else ("rows",)
    for layout in layouts:
        label = "eager" if layout != "channels-last" else "eager, channels-last"
        _measure(made, label, lambda layout=layout: eager(problem, layout, precision))  # type: ignore[misc]
    for mode in modes:
        last = layouts[-1]
        _measure(made, f"compile {mode}", lambda mode=mode, last=last: eager(problem, last, precision, mode))  # type: ignore[misc]
    _measure(made, "ours", lambda: ours(problem, precision, made, **options))
    return made


def _measure(made: Row, label: str, make: Callable[[], Callable[[], object]]) -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        step = make()
        for _ in range(4):
            step()
        made.milliseconds[label] = milliseconds([step], 1.0)
        made.peak[label] = torch.cuda.max_memory_allocated()
        if label == "ours":
            made.launches = launches(step)
    except Exception as error:
        made.notes.append(f"{label}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")


def _moved(problem: Any, layout: str) -> tuple[nn.Module, list[Tensor], Tensor, torch.optim.Optimizer]:
    model = copy.deepcopy(problem.model).cuda()
    inputs = [t.cuda() for t in (problem.inputs if isinstance(problem.inputs, tuple) else (problem.inputs,))]
    if layout == "channels-last":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = [t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for t in inputs]
    options = {k: v for k, v in problem.optimizer.defaults.items() if k in ("lr", "momentum", "fused") and v}
    return model, inputs, problem.targets.cuda(), type(problem.optimizer)(model.parameters(), **options)


def _precision(precision: str) -> Any:
    return torch.autocast("cuda", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


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


def ours(problem: Any, precision: str, made: Row, **options: Any) -> Callable[[], object]:
    """The compiled step."""
    model, inputs, targets, optimizer = _moved(problem, "rows")
    step = dt.training_step(model, problem.loss, optimizer, **options)
    given = tuple(inputs) if len(inputs) > 1 else inputs[0]

    def call() -> None:
        with _precision(precision):
            step(given, targets)

    for _ in range(3):
        call()
    made.notes += step.breaks
    for recorder in step.recorders.values():
        made.notes += recorder.reasons
        made.streams = max([made.streams, *(r.schedule.streams for r in recorder.recordings.values())])
    return call


def launches(step: Callable[[], object]) -> int:
    """Calls that launch kernels or graphs, of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
        torch.cuda.synchronize()
    return sum("Launch" in event.name for event in profile.events())


def rows(which: dict[str, Network], precisions: tuple[str, ...], modes: tuple[str, ...] = MODES) -> Iterator[Row]:
    """Each network in each precision."""
    for name, network in which.items():
        for precision in precisions:
            yield row(name, network, precision, modes)
