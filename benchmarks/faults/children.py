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
    def moment(self) -> str:
        """What it was at when last heard of."""
        lines = self.heard.split(b"\0")[0].decode(errors="replace").splitlines()
        return lines[-1] if lines else "start"

    @property
    def result(self) -> Any:
        """What its function returned, or the error that it raised; None if it was killed."""
        found = self.heard.split(b"\0", 1)
        try:
            return pickle.loads(found[1]) if len(found) > 1 else None  # from our own pipe
        except Exception:
            return None

    def listen(self, until: float) -> None:
        """Hear it until it ends, or until that time."""
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
