"""Compiler: runs a compiler's command under a time limit and terminates it with all of its child processes.

A compiler that hangs (a stalled network file system, a license server) must not stop training: after
`$DACEML_TRAIN_COMPILER_TIMEOUT` seconds (600) the command is killed and counts as failed, and PyTorch takes over. The
same process does not run that compiler again, since every further graph would wait as long.

A compiler does not outlive the process that needs it, however that ends. The system tells children of their parent's
end only by thread (`PR_SET_PDEATHSIG`), and not theirs, as g++ has: so a shell waits beside them for the end of a pipe.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from daceml_train.errors import CompilerError, Rejected
from daceml_train.storage.interruption import Interrupted, interrupted, works_for_another
from daceml_train.storage.time_limits import seconds_of

TIMEOUT = "DACEML_TRAIN_COMPILER_TIMEOUT"
SECONDS = 600.0
"""The default limit: ten times the compile time of the package's largest source."""

_LACKS = tuple(
    os.strerror(number)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.EIO)
)
"""What a compiler prints when the machine lacks space, memory, processes, or files."""

LOOK = 0.1
"""Seconds between two looks of a thread whether the call that it works for was interrupted."""

_WATCH = ("/bin/sh", "-c", "read end; kill -9 0")

_watching: set[int] = set()
"""This process's ends of the pipes that the shells wait for."""

_hung: dict[str, str] = {}
"""Compiler -> the message of its timeout."""


def compiler_command(compiler: str | None = None) -> list[str]:
    """The C++ compiler with its first arguments: as given, else `$CXX`, else g++."""
    return shlex.split(compiler or os.environ.get("CXX") or "g++") or ["g++"]


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed, whatever its exit status.

    Raises `OSError` if it cannot be started, `CompilerError` if it exceeds the limit, `Interrupted`. No process
    that the command started survives these, nor the end of this process.
    """
    if command[0] in _hung:
        raise CompilerError(_hung[command[0]])
    limit = seconds_of(TIMEOUT, SECONDS, CompilerError)
    with _group() as group:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=group,
        )
        try:
            out, err = _printed(process, limit)
        except subprocess.TimeoutExpired:
            _hung[command[0]] = (
                f"the compiler {command[0]!r} did not end within {limit:g} s and was stopped; name one that works in "
                f"$CXX, or give it more time with {TIMEOUT}=<seconds>"
            )
            raise CompilerError(_hung[command[0]]) from None
        finally:
            if process.returncode is None:
                _kill(group or process.pid)
                process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _printed(process: subprocess.Popen[str], limit: float) -> tuple[str, str]:
    """What a process prints on its output and as errors until its end. Raises `TimeoutExpired`, or `Interrupted`."""
    if not works_for_another():
        return process.communicate(timeout=limit)
    end = time.monotonic() + limit
    while True:
        left = end - time.monotonic()
        try:
            return process.communicate(timeout=min(left, LOOK))
        except subprocess.TimeoutExpired:
            if interrupted():
                raise Interrupted from None
            if left <= LOOK:
                raise


@contextlib.contextmanager
def _group() -> Iterator[int]:
    """The number of a new group of processes: of a driver such as g++, and of the compiler that it starts.

    They are killed where this process ends within the context, or an error ends the context. 0, which makes a process
    the first of its own group, where no shell can be started that watches.
    """
    watched, ours = os.pipe()
    _watching.add(ours)
    shell = None
    try:
        with contextlib.suppress(OSError):
            nowhere = subprocess.DEVNULL
            shell = subprocess.Popen(_WATCH, stdin=watched, stdout=nowhere, stderr=nowhere, process_group=0)
        yield shell.pid if shell is not None else 0
    except BaseException:
        if shell is not None:  # Ctrl-C may have come when the compiler had just been started
            _kill(shell.pid)
        raise
    finally:
        if shell is not None:
            shell.kill()
            shell.wait()
        if ours in _watching:  # in a process that was forked here, it is closed
            _watching.remove(ours)
            os.close(ours)
        os.close(watched)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _leave_to_parent() -> None:
    """In a process that was just forked: its parent's end must end the parent's compilers while this one lives on."""
    while _watching:
        os.close(_watching.pop())


os.register_at_fork(after_in_child=_leave_to_parent)


def failure(result: subprocess.CompletedProcess[str], what: str) -> CompilerError:
    """The error of a command that failed: the text was refused (`Rejected`), or the machine lacks something.

    A compiler that was killed, in whole or in part, was so for lack of memory, or by whoever stops programs.
    """
    printed = (result.stderr or result.stdout).strip()
    tail = "\n".join(printed.splitlines()[-20:])
    lacks = [text for text in _LACKS if text.lower() in printed.lower()]
    if result.returncode < 0 or "killed signal" in printed.lower():
        lacks.append("it was killed")
    if lacks:
        return CompilerError(f"{what} failed: {lacks[0]}\n{tail}")
    return Rejected(f"{what} failed (exit {result.returncode}):\n{tail}")
