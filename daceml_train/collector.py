"""Python's collector of cyclic garbage, paused while a program is captured and read back.

Both allocate some hundred thousand objects that stay. Python answers with full collections, each of which visits all
objects of the process, and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_inside = [0, False]
"""How many calls are inside `paused`, and whether the collector was enabled before the first one."""


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Without collections until the last of the calls that are inside ends; a collector that is disabled stays so."""
    with _lock:
        if not _inside[0]:
            _inside[1] = gc.isenabled()
            gc.disable()
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0] and _inside[1]:
                gc.enable()
