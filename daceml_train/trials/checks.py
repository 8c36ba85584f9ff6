"""Checks of what users hand to a search by stages, and notes that tell in which trial an error was raised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid


def check_functions(step: Any, data: Any, evaluate: Any, apply: Any) -> None:
    """Raise `Invalid` for what is no training step, and for what cannot be called."""
    if not isinstance(step, TrainingStep):
        advice = "Stages(daceml_train.training_step(model, loss, optimizer), data=...)"
        raise Invalid(f"a search by stages takes a training step, given {type(step).__name__}", advice=advice)
    for name, function in (("data", data), ("evaluate", evaluate), ("apply", apply)):
        if not callable(function) and (function is not None or name == "data"):
            raise Invalid(f"{name} is a function, given {function!r}")


def check_numbers(**options: Any) -> None:
    """Raise `Invalid` for an option that is no whole number from 1 on."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Invalid(f"{name} is a whole number from 1 on, given {value!r}")


@contextlib.contextmanager
def noted(where: Callable[[], str]) -> Iterator[None]:
    """Errors have a note that tells where they were raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"daceml_train: {where()}")
        raise


def as_rungs(until: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers of steps at which values are wanted. Raises `Invalid` where they are none, or out of order."""
    rungs = tuple(until) if isinstance(until, Sequence) else (until,)
    if not rungs or any(isinstance(r, bool) or not isinstance(r, int) or r < 1 for r in rungs):
        raise Invalid(f"until is a positive number of steps, or several in order, given {until!r}")
    if list(rungs) != sorted(set(rungs)):
        raise Invalid(f"until names steps in order, given {until!r}")
    return rungs


def number_of(trial: Any) -> int:
    """The number of a trial, which is one or has one. Raises `Invalid`."""
    number = getattr(trial, "number", trial)
    if isinstance(number, bool) or not isinstance(number, int):
        raise Invalid(f"a trial is a number or has one (trial.number), given {trial!r}")
    return number


def as_steps(given: Iterable[int]) -> tuple[int, ...]:
    """Numbers of steps in any order. Raises `Invalid` for what is none."""
    steps = tuple(given)
    if any(isinstance(step, bool) or not isinstance(step, int) or step < 1 for step in steps):
        raise Invalid(f"save_at names steps from 1 on, given {steps!r}")
    return steps
