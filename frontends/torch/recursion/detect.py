"""Which functions call themselves: `recursive` names them; others are found by the names in the code of a model."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from daceml_train.errors import Invalid

CALLED = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLOSURE", "LOAD_NAME", "LOAD_SUPER_ATTR")
"""Instructions that name what may be called."""

MARKED: dict[types.CodeType, Any] = {}
"""The functions that `dt.recursive` names, by their code."""


def recursive(function: Callable[..., Any]) -> Callable[..., Any]:
    """Name `function` as one that calls itself, directly or by way of others; it stays what it is.

    A model that `optimize` or `training_step` compiles records its calls, and runs those of equal structure together,
    level by level. What one call computes between the calls of itself is a cell. Without this name, functions that
    call themselves are looked for in the code that the model's forward pass names; see `cycles`.
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


def _methods(owners: Iterable[type], name: str, bases_too: bool) -> list[Any]:
    """What `name` is in classes of the user's, or as well in those that they are derived from."""
    own = [owner for owner in owners if not _library(owner.__module__)]
    if not bases_too:
        return [getattr(owner, name, None) for owner in own]
    bases = dict.fromkeys(base for owner in own for base in owner.__mro__ if not _library(base.__module__))
    return [vars(base)[name] for base in bases if name in vars(base)]


def _free(function: types.FunctionType, name: str) -> Any:
    """The value of a free variable, or None."""
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        return closure[name].cell_contents if name in closure else None
    except ValueError:  # an empty cell
        return None


def reachable(entry: Callable[..., Any], owners: list[type]) -> dict[types.CodeType, types.FunctionType]:
    """Code of the user's that may run below `entry`, with its function: methods of `owners`, functions, nested ones."""
    found: dict[types.CodeType, types.FunctionType] = {}
    waiting = [entry]
    while waiting:
        function = _own(waiting.pop())
        if function is None or function.__code__ in found:
            continue
        nested = list(_nested(function.__code__))  # several may have one name, as comprehensions do
        found |= dict.fromkeys((function.__code__, *nested), function)
        names = set().union(*map(_names, (function.__code__, *nested)))
        for name in names:
            candidates = [function.__globals__.get(name), _free(function, name)]
            candidates += _methods(owners, name, "super" in names)
            waiting += [own for c in candidates if (own := _own(c)) is not None and not _library(own.__module__)]
    return found


def _static(owner: type, name: str) -> bool:
    return isinstance(vars(owner).get(name), staticmethod)


# ---- functions that call themselves, without a name for them ------------------------------------------------------
def _called(code: types.CodeType, this: str) -> Iterator[tuple[str, str]]:
    """What code calls by name: ("self", "visit") for a method of its own object, which it names `this`,
    ("self", "forward") for the object itself, and ("", "visit") for a function.
    """
    skipped = ("CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "RESUME")
    instructions = [i for i in dis.get_instructions(code) if i.opname not in skipped]
    for before, one, after in zip([None, *instructions], instructions, [*instructions[1:], None], strict=False):
        if one.opname in ("LOAD_FAST", "LOAD_DEREF") and one.argval == this:
            if after is not None and after.opname in ("LOAD_METHOD", "LOAD_ATTR"):
                yield "self", str(after.argval)
            elif before is not None and before.opname == "PUSH_NULL":  # a call of the object
                yield "self", "forward"
        elif one.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
            yield "", str(one.argval)


def cycles(entry: Callable[..., Any], owners: list[type]) -> dict[types.CodeType, types.FunctionType]:
    """Code below `entry` that calls itself by name, directly or by way of others, with its function.

    A method calls itself as `self.visit(...)`, or `self(...)` for `forward`, whatever its first parameter is named; a
    function by its name. A call of a method of the base class is no call of itself.
    """
    found = reachable(entry, owners)
    targets: dict[types.CodeType, set[types.CodeType]] = {}
    for code, function in found.items():
        own = function.__code__
        bases = [b for o in owners for b in o.__mro__]
        method = any(_own(vars(b).get(own.co_name)) is function and not _static(b, own.co_name) for b in bases)
        this = own.co_varnames[0] if own.co_argcount and (method or own.co_varnames[0] == "self") else ""
        # comprehensions run where they are
        results = targets[code] = {c for c in _nested(code) if c.co_name.startswith("<")}
        own_classes = [o for o in owners if any(_own(vars(b).get(own.co_name)) is function for b in o.__mro__)]
        for kind, name in _called(code, this):
            if kind == "self":
                candidates = _methods(own_classes, name, False)
            else:
                candidates = [function.__globals__.get(name), _free(function, name)]
                scope = (*code.co_freevars, *code.co_cellvars)
                results.update(c for c in _nested(own) if c.co_name == name and name in scope)
            results.update(f.__code__ for c in candidates if (f := _own(c)) is not None and f.__code__ in found)
    return {code: found[code] for code in found if not code.co_name.startswith("<") and _returns(code, targets)}


def _returns(code: types.CodeType, targets: dict[types.CodeType, set[types.CodeType]]) -> bool:
    """Whether calls lead from code back to it."""
    seen: set[types.CodeType] = set()
    waiting = list(targets[code])
    while waiting:
        if (at := waiting.pop()) is code:
            return True
        if at not in seen:
            seen.add(at)
            waiting += targets[at]
    return False


def over_data(arguments: Iterable[Any]) -> bool:
    """Whether there is data among the arguments that a function can call itself over: objects, nested sequences."""
    plain = (torch.Tensor, torch.nn.Module, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
    waiting, seen = list(arguments), set[int]()
    while waiting:
        a = waiting.pop()
        if isinstance(a, np.ndarray):
            return True
        if isinstance(a, list | tuple | dict):
            if id(a) not in seen:  # deep, shared, or within itself
                seen.add(id(a))
                parts = list(a.values()) if isinstance(a, dict) else list(a)
                if any(type(p) is int for p in parts):
                    return True
                waiting += parts
        elif not isinstance(a, plain) and not callable(a) and not _library(type(a).__module__):
            return True
    return False
