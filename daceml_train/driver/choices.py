"""Choices among libraries by measurement: kept with a search, so that processes that share it compute the same bits.

Libraries sum in other orders. Within the cache, a choice that was measured under load serves its process alone; two
processes of a search would then train equal trials to other bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from daceml_train.driver.micro_batches import MicroBatchedStep
from daceml_train.driver.step import TrainingStep


def share_choices(step: TrainingStep, path: Path | None) -> None:
    """From now on take the choices in `path`, or add those that are missing; None: those of the cache.

    What the step has bound with other choices is bound again.
    """
    if step.options.matmuls == path:
        return
    for part in (step, step.accumulating) if isinstance(step, MicroBatchedStep) else (step,):
        with part._lock:
            part.options = replace(part.options, matmuls=path)
            part._bound.clear()
            part._steps.clear()


__all__ = ["share_choices"]
