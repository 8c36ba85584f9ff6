"""Work in a forked copy of this process, at low priority: it sees all objects as they are, and changes none of ours.

The copy ends with this process, however that ends. Its output goes to a file, of which failures show the end. It
belongs to the process that forked it: one that the user forks meanwhile, as a data loader does, has no part in it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from daceml_train.errors import Invalid

NICE = 5
"""How far the priority of the copy is below ours: a third of our share, where all cores are busy."""

STALLED = 120.0
"""Seconds without processor time after which a copy is ended: a lock that another thread held may have been copied."""

_LOOKED = 10.0
"""Seconds between two looks at the processor time."""

Tell = Callable[[Mapping[str, Any]], None]
"""Sends a message, of what JSON expresses, to the process that forked."""


FOREIGN = "the compiling process belongs to the process that this one was forked from"


class Forked:
    """A function that runs in a forked copy of this process; `tell` sends what `poll` returns here."""

    def __init__(self, work: Callable[[Tell], Mapping[str, Any]]) -> None:
        if not hasattr(os, "fork"):
            raise Invalid("compilation in the background forks the process, which this system cannot do")
        self.started = time.monotonic()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # it is read after the copy has ended
        receive, send = os.pipe()
        alive, ours = os.pipe()  # at whose end the copy knows that this process has ended
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, whose locks `STALLED` is about
            self.pid = os.fork()
        if not self.pid:
            os.close(receive)
            os.close(ours)
            _copy(work, send, alive, self._log)
        os.close(send)
        os.close(alive)
        os.set_blocking(receive, False)
        self._receive, self._rest = receive, b""
        self.result: Mapping[str, Any] | None = None
        """What `work` returned, or `error`: why there is no result; None while it runs."""
        self._looked, self._used = self.started, -1.0
        self.foreign = False
        """Whether this is another process than the one that the copy belongs to, so that there is no result."""
        self._owner, self._pipes = os.getpid(), (ours, receive)
        self._end = weakref.finalize(self, _end, self._owner, self.pid, *self._pipes)
        _copies.add(self)

    def poll(self) -> list[Mapping[str, Any]]:
        """The messages that arrived since the last call; once the copy has ended, `result` is set."""
        if os.getpid() != self._owner:
            self._leave()
        if self.result is not None:
            return []
        found, ended = [], False
        with contextlib.suppress(BlockingIOError):
            while not ended:
                read = os.read(self._receive, 1 << 16)
                self._rest, ended = self._rest + read, not read
        *lines, self._rest = self._rest.split(b"\n")
        for line in map(json.loads, lines):
            if "result" in line:
                self.result = line["result"]
            else:
                found.append(line)
        if self.result is None and ended:
            self.result = {"error": _died(self.pid, self._log)}
        elif self.result is None and self._stalled():
            self.result = {"error": f"the compiling process used no processor time for {STALLED:.0f} s"}
        if self.result is not None:
            self.end()
        return found

    @property
    def running(self) -> bool:
        """Whether the copy is still there; its result may wait to be polled."""
        if self.result is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except OSError:
            return False

    def end(self) -> None:
        """End the copy and the compilers that it has started."""
        self._end()

    def _leave(self) -> None:
        """In a process that was forked from the one that the copy belongs to: have no part in it."""
        if self._end.detach() is None:  # it has been ended
            return
        for pipe in self._pipes:  # as long as one is open here, the copy does not notice the other process's end
            os.close(pipe)
        self.foreign, self.result = True, {"error": FOREIGN}

    def _stalled(self) -> bool:
        now = time.monotonic()
        if now - self._looked < (STALLED if self._used >= 0 else _LOOKED):
            return False
        used, before = sum(family(self.pid).values()), self._used
        self._looked, self._used = now, used
        return used == before


_copies: weakref.WeakSet[Forked] = weakref.WeakSet()


def _leave_all() -> None:
    for copy in list(_copies):
        copy._leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


def family(pid: int) -> dict[int, float]:
    """A process and all that it started, in any group, with the processor time of each in clock ticks."""
    used: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            own = int(path.parent.name)
            used[own] = float(sum(map(int, fields[11:15])))
            children.setdefault(int(fields[1]), []).append(own)
    found, waiting = {}, [pid]
    while waiting:
        current = waiting.pop()
        if current in used:
            found[current] = used[current]
            waiting += children.get(current, [])
    return found


def _end(owner: int, pid: int, *pipes: int) -> None:
    if os.getpid() != owner:  # forked by native code, which `_leave_all` is not told of
        return
    for pipe in pipes:
        with contextlib.suppress(OSError):
            os.close(pipe)
    for member in family(pid):
        with contextlib.suppress(OSError):
            os.kill(member, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.waitpid(pid, 0)


def _died(pid: int, log: IO[bytes]) -> str:
    status = 0
    with contextlib.suppress(OSError):
        status = os.waitpid(pid, 0)[1]
    how = "ended"
    if os.WIFSIGNALED(status):
        how = f"was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return f"the compiling process {how}" + (f": {lines[-1]}" if lines else "")


def _copy(work: Callable[[Tell], Mapping[str, Any]], send: int, alive: int, log: IO[bytes]) -> NoReturn:
    """The life of the copy, which runs nothing that this process does when it exits."""
    try:
        os.setsid()
        gc.freeze()  # what was garbage here may have finalizers, such as those of folders
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=_follow, args=(alive,), daemon=True).start()
        _silence(log)
        os.nice(NICE)
        torch.set_num_threads(1)  # the threads of OpenMP are not copied

        def tell(message: Mapping[str, Any]) -> None:
            os.write(send, json.dumps(message).encode() + b"\n")

        try:
            result = work(tell)
        except BaseException as error:
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        tell({"result": result})
    finally:
        os._exit(0)


def _follow(alive: int) -> None:
    """End, with the compilers that were started, when the process that forked has ended."""
    with contextlib.suppress(OSError):
        os.read(alive, 1)
    for member in reversed(list(family(os.getpid()))):
        with contextlib.suppress(OSError):
            os.kill(member, signal.SIGKILL)


def _silence(log: IO[bytes]) -> None:
    """Let output go to the log, and messages nowhere: this process prints its own."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.disable(logging.CRITICAL)
    faulthandler.enable(sys.stderr)


__all__ = ["Forked", "Tell"]
