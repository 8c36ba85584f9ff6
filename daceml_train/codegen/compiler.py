"""Compiler: runs a compiler's command under a time limit and terminates it with all of its child processes.

A compiler that hangs (a stalled network file system, a license server) must not stop training: after
`$DACEML_TRAIN_COMPILER_TIMEOUT` seconds (600) the command is killed and counts as failed, and PyTorch takes over. The
same process does not run that compiler again, since every further graph would wait as long.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence

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

_hung: dict[str, str] = {}
"""Compiler -> the message of its timeout."""


def compiler_command(compiler: str | None = None) -> list[str]:
    """The C++ compiler with its first arguments: as given, else `$CXX`, else g++."""
    return shlex.split(compiler or os.environ.get("CXX") or "g++") or ["g++"]


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it printed, whatever its exit status.

    Raises `OSError` if it cannot be started, `CompilerError` if it exceeds the limit, `Interrupted`. No process
    that the command started survives these.
    """
    if command[0] in _hung:
        raise CompilerError(_hung[command[0]])
    limit = seconds_of(TIMEOUT, SECONDS, CompilerError)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a group of its own: a driver such as g++ starts the compiler and the assembler
    )
    try:
        out, err = _printed(process, limit)
    except subprocess.TimeoutExpired:
        _hung[command[0]] = (
            f"the compiler {command[0]!r} did not end within {limit:g} s and was stopped; name one that works in $CXX, "
            f"or give it more time with {TIMEOUT}=<seconds>"
        )
        raise CompilerError(_hung[command[0]]) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
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
