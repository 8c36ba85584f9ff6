"""Folders: the location of the cache, and a private folder of the process if the cache is unusable."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from daceml_train.errors import Invalid
from daceml_train.storage.named_by_user import path_of
from daceml_train.storage.trust import distrust, warn_once

CACHE = "DACEML_TRAIN_CACHE"
DUMP = "DACEML_TRAIN_DUMP"
"""Names the folder that receives every stage of what is compiled; see `driver.dump`."""
BUILDING = ".building-"
"""The name prefix of build folders; each contains a file that its builder keeps locked."""
PRIVATE = "daceml_train-private-"
LOCK = "lock"
YOUNG = 60
"""The age in seconds up to which a folder without a lock counts as being created."""


def cache_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """The cache: `given`, else `$DACEML_TRAIN_CACHE`, else `daceml_train` in the user's cache folder.

    For a user without a home folder, as the arbitrary ones of containers, that is a folder below the temporary one.
    Raises `Invalid` where the folder that was named is none.
    """
    named = os.environ.get(CACHE)
    if given is not None:
        folder, origin = path_of(given, "cache"), ""
    elif named:
        folder, origin = path_of(named, f"${CACHE}"), f" (from ${CACHE})"
    else:
        folder, origin = _default(), ""
    folder = folder.absolute()
    for place in (folder, *folder.parents):
        if place.is_dir():
            break
        if place.exists() or place.is_symlink():
            raise Invalid(f"the cache {folder}{origin} is not a folder: {place} is a file", advice="name another one")
    return folder


def _default() -> Path:
    try:
        return (Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "daceml_train").expanduser()
    except RuntimeError:  # no $HOME, and no entry in the list of users: all runs of this user number share one
        return Path(tempfile.gettempdir()) / f"daceml_train-{os.geteuid()}"


def make(folder: Path) -> Path:
    """The folder, created if necessary with its parents, for this user alone. Raises `OSError`."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        with contextlib.suppress(FileExistsError):  # another process was faster
            place.mkdir(mode=0o700)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    return folder


def usable(folder: Path) -> Path:
    """The folder if its content is trusted; else a private one for this process, and a warning with the reason."""
    try:
        reason = distrust(make(folder))
    except OSError as error:
        reason = str(error)
    if not reason:
        return folder
    warn_once(f"daceml_train cannot use its cache in {folder}: {reason}; this process keeps what it compiles to itself")
    return private() / folder.name


def to_write(folder: Path) -> Path:
    """The trusted folder if files can be created in it; else a private one."""
    folder = usable(folder)
    if os.access(folder, os.W_OK | os.X_OK):
        return folder
    return make(private() / folder.name)


def private() -> Path:
    """A folder that only this process uses and that is removed with it."""
    return _private(os.getpid())


@functools.cache
def _private(process: int) -> Path:  # per process: a fork must not take its parent's folder away
    place = Path(tempfile.gettempdir())
    clear_dead(place, f"{PRIVATE}{os.geteuid()}-")
    stack = contextlib.ExitStack()
    folder = stack.enter_context(locked(place, f"{PRIVATE}{os.geteuid()}-"))
    _open.append(stack)
    return folder


_open: list[contextlib.ExitStack] = []


@atexit.register
def close_private() -> None:
    """Remove this process's private folder; for those that end by `os._exit`, which runs no exit handlers."""
    while _open:
        _open.pop().close()
    _private.cache_clear()


@contextlib.contextmanager
def locked(parent: Path, prefix: str = BUILDING) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end. While the process lives, `clear_dead` leaves it alone."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    owner = os.getpid()
    try:
        unlocked = folder / f"{LOCK}-new"  # `clear_dead` may look before it is locked
        with unlocked.open("w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: then its age counts
                fcntl.flock(lock, fcntl.LOCK_EX)
            unlocked.rename(folder / LOCK)
            yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


def clear_dead(parent: Path, prefix: str = BUILDING) -> int:
    """Remove folders of `locked` whose process was killed; the bytes that were freed."""
    freed = 0
    for folder in parent.glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or not _dead(folder):
                continue
            freed += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        except OSError:  # its builder finished first
            continue
        shutil.rmtree(folder, ignore_errors=True)
    return freed


def _dead(folder: Path) -> bool:
    """Whether no process holds the folder's lock."""
    try:
        with (folder / LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:  # killed before it created the lock, or about to create it
        return time.time() - folder.stat().st_mtime > YOUNG
    except OSError:
        return False


def writable_folder(folder: Path) -> Path:
    """The folder, made if need be, in which files can be written. Raises `OSError` where they cannot.

    It is the user's, who decides by the umask who may write there: nothing that is read from it is executed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder
