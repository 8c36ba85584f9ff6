"""Files: written atomically, and read only if they belong to this user and are undamaged."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path

from daceml_train.storage.folders import make
from daceml_train.storage.trust import distrust_open, warn_once

PARTIAL = ".partial-"
"""The name prefix of files that are being written."""
_STALE = 3600
"""The age in seconds from which such a file counts as left by a killed process."""
_DIGEST = hashlib.sha256().digest_size
_SEAL = b"daceml_train: whole\n"


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file atomically: readers see the old or the new one. Raises `OSError` and then leaves no file."""
    descriptor, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(descriptor, mode)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def keep(path: Path, content: bytes) -> None:
    """`replace` for content that can be regenerated: failure is a warning. Creates the parent folders."""
    try:
        make(path.parent)
        replace(path, content)
    except OSError as error:
        warn_once(f"daceml_train cannot write its cache in {path.parent}: {error}")


def clear_partial(folder: Path, age: float = _STALE) -> int:
    """Remove files that processes were writing when they were killed; the bytes that were freed."""
    freed = 0
    for file in folder.glob(f"{PARTIAL}*"):
        with contextlib.suppress(OSError):  # its writer finished first
            status = file.stat()
            if time.time() - status.st_mtime >= age:
                file.unlink()
                freed += status.st_size
    return freed


def sealed(content: bytes, name: str) -> bytes:
    """The content followed by a checksum of it and of its file name, which a loader ignores."""
    return content + _SEAL + _checksum(content, name)


def unsealed(path: Path, name: str | None = None) -> bytes | None:
    """The content sealed under this name, by default the file's own.

    None if the file is missing, damaged, a copy of another one, or writable by others; that last case is a warning.
    """
    try:
        with path.open("rb") as file:
            if reason := distrust_open(path, file.fileno()):
                warn_once(f"daceml_train does not use a file of its cache: {reason}; it is regenerated")
                return None
            whole = file.read()
    except OSError:
        return None
    content, end = whole[: -_DIGEST - len(_SEAL)], whole[-_DIGEST - len(_SEAL) :]
    return content if end == _SEAL + _checksum(content, path.name if name is None else name) else None


def _checksum(content: bytes, name: str) -> bytes:
    return hashlib.sha256(content + b"\0" + name.encode()).digest()
