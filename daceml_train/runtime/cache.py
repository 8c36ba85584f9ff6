"""Cache: lowered programs and compiled kernels on disk, keyed by content.

An entry is written under a temporary name and renamed, and carries a checksum: a reader sees a whole entry or none,
and a corrupt one counts as missing, as does one that others may have written (`storage.trust`). Least recently used
programs are evicted above a size limit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daceml_train.runtime.encoding import Unencodable, decode, encode
from daceml_train.storage.files import clear_partial, keep, sealed, unsealed
from daceml_train.storage.folders import clear_dead, usable
from daceml_train.storage.trust import warn_once
from daceml_train.storage.turns import TURN, build_once, clear_turns

LIMIT = 4 << 30
"""Bytes of all entries above which the least recently used are removed."""


@dataclass(frozen=True)
class Cache:
    """The cache in `folder`; entries of one key are equal, so the last writer may win."""

    folder: Path
    limit: int = LIMIT

    @property
    def kernels(self) -> Path:
        """The folder of compiled kernels."""
        return self.folder / "kernels"

    @property
    def products(self) -> Path:
        """The file that stores which library computes each matmul."""
        return self.folder / "products.json"

    @property
    def threads(self) -> Path:
        """The file that stores how long launches take with one thread and with several."""
        return self.folder / "threads.json"

    @property
    def schedules(self) -> Path:
        """The file that stores the schedules of tiled kernels."""
        return self.folder / "schedules.json"

    @property
    def shapes(self) -> Path:
        """The file that stores the launch configurations of GPU kernels."""
        return self.folder / "shapes.json"

    def _path(self, key: str) -> Path:
        return self.folder / "programs" / f"{key}.program"

    def load(self, key: str) -> Any | None:
        """The entry, or None if there is none, it is damaged, or others may have written it."""
        path = self._path(key)
        if not path.exists() or usable(path.parent) != path.parent or (content := unsealed(path)) is None:
            return None
        try:
            entry = decode(content)
        except Unencodable:  # rebuilt
            return None
        with contextlib.suppress(OSError):  # a cache may be read-only
            os.utime(path)
        return entry

    def store(self, key: str, entry: Any) -> None:
        """Write an entry and evict old ones if the cache has grown too large; a warning if it cannot be written."""
        path = self._path(key)
        if usable(path.parent) != path.parent:
            return
        try:
            text = encode(entry)
        except Unencodable as error:
            warn_once(f"daceml_train compiles a program in each process: {error}")
            return
        keep(path, sealed(text, path.name))
        self.evict()

    def once(self, key: str, build: Callable[[], Any]) -> tuple[Any, bool]:
        """The entry, loaded or else built and stored, and whether it was loaded.

        Of all processes with this cache, one builds it; the others wait and load.
        """
        path = self._path(key)

        def stored() -> tuple[Any, bool]:
            entry = build()
            self.store(key, entry)
            return entry, False

        def loaded() -> tuple[Any, bool] | None:
            entry = self.load(key)
            return None if entry is None else (entry, True)

        if (found := loaded()) is not None:
            return found
        if usable(path.parent) != path.parent:  # nothing can be shared
            return stored()
        return build_once(path, loaded, stored)

    def evict(self) -> None:
        """Remove what killed processes left, and the least recently used files until the cache fits its limit."""
        self.clear_left()
        found = (
            f for kind in ("programs", "kernels", "captures") for f in (self.folder / kind).glob("*") if f.is_file()
        )
        files = [file for file in found if not file.name.startswith(TURN)]
        status = []
        for file in files:
            try:
                status.append((file.stat(), file))
            except OSError:  # another process was faster
                continue
        total = sum(s.st_size for s, _ in status)
        for info, file in sorted(status, key=lambda entry: entry[0].st_mtime):
            if total <= self.limit:
                break
            with contextlib.suppress(OSError):  # a cache may be read-only
                file.unlink(missing_ok=True)
                total -= info.st_size

    def clear_left(self) -> int:
        """Remove what processes were building or writing when they were killed; return the bytes that were freed."""
        places = [self.folder, *(self.folder / kind for kind in ("programs", "kernels", "captures", "native"))]
        for place in places:
            clear_turns(place)
        return sum(clear_dead(place) + clear_partial(place) for place in places)

    def clear(self) -> int:
        """Remove what this package wrote and no other file in the folder; return the bytes that were freed."""
        left = clear_partial(self.folder, age=0)
        own = [self.folder / name for name in ("programs", "captures", "kernels", "native", "steps")]
        files = [f for folder in own if folder.exists() for f in folder.rglob("*") if f.is_file()]
        measured = self.products, self.shapes, self.threads, self.threads.with_name("lanes.json"), self.schedules
        files += [file for file in measured if file.exists()]
        freed = sum(f.stat().st_size for f in files)
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)
        for file in measured:
            file.unlink(missing_ok=True)
        return freed + left
