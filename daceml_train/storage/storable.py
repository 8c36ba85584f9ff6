"""The classes that stored programs may contain: registered ones, and those that `runtime.encoding` lists."""

from __future__ import annotations

from typing import TypeVar

CLASSES: dict[str, type] = {}
"""Name -> class whose objects a text may contain."""

Kind = TypeVar("Kind", bound=type)


def storable(kind: Kind) -> Kind:
    """Allow objects of a class, or members of an enumeration, in stored programs; usable as a decorator."""
    CLASSES[f"{kind.__module__}:{kind.__qualname__}"] = kind
    return kind
