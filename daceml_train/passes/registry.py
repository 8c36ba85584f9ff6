"""The registry of passes: every concrete pass registers under its name when its class is defined."""

from __future__ import annotations

import re
from typing import Any

from daceml_train.errors import Duplicate, Invalid, nearest
from daceml_train.plugins import PASSES, load_plugins
from daceml_train.renamed import pass_name

_KNOWN: dict[str, type[Any]] = {}


def name_of(kind: type[Any]) -> str:
    """The class name in snake case, which is the name of the pass in texts."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def register(kind: type[Any]) -> None:
    """Register a pass. Raises `Duplicate`, naming both owners, if another class has its name.

    A redefined class (a notebook's cell, a reloaded module) replaces itself. Abstract classes and those defined inside
    functions are not registered.
    """
    if "<locals>" in kind.__qualname__ or kind.__name__.startswith("_") or _abstract(kind):
        return
    name = name_of(kind)
    other = _KNOWN.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise Duplicate("pass", name, owner(other), owner(kind))
    _KNOWN[name] = kind


def owner(kind: type[Any]) -> str:
    """The source of a class, for messages."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _abstract(kind: type[Any]) -> bool:
    return any(getattr(getattr(kind, name, None), "__isabstractmethod__", False) for name in dir(kind))


def registered() -> dict[str, type[Any]]:
    """Name -> class of every registered pass, plugins' included, sorted by name."""
    load_plugins(PASSES)
    return dict(sorted(_KNOWN.items()))


def find(name: str, where: str = "") -> type[Any]:
    """The pass named `name`. Raises `Invalid`, with the nearest name or all names, if there is none."""
    name = pass_name(name)
    if name not in _KNOWN:
        known = registered()
        if name not in known:
            close = nearest(name, known)
            advice = "" if close else f"known: {', '.join(known)}"
            raise Invalid(f"no pass is named {name!r}{close}", where=where, advice=advice)
    return _KNOWN[name]
