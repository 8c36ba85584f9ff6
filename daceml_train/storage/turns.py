"""Turns: of all processes and threads that need the same file of the cache, one builds it, and the others wait for it.

Whose turn it is is an advisory lock on a file beside what is built. The kernel of the system releases the lock of a
process that dies, and the next one that waits builds. Without locks (some file systems have none), or after a time
limit, each builds for itself: files are written atomically and equal, so that costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TypeVar

from daceml_train.errors import Invalid
from daceml_train.storage.interruption import pause
from daceml_train.storage.remote import fetch, store
from daceml_train.storage.time_limits import seconds_of
from daceml_train.storage.trust import warn_once

TIMEOUT = "DACEML_TRAIN_BUILD_TIMEOUT"
SECONDS = 900.0
"""The default time limit of those who wait: more than a compiler may take."""
TURN = ".turn-"
"""The name prefix of the files that are locked."""
_PAUSES = (0.01, 0.25)
"""The first and the longest pause between two looks at a lock, in seconds."""

Built = TypeVar("Built")


class Turn(Enum):
    """What came of asking for a turn."""

    MINE = "this process builds"
    FINISHED = "another process has ended its turn"
    BUSY = "another process is building"
    NONE = "there is no lock, or it took too long"


def build_once(path: Path, ready: Callable[[], Built | None], build: Callable[[], Built]) -> Built:
    """What is `ready`, what is in the remote cache, or the result of `build`, which one process at a time runs for it.

    `ready` looks whether it is there. If the process whose turn it was has ended and it is not, as where the cache is
    full, those who waited build at once, rather than one after another.
    """
    with turn(path) as state:
        if state is Turn.MINE or state is Turn.FINISHED:
            found = ready()
            if found is not None:
                return found
        if state is not Turn.FINISHED:
            return _fetched_or_built(path, ready, build)
    return _fetched_or_built(path, ready, build)


def _fetched_or_built(path: Path, ready: Callable[[], Built | None], build: Callable[[], Built]) -> Built:
    """What another host has built, or else the result of `build`, which other hosts may fetch then."""
    if fetch(path) and (found := ready()) is not None:
        return found
    built = build()
    store(path)
    return built


@contextlib.contextmanager
def turn(path: Path, wait: bool = True) -> Iterator[Turn]:
    """The turn to build `path`, held within the context if it is `MINE`; without `wait` it may be `BUSY`."""
    lock, limit = path.parent / f"{TURN}{path.name}", seconds_of(TIMEOUT, SECONDS, Invalid)
    try:
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:  # what is built cannot be written either
        yield Turn.NONE
        return
    try:
        state = _ask(lock, file)
        if wait and state is Turn.BUSY:
            state = _wait(lock, file, path.name, limit)
        try:
            yield state
        finally:
            if state is Turn.MINE:
                with contextlib.suppress(OSError):
                    lock.unlink()  # while it is locked: those who wait find that the turn was ended, not lost
                with contextlib.suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it, too
    finally:
        os.close(file)


def _ask(lock: Path, file: int) -> Turn:
    """Whose turn it is now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN):
            return Turn.NONE
        return Turn.BUSY if _current(lock, file) else Turn.FINISHED
    if not _current(lock, file):
        return Turn.FINISHED
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return Turn.MINE


def _wait(lock: Path, file: int, name: str, limit: float) -> Turn:
    """Whose turn it is once the process that builds has ended its turn or died, or the limit is over."""
    start, seconds = time.monotonic(), _PAUSES[0]
    while (state := _ask(lock, file)) is Turn.BUSY:
        if time.monotonic() - start >= limit:
            warn_once(
                f"daceml_train has waited {limit:g} s for {_holder(lock)}, which builds {name}, and now builds it "
                f"itself; {TIMEOUT}=<seconds> is how long it waits"
            )
            return Turn.NONE
        pause(seconds)
        seconds = min(2 * seconds, _PAUSES[1])
    return state


def _current(lock: Path, descriptor: int) -> bool:
    """Whether the locked file is still the one at its path."""
    try:
        return os.path.samestat(lock.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _holder(lock: Path) -> str:
    """Who holds a lock, as it has written."""
    try:
        return lock.read_text(errors="replace").strip() or "another process"
    except OSError:
        return "another process"


def clear_turns(folder: Path) -> None:
    """Remove the lock files of processes that were killed."""
    for lock in folder.glob(f"{TURN}*"):
        with contextlib.suppress(OSError), lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _current(lock, file.fileno()):
                lock.unlink()
