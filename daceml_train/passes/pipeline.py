"""Pipeline: an ordered list of passes per level, as an immutable value; every edit returns a new pipeline."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.traffic import traffic
from daceml_train.passes.base import LEVELS, Pass, checked
from daceml_train.tensor import Dim


@dataclass(frozen=True)
class Step:
    """What a watcher hears of one pass: where it stands, what it did to the bytes, and how long it took."""

    level: str
    transformation: Pass
    bytes_before: Dim
    bytes_after: Dim
    operators_before: int
    operators_after: int
    seconds: float


Watcher = Callable[[Step, Graph], None]


@dataclass(frozen=True)
class Pipeline:
    """Passes by level. Levels run in the order of `LEVELS`, passes of a level in their own order."""

    passes: tuple[tuple[str, tuple[Pass, ...]], ...]

    def __init__(self, **levels: tuple[Pass, ...]) -> None:
        for level in levels:
            _known_level(level)
        object.__setattr__(self, "passes", tuple((name, tuple(levels.get(name, ()))) for name in LEVELS))

    def level(self, name: str) -> tuple[Pass, ...]:
        """The passes of one level."""
        _known_level(name)
        return dict(self.passes)[name]

    def __iter__(self) -> Iterator[Pass]:
        return (p for _, passes in self.passes for p in passes)

    def after(self, place: str | type[Pass], *added: Pass) -> Pipeline:
        """With passes added behind a level's last pass or behind every pass of a class."""
        return self._edit(place, lambda p: (p, *added), lambda passes: (*passes, *added))

    def before(self, place: str | type[Pass], *added: Pass) -> Pipeline:
        """With passes added before a level's first pass or before every pass of a class."""
        return self._edit(place, lambda p: (*added, p), lambda passes: (*added, *passes))

    def replace(self, kind: type[Pass], *others: Pass) -> Pipeline:
        """With every pass of a class replaced."""
        return self._edit(kind, lambda p: others, lambda passes: passes)

    def without(self, *kinds: type[Pass]) -> Pipeline:
        """Without the passes of these classes. Raises `Invalid` for a class that is not there."""
        result = self
        for kind in kinds:
            result = result._edit(kind, lambda p: (), lambda passes: passes)
        return result

    def only(self, *kinds: type[Pass]) -> Pipeline:
        """With the passes of these classes alone."""
        return Pipeline(**{level: tuple(p for p in passes if isinstance(p, kinds)) for level, passes in self.passes})

    def _edit(
        self,
        place: str | type[Pass],
        at_pass: Callable[[Pass], tuple[Pass, ...]],
        at_level: Callable[[tuple[Pass, ...]], tuple[Pass, ...]],
    ) -> Pipeline:
        if isinstance(place, str):
            _known_level(place)
            edited = {level: at_level(passes) if level == place else passes for level, passes in self.passes}
            return Pipeline(**edited)
        if not any(isinstance(p, place) for p in self):
            present = ", ".join(sorted({type(p).__name__ for p in self}))
            raise Invalid(f"the pipeline has no pass {place.__name__}", advice=f"it has: {present}")
        return Pipeline(
            **{
                level: tuple(n for p in passes for n in (at_pass(p) if isinstance(p, place) else (p,)))
                for level, passes in self.passes
            }
        )

    def run(self, graph: Graph, levels: tuple[str, ...] = LEVELS, watch: Watcher | None = None) -> Graph:
        """Run the passes of `levels`, verifying after each; `watch` hears of each pass and sees its result."""
        before: Dim = traffic(graph).bytes if watch is not None else 0
        for level in levels:
            for transformation in self.level(level):
                start = time.perf_counter()
                result = checked(transformation, graph)
                if watch is not None:
                    seconds = time.perf_counter() - start
                    after = before if result is graph else traffic(result).bytes
                    step = Step(level, transformation, before, after, len(graph.nodes), len(result.nodes), seconds)
                    watch(step, result)
                    before = after
                graph = result
        return graph

    def __str__(self) -> str:
        return "\n".join(f"{level}: {', '.join(map(str, passes))}".rstrip() for level, passes in self.passes)

    @property
    def key(self) -> str:
        """A hash of the text form, part of cache keys."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def with_options(self, kind: type[Pass], **options: object) -> Pipeline:
        """With options of every pass of a class changed."""
        return self._edit(kind, lambda p: (replace(p, **options),) if isinstance(p, kind) else (p,), lambda ps: ps)


def _known_level(name: str) -> None:
    if name not in LEVELS:
        raise Invalid(f"no level is called {name!r}", advice=f"known: {', '.join(LEVELS)}")
