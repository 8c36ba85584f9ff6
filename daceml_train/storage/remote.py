"""The remote cache: a folder of any file system that fsspec knows, where hosts find what one of them has built.

Names are made of content alone, so an entry of one name is equal wherever it was built. Entries are executed, and an
object store has no owners that could be checked: each entry is therefore signed with a secret of its users, and what
has no valid signature is not used. The remote cache only ever saves time: without it, each host builds for itself.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import stat
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.storage.files import PARTIAL, replace
from daceml_train.storage.trust import warn_once

REMOTE = "DACEML_TRAIN_REMOTE_CACHE"
"""Names the URL of the remote cache, such as `s3://bucket/folder`."""
KEY = "DACEML_TRAIN_REMOTE_CACHE_KEY"
"""Names a local file with the secret that entries are signed with."""
SHORTEST = 16
"""The bytes that a secret has at least."""
_MARK = b"daceml_train: signed\n"
_TAG = hashlib.sha256().digest_size
_unreachable: set[str] = set()


@dataclass(frozen=True)
class RemoteCache:
    """Signed copies of files of the cache, under `folder` of a file system."""

    url: str
    files: Any
    """A file system of fsspec."""
    folder: str
    secret: bytes

    def fetch(self, path: Path) -> bool:
        """Write the entry of this name to `path`; whether there was one that is signed."""
        name = _name(path)
        try:
            whole = self.files.cat_file(f"{self.folder}/{name}")
        except FileNotFoundError:
            return False
        content, end = whole[: -_TAG - len(_MARK)], whole[-_TAG - len(_MARK) :]
        if not hmac.compare_digest(end, _MARK + self._signature(name, content)):
            warn_once(
                f"daceml_train does not use {name} of its remote cache {self.url}: it is damaged, or signed with "
                f"another secret than that of ${KEY}; it is built here"
            )
            return False
        try:
            replace(path, content, 0o700)
        except OSError:  # a full disk: whoever builds says so
            return False
        return True

    def store(self, path: Path) -> None:
        """Copy a file there unless the remote cache has one of its name. A reader sees a whole entry or none."""
        name = _name(path)
        final = f"{self.folder}/{name}"
        if not path.exists() or self.files.exists(final):
            return
        content = path.read_bytes()
        folder = final.rpartition("/")[0]
        partial = f"{folder}/{PARTIAL}{uuid.uuid4().hex}"
        self.files.makedirs(folder, exist_ok=True)
        self.files.pipe_file(partial, content + _MARK + self._signature(name, content))
        self.files.mv(partial, final)

    def _signature(self, name: str, content: bytes) -> bytes:
        return hmac.digest(self.secret, name.encode() + b"\0" + content, "sha256")


def remote_cache() -> RemoteCache | None:
    """The remote cache that the environment names, or None. Raises `Invalid` where it cannot be what is meant."""
    url = os.environ.get(REMOTE)
    return _opened(url, os.environ.get(KEY), os.getpid()) if url else None


@functools.lru_cache(maxsize=4)
def _opened(url: str, key: str | None, process: int) -> RemoteCache:  # per process: connections do not survive a fork
    import fsspec

    secret = _secret(key)
    try:
        files, folder = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, TypeError) as error:
        raise Invalid(f"the remote cache {url} (from ${REMOTE}) cannot be opened: {error}") from error
    return RemoteCache(url, files, folder.rstrip("/"), secret)


def _secret(key: str | None) -> bytes:
    advice = f"openssl rand -hex 32 > FILE; chmod 600 FILE; and name the file in ${KEY} on all hosts"
    if not key:
        raise Invalid(f"${REMOTE} is set without ${KEY}: entries are executed, so they are signed", advice=advice)
    try:
        with open(key, "rb") as file:
            status, secret = os.fstat(file.fileno()), file.read().strip()
    except OSError as error:
        raise Invalid(f"the secret of the remote cache cannot be read: {error}", advice=advice) from error
    if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o077:
        raise Invalid(f"the secret of the remote cache can be read or written by others: {key}", advice=advice)
    if len(secret) < SHORTEST:
        raise Invalid(f"the secret of the remote cache in {key} has less than {SHORTEST} bytes", advice=advice)
    return secret


def fetch(path: Path) -> bool:
    """Write the file of this name from the remote cache; False where there is none, or no remote cache."""
    return bool(_ask(RemoteCache.fetch, path))


def store(path: Path) -> None:
    """Copy a file that was built to the remote cache, if there is one."""
    _ask(RemoteCache.store, path)


def _ask(what: Callable[[RemoteCache, Path], Any], path: Path) -> Any:
    """A result of the remote cache. One that fails is a warning, and this process does not ask it again."""
    remote = remote_cache()
    if remote is None or remote.url in _unreachable:
        return None
    try:
        return what(remote, path)
    except Exception as error:  # file systems raise errors of their own libraries
        _unreachable.add(remote.url)
        cause = f"{type(error).__name__}: {error}"
        warn_once(f"daceml_train cannot use its remote cache {remote.url} ({cause}); this process goes on without it")
        return None


def _name(path: Path) -> str:
    """The name of an entry: the kind, which is the folder's name in the cache, and the file's name."""
    return f"{path.parent.name}/{path.name}"
