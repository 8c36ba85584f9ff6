"""How deep a recursion may go: as deep as its data, where no level of it needs the native stack."""

from __future__ import annotations

import ctypes
import dis
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

DEEPEST = 200_000
"""Calls below each other in a recursion of Python functions; a deeper one is taken for a cycle."""
_LOCK = threading.Lock()
_USERS: list[int] = []
"""The limits before the recordings that run now."""


def native(codes: Iterable[types.CodeType]) -> bool:
    """Whether functions may call themselves by way of native code: as a module, in a generator, or as an argument.

    Python's own calls of functions and methods take none of the native stack; comprehensions are such calls.
    """
    codes = list(codes)
    names = {code.co_name for code in codes}
    return any(_through(each, names) for code in codes for each in _whole(code))


def _whole(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _whole(constant)


def _through(code: types.CodeType, names: set[str]) -> bool:
    if code.co_name == "<genexpr>":
        return not names.isdisjoint(code.co_names) or not names.isdisjoint(code.co_freevars)
    loads = ("LOAD_ATTR", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME")
    found = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
    for before, one in zip([None, *found], found, strict=False):
        if before is not None and before.opname == "PUSH_NULL" and one.argval == "self":
            return True
        called = sys.version_info >= (3, 12) or (before is not None and before.opname == "PUSH_NULL")
        if one.opname in loads and one.argval in names and not called and "NULL" not in one.argrepr:
            return True
    return False


@functools.cache
def _frames() -> tuple[Callable[[], int], int]:
    """What returns the address of the interpreter's evaluator of frames, and that of Python's own."""
    api = ctypes.pythonapi
    interpreter = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyInterpreterState_Get", api))
    current = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("_PyInterpreterState_GetEvalFrameFunc", api))
    own = ctypes.cast(api._PyEval_EvalFrameDefault, ctypes.c_void_p).value
    return lambda: int(current(interpreter())), int(own or 0)


def evaluated_by_others() -> bool:
    """Whether another evaluator runs Python's frames, as TorchDynamo's does while compiled code is active in a thread.

    Each call of a function then takes some of the native stack.
    """
    current, own = _frames()
    return current() != own


@contextmanager
def deep() -> Iterator[None]:
    """Let Python's functions call each other as deep as data are, where that takes none of the native stack."""
    if evaluated_by_others():
        yield
        return
    with _LOCK:
        _USERS.append(sys.getrecursionlimit())
        sys.setrecursionlimit(max(DEEPEST, _USERS[0]))
    try:
        yield
    finally:
        with _LOCK:
            first = _USERS[0]
            _USERS.pop()
            if not _USERS:
                sys.setrecursionlimit(first)
