"""Calls of Python functions that call each other as deep as data are: on a stack of their own, with a raised limit."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_void_p, py_object
from typing import Any, TypeVar

from daceml_train.errors import CompilerError
from daceml_train.runtime.native_library import library

R = TypeVar("R")
DEEPEST = 200_000
"""Calls below each other; a recursion that is deeper is taken for one without end."""
BYTES_PER_CALL = 16 << 10
"""Native stack for one of them; modules, generators, and TorchDynamo's evaluator of frames need 0.5 KiB."""
_LOCK = threading.Lock()
_USERS: list[int] = []
"""The limits before the calls that run now."""


def call_deeply(function: Callable[[], R]) -> R:
    """The result of a function whose calls may be nested 200,000 deep, also by way of native code.

    The thread and all that is local to it stay what they are. The stack is address space: memory is taken as far as
    calls go, and returned. Where the system lends none, Python's limit stands.
    """
    try:
        native = library()
    except CompilerError:
        return function()
    stack = native.stack_create(DEEPEST * BYTES_PER_CALL)
    if not stack:
        return function()
    run = ctypes.PYFUNCTYPE(py_object, c_void_p, c_void_p, py_object)(("stack_call", native))  # keeps Python's lock
    call: Any = ctypes.cast(ctypes.pythonapi.PyObject_CallNoArgs, c_void_p)
    try:
        with _limit():
            result: R = run(stack, call, function)
            return result
    finally:
        native.stack_destroy(stack)


@contextmanager
def _limit() -> Iterator[None]:
    """Python's limit of nested calls is its process's: the first to come raises it, the last to go restores it."""
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
