"""Reference: the function of an expression on NumPy arrays, element by element, as Python runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.expressions.loops import Frame, Size, View, state
from daceml_train.expressions.promotion import location

Array = np.ndarray[Any, Any]


class Concrete:
    """A NumPy array with the interface of an operand."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self.shape = tuple(map(Size, values.shape))

    def __getitem__(self, index: Any) -> Any:
        given = self._indices(index)
        if not all(0 <= i < n for i, n in zip(given, self.shape, strict=True)):
            raise Invalid(f"index {given} is outside of {tuple(map(int, self.shape))}", where=location())
        return self.values[given]

    def _indices(self, index: Any) -> tuple[int, ...]:
        given = tuple(int(i) for i in (index if isinstance(index, tuple) else (index,)))
        if len(given) != len(self.shape):
            raise Invalid(f"an array of {len(self.shape)} dimensions, given {len(given)} indices", where=location())
        return given

    def outside(self, value: float) -> View:
        """Reads that yield `value` outside of the array."""

        def get(index: Any) -> Any:
            given = self._indices(index)
            inside = all(0 <= i < n for i, n in zip(given, self.shape, strict=True))
            return self.values[given] if inside else self.values.dtype.type(value)

        return View(get)

    @property
    def clamp(self) -> View:
        """Reads that yield the nearest element outside of the array."""
        return self._around(lambda i, n: min(max(i, 0), n - 1))

    @property
    def wrap(self) -> View:
        """Reads that start over at the other end outside of the array."""
        return self._around(lambda i, n: i % n)

    def _around(self, change: Callable[[int, int], int]) -> View:
        return View(
            lambda index: self.values[
                tuple(change(i, n) for i, n in zip(self._indices(index), self.shape, strict=True))
            ]
        )


def _items(generator: Any, frame: Frame) -> tuple[list[Any], list[int]]:
    """The elements of a comprehension and its sizes: every `for` is entered once before the first element."""
    try:
        first = next(generator)
    except StopIteration:
        return [], frame.sizes
    sizes = list(frame.sizes)
    return [first, *generator], sizes


def listed(generator: Any, frame: Frame) -> Concrete:
    """The array of a comprehension."""
    values, sizes = _items(generator, frame)
    return Concrete(np.array(values).reshape(sizes if values else [*sizes[:-1], 0]))


def reduced(kind: str, generator: Any, frame: Frame) -> Any:
    """The reduction of a comprehension."""
    values, _ = _items(generator, frame)
    functions: dict[str, Callable[[Any], Any]] = {
        "sum": np.sum,
        "amax": np.max,
        "amin": np.min,
        "prod": np.prod,
        "lse": np.logaddexp.reduce,
        "argmax": np.argmax,
    }
    return functions[kind](np.array(values))


def reference(function: Callable[..., Any], *arrays: Array, **options: Any) -> Any:
    """The results of `function` on NumPy arrays, as NumPy arrays."""
    outer, frames = state.stages, state.frames
    state.stages, state.frames = None, []
    try:
        results = function(*(Concrete(np.asarray(a)) for a in arrays), **options)
    finally:
        state.stages, state.frames = outer, frames
    several = results if isinstance(results, tuple) else (results,)
    if wrong := [r for r in several if not isinstance(r, Concrete)]:
        raise Invalid(f"an expression returns arrays, this one returned {type(wrong[0]).__name__}")
    return tuple(m.values for m in results) if isinstance(results, tuple) else results.values
