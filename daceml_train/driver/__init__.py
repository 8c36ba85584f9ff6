"""The driver: capture, differentiate, transform, lower, run; what users call."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from daceml_train.driver.dump import Dump
from daceml_train.driver.micro_batches import MicroBatchedStep, Reduction
from daceml_train.driver.module import Backend, optimized
from daceml_train.driver.options import Options
from daceml_train.driver.step import Loss, ScheduleKind, TrainingStep
from daceml_train.errors import Invalid
from daceml_train.frontends.torch.capture.rng_draws import Randomness
from daceml_train.passes.pipeline import Pipeline, Watcher
from daceml_train.plugins import OPERATORS, PASSES, load_plugins
from daceml_train.runtime.cache import Cache
from daceml_train.storage.folders import cache_folder
from daceml_train.training.gradients import Clipping
from daceml_train.transformations.pipelines import INFERENCE, TRAINING

Progress = Callable[[int, int], None]
OnnxModel = Any
"""A path (`str`, `os.PathLike`), bytes, or an `onnx.ModelProto`."""


def optimize(
    module: torch.nn.Module | OnnxModel,
    *,
    pipeline: Pipeline | str | Path | None = None,
    cache: Path | str | None = None,
    jobs: int | None = None,
    observe: Path | str | None = None,
    watch: Watcher | None = None,
    progress: Progress | None = None,
    dynamic: bool | None = None,
    random: Randomness = "seeded",
    search: bool = True,
    schedule: ScheduleKind = "plain",
) -> torch.nn.Module:
    """A drop-in replacement of `module` that trains to the same numbers.

    It shares parameters and buffers with `module`, works with any loss, optimizer and training loop, and is compiled
    at its first call. `pipeline` chooses the transformations: a `Pipeline`, its text, or the path of a JSON or text
    file that holds one; by default `TRAINING` where gradients are asked for, `INFERENCE` elsewhere. `cache` is a folder
    for compiled programs (default: `$DACEML_TRAIN_CACHE` or the user's cache folder); `jobs` bounds compiler
    processes; `observe` names a folder that receives the graph's text after each
    pass, an SDFG for DaCe's viewers, and the kernels' C++. `watch` is called with a `Step` after each pass, `progress`
    with (kernels done, kernels in all) while kernels compile. `dynamic`: sizes of arguments are symbols from the first
    call on (True), never (False: each size is compiled), or once a second size was seen (None). Random numbers
    (dropout) are made from a seed that each call draws from PyTorch's generator; `random="eager"` draws the very
    numbers of eager execution instead, with PyTorch's operators and in its order, so that runs can be compared. On a
    GPU, kernels that move megabytes are compiled in a few shapes and measured at the first call of each size, unless
    `search=False`; what was found is kept in the cache. With `schedule="ahead_of_time"` the forward and the backward
    pass on a GPU are recorded at the second call of each size, and then are one launch each; see `docs/gpu.md` for what
    that keeps in memory. An ONNX model, as a path or an `onnx.ModelProto`, becomes a module first, as `load_onnx` makes
    it. Raises `Invalid` for anything else.
    """
    if not isinstance(module, torch.nn.Module) and _is_onnx(module):
        module = load_onnx(module)
    chosen = options(pipeline, cache, jobs, observe, watch, progress, dynamic, random, search)
    return optimized(module, dataclasses.replace(chosen, recorded=_ahead_of_time(schedule)))


def training_step(
    model: torch.nn.Module,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer,
    *,
    keep_gradients: bool = False,
    micro_batches: int = 1,
    reduction: Reduction = "batch",
    clip_norm: float | None = None,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    schedule: ScheduleKind = "ahead_of_time",
    pipeline: Pipeline | str | Path = TRAINING,
    cache: Path | str | None = None,
    jobs: int | None = None,
    observe: Path | str | None = None,
    watch: Watcher | None = None,
    progress: Progress | None = None,
    dynamic: bool | None = None,
    random: Randomness = "seeded",
    search: bool = True,
) -> TrainingStep:
    """Forward, loss, backward and update as one graph: `loss_value = step(inputs, *targets)`.

    With `micro_batches`, each batch is cut into so many parts along its tensors' first dimension, whose gradients are
    added up before one update: the memory of a part instead of that of the batch. Loss and gradients are those of the
    whole batch, also where the loss is a mean over other things than rows; one of which that cannot be told is refused.
    `reduction="mean"` or `"sum"` takes the mean or the sum of the parts' losses instead, as accumulation in PyTorch
    does. `clip_norm` and `clip_value` clip the gradients of the optimizer's
    parameters before the update, as `torch.nn.utils.clip_grad_norm_(..., norm_type=norm_type)` and `clip_grad_value_`
    do; `step.gradient_norm` is then the norm before. With a `scaler` the step goes through it: the loss is scaled,
    gradients are unscaled (and then clipped), the update is left out where one is not finite, and the scale adapts.
    On a GPU a step is recorded after its first call and then runs as one launch; `schedule="plain"` launches its
    kernels one by one instead.
    See `TrainingStep` for the meaning of a step and `optimize` for the other
    options.
    """
    chosen = options(pipeline, cache, jobs, observe, watch, progress, dynamic, random, search)
    clipping = Clipping(clip_norm, norm_type, clip_value)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise Invalid(f"scaler is a torch.amp.GradScaler, given {type(scaler).__name__}")
    _ahead_of_time(schedule)
    closure = inspect.signature(optimizer.step).parameters.get("closure") if hasattr(optimizer, "step") else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Invalid(
            f"{type(optimizer).__name__} evaluates the loss several times per step, a training step does so once",
            advice="call optimizer.step(closure) with a closure around optimize(model)",
        )
    if micro_batches != 1:
        if keep_gradients:
            raise Invalid("keep_gradients and micro_batches exclude each other: no call has the whole gradient")
        return MicroBatchedStep(model, loss, optimizer, chosen, micro_batches, reduction, clipping, scaler, schedule)
    return TrainingStep(model, loss, optimizer, chosen, keep_gradients, clipping, scaler, schedule)


def _ahead_of_time(schedule: str) -> bool:
    """Whether runs are recorded. Raises `Invalid` for another word."""
    if schedule not in get_args(ScheduleKind):
        raise Invalid(f"schedule is one of {', '.join(get_args(ScheduleKind))}, given {schedule!r}")
    return schedule == "ahead_of_time"


def options(
    pipeline: Pipeline | str | Path | None = None,
    cache: Path | str | None = None,
    jobs: int | None = None,
    observe: Path | str | None = None,
    watch: Watcher | None = None,
    progress: Progress | None = None,
    dynamic: bool | None = None,
    random: Randomness = "seeded",
    search: bool = True,
) -> Options:
    """The compilation options behind the public arguments; plugins are loaded first."""
    if random not in get_args(Randomness):
        raise Invalid(f"random is one of {', '.join(get_args(Randomness))}, given {random!r}")
    load_plugins(PASSES, OPERATORS)
    folder = cache_folder(cache)
    observation = Dump(Path(observe)) if observe is not None else None
    chosen, without = (TRAINING, INFERENCE) if pipeline is None else (Pipeline.of(pipeline), None)
    made = Options(chosen, Cache(folder), jobs, observation, progress, watch, dynamic, random, search)
    return dataclasses.replace(made, inference=without)


def load_onnx(
    model: OnnxModel,
    *,
    trainable: Callable[[str], bool] | Iterable[str] | bool | None = None,
    train_mode: bool = False,
) -> torch.nn.Module:
    """A module from an ONNX model; see `daceml_train.frontends.onnx.load` for the options.

    Raises `Invalid` for a damaged model.
    """
    module: torch.nn.Module = _onnx().load(model, trainable=trainable, train_mode=train_mode)
    return module


def save_onnx(model: torch.nn.Module, path: Path | str, *, external: bool | None = None) -> Path:
    """Write a module that came from ONNX back with its trained weights; see `daceml_train.frontends.onnx.save_onnx`."""
    written: Path = _onnx().save_onnx(model, path, external=external)
    return written


def _onnx() -> Any:
    return importlib.import_module("daceml_train.frontends.onnx")  # at first use: `onnx` takes a while to import


def _is_onnx(model: Any) -> bool:
    return isinstance(model, str | os.PathLike | bytes) or type(model).__module__.startswith("onnx")


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"schedule": "ahead_of_time"},
    "max-autotune": {"search": True, "schedule": "ahead_of_time"},
    "max-autotune-no-cudagraphs": {"search": True},
}
"""What `mode` of `torch.compile` stands for here."""


def backend(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="daceml_train", options={...}, mode=...)`.

    The options are those of `optimize`, but for `dynamic`, which is `torch.compile`'s own argument. Raises `Invalid`
    for others and for an unknown mode.
    """
    known = [name for name in inspect.signature(optimize).parameters if name not in ("module", "dynamic")]
    for name in options or {}:
        if name not in known:
            raise Invalid(f"options has no {name!r}{_meant(name, known)}", advice=f"there are {', '.join(known)}")
    if mode is not None and mode not in MODES:
        raise Invalid(f"mode is one of {', '.join(MODES)}, given {mode!r}{_meant(mode, list(MODES))}")
    given = {**MODES[mode or "default"], **(options or {})}
    recorded = _ahead_of_time(given.pop("schedule", "plain"))
    return Backend(dataclasses.replace(_options(**given), recorded=recorded))(module, examples)


def _meant(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f", did you mean {near[0]!r}?" if near else ""


_options = options

__all__ = ["Loss", "TrainingStep", "backend", "load_onnx", "optimize", "options", "save_onnx", "training_step"]
