"""Which functions call themselves: `recursive` names them; what a model may call is found by names in its code."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator
from typing import Any

from daceml_train.errors import Invalid

CALLED = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME")
"""Instructions that name what may be called."""

MARKED: dict[types.CodeType, Any] = {}
"""The functions that `dt.recursive` names, by their code."""


def recursive(function: Callable[..., Any]) -> Callable[..., Any]:
    """Name `function` as one that calls itself, directly or by way of others; it stays what it is.

    A model that `optimize` or `training_step` compiles records its calls, and runs those of equal structure together,
    level by level. What one call computes between the calls of itself is a cell. Without this name, the recursion is
    unrolled, and each shape of tree has a program of its own.
    """
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        raise Invalid(f"recursive takes a Python function, given {type(function).__name__}")
    MARKED[code] = getattr(function, "__func__", function)
    return function


def _names(code: types.CodeType) -> set[str]:
    return {str(i.argval) for i in dis.get_instructions(code) if i.opname in CALLED and i.argval is not None}


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _nested(constant)


def _own(function: Any) -> types.FunctionType | None:
    function = getattr(function, "__func__", function)
    function = getattr(function, "__wrapped__", function)
    return function if isinstance(function, types.FunctionType) else None


def _library(module: str | None) -> bool:
    return (module or "").split(".")[0] in ("torch", "numpy", "daceml_train", "builtins")


def reachable(entry: Callable[..., Any], owners: list[type]) -> dict[types.CodeType, str]:
    """Code of the user's that may run below `entry`, with its name: methods of `owners`, functions, and nested ones."""
    found: dict[types.CodeType, str] = {}
    waiting = [entry]
    while waiting:
        function = _own(waiting.pop())
        if function is None or function.__code__ in found:
            continue
        nested = list(_nested(function.__code__))  # several may have one name, as comprehensions do
        found[function.__code__] = function.__code__.co_name
        found |= {code: code.co_name for code in nested}
        for name in set().union(*map(_names, (function.__code__, *nested))):
            candidates = [function.__globals__.get(name)]
            candidates += [getattr(owner, name, None) for owner in owners if not _library(owner.__module__)]
            closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            if name in closure:
                try:
                    candidates.append(closure[name].cell_contents)
                except ValueError:  # an empty cell
                    pass
            waiting += [own for c in candidates if (own := _own(c)) is not None and not _library(own.__module__)]
    return found
