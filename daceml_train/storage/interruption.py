"""Interruption: the threads that work for a call end with it where it is interrupted, as by Ctrl-C.

Python raises `KeyboardInterrupt` in the main thread alone. The others look, while they wait, whether the call that they
work for still needs them.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from daceml_train.errors import DacemlError

_here = threading.local()


class Interrupted(Exception):
    """The call that this thread works for has ended without it: nobody is told."""


@contextlib.contextmanager
def workers(count: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Threads that work for the calling one, by default as many as there are cores.

    Where the context ends by an error of this package, as of one of the threads, what runs is finished and nothing else
    starts. Where anything else ends it, such as Ctrl-C, what runs is ended, too.
    """
    ended = threading.Event()
    pool = ThreadPoolExecutor(count or os.cpu_count() or 1, initializer=_work_for, initargs=(ended,))
    try:
        try:
            yield pool
        except DacemlError:
            pool.shutdown(cancel_futures=True)
            raise
    except BaseException as error:
        if not isinstance(error, DacemlError):
            ended.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _work_for(ended: threading.Event) -> None:
    _here.ended = ended


def works_for_another() -> bool:
    """Whether this thread is one of `workers`: it looks whether it is `interrupted`, as nothing is raised in it."""
    return getattr(_here, "ended", None) is not None


def interrupted() -> bool:
    """Whether the call that this thread works for was interrupted."""
    ended = getattr(_here, "ended", None)
    return ended is not None and ended.is_set()


def pause(seconds: float) -> None:
    """Sleep. Raises `Interrupted` as soon as the call that this thread works for is interrupted."""
    if not works_for_another():
        time.sleep(seconds)
    elif _here.ended.wait(seconds):
        raise Interrupted


__all__ = ["Interrupted", "interrupted", "pause", "workers", "works_for_another"]
