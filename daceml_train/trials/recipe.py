"""A recipe: what another process needs to train the same trials, as a value that can be pickled.

A training step is bound to tensors of its process and is not pickled. The model, the loss, the optimizer, and all
options are, in one piece, so that they share their parameters there as they do here. The process that reads a recipe
creates the step, and compares the root: functions that arrive with another meaning are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from daceml_train.driver.micro_batches import MicroBatchedStep
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid
from daceml_train.trials.state import State, Training, generators, restore_generators

_STEP = ("model", "loss", "optimizer", "options", "scaler", "schedule")
"""The attributes that a step is created from, which have the names of its parameters."""


@dataclass(frozen=True)
class Recipe:
    """A training step, the options of trials on it, and where they start."""

    step: Mapping[str, Any]
    stages: Mapping[str, Any]
    start: State
    groups: list[dict[str, Any]]
    """The first options of the optimizer, by parameter group."""
    threads: int
    root: str
    parts: Mapping[str, str]
    """What the root depends on, each with its hash."""

    @classmethod
    def of(cls, stages: Any) -> Recipe:
        """The recipe of a `Stages`. Raises `Invalid` for a step over several processes."""
        step: TrainingStep = stages.step
        if step.ranks is not None:
            raise Invalid("a step that several processes train together cannot be handed to another process")
        made: dict[str, Any] = {name: getattr(step, name) for name in _STEP} | {"clipping": step._clipping}
        if isinstance(step, MicroBatchedStep):
            made |= {"count": step.count, "reduction": step.reduction}
        else:
            made["keep_gradients"] = step.keep_gradients
        start, groups = stages._start, stages.applied.first
        return cls(made, stages.options, start, groups, stages._threads, stages.root, stages.parts)


def rebuilt(kind: Callable[..., Any], recipe: Recipe) -> Any:
    """The `Stages` of a recipe, in this process, which from now on has its number of threads.

    Raises `Invalid` where its root is another one.
    """
    torch.set_num_threads(recipe.threads)
    created = MicroBatchedStep if "count" in recipe.step else TrainingStep
    step: TrainingStep = created(**recipe.step)
    for group, first in zip(step.optimizer.param_groups, recipe.groups, strict=True):
        group.update(first)
    before = generators()
    try:
        Training(step, recipe.stages["also"]).restore(recipe.start)
        found = kind(step, **recipe.stages)
    finally:
        restore_generators(before)
    if found.root != recipe.root:
        names = [name for name, text in recipe.parts.items() if found.parts.get(name) != text]
        told = ", ".join(
            f"{name} ({recipe.parts[name]} there, {found.parts.get(name)} here)" if name == "versions" else name
            for name in names
        )
        raise Invalid(
            f"these trials are others in this process: {told}",
            advice="processes that share trials need the same versions, processor, and code",
        )
    return found


__all__ = ["Recipe", "rebuilt"]
