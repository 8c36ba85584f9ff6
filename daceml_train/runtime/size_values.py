"""The values of size expressions, for one set of sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import sympy

from daceml_train.lowering.program import ControlLaunch, Launch
from daceml_train.tensor import Dim, evaluate


def varies(launch: Launch) -> bool:
    """Whether a launch's sizes differ in nearly every run: those of levels are numbers of nodes."""
    return isinstance(launch, ControlLaunch) and launch.cells is not None


def rounded(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes rounded up to powers of two: libraries are compared for those, since each comparison takes milliseconds."""
    return {name: 1 << max(size - 1, 0).bit_length() for name, size in sizes.items()}


def evaluator(sizes: dict[str, int], read: set[str] | None = None) -> Callable[..., int]:
    """A function from size expressions to integers; `blocks` may be given where the expression has it.

    The symbols of the expressions are added to `read`.
    """
    known: dict[Any, int] = {}

    @functools.cache
    def free(expression: sympy.Expr) -> bool:
        return any(str(s) == "blocks" for s in expression.free_symbols)

    def value(size: Dim, blocks: int = 1) -> int:
        if isinstance(size, int):
            return size
        key = (size, blocks) if free(size) else size
        if key not in known:
            known[key] = evaluate(size, {**sizes, "blocks": blocks})
            if read is not None:
                read.update(sizes.keys() & {str(symbol) for symbol in size.free_symbols})
        return known[key]

    return value
