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
"""Takes what a page is to show."""


class Cancelled(BaseException):
    """Raised within the work that a person cancelled. No `Exception`: nothing in between takes it for a failure."""


class Work:
    """A queue of calls and the thread that runs them. Without a thread, each runs at once."""

    def __init__(self, threads: bool = True) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads, self._thread = threads, threading.Thread(target=self._run, name="daceml_train work", daemon=True)
        self.doing = ""
        """What runs now; empty for nothing."""
        self.since = 0.0

    def put(self, call: Callable[[], None], what: str) -> None:
        """Run a call after those that wait. It handles its own exceptions, `Cancelled` among them."""
        if not self._threads:
            call()
            return
        if not self._thread.is_alive():
            self._thread.start()
        self._queue.put((call, what))

    def cancel(self) -> str:
        """Interrupt what runs, at the next line of Python; what it was, or an empty text."""
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
