"""Keys: the name of a point in training, a hash of all settings since the root.

A path cuts a trial into segments of equal settings, as long as possible. The key of a point is the hash of the key at
its segment's start, the segment's settings, and the steps since then, so it does not depend on where a tree is cut.
Equal keys are equal settings at every step, and therefore equal bits.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from daceml_train.errors import Invalid
from daceml_train.trials.schedules import Schedule, Value, of

Settings = tuple[tuple[str, Value], ...]
"""The settings at one step: names in order, each with its value."""


@dataclass(frozen=True)
class Segment:
    """Steps `start` to `end`, the end not included, with the same settings."""

    start: int
    end: int
    settings: Settings

    @cached_property
    def text(self) -> str:
        """The settings as text that differs wherever a value or its type does."""
        return exact(self.settings)


def exact(value: Any) -> str:
    """A value as text that differs wherever the value, its type, or a bit of a float does."""
    if isinstance(value, tuple):
        return f"({','.join(map(exact, value))})"
    if isinstance(value, float):
        return value.hex()
    return f"{type(value).__name__}:{value!r}"


def digest(*parts: str) -> str:
    """A hash of texts, each with its length, so that no two lists of texts run into one."""
    state = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.hexdigest()[:32]


class Path:
    """The settings of a trial up to its last step, and the key of each point on the way."""

    def __init__(self, root: str, settings: Mapping[str, Any], end: int) -> None:
        if end < 1:
            raise Invalid(f"a trial has at least one step, given {end}")
        self.root, self.end = root, end
        self.schedules = {name: of(value, name) for name, value in sorted(settings.items())}
        self.segments = list(_segments(self.schedules, end))
        self._ends = [segment.end for segment in self.segments]
        self._keys = [root]
        """The key at the start of each segment whose key is known."""
        self._at: dict[int, str] = {0: root}
        """The keys that were asked for, by step."""

    def position(self, step: int) -> int:
        """The index of the segment that contains a point, which belongs to the segment that ends there."""
        return bisect_left(self._ends, step)

    def key(self, step: int) -> str:
        """The key of the point after `step` steps. Raises `Invalid` beyond the end."""
        if not 0 <= step <= self.end:
            raise Invalid(f"a trial of {self.end} steps has no point after {step}")
        if step in self._at:
            return self._at[step]
        position = self.position(step)
        while len(self._keys) <= position:
            known = self.segments[len(self._keys) - 1]
            self._keys.append(_link(self._keys[-1], known, known.end))
        found = self._at[step] = _link(self._keys[position], self.segments[position], step)
        return found

    def settings(self, step: int) -> Settings:
        """The settings of the step with this number."""
        return self.segments[self.position(step + 1)].settings

    def between(self, start: int, end: int) -> Iterator[Segment]:
        """The segments from `start` to `end`, the first and the last one cut."""
        for position in range(self.position(start + 1), len(self.segments)):
            segment = self.segments[position]
            if segment.start >= end:
                return
            yield Segment(max(start, segment.start), min(end, segment.end), segment.settings)

    def diverges(self, other: Path, start: int, end: int) -> int:
        """The first step from `start` on whose settings are not those of `other`, at most `end`."""
        while start < end:
            own, its = self.segments[self.position(start + 1)], other.segments[other.position(start + 1)]
            if own.text != its.text:
                return start
            start = min(own.end, its.end, end)
        return end


def _link(before: str, segment: Segment, step: int) -> str:
    return digest(before, segment.text, str(step - segment.start))


def _segments(schedules: Mapping[str, Schedule], end: int) -> Iterator[Segment]:
    start, now = 0, _settings(schedules, 0)
    text, last = exact(now), 0
    for step in heapq.merge(*(schedule.changes(0, end) for schedule in schedules.values())):
        if step == last:
            continue
        last, following = step, _settings(schedules, step)
        if (other := exact(following)) != text:
            yield Segment(start, step, now)
            start, now, text = step, following, other
    yield Segment(start, end, now)


def _settings(schedules: Mapping[str, Schedule], step: int) -> Settings:
    return tuple((name, schedule.at(step)) for name, schedule in schedules.items())


__all__ = ["Path", "Segment", "Settings", "digest", "exact"]
