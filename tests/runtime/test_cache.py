"""The cache on disk: whole entries or none, and the least recently used go first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from daceml_train.runtime.cache import Cache


def test_eviction_removes_what_was_used_least_recently(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit=4700)
    for number in range(3):
        cache.store(str(number), bytes(1000))
        os.utime(tmp_path / "programs" / f"{number}.program", (number, number))
    assert cache.load("0") == bytes(1000)  # used now, so number 1 is the oldest
    cache.store("3", bytes(1000))
    assert cache.load("1") is None
    assert all(cache.load(key) is not None for key in "023")
    other = tmp_path / "notes.txt"
    other.write_text("not ours")
    for measured in (cache.products, cache.threads, cache.schedules, cache.shapes, tmp_path / "lanes.json"):
        measured.write_text("{}")
    (tmp_path / "steps").mkdir()
    assert cache.clear() > 3000 and list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: b"", lambda c: c[:40] + b"?" + c[41:]])
def test_damaged_entries_count_as_missing(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    cache = Cache(tmp_path)
    cache.store("key", {"a": list(range(100))})
    path = tmp_path / "programs" / "key.program"
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load("key") is None
    cache.store("key", 7)
    assert cache.load("key") == 7
