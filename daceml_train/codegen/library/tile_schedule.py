"""Tile schedules: what a tiled loop nest may choose, as a value with a text; the few that are worth a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

MOST = 10
"""Schedules of a nest that are measured."""
PER_PAIR = 3
"""Of these, schedules with the same two axes: their neighbors in the ranking are much like them."""


@dataclass(frozen=True)
class TileSchedule:
    """Tiles of `tu` along axis u (-1 for none) and `nv` vectors along axis v; `inner` is the innermost reduced axis.

    Without `inner`, reduced axes are in the order of their strides.
    """

    v: int
    nv: int
    u: int
    tu: int
    inner: int = -1

    def __str__(self) -> str:
        rows = f" u{self.u}x{self.tu}" if self.u >= 0 else ""
        return f"v{self.v}x{self.nv}{rows}{f' inner{self.inner}' if self.inner >= 0 else ''}"

    @staticmethod
    def of(text: str) -> TileSchedule:
        """The schedule of a text."""
        found = {"v": (0, 1), "u": (-1, 1), "inner": (-1, 1)}
        for word in text.split():
            name = word.rstrip("x0123456789")
            axis, _, count = word.removeprefix(name).partition("x")
            found[name] = int(axis), int(count or 1)
        (v, nv), (u, tu), (inner, _) = found["v"], found["u"], found["inner"]
        return TileSchedule(v, nv, u, tu, inner)


def few(ranked: Sequence[TileSchedule], inner: Sequence[int]) -> list[TileSchedule]:
    """At most `MOST` schedules: the best of each pair of axes, and the first ones with other innermost loops."""
    pairs: dict[tuple[int, int], int] = {}
    found = []
    for schedule in ranked:
        pairs[schedule.v, schedule.u] = pairs.get((schedule.v, schedule.u), 0) + 1
        if pairs[schedule.v, schedule.u] <= PER_PAIR:
            found.append(schedule)
    others = [replace(schedule, inner=axis) for schedule in found[:2] for axis in inner[1:3]]
    return [*found[: MOST - len(others)], *others]


__all__ = ["MOST", "TileSchedule", "few"]
