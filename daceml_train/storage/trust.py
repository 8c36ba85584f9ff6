"""Trust: whether only this user or root can have written the content of a path.

The cache contains native code. A checksum detects damage, but whoever can write the file can write its checksum, so
only the owner and the permissions tell who may have written it.
"""

from __future__ import annotations

import logging
import os
import stat
import warnings
from pathlib import Path

_warned: set[str] = set()


def distrust(path: Path) -> str:
    """Why a folder or file is not trusted, as a sentence that names it; empty if it is trusted.

    It must belong to this user or to root and be writable by its owner alone. A world-writable
    parent folder must have the sticky bit, as `/tmp` has; otherwise anybody could replace it.
    """
    place = Path(os.path.realpath(path))
    if reason := _own(place, place.stat()):
        return reason
    for above in place.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"{above}, above {place}, is writable by everybody"
    return ""


def distrust_open(path: Path, descriptor: int) -> str:
    """As `distrust`, for an open file in a folder that is trusted."""
    return _own(path, os.fstat(descriptor))


def _own(place: Path, status: os.stat_result) -> str:
    if status.st_uid not in (0, os.geteuid()):
        return f"{place} belongs to another user (number {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{place} is writable by others (chmod go-w makes it yours alone)"
    return ""


def warn_once(message: str) -> None:
    """A warning about the cache, shown once per process; where warnings are errors, it is logged as one."""
    if message in _warned:
        return
    _warned.add(message)
    try:
        warnings.warn(message, stacklevel=2)
    except UserWarning:
        # `-W error` is meant for what a program does wrong. Here only time is lost, and whoever warns is about to go on
        # without the cache; raised, it would end one compilation, as a defect of this package, and not the next.
        logging.getLogger("daceml_train").error("%s", message)
