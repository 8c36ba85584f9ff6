"""Work: long requests of a widget, one after the other in a thread: the kernel stays free for a cancellation."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

Send = Callable[[dict[str, Any], list[bytes]], None]
"""Takes a message to a page, and buffers."""
Publish = Callable[[dict[str, Any]], None]
"""Takes the state that a page shows."""


class Cancelled(BaseException):
    """Raised within work that a person cancelled. Not an `Exception`, so that no handler takes it for a failure."""


class Work:
    """A queue of calls and the thread that runs them. Without a thread, each runs at once."""

    def __init__(self, threads: bool = True) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads, self._thread = threads, threading.Thread(target=self._run, name="daceml_train work", daemon=True)
        self.doing = ""
        """The running work; empty for none."""
        self.since = 0.0

    def another(self) -> Work:
        """A queue beside this one, with a thread if this one has one."""
        return Work(self._threads)

    @property
    def waiting(self) -> bool:
        """Whether a call waits for the running one."""
        return not self._queue.empty()

    def put(self, call: Callable[[], None], what: str) -> None:
        """Run a call after those that wait. It handles its own exceptions, including `Cancelled`."""
        if not self._threads:
            call()
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._queue.put((call, what))

    def cancel(self) -> str:
        """Interrupt the running work at the next line of Python; return its name, or an empty text."""
        with self._lock:
            doing = self.doing
            if doing and self._thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident), ctypes.py_object(Cancelled)
                )
            return doing

    def _run(self) -> None:
        while True:
            try:
                call, what = self._queue.get()
                self.doing, self.since = what, time.perf_counter()
                try:
                    call()
                finally:
                    with self._lock:
                        self.doing = ""
            except Cancelled:  # it came when the work had just ended
                continue
