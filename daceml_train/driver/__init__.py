"""The driver: capture, differentiate, transform, lower, run; what users call."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, get_args

import torch

from daceml_train.driver.background import BackgroundStep, When
from daceml_train.driver.by_torch_compile import backend_of_call
from daceml_train.driver.checking import check_flag, check_scaler
from daceml_train.driver.distribution import Mesh, ranks_of, unwrapped, warn_of_others
from daceml_train.driver.micro_batches import MicroBatchedStep, Reduction, check_parts
from daceml_train.driver.module import optimized
from daceml_train.driver.on_ranks import Sharding, Sharing, Sparse
from daceml_train.driver.options import OptionKeywords, Options, ScheduleKind, chosen, current, takes_options
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import Loss, TrainingStep
from daceml_train.errors import Invalid, nearest
from daceml_train.frontends.torch import absent_gradients
from daceml_train.frontends.torch.dynamo import assumptions, dropouts, gradient_calls, versions
from daceml_train.frontends.torch.traces import cover
from daceml_train.runtime.links import Link
from daceml_train.training.gradients import Clipping
from daceml_train.transformations.distribution.bucket import BUCKET

OnnxModel = Any
"""A path (`str`, `os.PathLike`), bytes, or an `onnx.ModelProto`."""


@takes_options
def optimize(
    module: torch.nn.Module | OnnxModel,
    *,
    options: Options | Mapping[str, Any] | None = None,
    mode: str | None = None,
    **keywords: Unpack[OptionKeywords],
) -> torch.nn.Module:
    """A drop-in replacement of `module` that trains to the same numbers.

    It shares parameters and buffers with `module`, works with any loss, optimizer and training loop, and is compiled
    at its first call. An ONNX model, as a path or an `onnx.ModelProto`, becomes a module first, as `load_onnx` does
    it. Raises `Invalid` for anything else, and for an option that does not exist or does not fit.

    What is compiled is chosen by `mode`, one of `torch.compile`'s (`"default"`, `"reduce-overhead"`, `"max-autotune"`,
    `"max-autotune-no-cudagraphs"`), by `options`, which may be a dictionary, and by keyword arguments; the later ones
    of these take precedence.
    """
    settings = chosen("optimize", options, keywords, ("mode",), of_mode=_of_mode(mode)).settings()
    if not isinstance(module, torch.nn.Module) and _is_onnx(module):
        module = load_onnx(module)
    return optimized(module, settings)


@takes_options
def training_step(
    model: torch.nn.Module,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer,
    *,
    keep_gradients: bool = False,
    compile: When = "first_call",
    micro_batches: int = 1,
    reduction: Reduction = "batch",
    clip_norm: float | None = None,
    norm_type: float = 2.0,
    clip_value: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    mesh: Mesh = None,
    shard: Sharding = None,
    sparse: Sparse = "auto",
    sync_batch_norm: bool = False,
    bucket: int | Link = BUCKET,
    options: Options | Mapping[str, Any] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> TrainingStep:
    """Forward, loss, backward and update as one graph: `loss_value = step(inputs, *targets)`.

    See `TrainingStep` for the meaning of a step. What is compiled is chosen by `options`, or by keyword arguments,
    which take precedence. Raises `Invalid` for an option that does not exist or does not fit.

    Training:
        keep_gradients: bool = False
            Leave the gradients in `.grad` after each step.
        compile: When = 'first_call'
            `'background'`: PyTorch trains from the first step, and the compiled step takes over between two steps once
            it is ready. `'next_run'`: so that later runs find it, and this one has the same numbers throughout.
        micro_batches: int = 1
            Cut each batch into so many parts along the first dimension, whose gradients are added up before one update.
        reduction: Reduction = 'batch'
            What the losses of parts are to that of the batch. `'batch'`: loss and gradients are those of the whole
            batch, also where the loss is a mean over other things than rows; one of which that cannot be told is
            refused. `'mean'` or `'sum'`: the mean or the sum of the parts' losses, as accumulation in PyTorch.
        clip_norm: float | None = None
            Clip the gradients of the optimizer's parameters before the update, as `torch.nn.utils.clip_grad_norm_`
            does; `step.gradient_norm` is the norm before. A bound that changes between steps compiles nothing.
        norm_type: float = 2.0
            The order of that norm.
        clip_value: float | None = None
            Clip the gradients as `torch.nn.utils.clip_grad_value_` does.
        scaler: torch.amp.GradScaler | None = None
            Scale the loss, unscale the gradients before they are clipped, leave the update out where one is not
            finite, and adapt the scale.
        mesh: Mesh = None
            The processes that train together, a device mesh or a process group, each on its part of the batch:
            gradients and the loss are means over them. `False`: each trains alone.
        shard: Sharding = None
            `'optimizer'`: each has a shard of the optimizer's state and updates that part of the parameters (ZeRO 1).
        sparse: Sparse = 'auto'
            How gradients of embedding tables are exchanged: `'dense'`, `'gather'` (rows), or by what sends fewer bytes.
        sync_batch_norm: bool = False
            Batch norms have the statistics of the whole batch rather than of each process's part of it.
        bucket: int | Link = 26214400
            Bytes of gradients that are sent in one message, which leaves while the backward pass computes the next one.
            For a `Link`, as many as make its latency a tenth of a message's time.
    """
    others = [n for n, p in inspect.signature(training_step).parameters.items() if p.kind is p.KEYWORD_ONLY]
    found = chosen("training_step", options, keywords, others)
    schedule = found.schedule or "ahead_of_time"
    settings = dataclasses.replace(found, schedule=None).settings()
    clipping = Clipping(clip_norm, norm_type, clip_value)
    alone = shard is None and micro_batches == 1 and not keep_gradients and compile == "first_call"
    model, mesh, wrapper = unwrapped(model, mesh, alone)
    ranks = ranks_of(mesh, model)
    sharing = Sharing(ranks, shard, sparse, sync_batch_norm, bucket, wrapper)
    settings = dataclasses.replace(settings, pipeline=sharing.passes(settings.pipeline))
    _check_together(keep_gradients, micro_batches, mesh, shard, compile)
    own = (model, loss, optimizer, settings), (clipping, scaler, schedule)
    step = _step_of(*own, compile, keep_gradients, micro_batches, reduction)
    step.train_on(sharing, {"micro_batches": micro_batches, "reduction": reduction, "clipping": clipping})
    if mesh is None:
        warn_of_others(model)
    return step


def _step_of(
    given: tuple[torch.nn.Module, Loss | None, torch.optim.Optimizer, Settings],
    further: tuple[Clipping, torch.amp.GradScaler | None, ScheduleKind],
    compiled: When,
    keep_gradients: bool,
    micro_batches: int,
    reduction: Reduction,
) -> TrainingStep:
    """The kind of step that these options ask for."""
    model, loss, optimizer, settings = given
    clipping, scaler, schedule = further
    _check_given(optimizer, scaler)
    check_parts(micro_batches, reduction)
    if micro_batches != 1:
        count = micro_batches
        return MicroBatchedStep(model, loss, optimizer, settings, count, reduction, clipping, scaler, schedule)
    if compiled == "first_call":
        return TrainingStep(model, loss, optimizer, settings, keep_gradients, clipping, scaler, schedule)
    swaps = compiled == "background"
    return BackgroundStep(model, loss, optimizer, settings, keep_gradients, clipping, scaler, schedule, swaps)


def _check_together(keep_gradients: bool, micro_batches: int, mesh: Mesh, shard: Sharding, compiled: When) -> None:
    check_flag("keep_gradients", keep_gradients)
    if compiled not in get_args(When):
        close = nearest(compiled, get_args(When)) if isinstance(compiled, str) else ""
        raise Invalid(f"compile is one of {', '.join(get_args(When))}, given {compiled!r}{close}")
    others = {"micro_batches": micro_batches != 1, "mesh": mesh is not None}
    if compiled != "first_call" and (name := next((n for n, given in others.items() if given), "")):
        raise Invalid(f"compile={compiled!r} and {name} exclude each other")
    if shard and mesh is None:
        raise Invalid("shard= divides the optimizer's state among several processes", advice="pass mesh=")
    if keep_gradients and (shard or micro_batches != 1):
        what = "shard and keep_gradients" if shard else "keep_gradients and micro_batches"
        raise Invalid(f"{what} exclude each other: no {'process' if shard else 'call'} has the whole gradient")


def _check_given(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    check_scaler(scaler)
    closure = inspect.signature(optimizer.step).parameters.get("closure") if hasattr(optimizer, "step") else None
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Invalid(
            f"{type(optimizer).__name__} evaluates the loss several times per step, a training step does so once",
            advice="call optimizer.step(closure) with a closure around optimize(model)",
        )


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
    "max-autotune": {"autotune": True, "schedule": "ahead_of_time"},
    "max-autotune-no-cudagraphs": {"autotune": True},
}
"""What `mode` of `torch.compile` stands for here."""


def backend(
    module: torch.fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend of `torch.compile(model, backend="daceml_train", options={...}, mode=...)`.

    The options are those of `optimize`, but for `dynamic`, which is `torch.compile`'s own argument. Raises `Invalid`
    for others and for an unknown mode.
    """
    standard = _of_mode(mode)
    given = current('backend="daceml_train"', options or {})
    if "dynamic" in given:
        raise Invalid("dynamic is an argument of torch.compile itself", advice="torch.compile(model, dynamic=...)")
    return backend_of_call(lambda: Options(**{**standard, **given}).settings())(module, examples)


cover(
    backend,
    absent_gradients.traces,
    assumptions.traces,
    dropouts.traces,
    gradient_calls.traces,
    versions.traces,
)


def _of_mode(mode: str | None) -> dict[str, Any]:
    """The options that a mode of `torch.compile` stands for. Raises `Invalid` for an unknown one."""
    if mode is not None and (not isinstance(mode, str) or mode not in MODES):
        raise Invalid(f"mode is one of {', '.join(MODES)}, given {mode!r}{nearest(str(mode), MODES)}")
    return MODES[mode or "default"]


__all__ = ["Loss", "Options", "TrainingStep", "backend", "load_onnx", "optimize", "save_onnx", "training_step"]
