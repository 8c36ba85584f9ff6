"""Many lazy values at once: what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from daceml_train.frontends.torch.recursion.lazy import Lazy, Meta


def unknown(values: Sequence[Any]) -> bool:
    """Whether all are lazy values, and none is known yet."""
    return set(map(type, values)) <= {Lazy} and not [v for v in values if v.value is not None]


def metas(values: Sequence[Lazy]) -> set[Meta]:
    """The types of values."""
    return {v.meta for v in values}


def all_of(values: Sequence[Any], kind: type, forest: Any) -> bool:
    """Whether all are lazy values of sources of one class that belong to this forest, or to none yet (None)."""
    lazy = set(map(type, values)) <= {Lazy}
    return lazy and not [v for v in values if v.source.forest is not forest or type(v.source) is not kind]


def outputs(values: Sequence[Lazy]) -> set[tuple[Any, int]]:
    """The groups and numbers of values of runs."""
    return {(v.source.group, v.index) for v in values}


def positions(values: Sequence[Lazy]) -> list[int]:
    """The positions in their groups of runs that compute values."""
    return [v.source.position for v in values]
