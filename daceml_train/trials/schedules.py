"""Schedules: the value of a setting at each step of a trial, as a value that can be compared and hashed.

Trials share a stage where their values are equal to the bit, however they are written: `steps(0.1, {80: 0.5})` and
`piecewise({0: 0.1, 80: 0.05})` are one trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.errors import Invalid

Scalar = bool | int | float | str | None
Value = Scalar | tuple["Value", ...]
"""A setting at one step."""


def plain(value: Any, name: str) -> Value:
    """The value with NumPy's and PyTorch's numbers as Python's, and lists as tuples.

    Raises `Invalid` for what has no exact text, and for NaN, which equals nothing.
    """
    if isinstance(value, list | tuple):
        return tuple(plain(entry, name) for entry in value)
    if type(value) not in (bool, int, float, str, type(None)) and callable(getattr(value, "item", None)):
        if math.prod(getattr(value, "shape", ())) != 1:
            what = f"the setting {name!r} is {type(value).__name__} of shape {tuple(value.shape)}"
            raise Invalid(what, advice="a setting is a number, or a tuple of them: tuple(values.tolist())")
        value = value.item()
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, float):
        what = f"the setting {name!r} is {type(value).__name__}"
        raise Invalid(what, advice="a setting is a number, a text, None, a tuple of them, or a schedule of them")
    if math.isnan(value):
        raise Invalid(f"the setting {name!r} is NaN")
    return float(value)


class Schedule:
    """The value of a setting at each step. Subclasses are frozen dataclasses."""

    def at(self, step: int) -> Value:
        """The value at a step."""
        raise NotImplementedError

    def changes(self, start: int, end: int) -> Iterator[int]:
        """The steps in `start < step < end` at which the value may differ from the one before, in order."""
        return iter(range(start + 1, end))

    def then(self, at: int, following: Schedule | Value) -> Schedule:
        """This schedule before step `at`, and from there `following`, which sees the same step numbers."""
        return Joined(self, _count("at", at), of(following, "following"))


@dataclass(frozen=True)
class Constant(Schedule):
    """One value."""

    value: Value

    def at(self, step: int) -> Value:
        return self.value

    def changes(self, start: int, end: int) -> Iterator[int]:
        return iter(())


@dataclass(frozen=True)
class Steps(Schedule):
    """A number that is multiplied by a factor at each of some steps."""

    start: float
    drops: tuple[tuple[int, float], ...]

    def at(self, step: int) -> Value:
        value = self.start
        for position, factor in self.drops:
            if step >= position:
                value *= factor
        return value

    def changes(self, start: int, end: int) -> Iterator[int]:
        return (position for position, _ in self.drops if start < position < end)


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Values, each from its step on."""

    pieces: tuple[tuple[int, Value], ...]

    def at(self, step: int) -> Value:
        return next(value for position, value in reversed(self.pieces) if step >= position)

    def changes(self, start: int, end: int) -> Iterator[int]:
        return (position for position, _ in self.pieces if start < position < end)


@dataclass(frozen=True)
class Exponential(Schedule):
    """`start * gamma ** (step // every)`."""

    start: float
    gamma: float
    every: int

    def at(self, step: int) -> Value:
        try:
            growth = self.gamma ** (step // self.every)
        except OverflowError:  # a scheduler of PyTorch, which multiplies step by step, arrives at infinity
            growth = math.inf
        value: float = self.start * growth if self.start else self.start
        return value

    def changes(self, start: int, end: int) -> Iterator[int]:
        return iter(range((start // self.every + 1) * self.every, end, self.every))


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from `start` to `end` over `length` steps, and `end` from there on."""

    start: float
    end: float
    length: int

    def at(self, step: int) -> Value:
        if step >= self.length:
            return self.end
        return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * step / self.length))

    def changes(self, start: int, end: int) -> Iterator[int]:
        return iter(range(start + 1, min(end, self.length + 1)))


@dataclass(frozen=True)
class WarmUp(Schedule):
    """`following` times `(step + 1) / length` in the first `length` steps; `following` sees the same step numbers."""

    length: int
    following: Schedule

    def at(self, step: int) -> Value:
        value = self.following.at(step)
        if step >= self.length:
            return value
        if not isinstance(value, int | float):
            raise Invalid(f"a warm-up multiplies numbers, {value!r} is none")
        return value * ((step + 1) / self.length)

    def changes(self, start: int, end: int) -> Iterator[int]:
        yield from range(start + 1, min(end, self.length + 1))
        yield from self.following.changes(max(start, self.length), end)


@dataclass(frozen=True)
class Joined(Schedule):
    """A schedule up to a step, and another one from there on."""

    before: Schedule
    position: int
    after: Schedule

    def at(self, step: int) -> Value:
        return (self.before if step < self.position else self.after).at(step)

    def changes(self, start: int, end: int) -> Iterator[int]:
        yield from self.before.changes(start, min(end, self.position))
        if start < self.position < end:
            yield self.position
        yield from self.after.changes(max(start, self.position), end)


# ---- what users call ------------------------------------------------------------------------------------------------
def constant(value: Any) -> Schedule:
    """One value at all steps; a setting that is given as a plain value means this."""
    return Constant(plain(value, "constant"))


def steps(start: float, drops: Mapping[int, float]) -> Schedule:
    """`start`, multiplied by each factor of `drops` from its step on: `steps(0.1, {80: 0.5, 120: 0.1})`."""
    _check_by_step("steps(start, drops)", drops)
    ordered = sorted((_count("a step of drops", at), _number("a factor", factor)) for at, factor in drops.items())
    return Steps(_number("start", start), tuple(ordered))


def piecewise(values: Mapping[int, Any]) -> Schedule:
    """Each value from its step on: `piecewise({0: 0.1, 80: 0.01})`. Raises `Invalid` without a value at step 0."""
    _check_by_step("piecewise(values)", values)
    pieces = sorted(((_count("a step", at), plain(value, "piecewise")) for at, value in values.items()), key=_first)
    if not pieces or pieces[0][0] != 0:
        raise Invalid(f"piecewise has no value at step 0, given steps {[at for at, _ in pieces]}")
    return Piecewise(tuple(pieces))


def exponential(start: float, gamma: float, every: int = 1) -> Schedule:
    """`start * gamma ** (step // every)`: with the steps of an epoch as `every`, a drop per epoch."""
    return Exponential(_number("start", start), _number("gamma", gamma), _count("every", every, 1))


def cosine(start: float, length: int, end: float = 0.0) -> Schedule:
    """Half a cosine from `start` to `end` over `length` steps, and `end` from there on."""
    return Cosine(_number("start", start), _number("end", end), _count("length", length, 1))


def warm_up(length: int, following: Any) -> Schedule:
    """`following`, scaled by `(step + 1) / length` in the first `length` steps."""
    return WarmUp(_count("length", length, 1), of(following, "following"))


def of(value: Any, name: str) -> Schedule:
    """A schedule as it is, and any other value at all steps."""
    return value if isinstance(value, Schedule) else Constant(plain(value, name))


def _check_by_step(what: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise Invalid(f"{what} takes a dictionary by step, given {given!r}", advice="{0: 0.1, 80: 0.01}")


def _first(piece: tuple[int, Any]) -> int:
    return piece[0]


def _number(name: str, value: Any) -> float:
    found = plain(value, name)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise Invalid(f"{name} is a number, given {value!r}")
    return float(found)


def _count(name: str, value: Any, least: int = 0) -> int:
    found = plain(value, name)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise Invalid(f"{name} is a whole number from {least} on, given {value!r}")
    return found


__all__ = ["Schedule", "Value", "constant", "cosine", "exponential", "of", "piecewise", "plain", "steps", "warm_up"]
