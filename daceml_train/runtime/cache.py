"""Cache: lowered programs and compiled kernels on disk, keyed by content.

An entry is written under a temporary name and renamed, and carries a checksum: a reader sees a whole entry or none,
and a corrupt one counts as missing. Least recently used programs are evicted above a size limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import shutil
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 4 << 30
"""Bytes of all entries above which the least recently used are removed."""
_DIGEST = 32


def default_folder() -> Path:
    """`$DACEML_TRAIN_CACHE` if set, else `daceml_train` in the user's cache folder."""
    named = os.environ.get("DACEML_TRAIN_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named).expanduser() if named else Path(base).expanduser() / "daceml_train"


@dataclass(frozen=True)
class Cache:
    """The cache in `folder`; entries of one key are equal, so the last writer may win."""

    folder: Path
    limit: int = LIMIT

    @property
    def kernels(self) -> Path:
        """Where compiled kernels lie."""
        return self.folder / "kernels"

    @property
    def products(self) -> Path:
        """The file that remembers which library computes a matrix product."""
        return self.folder / "products.json"

    @property
    def shapes(self) -> Path:
        """The file that remembers the shapes of kernels on GPUs."""
        return self.folder / "shapes.json"

    def _path(self, key: str) -> Path:
        return self.folder / "programs" / f"{key}.program"

    def load(self, key: str) -> Any | None:
        """The entry, or None if there is none or it is damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
                return None
            entry = pickle.loads(content[_DIGEST:])
        except Exception:  # whatever is wrong with it, it can be made again
            return None
        with contextlib.suppress(OSError):  # a cache may be read-only
            os.utime(path)
        return entry

    def store(self, key: str, entry: Any) -> None:
        """Write an entry and evict old ones if the cache has grown too large; a warning if it cannot be written."""
        payload = pickle.dumps(entry, protocol=pickle.HIGHEST_PROTOCOL)
        path = self._path(key)
        partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(hashlib.sha256(payload).digest() + payload)
            partial.replace(path)
            self.evict()
        except OSError as error:
            warnings.warn(f"daceml_train cannot write its cache in {self.folder}: {error}", stacklevel=2)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def evict(self) -> None:
        """Remove the least recently used files until the cache is within its limit."""
        files = [f for kind in ("programs", "kernels") for f in (self.folder / kind).glob("*") if f.is_file()]
        status = []
        for file in files:
            try:
                status.append((file.stat(), file))
            except FileNotFoundError:  # another process was faster
                continue
        total = sum(s.st_size for s, _ in status)
        for info, file in sorted(status, key=lambda entry: entry[0].st_mtime):
            if total <= self.limit:
                break
            file.unlink(missing_ok=True)
            total -= info.st_size

    def clear(self) -> int:
        """Remove what this package wrote, and nothing else that may lie in the folder; the bytes that were freed."""
        own = [self.folder / name for name in ("programs", "kernels", "native")]
        files = [f for folder in own if folder.exists() for f in folder.rglob("*") if f.is_file()]
        files += [file for file in (self.products, self.shapes) if file.exists()]
        freed = sum(f.stat().st_size for f in files)
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)
        for file in (self.products, self.shapes):
            file.unlink(missing_ok=True)
        return freed
