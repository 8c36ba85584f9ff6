"""Pipeline: an ordered list of passes per level, as an immutable value; every edit returns a new pipeline.

`str(pipeline)` and `pipeline.to_json()` read back exactly; equal pipelines have equal texts, whose hash is `key`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from daceml_train.analysis.device_model import DeviceModel
from daceml_train.analysis.network import messages, sent
from daceml_train.analysis.traffic import Known, traffic
from daceml_train.errors import Invalid, nearest
from daceml_train.graph.graph import Graph
from daceml_train.passes import files, notation
from daceml_train.passes.base import LEVELS, Pass, applied, checked
from daceml_train.passes.options import check_names
from daceml_train.passes.registry import name_of, registered
from daceml_train.storage.storable import storable
from daceml_train.tensor import Dim


@storable
@dataclass(frozen=True)
class PassRecord:
    """The effect of one pass: bytes and operators before and after, and its time in seconds."""

    level: str
    name: str
    bytes_before: Dim
    bytes_after: Dim
    operators_before: int
    operators_after: int
    seconds: float
    matches: int = 0
    """Matches applied; 1 for a change by a pass that does not count them."""
    position: int = 0
    """The index of the pass in the pipeline, from 0."""
    flops: tuple[Dim, Dim] = (0, 0)
    """Operations before and after."""
    network: tuple[Dim, Dim] = (0, 0)
    """Bytes that each of the processes that train together sends, before and after a pass of level `distribution`."""
    messages: tuple[int, int] = (0, 0)
    """The collectives in which it sends them."""


@dataclass(frozen=True, kw_only=True)
class Step(PassRecord):
    """The argument of a pass callback: the record of one pass, the pass, and its result."""

    transformation: Pass
    passes: int
    """The number of passes of the pipeline."""
    graph: Graph | None = field(default=None, repr=False, compare=False)
    """The pass's result; None if the program came from the cache."""

    @staticmethod
    def of(record: PassRecord, passes: Sequence[Pass], graph: Graph | None = None) -> Step:
        """The step that a record of these passes describes."""
        return Step(**vars(record), transformation=passes[record.position], passes=len(passes), graph=graph)

    @property
    def record(self) -> PassRecord:
        """The step without pass and graph, as it is stored."""
        return PassRecord(**{f.name: getattr(self, f.name) for f in dataclasses.fields(PassRecord)})


Watcher = Callable[[Step], None]
Place: TypeAlias = str | type[Pass]
"""A pass's class or name, or a level's name."""


@dataclass(frozen=True)
class Pipeline:
    """Passes by level. Levels run in the order of `LEVELS`, passes of a level in their own order."""

    passes: tuple[tuple[str, tuple[Pass, ...]], ...]

    def __init__(self, **levels: tuple[Pass, ...]) -> None:
        for level, passes in levels.items():
            notation.known_level(level)
            if not isinstance(passes, tuple | list):
                raise Invalid(f"level {level} is a tuple of passes, given {passes!r}")
            for p in passes:
                _check_pass(p)
        object.__setattr__(self, "passes", tuple((name, tuple(levels.get(name, ()))) for name in LEVELS))

    # ---- text, JSON, key ----------------------------------------------------------------------------------------
    @staticmethod
    def parse(text: str) -> Pipeline:
        """The pipeline of a text: `Pipeline.parse(str(pipeline)) == pipeline`."""
        return Pipeline(**notation.parse(text))

    @staticmethod
    def from_json(text: str) -> Pipeline:
        """Parse a pipeline that `to_json` or `Session.save` wrote."""
        return Pipeline(**files.from_json(text))

    @staticmethod
    def of(given: Pipeline | str | Path) -> Pipeline:
        """A pipeline from a pipeline, its text, or the path of a file with its JSON, its text, or its Python form.

        A string is a path if it ends in `.json`, `.txt` or `.py`.
        """
        if isinstance(given, Pipeline):
            return given
        if isinstance(given, str) and not given.endswith(files.ENDINGS):
            return Pipeline.parse(given)
        if not isinstance(given, str | Path):
            raise Invalid(f"a pipeline is a Pipeline, its text or a file's path, given {type(given).__name__}")
        return Pipeline(**files.read(Path(given).expanduser()))

    def to_json(self) -> str:
        """The pipeline as JSON, which `from_json` reads."""
        return json.dumps(notation.to_entries(dict(self.passes)), indent=2)

    def __str__(self) -> str:
        return notation.show(dict(self.passes))

    @property
    def key(self) -> str:
        """A hash of the text form, the same in every process; part of cache keys."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:16]

    # ---- reading ------------------------------------------------------------------------------------------------
    def level(self, name: str) -> tuple[Pass, ...]:
        """The passes of one level."""
        return dict(self.passes)[notation.known_level(name)]

    def __iter__(self) -> Iterator[Pass]:
        return (p for _, passes in self.passes for p in passes)

    def __len__(self) -> int:
        return sum(len(passes) for _, passes in self.passes)

    def __bool__(self) -> bool:
        return True

    def for_target(self, target: str) -> Pipeline:
        """The pipeline without passes that do not support devices of this kind."""
        left = {name: tuple(p for p in passes if target in p.targets) for name, passes in self.passes}
        return self if left == dict(self.passes) else Pipeline(**left)

    def on(self, model: DeviceModel) -> Pipeline:
        """The pipeline with options that are None taken from the figures of a GPU."""
        return Pipeline(**{name: tuple(p.on(model) for p in passes) for name, passes in self.passes})

    # ---- edits --------------------------------------------------------------------------------------------------
    def after(self, place: Place, *added: Pass) -> Pipeline:
        """With passes added after a level's last pass or after every pass of a class."""
        return self._edit(place, lambda p: (p, *added), lambda passes: (*passes, *added))

    def before(self, place: Place, *added: Pass) -> Pipeline:
        """With passes added before a level's first pass or before every pass of a class."""
        return self._edit(place, lambda p: (*added, p), lambda passes: (*added, *passes))

    def replace(self, place: Place, *others: Pass) -> Pipeline:
        """With every pass of a class, or all passes of a level, replaced."""
        return self._edit(place, lambda p: others, lambda passes: others)

    def without(self, *places: Place) -> Pipeline:
        """Without the passes of these classes or levels. Raises `Invalid` for a class that is absent."""
        result = self
        for place in places:
            result = result._edit(place, lambda p: (), lambda passes: ())
        return result

    def only(self, *places: Place) -> Pipeline:
        """With only the passes of these classes or levels."""
        levels = {p for p in places if isinstance(p, str) and p in LEVELS}
        kinds = tuple(self._present(p) for p in places if not isinstance(p, str) or p not in levels)
        return Pipeline(
            **{
                level: passes if level in levels else tuple(p for p in passes if isinstance(p, kinds))
                for level, passes in self.passes
            }
        )

    def with_options(self, place: Place, **options: object) -> Pipeline:
        """With options of every pass of a class changed."""
        kind = self._present(place)
        check_names(name_of(kind), kind, options)
        return self._edit(kind, lambda p: (dataclasses.replace(p, **options),), lambda passes: passes)

    def _edit(
        self,
        place: Place,
        at_pass: Callable[[Pass], tuple[Pass, ...]],
        at_level: Callable[[tuple[Pass, ...]], tuple[Pass, ...]],
    ) -> Pipeline:
        if isinstance(place, str) and place in LEVELS:
            edited = {level: at_level(passes) if level == place else passes for level, passes in self.passes}
            return Pipeline(**edited)
        kind = self._present(place)
        return Pipeline(
            **{
                level: tuple(n for p in passes for n in (at_pass(p) if isinstance(p, kind) else (p,)))
                for level, passes in self.passes
            }
        )

    def _present(self, place: Place) -> type[Pass]:
        """The class for a class or name. Raises `Invalid` if the pipeline has no pass of it."""
        if isinstance(place, str):
            known = registered()
            if place not in known:
                close = nearest(place, (*LEVELS, *known))
                raise Invalid(f"no level or pass is named {place!r}{close}", advice=f"levels: {', '.join(LEVELS)}")
            kind = known[place]
        elif isinstance(place, type):
            kind = place
        else:
            raise Invalid(f"a place is a pass's class or name, or a level, given {place!r}")
        if not any(isinstance(p, kind) for p in self):
            present = ", ".join(sorted({type(p).__name__ for p in self}))
            raise Invalid(f"the pipeline has no pass {kind.__name__}", advice=f"it has: {present}")
        return kind

    # ---- running ------------------------------------------------------------------------------------------------
    def run(self, graph: Graph, levels: tuple[str, ...] = LEVELS, watch: Watcher | None = None) -> Graph:
        """Run the passes of `levels`, verifying after each; `watch` is called with each pass and its result."""
        known = Known()
        before = traffic(graph, known=known) if watch is not None else None
        for level in levels:
            notation.known_level(level)
        first, every = 0, list(self)
        for level, passes in self.passes:
            for place, transformation in enumerate(passes, first):
                if level not in levels:
                    continue
                start = time.perf_counter()
                result = checked(transformation, graph, every[place + 1 :])
                if watch is not None and before is not None:
                    seconds = time.perf_counter() - start
                    after = before if result is graph else traffic(result, known=known)
                    record = PassRecord(
                        level=level,
                        name=transformation.name,
                        bytes_before=before.bytes,
                        bytes_after=after.bytes,
                        operators_before=len(graph.nodes),
                        operators_after=len(result.nodes),
                        seconds=seconds,
                        matches=applied(graph, result),
                        position=place,
                        flops=(before.flops, after.flops),
                        **(_network(graph, result) if level == "distribution" else {}),
                    )
                    watch(Step.of(record, every, result))
                    before = after
                graph = result
            first += len(passes)
        return graph


def _network(before: Graph, after: Graph) -> dict[str, Any]:
    """What each rank sends before and after a pass."""
    return {"network": (sent(before), sent(after)), "messages": (messages(before), messages(after))}


def _check_pass(given: object) -> None:
    if not isinstance(given, Pass):
        hint = f"{given.__name__}()" if isinstance(given, type) else "an object of a subclass of Pass"
        raise Invalid(f"a pipeline consists of passes, given {given!r}", advice=f"expected {hint}")
    level = getattr(given, "level", None)
    if level not in LEVELS:
        raise Invalid(f"{type(given).__name__} has level {level!r}", advice=f"levels: {', '.join(LEVELS)}")
