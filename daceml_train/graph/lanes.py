"""Lanes: how the operators of a graph may share the cores of a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Lanes:
    """What the pass `Concurrency` writes onto a graph; operators are named by the arrays that they produce."""

    most: int = 0
    """The most operators at once; 0 for as many as there are threads."""
    memory: float = 1.1
    """The most that planned memory may grow for that, as a multiple of what it takes in order."""
    threads: tuple[tuple[str, int], ...] = ()
    """Numbers of threads that are given, and not measured."""
    alone: tuple[str, ...] = ()
    """Operators that run beside no other."""

    def renamed(self, names: Mapping[str, str]) -> Lanes:
        """The same for a graph whose arrays have other names."""
        threads = tuple((names.get(name, name), count) for name, count in self.threads)
        return replace(self, threads=threads, alone=tuple(names.get(name, name) for name in self.alone))

    @property
    def fields(self) -> tuple[int, float, tuple[tuple[str, int], ...], tuple[str, ...]]:
        """All fields in their order, for texts."""
        return self.most, self.memory, self.threads, self.alone
