"""Children: forked from a process that has imported everything, so that one costs no more than its training."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from daceml_train.storage.folders import close_private

HANG = 60.0
"""Seconds after which a child counts as hanging."""


@dataclass
class Child:
    """A child process, its output, and its result."""

    process: int
    pipe: int
    begun: float = field(default_factory=time.monotonic)
    heard: bytes = b""
    status: int | None = None
    hung: bool = False

    @property
    def moments(self) -> list[str]:
        """The moments that it told of, in order."""
        return ["start", *self.heard.split(b"\0")[0].decode(errors="replace").splitlines()]

    @property
    def moment(self) -> str:
        """What it was at when last heard of."""
        return self.moments[-1]

    @property
    def result(self) -> Any:
        """What its function returned, or the error that it raised; None if it was killed."""
        found = self.heard.split(b"\0", 1)
        try:
            return pickle.loads(found[1]) if len(found) > 1 else None  # from our own pipe
        except Exception:
            return None

    def await_moment(self, moment: str, limit: float = HANG) -> None:
        """Hear it until it tells of a moment or ends, for so many seconds at most."""
        until = self.begun + limit
        while moment not in self.moments and self.status is None and time.monotonic() < until:
            self.listen(until, once=True)

    def listen(self, until: float, once: bool = False) -> None:
        """Hear it until it ends, until that time, or with `once` until it says anything."""
        while self.status is None:
            left = until - time.monotonic()
            if left <= 0:
                return
            ready, _, _ = select.select([self.pipe], [], [], left)
            if ready:
                told = os.read(self.pipe, 1 << 16)
                self.heard += told
                if not told:
                    self.status = os.waitpid(self.process, 0)[1]
                    os.close(self.pipe)
                if once:
                    return

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, alone, as an out-of-memory killer does."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, number)

    def end(self, limit: float = HANG) -> None:
        """Wait for its end; kill it and note so if it does not come."""
        self.listen(time.monotonic() + limit)
        if self.status is None:
            self.hung = True
            self.kill()
            self.listen(time.monotonic() + 10)


def begin(function: Callable[[int], Any]) -> Child:
    """Fork a child that calls the function with a descriptor for marks."""
    reader, writer = os.pipe()
    os.set_inheritable(writer, False)
    process = os.fork()
    if process:
        os.close(writer)
        return Child(process, reader)
    code = 1
    try:
        os.close(reader)
        try:
            value = function(writer)
            code = 0
        except BaseException as error:
            value = f"{type(error).__name__}: {error}"
        os.write(writer, b"\0" + pickle.dumps(value))
        close_private()  # the parent's own exit handlers must not run here
    finally:
        os._exit(code)


def finished(function: Callable[[int], Any], limit: float = HANG) -> Child:
    """The child of a function, ended."""
    child = begin(function)
    child.end(limit)
    return child
