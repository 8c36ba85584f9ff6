"""Loops: what a thread traces, sizes that yield an index, and views of arrays. Shared by tracing and the reference."""

from __future__ import annotations

import dis
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.expressions.program import Stage
from daceml_train.expressions.promotion import location
from daceml_train.expressions.term import Axis, at


class Frame:
    """One comprehension while it is entered."""

    def __init__(self, code: Any) -> None:
        self.code = code
        self.axes: list[Axis] = []
        self.ended: list[tuple[Axis, str]] = []
        """The axes whose loops have ended, and where."""
        self.sizes: list[int] = []


class _State(threading.local):
    """What this thread traces; no stages where the reference runs."""

    def __init__(self) -> None:
        self.stages: list[Stage] | None = None
        self.frames: list[Frame] = []


state = _State()


@functools.lru_cache(maxsize=4096)
def targets(code: Any) -> tuple[str, ...]:
    """The names that a comprehension's loops assign, in their order."""
    return tuple(str(i.argval) for i in dis.get_instructions(code) if i.opname in ("STORE_FAST", "STORE_DEREF"))


class Size(int):
    """A size. Iterating it yields one index while a function is traced; arithmetic keeps it a size."""

    def __iter__(self) -> Iterator[Any]:
        if state.stages is not None and not _in_for():
            message = "a size is looped over by something other than a for"
            raise Invalid(
                message, where=location(), advice="write a for of its own for each size, without zip or enumerate"
            )
        return self._indices()  # later: Python calls iter() of the outermost `for` before `array` is entered

    def _indices(self) -> Iterator[Any]:
        if not state.frames:
            advice = "loop over sizes in array(... for i in I), which is given no list, and elsewhere over range(...)"
            raise Invalid("a loop over a size outside of array and total", where=location(), advice=advice)
        if state.stages is None:
            state.frames[-1].sizes.append(int(self))
            yield from range(int(self))
            return
        if self < 0:
            raise Invalid(f"a loop over the negative size {int(self)}", where=location())
        frame = state.frames[-1]
        names = targets(frame.code)
        axis = Axis(int(self), names[len(frame.axes)] if len(frame.axes) < len(names) else "")
        frame.axes.append(axis)
        yield at(axis)
        frame.ended.append((axis, location()))


def _in_for() -> bool:
    """Whether a `for` asks for the iterator, and no call of `zip`, `enumerate`, or `list`."""
    frame = sys._getframe(2)
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "GET_ITER"


def _keep_size(name: str) -> None:
    function = getattr(int, name)

    def method(self: Size, *others: Any) -> Any:
        result = function(int(self), *others)
        return Size(result) if isinstance(result, int) else result

    setattr(Size, name, method)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "neg"):
    _keep_size(f"__{_name}__")


class View:
    """An array with a rule for what lies outside."""

    def __init__(self, get: Callable[[Any], Any]) -> None:
        self._get = get

    def __getitem__(self, index: Any) -> Any:
        return self._get(index)
