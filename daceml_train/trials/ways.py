"""The way in which a step runs: one for all trials, or their bits would depend on which of them came first.

A step that is one program always is, and one in pieces is always compiled, as long as a search runs. A model that
changes Python objects which its programs depend on, such as a counter, is captured a few times and is then left to
PyTorch. That is found out with the first stage of a process, which then is trained a second time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from daceml_train.driver.along_paths import CHANGES_BEFORE_PATHS
from daceml_train.driver.step import TrainingStep
from daceml_train.trials.values import same


@contextlib.contextmanager
def fixed(step: TrainingStep) -> Iterator[None]:
    """Calls of the step run in one way."""
    before, step.fixed = step.fixed, True
    try:
        yield
    finally:
        step.fixed = before


def is_settled(step: TrainingStep, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether steps that made attributes `now` of those `before` tell in which way all steps are to run."""
    if step.in_python:
        return True
    if step.breaks and not same(before, now):
        step.in_python = True  # pieces are compiled for each value of an attribute, up to a number of them
        return False
    return not step.changes_itself


def settle(step: TrainingStep, arguments: tuple[Any, ...]) -> None:
    """Run steps until it is known whether one of them changes what the next one depends on; the caller restores."""
    for _ in range(CHANGES_BEFORE_PATHS + 1):
        if not step.in_python:
            step(*arguments)


__all__ = ["fixed", "is_settled", "settle"]
