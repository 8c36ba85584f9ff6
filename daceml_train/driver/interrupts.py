"""Exceptions of signal handlers, such as a user's time limit, which arrive in the middle of whatever runs.

An error while a graph is captured or compiled is a reason to run it in PyTorch. What a handler raises is not one: it is
for the user's code around the call, and the next call starts where this one did.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any

from daceml_train.errors import Invalid


def raise_from_handler(error: BaseException) -> None:
    """Raise what a handler of a signal has raised, if `error` is that or came of it."""
    codes = set(_handlers())
    for cause in _causes(error) if codes else ():
        around = getattr(cause, "inner_exception", None) is not None  # TorchDynamo's error, of another one
        trace = None if around else cause.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code in codes:
                raise cause
            trace = trace.tb_next


def _handlers() -> Iterator[CodeType]:
    """The code of the handlers that are set, in Python."""
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if code is not None:
            yield code


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that it came of."""
    waiting: list[Any] = [error]
    seen: set[int] = set()
    while waiting:
        cause = waiting.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [cause.__context__, cause.__cause__, getattr(cause, "inner_exception", None)]


class Turns:
    """One call at a time: other threads wait, and a call from within a call, as a signal handler's, is an error."""

    def __init__(self, what: str) -> None:
        self._what, self._lock, self._owner = what, threading.Lock(), 0
        _all.add(self)

    def after_fork(self) -> None:
        """Forget a call of another thread, which does not exist in a process that was forked meanwhile."""
        if self._owner not in (0, threading.get_ident()):
            self._lock, self._owner = threading.Lock(), 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise Invalid(
                f"{self._what} is called while a call of it runs in the same thread, as from a signal handler"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._owner = 0
        self._lock.release()


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork() -> None:
    for turns in _all:
        turns.after_fork()


os.register_at_fork(after_in_child=_after_fork)
