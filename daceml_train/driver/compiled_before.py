"""Which steps earlier runs have compiled, by what is known of a step before it is captured."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import torch

from daceml_train.runtime.cache import Cache
from daceml_train.storage.folders import make, usable


def _path(cache: Cache, identity: str) -> Path:
    versions = version("daceml_train"), torch.__version__  # that is enough: what is not in the cache is compiled
    key = hashlib.sha256(repr((identity, *versions)).encode()).hexdigest()
    return cache.folder / "steps" / key


def known(cache: Cache, identity: str) -> bool:
    """Whether an earlier run has noted this step; its programs may have left the cache since."""
    return _path(cache, identity).exists()


def remember(cache: Cache, identity: str) -> None:
    """Note that the programs of this step are in the cache. Raises `OSError` where nothing can be written."""
    path = _path(cache, identity)
    if usable(make(path.parent)) == path.parent:
        path.touch()


def forget(cache: Cache, identity: str) -> None:
    """Note that they are not."""
    _path(cache, identity).unlink(missing_ok=True)


__all__ = ["forget", "known", "remember"]
