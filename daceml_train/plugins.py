"""Plugins: packages that provide passes and operators, found through entry points.

An entry point of group `daceml_train.passes`, `daceml_train.operators` or `daceml_train.onnx_operators` names a module
(or something in one) whose import defines passes, operators or ONNX rules, which register themselves. A plugin that
fails to load is skipped, with one warning; `daceml-train doctor` shows it. A name that is already taken is an error
that names both owners, since otherwise the result would depend on the order of loading.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from daceml_train.errors import Duplicate

GROUPS = ("daceml_train.passes", "daceml_train.operators", "daceml_train.onnx_operators")
PASSES, OPERATORS, ONNX_OPERATORS = GROUPS


@dataclass(frozen=True)
class Plugin:
    """An entry point and the outcome of loading it; `failure` is empty on success."""

    group: str
    name: str
    target: str
    package: str
    failure: str = ""


_loaded: dict[str, tuple[Plugin, ...]] = {}
_loading = threading.RLock()


def load_plugins(*groups: str) -> tuple[Plugin, ...]:
    """Load the plugins of these groups, each once per process; return all of them, failed ones with the reason."""
    with _loading:
        for group in groups:
            if group not in _loaded:
                _loaded[group] = ()  # a plugin that queries the registry while it loads sees what is there
                try:
                    _loaded[group] = tuple(map(_load, _entry_points(group)))
                except Duplicate:
                    del _loaded[group]
                    raise
        return tuple(plugin for group in groups for plugin in _loaded[group])


def _entry_points(group: str) -> list[importlib.metadata.EntryPoint]:
    return sorted(importlib.metadata.entry_points(group=group), key=lambda e: (e.name, e.value))


def _load(entry: importlib.metadata.EntryPoint) -> Plugin:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    plugin = Plugin(entry.group, entry.name, entry.value, package)
    try:
        entry.load()
    except Duplicate as error:
        error.add_note(f"while loading plugin {entry.name!r} ({entry.value}) of package {package or 'unknown'}")
        raise
    except Exception as error:  # everything else works without a broken plugin
        failure = f"{type(error).__name__}: {error}"
        warnings.warn(f"plugin {entry.name!r} ({entry.value}) of {package} is skipped: {failure}", stacklevel=2)
        return Plugin(entry.group, entry.name, entry.value, package, failure)
    return plugin


def source_key(producers: Iterable[Callable[..., Any]]) -> str:
    """A hash of the source that defines classes and functions from outside this package: part of cache keys.

    For a module in a package, the whole folder counts, since helpers are likely to be there.
    """
    own = __name__.partition(".")[0] + "."
    whole = (m.func if isinstance(m, functools.partial) else m for m in producers)
    foreign = [m for m in whole if not m.__module__.startswith(own)]
    digest = hashlib.sha256()
    for name in sorted({m.__module__ for m in foreign}):
        digest.update(name.encode())
        module = sys.modules.get(name)
        file = Path(getattr(module, "__file__", None) or "")
        if file.is_file():
            for path in sorted(file.parent.glob("*.py")) if getattr(module, "__package__", "") else [file]:
                digest.update(path.read_bytes())
        else:  # a notebook's cells
            for producer in sorted((m for m in foreign if m.__module__ == name), key=lambda m: m.__qualname__):
                digest.update("\n".join(_parts(producer)).encode())
    return digest.hexdigest()


def _parts(producer: Callable[..., Any]) -> Iterator[str]:
    """The source of a function or class in a notebook's cell; the source of a class is found method by method."""
    if not isinstance(producer, type):
        yield inspect.getsource(producer)
        return
    for name, value in vars(producer).items():
        function = inspect.unwrap(getattr(value, "__func__", value))
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith("<"):  # methods that a dataclass generates have no file
            yield inspect.getsource(function)
        elif code is None and not name.startswith("__"):
            yield f"{name} = {value!r}"
