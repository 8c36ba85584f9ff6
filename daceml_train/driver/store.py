"""The store of compiled programs: what a program depends on is its key, and equal ones are compiled once."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, TypeVar, cast

import daceml_train.frontends
import daceml_train.transformations
from daceml_train import processor
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.errors import NotCompiled
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import canonical_text
from daceml_train.lowering.device import Device
from daceml_train.ops.operator import REGISTRY
from daceml_train.plugins import source_key


class _Recorded(Protocol):
    records: list[Record]


Entry = TypeVar("Entry", bound=_Recorded)


def cached(graph: Graph, description: str, options: Settings, device: Device, build: Callable[[], Entry]) -> Entry:
    """The result of `build`, or of the cache: its records are then `warm`."""
    start = time.perf_counter()
    foreign = source_key([*map(type, options.pipeline), *REGISTRY.values()])
    text = "\n".join([canonical_text(graph), description, str(options.pipeline), environment(), device.key, foreign])
    key = hashlib.sha256(text.encode()).hexdigest()

    def built() -> Entry:
        begun = time.perf_counter()
        with _without_collection():
            entry = build()
        entry.records[0].seconds["passes and lowering"] = time.perf_counter() - begun
        return entry

    if options.compiled_only:
        if (entry := options.cache.load(key)) is None:
            raise NotCompiled("the cache does not have the program, which is compiled in the background")
        return cast(Entry, _loaded(entry, start))
    if options.dump:
        entry = built()
        options.cache.store(key, entry)
        return entry
    entry, loaded = options.cache.once(key, built)
    return cast(Entry, _loaded(entry, start) if loaded else entry)


def _loaded(entry: Entry, start: float) -> Entry:
    """The entry with records that say so."""
    for record in entry.records:
        record.warm, record.seconds = True, {"load": time.perf_counter() - start}
    return entry


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Passes create millions of small objects that live until the end; searching them for cycles takes a third of their
    time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@functools.cache
def environment() -> str:
    """What a program depends on besides its graph: this package's source, versions, processor."""
    own = hashlib.sha256()
    for package in (daceml_train, daceml_train.transformations, daceml_train.frontends):
        for path in sorted(Path(package.__path__[0]).resolve().rglob("*")):
            if path.suffix in (".py", ".h", ".cpp"):
                own.update(path.read_bytes())
    versions = [f"{name} {version(name)}" for name in ("torch", "dace", "sympy")]
    return "\n".join([own.hexdigest(), *versions, processor.properties()])
