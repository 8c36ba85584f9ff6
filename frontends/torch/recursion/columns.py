"""Many runs, or many lazy values, at once: loops over all nodes of all trees of a batch.

`use_native` replaces those that have a native version, which does the same in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from daceml_train.frontends.torch.recursion.lazy import Lazy, Meta
from daceml_train.frontends.torch.recursion.runs import Run

Numbers = np.ndarray[Any, Any]
_NATIVE: dict[str, Callable[..., Any]] = {}


def use_native(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Use these functions, by name, in place of those of this module; none: use those of this module."""
    _NATIVE.clear()
    _NATIVE.update(functions)


def native(name: str) -> Callable[..., Any] | None:
    """The native version of a function, if there is one."""
    return _NATIVE.get(name)


def unknown(values: Sequence[Any]) -> bool:
    """Whether all are lazy values, and none is known yet."""
    if (function := _NATIVE.get("unknown")) and type(values) is list:
        found: bool = function(values)
        return found
    return set(map(type, values)) <= {Lazy} and not [v for v in values if v.value is not None]


def metas(values: Sequence[Lazy]) -> set[Meta]:
    """The types of lazy values."""
    if (function := _NATIVE.get("metas")) and type(values) is list:
        found: set[Meta] = function(values)
        return found
    return {v.meta for v in values}


def all_of(values: list[Any], forest: Any) -> bool:
    """Whether all are lazy values of runs that belong to this forest."""
    if function := _NATIVE.get("all_of"):
        found: bool = function(values, forest)
        return found
    lazy = set(map(type, values)) <= {Lazy}
    return lazy and not [v for v in values if v.source.forest is not forest or type(v.source) is not Run]


def outputs(values: list[Lazy]) -> set[tuple[Any, int]]:
    """The groups and numbers of values of runs."""
    if function := _NATIVE.get("sources"):
        return set(function(values, False)[1:])
    return {(v.source.group, v.index) for v in values}


def positions(values: list[Lazy]) -> Numbers:
    """The positions in their groups of runs that compute values."""
    if function := _NATIVE.get("positions"):
        found = np.empty(len(values), dtype=np.int64)
        function(values, found.ctypes.data)
        return found
    return np.array([v.source.position for v in values], dtype=np.int64)


def heights(runs: list[Run]) -> Numbers:
    """The heights of runs."""
    if function := _NATIVE.get("heights"):
        found = np.empty(len(runs), dtype=np.int64)
        function(runs, found.ctypes.data)
        return found
    return np.array([run.height for run in runs], dtype=np.int64)


def seal(runs: list[Run]) -> dict[int, list[Run]]:
    """Seal runs; those that compute anything, by their stages."""
    found: dict[int, list[Run]]
    if function := _NATIVE.get("seal"):
        found = function(runs)
        return found
    found = {}
    for run in runs:
        run.sealed = True
        if run.at.operator is not None:
            found.setdefault(run.stage, []).append(run)
    return found


def by_structure(runs: list[Run]) -> dict[Any, list[Run]]:
    """Runs by the ends of their paths, in the order of their heights."""
    found: dict[Any, list[Run]]
    if function := _NATIVE.get("by_structure"):
        found = function(runs)
        return found
    found = {}
    for run in runs:
        found.setdefault(run.at, []).append(run)
    for own in found.values():
        own.sort(key=_height)
    return found


def _height(run: Run) -> int:
    return run.height


def inputs(runs: list[Run]) -> list[list[Any]]:
    """Per input, what runs of one structure take."""
    if function := _NATIVE.get("inputs"):
        found: list[list[Any]] = function(runs)
        return found
    return list(map(list, zip(*[run.inputs for run in runs], strict=True)))


def place(runs: list[Run], group: Any, first: int = 0, forest: Any = None, numbers: Numbers | None = None) -> None:
    """Note the group of runs, their positions in it, and their forest, unless it is None.

    Positions count from `first` on; with `numbers`, they are those after `first`.
    """
    if function := _NATIVE.get("place"):
        own = None if numbers is None else np.ascontiguousarray(numbers, dtype=np.int64)
        function(runs, group, first, forest, 0 if own is None else own.ctypes.data)
        return
    for k, run in enumerate(runs):
        run.group, run.position = group, first + (k if numbers is None else int(numbers[k]))
        if forest is not None:
            run.forest = forest


def sources(values: list[Any]) -> tuple[bool, set[tuple[Any, int]]]:
    """Whether there are other values than those of runs that are not computed; the groups and numbers of those."""
    if function := _NATIVE.get("sources"):
        data, *pairs = function(values, True)
        return data, set(pairs)
    waiting = [v for v in values if type(v) is Lazy and type(v.source) is Run and v.source.forest is None]
    return len(waiting) < len(values), outputs(waiting)


def release(runs: list[Run]) -> None:
    """Release what runs refer to, and what refers to them."""
    if function := _NATIVE.get("release"):
        function(runs, ())
        return
    for run in runs:
        run.height = run.stage = 0
        run.inputs = run.values = ()


def use(values: list[Lazy]) -> int:
    """Note that values are read, unless they are known; the first stage in which all of them are."""
    if function := _NATIVE.get("use"):
        found: int = function(values)
        return found
    stage = 0
    for value in values:
        if value.value is None:
            source = value.source
            waiting = type(source) is Run and source.forest is None
            if waiting:
                source.use(value.index)
            stage = max(stage, source.stage + waiting)
    return stage
