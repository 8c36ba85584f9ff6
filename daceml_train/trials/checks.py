"""Checks of what users hand to a search by stages, and notes that tell in which trial an error was raised."""

from __future__ import annotations

import contextlib
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

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


def check_numbers(least: int = 1, **options: Any) -> None:
    """Raise `Invalid` for an option that is no whole number from `least` on."""
    for name, value in options.items():
        if not is_count(value, least):
            raise Invalid(f"{name} is a whole number from {least} on, given {value!r}")


def check_progress(progress: Any) -> None:
    """Raise `Invalid` for what cannot be told about progress."""
    if progress is not None and not callable(progress):
        raise Invalid(f"progress is a function of (stages done, stages in all), given {progress!r}")


def check_options(step: Any, seed: Any, name: Any, also: Any, storage: Any, stacked: int) -> None:
    """Raise `Invalid` for an option of another type, and for one that a step on several ranks does not go with."""
    if step.ranks is not None and (storage is not None or stacked != 1):
        what = "a storage" if storage is not None else "stacked="
        why = "a rank that finds a point there, or measures other times, leaves the others waiting"
        raise Invalid(f"a search on a step that several ranks train together has no {what}: {why}")
    if seed is not None and not is_count(seed, None):
        raise Invalid(f"seed is a whole number, given {seed!r}")
    if name is not None and not isinstance(name, str):
        raise Invalid(f"name is a text, given {name!r}")
    if isinstance(storage, str | os.PathLike) and not os.fspath(storage):
        raise Invalid("storage is a folder, given an empty name", advice="None keeps checkpoints in memory")
    if also is not None and not isinstance(also, Mapping):
        raise Invalid(f"also is a dictionary of objects by name, given {also!r}")
    for key, part in (also or {}).items():
        if not all(callable(getattr(part, method, None)) for method in ("state_dict", "load_state_dict")):
            raise Invalid(f"also[{key!r}] has no state_dict() and load_state_dict(), given {type(part).__name__}")


def is_count(value: Any, least: int | None) -> bool:
    """Whether a value is a whole number, Python's or NumPy's, from `least` on."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and (least is None or int(value) >= least)


@contextlib.contextmanager
def noted(where: Callable[[], str]) -> Iterator[None]:
    """Errors have a note that tells where they were raised."""
    try:
        yield
    except StopIteration:  # which would end the caller's loop without a word
        ended = RuntimeError("an iterator has no further element: StopIteration")
        ended.add_note(f"daceml_train: {where()}")
        raise ended from None
    except Exception as error:
        error.add_note(f"daceml_train: {where()}")
        raise


def as_rungs(until: int | Sequence[int]) -> tuple[int, ...]:
    """The numbers of steps at which values are wanted. Raises `Invalid` where they are none, or out of order."""
    given: Any = until
    several = isinstance(given, Sequence) or (isinstance(given, np.ndarray) and given.ndim == 1)
    found = tuple(given) if several else (given,)
    if not found or not all(is_count(rung, 1) for rung in found):
        raise Invalid(f"until is a positive number of steps, or several in order, given {until!r}")
    rungs = tuple(map(int, found))
    if list(rungs) != sorted(set(rungs)):
        raise Invalid(f"until names steps in order, given {until!r}")
    return rungs


def number_of(trial: Any) -> int:
    """The number of a trial, which is one or has one. Raises `Invalid`."""
    number = getattr(trial, "number", trial)
    if not is_count(number, None):
        raise Invalid(f"a trial is a number or has one (trial.number), given {trial!r}")
    return int(number)


def as_names(given: Any) -> tuple[str, ...]:
    """Names of settings; a text is one. Raises `Invalid` for what is none."""
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise Invalid(f"data_settings names settings, given {given!r}")
    return names


def as_steps(given: Any) -> tuple[int, ...]:
    """Numbers of steps in any order. Raises `Invalid` for what is none."""
    steps = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(is_count(step, 1) for step in steps):
        raise Invalid(f"save_at names steps from 1 on, given {steps!r}")
    return tuple(map(int, steps))


def as_trials(given: Any) -> list[Any]:
    """Trials that are known beforehand. Raises `Invalid` for what are none."""
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise Invalid(
            f"trials is a list of settings, a dictionary for each trial, given {type(given).__name__}",
            advice="[{'lr': 0.1}, {'lr': 0.05}]; what a study will choose is not known beforehand",
        )
    return list(given)


def as_values(value: Any) -> Any:
    """What `evaluate` returned, as numbers that a file can hold to the bit. Raises `Invalid` for what is none."""
    if isinstance(value, Mapping):
        return {str(name): as_values(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_values(entry) for entry in value]
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    one = one or (isinstance(value, np.ndarray | np.generic) and value.size == 1)
    found = value.item() if one else value
    if isinstance(found, bool):
        return found
    for kind in (int, float):
        if isinstance(found, kind):
            return kind(found)
    what = repr(found) if isinstance(found, str | complex) else type(found).__name__
    raise Invalid(f"evaluate returned {what}", advice="a number, or a dictionary or list of numbers")


def of_trial(number: int) -> str:
    """A trial in a message; what is loaded has no number."""
    return f"of trial {number}" if number >= 0 else "of the trial that is loaded"


def said(settings: Iterable[tuple[str, Any]]) -> str:
    """Settings in a message."""
    return ", ".join(f"{name}={value!r}" for name, value in settings) or "no settings"
