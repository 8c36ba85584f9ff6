"""Threads that a model starts: what they compute is not seen by the thread that follows or records its calls."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

_watched = threading.local()


@contextlib.contextmanager
def watched(started: Callable[[], None]) -> Iterator[None]:
    """Within this context, `started` is called before this thread starts another one."""
    _install()
    before = getattr(_watched, "started", None)
    _watched.started = started
    try:
        yield
    finally:
        _watched.started = before


@functools.cache
def _install() -> None:
    original = threading.Thread.start

    @functools.wraps(original)
    def start(self: threading.Thread) -> None:
        started = getattr(_watched, "started", None)
        if started is not None:
            started()
        original(self)

    threading.Thread.start = start  # type: ignore[method-assign]


__all__ = ["watched"]
