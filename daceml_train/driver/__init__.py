"""The driver: capture, differentiate, transform, lower, run; what users call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from daceml_train.driver.compilation import Options
from daceml_train.driver.module import Backend, optimized
from daceml_train.driver.observation import Observation
from daceml_train.driver.step import Loss, TrainingStep
from daceml_train.errors import Invalid
from daceml_train.frontends.torch.draws import Randomness
from daceml_train.passes.pipeline import Pipeline, Watcher
from daceml_train.plugins import OPERATORS, PASSES, load_plugins
from daceml_train.runtime.cache import Cache, default_folder
from daceml_train.transformations.pipelines import TRAINING

Progress = Callable[[int, int], None]


def optimize(
    module: torch.nn.Module,
    *,
    pipeline: Pipeline | str | Path = TRAINING,
    cache: Path | str | None = None,
    jobs: int | None = None,
    observe: Path | str | None = None,
    watch: Watcher | None = None,
    progress: Progress | None = None,
    random: Randomness = "seeded",
) -> torch.nn.Module:
    """A drop-in replacement of `module` that trains to the same numbers.

    It shares parameters and buffers with `module`, works with any loss, optimizer and training loop, and is compiled
    at its first call. `pipeline` chooses the transformations: a `Pipeline`, its text, or the path of a JSON or text
    file that holds one. `cache` is a folder for compiled programs (default: `$DACEML_TRAIN_CACHE` or the user's cache
    folder); `jobs` bounds compiler processes; `observe` names a folder that receives the graph's text after each
    pass, an SDFG for DaCe's viewers, and the kernels' C++. `watch` is called with a `Step` after each pass, `progress`
    with (kernels done, kernels in all) while kernels compile. Random numbers (dropout) are made from a seed that each
    call draws from PyTorch's generator; `random="eager"` draws the very numbers of eager execution instead, with
    PyTorch's operators and in its order, so that runs can be compared. Raises `Invalid` for anything but a module.
    """
    return optimized(module, options(pipeline, cache, jobs, observe, watch, progress, random))


def training_step(
    model: torch.nn.Module,
    loss: Loss | None,
    optimizer: torch.optim.Optimizer,
    *,
    keep_gradients: bool = False,
    pipeline: Pipeline | str | Path = TRAINING,
    cache: Path | str | None = None,
    jobs: int | None = None,
    observe: Path | str | None = None,
    watch: Watcher | None = None,
    progress: Progress | None = None,
    random: Randomness = "seeded",
) -> TrainingStep:
    """Forward, loss, backward and update as one graph: `loss_value = step(inputs, *targets)`.

    See `TrainingStep` for the meaning of a step and `optimize` for the other options.
    """
    chosen = options(pipeline, cache, jobs, observe, watch, progress, random)
    return TrainingStep(model, loss, optimizer, chosen, keep_gradients)


def options(
    pipeline: Pipeline | str | Path = TRAINING,
    cache: Path | str | None = None,
    jobs: int | None = None,
    observe: Path | str | None = None,
    watch: Watcher | None = None,
    progress: Progress | None = None,
    random: Randomness = "seeded",
) -> Options:
    """The compilation options behind the public arguments; plugins are loaded first."""
    if random not in get_args(Randomness):
        raise Invalid(f"random is one of {', '.join(get_args(Randomness))}, given {random!r}")
    load_plugins(PASSES, OPERATORS)
    folder = Path(cache).expanduser() if cache is not None else default_folder()
    observation = Observation(Path(observe)) if observe is not None else None
    return Options(Pipeline.of(pipeline), Cache(folder), jobs, observation, progress, watch, random)


def backend(module: torch.fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="daceml_train")`."""
    return Backend(options())(module, examples)


__all__ = ["Loss", "TrainingStep", "backend", "optimize", "options", "training_step"]
