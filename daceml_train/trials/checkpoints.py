"""Checkpoints: saved points in training by step and key, in memory up to a limit and in a folder if one is given.

A file is written atomically, ends with a checksum, and contains tensors and plain containers alone, so that reading it
runs no code. A file that is damaged counts as missing: its stage is trained a second time. Processes that share a
folder train a stage under a lock, which the operating system releases where its holder is killed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path as Folder
from typing import Any

import torch
from filelock import FileLock, Timeout

from daceml_train.errors import Invalid
from daceml_train.storage.files import clear_partial, replace, sealed, unsealed
from daceml_train.storage.folders import make
from daceml_train.trials.checks import of_trial
from daceml_train.trials.state import State
from daceml_train.trials.values import copied, size_of

Point = tuple[int, str]
"""A point in training: the number of steps, and the key."""

_POINTS, _VALUES, _LOCKS, _LOGS, _ROOT, _CHOICES = "points", "values", "locks", "logs", "root.json", "matmuls.json"
_SETTLED = 50_000_000
"""The age in nanoseconds from which a folder's time stamp tells of all files in it."""


class Store:
    """The checkpoints, values and records of one root.

    `folder` is the storage that studies and processes share, or None; `memory` the bytes that copies may take here.
    """

    def __init__(
        self, root: str, folder: str | os.PathLike[str] | None, memory: int, parts: Mapping[str, str] | None = None
    ) -> None:
        self.memory, self.folder = memory, None if folder is None else _named(folder) / root
        self._copies: OrderedDict[Point, State] = OrderedDict()
        self._bytes = 0
        self._values: dict[tuple[Point, str], Any] = {}
        self._found: dict[int, set[str]] = {}
        self._scanned = -1
        self._records: list[dict[str, Any]] = []
        self.worker = f"{socket.gethostname()}-{os.getpid()}"
        self._damaged: set[Point] = set()
        """Points whose files cannot be read, and perhaps not be removed."""
        self.unsaved: set[Point] = set()
        """The points that could not be written."""
        if self.folder is not None:
            self._prepare(self.folder, dict(parts or {}))

    def _prepare(self, folder: Folder, parts: dict[str, str]) -> None:
        try:
            for name in (_POINTS, _VALUES, _LOCKS, _LOGS):
                clear_partial(make(folder / name))
            if not (folder / _ROOT).exists():  # for people: what tells this root from others in the storage
                replace(folder / _ROOT, json.dumps(parts, indent=1).encode())
        except OSError as error:
            advice = "name a folder that can be written, or leave storage out to keep checkpoints in memory"
            raise Invalid(f"the storage {folder.parent} cannot be used: {error}", advice=advice) from error

    @property
    def choices(self) -> Folder | None:
        """The file of choices among libraries, by which the bits of points are what they are."""
        return None if self.folder is None else self.folder / _CHOICES

    # ---- points -------------------------------------------------------------------------------------------------
    def steps(self) -> list[int]:
        """The steps at which there is a checkpoint, the last first."""
        self._scan()
        return sorted({step for step, _ in self._copies} | self._found.keys(), reverse=True)

    def has(self, point: Point) -> bool:
        """Whether there is a checkpoint."""
        written = self.folder is not None and point not in self._damaged and self._file(point).exists()
        return point in self._copies or written

    def load(self, point: Point, trial: int) -> State | None:
        """A checkpoint, which is not to be changed; None if it is missing or damaged."""
        if point in self._copies:
            self._copies.move_to_end(point)
            return self._copies[point]
        if self.folder is None or point in self._damaged or not (file := self._file(point)).exists():
            return None
        content = unsealed(file)
        state = None if content is None else _decoded(content)
        if state is None:
            warnings.warn(
                f"the checkpoint {of_trial(trial)} after {point[0]} steps is damaged ({file}); "
                "the steps since the checkpoint before it are trained a second time",
                stacklevel=2,
            )
            self._damaged.add(point)
            with contextlib.suppress(OSError):
                file.unlink()
            self._found.get(point[0], set()).discard(point[1])
            return None
        self._copy(point, state)
        return state

    def save(self, point: Point, state: State, trial: int) -> None:
        """Keep a copy in memory, and write it. A full disk is a warning: the search goes on in memory."""
        self._copy(point, state)
        if self.folder is None:
            return
        file, buffer = self._file(point), io.BytesIO()
        torch.save(state, buffer)
        try:
            replace(file, sealed(buffer.getvalue(), file.name))
            self._damaged.discard(point)
        except OSError as error:
            if not self.unsaved:
                warnings.warn(
                    f"the checkpoint {of_trial(trial)} after {point[0]} steps cannot be written in {self.folder}: "
                    f"{error}; the search goes on with copies in memory, which end with this process",
                    stacklevel=2,
                )
            self.unsaved.add(point)

    def _copy(self, point: Point, state: State) -> None:
        if point in self._copies:
            return
        self._copies[point] = state
        self._bytes += size_of(state)
        while self._bytes > self.memory and len(self._copies) > 1:
            self._bytes -= size_of(self._copies.popitem(last=False)[1])

    def _scan(self) -> None:
        """Look into the folder, unless nothing was added since."""
        if self.folder is None:
            return
        try:
            changed = (self.folder / _POINTS).stat().st_mtime_ns
        except OSError as error:
            advice = "create another Stages: what was not in memory is trained a second time"
            raise Invalid(f"the storage {self.folder.parent} is gone: {error}", advice=advice) from error
        if changed == self._scanned:
            return
        self._scanned = changed if time.time_ns() - changed > _SETTLED else -1
        self._found = {}
        for name in os.listdir(self.folder / _POINTS):
            step, _, key = name.removesuffix(".pt").partition("-")
            if step.isdigit():
                self._found.setdefault(int(step), set()).add(key)

    def _file(self, point: Point) -> Folder:
        assert self.folder is not None
        return self.folder / _POINTS / f"{_name(point)}.pt"

    # ---- values -------------------------------------------------------------------------------------------------
    def value(self, point: Point, evaluation: str) -> tuple[bool, Any]:
        """Whether the value of a point is known, and a copy of it."""
        if (point, evaluation) in self._values:
            return True, copied(self._values[point, evaluation])
        content = None if self.folder is None else unsealed(self._value_file(point, evaluation))
        if content is None:
            return False, None
        self._values[point, evaluation] = json.loads(content)
        return True, copied(self._values[point, evaluation])

    def keep_value(self, point: Point, evaluation: str, value: Any) -> None:
        """Keep a copy of the value of a point."""
        self._values[point, evaluation] = copied(value)
        if self.folder is not None:
            file = self._value_file(point, evaluation)
            with contextlib.suppress(OSError):  # a full disk: the value is computed where it is asked for
                replace(file, sealed(json.dumps(value).encode(), file.name))

    def _value_file(self, point: Point, evaluation: str) -> Folder:
        assert self.folder is not None
        return self.folder / _VALUES / f"{_name(point)}-{evaluation[:12]}.json"

    # ---- locks --------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def lock(self, point: Point) -> Iterator[None]:
        """Wait until no other process trains towards this point."""
        with self._lock(point) if self.folder is not None else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def lock_at_once(self, point: Point) -> Iterator[bool]:
        """Whether no other process trains towards this point; then none does until the end."""
        if self.folder is None:
            yield True
            return
        lock = self._lock(point)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _lock(self, point: Point) -> FileLock:
        """The lock of a point, which a process may take twice."""
        assert self.folder is not None
        return FileLock(self.folder / _LOCKS / _name(point), poll_interval=0.01, is_singleton=True)

    # ---- records ------------------------------------------------------------------------------------------------
    def record(self, **entry: Any) -> None:
        """Remember what was done, for the report; in the storage, too."""
        entry["worker"] = self.worker
        self._records.append(entry)
        if self.folder is not None:
            with contextlib.suppress(OSError), (self.folder / _LOGS / f"{self.worker}.jsonl").open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """What all processes did; the line that a killed one was writing is left out."""
        if self.folder is None:
            return list(self._records)
        found = []
        for file in sorted((self.folder / _LOGS).glob("*.jsonl")):
            for line in file.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    if isinstance(entry := json.loads(line), dict):
                        found.append(entry)
        return found


def _named(folder: str | os.PathLike[str]) -> Folder:
    """The folder that a user names. Raises `Invalid` for what is none."""
    if not isinstance(folder, str | os.PathLike):
        raise Invalid(f"storage is a folder, given {folder!r}")
    if "://" in str(folder):
        advice = "name a folder that all processes see; only compiled programs may be remote (the remote cache)"
        raise Invalid(f"storage is a folder with locks, given the URL {folder}", advice=advice)
    return Folder(folder).expanduser().absolute()


def _name(point: Point) -> str:
    return f"{point[0]:09d}-{point[1]}"


def _decoded(content: bytes) -> State | None:
    try:
        state: State = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception:  # another version's format: the stage is trained
        return None
    return state


__all__ = ["Point", "Store"]
