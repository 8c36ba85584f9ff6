"""Copies at the end of a program: new values that no kernel stored in place are written back by one launch."""

from __future__ import annotations

from collections.abc import Iterable

from daceml_train.lowering.program import BufferView, CopyLaunch, Launch


def joined(launches: Iterable[Launch]) -> list[Launch]:
    """The launches with their bytewise copies as one, after the others.

    All of them write inputs, and none reads what another one writes: lowering copies such values before.
    """
    pairs: list[tuple[BufferView, BufferView]] = []
    origins: list[str] = []
    others: list[Launch] = []
    for launch in launches:
        if isinstance(launch, CopyLaunch):
            pairs += launch.pairs
            origins.append(launch.origin)
        else:
            others.append(launch)
    if not pairs:
        return others
    origin = origins[0] if len(origins) == 1 else f"{origins[0]} and {len(origins) - 1} more"
    return [*others, CopyLaunch(tuple(pairs), origin)]
