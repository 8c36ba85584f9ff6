"""Pass and Rewrite: a transformation as an immutable value with typed options.

A `Pass` maps a graph to a graph. A `Rewrite` is a pass that replaces one operator (the *root* of a match) by others:
its docstring draws `before => after`, `match` recognizes the pattern, `legality` yields conditions, each with the
sentence that explains a refusal, `traffic` promises the bytes, and `emit` builds the replacement. Matches are found in
one topological sweep over the operators, never by searching for subgraphs.

Every pass also works one match at a time: `matches` lists `Candidate`s, each of which knows its place, the reason
for a refusal and the bytes that applying it saves, and can be applied alone.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Protocol

from daceml_train.analysis.aliases import roots
from daceml_train.analysis.chunks import mended
from daceml_train.analysis.device_model import DeviceModel
from daceml_train.analysis.reachability import required
from daceml_train.analysis.traffic import Known, Traffic, traffic
from daceml_train.analysis.verify import verify
from daceml_train.analysis.weights_only import held
from daceml_train.errors import EXPECTED, DacemlError, Invalid, PassFailed, Refused
from daceml_train.graph.bodies import within
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.operator import Value
from daceml_train.passes.options import check_names, checked_option, option_types, show_annotation, show_option
from daceml_train.passes.registry import name_of, register
from daceml_train.renamed import warn
from daceml_train.tensor import Dim, Tensor, same_shape, simplify

LEVELS = ("forward", "distribution", "intra_operator", "fusion", "layout", "global_movement")
"""Stages of a pipeline, in order. `forward` runs before differentiation, the others on the whole training graph:
`distribution` says how sums over the processes that train together travel.
"""


class Candidate(Protocol):
    """One place where a pass applies, or the reason why it does not."""

    @property
    def transformation(self) -> Pass:
        """The pass, with its options."""

    @property
    def where(self) -> str:
        """The place, identified by the names of the arrays produced there."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that the affected operators produce."""

    @property
    def refusal(self) -> str | None:
        """Why the pass must not be applied here, or None."""

    @property
    def traffic(self) -> Dim:
        """Bytes that applying adds (negative: saves)."""

    def apply(self) -> Graph:
        """The graph with the pass applied here alone. Raises `Refused` with the reason where that is not legal."""


@dataclass(frozen=True)
class Description:
    """The description of a pass: the sections of its docstring, and its options."""

    name: str
    level: str
    summary: str
    picture: str
    """`before => after`."""
    details: str
    options: Mapping[str, tuple[str, str]]
    """Name -> (type, default as text)."""

    def __str__(self) -> str:
        options = [f"    {name}: {kind} = {default}" for name, (kind, default) in self.options.items()]
        parts = [f"{self.name} ({self.level})", self.summary, self.picture, self.details]
        return "\n\n".join(part for part in (*parts, "\n".join(["options:", *options]) if options else "") if part)


class _PassClass(ABCMeta):
    """Checks the options of a pass when it is constructed."""

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        check_names(name_of(cls), cls, options)
        result = super().__call__(*arguments, **options)
        for option, annotation in option_types(cls).items():
            given = getattr(result, option)
            value = checked_option(name_of(cls), option, annotation, given)
            if value is not given:
                object.__setattr__(result, option, value)
        return result


@dataclass(frozen=True)
class Pass(metaclass=_PassClass):
    """A transformation of the whole graph; subclasses are frozen dataclasses whose fields are the options.

    Options are typed; constructing a pass with an unknown option, or with a value of another type, raises `Invalid`.
    The texts of pipelines refer to a concrete class by its name.
    """

    level: ClassVar[str]
    targets: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    """The device kinds that the pass supports; a pipeline for another device omits it, and the report says so."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register(cls)

    @abstractmethod
    def run(self, graph: Graph) -> Graph:
        """The transformed graph; `graph` itself is not changed."""

    def run_before(self, graph: Graph, rest: Sequence[Pass]) -> Graph:
        """The transformed graph, for a pass whose choice depends on the passes `rest` that follow in the pipeline."""
        return self.run(graph)

    def on(self, model: DeviceModel) -> Pass:
        """The pass for a GPU: options that are None take the figures of the device."""
        return self

    def matches(self, graph: Graph) -> Sequence[Candidate]:
        """Every place where the pass applies or is refused; by default the whole graph, if the pass changes it."""
        result = self.run(graph)
        return [Measured(self, graph, "the whole graph", (), lambda: result)] if applied(graph, result) else []

    @classmethod
    def describe(cls) -> Description:
        """Name, level, picture, text and options."""
        paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
        drawn = next((i for i, paragraph in enumerate(paragraphs) if "=>" in paragraph), None)
        picture = "" if drawn is None else paragraphs.pop(drawn)
        summary = paragraphs.pop(0) if paragraphs and drawn != 0 else ""
        defaults = {f.name: show_option(f.default) for f in fields(cls) if f.default is not MISSING}
        options = {n: (show_annotation(kind), defaults.get(n, "")) for n, kind in option_types(cls).items()}
        return Description(name_of(cls), cls.level, summary, picture, "\n\n".join(paragraphs), options)

    @property
    def name(self) -> str:
        """The class name in snake case, as in pipelines' texts."""
        return name_of(type(self))

    @property
    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={show_option(v)}' for k, v in self.options.items())})"


@dataclass(frozen=True)
class Uses:
    """The use-def index of a graph: the lookups that matching needs, computed once per sweep."""

    graph: Graph
    producers: Mapping[str, Node]
    readers: Mapping[str, Sequence[Node]]
    visible: frozenset[str]
    """Arrays that are outputs or written values."""

    @staticmethod
    def of(graph: Graph) -> Uses:
        """The lookups of `graph`."""
        return Uses(graph, graph.producers(), graph.readers(), frozenset(graph.results))

    @cached_property
    def _counted(self) -> tuple[Traffic, Known]:
        known = Known()
        return traffic(self.graph, known=known), known

    def change(self, after: Graph) -> Dim:
        """Bytes that `after` moves more than the graph (negative: fewer); only operators that differ are counted."""
        before, known = self._counted
        return simplify(traffic(after, known=known.copy()).bytes - before.bytes)

    @cached_property
    def held(self) -> frozenset[str]:
        """Arrays that do not change from call to call: parameters, buffers, and values computed from them alone."""
        return held(self.graph)

    def only_reader(self, name: str, reader: Node) -> bool:
        """Whether `reader` is the only reader of array `name`, which is not visible outside the graph."""
        readers = self.readers[name]
        return name not in self.visible and len(readers) == 1 and readers[0] is reader

    def bytes(self, *names: str) -> Dim:
        """The total bytes of arrays."""
        total: Dim = 0
        for name in names:
            total = total + self.graph.tensors[name].bytes
        return total


@dataclass(frozen=True)
class Match:
    """One place where a rewrite applies, or the reason why it does not."""

    rewrite: Rewrite
    uses: Uses
    root: Node
    bindings: Mapping[str, Any]
    """The result of `match`, under the names in the rewrite's picture."""
    near_miss: str = ""
    """Why the pattern almost matches, where it does not match."""

    @property
    def parts(self) -> Mapping[str, Any]:
        """The old name of `bindings`."""
        warn("Match.parts", "Match.bindings")
        return self.bindings

    @property
    def view(self) -> Uses:
        """The old name of `uses`."""
        warn("Match.view", "Match.uses")
        return self.uses

    @property
    def refusal(self) -> str | None:
        """Why this match must not be rewritten, or None."""
        if self.near_miss:
            return self.near_miss
        return next((why for holds, why in self.rewrite.legality(self) if not holds), None)

    @property
    def transformation(self) -> Pass:
        """The rewrite."""
        return self.rewrite

    @property
    def where(self) -> str:
        """The root, as the graph's text shows it."""
        return str(self.root)

    @property
    def arrays(self) -> tuple[str, ...]:
        """The results of the root."""
        return self.root.outputs

    @property
    def traffic(self) -> Dim:
        """Bytes that applying adds (negative: saves)."""
        return 0 if self.near_miss else self.rewrite.traffic(self)

    def apply(self) -> Graph:
        """The graph with this one match rewritten. Raises `Refused` with the reason where it is not legal."""
        if reason := self.refusal:
            raise Refused(f"{self.rewrite.name} at {self.root}: {reason}", where=str(self.root.origin))
        return self.rewrite.sweep(self.uses.graph, {id(self.root): self})


@dataclass(frozen=True)
class Rewrite(Pass):
    """A pass that replaces matched operators; see the module's docstring."""

    def __init_subclass__(cls, **options: Any) -> None:
        if "find" in vars(cls) and "match" not in vars(cls):
            warn(f"the method find of {cls.__name__}", "match")
            cls.match = vars(cls)["find"]  # type: ignore[method-assign]
        super().__init_subclass__(**options)

    @abstractmethod
    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | str | None:
        """The bindings of a match whose last operator is `node`, or None if the pattern does not match.

        A sentence says why it almost matches, and names the user's line; `explain` and sessions show it.
        """

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        """Conditions (holds, sentence that explains a refusal), lazily: the first that fails is the reason."""
        yield True, ""

    def traffic(self, match: Match) -> Dim:
        """Bytes added by applying (negative: saved)."""
        return 0

    @abstractmethod
    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        """Build replacements of the root's results; `values` maps arrays of the old graph to those of the new one."""

    def matches(self, graph: Graph) -> list[Match]:
        """Every match and near miss of the pattern, refused ones included."""
        uses = Uses.of(graph)
        found = ((node, self.match(uses, node)) for node in graph.nodes)
        return [
            Match(self, uses, node, {}, near_miss=result)
            if isinstance(result, str)
            else Match(self, uses, node, result)
            for node, result in found
            if result is not None
        ]

    def run(self, graph: Graph) -> Graph:
        chosen = {id(m.root): m for m in self.matches(graph) if m.refusal is None}
        return self.sweep(graph, chosen) if chosen else graph

    def sweep(self, graph: Graph, chosen: Mapping[int, Match]) -> Graph:
        """Rebuild `graph` with the roots in `chosen` replaced and dead operators removed."""
        other = graph.empty()
        other.applied += len(chosen)
        values = {name: other.value(name) for name in graph.inputs}
        for node in graph.nodes:
            if match := chosen.get(id(node)):
                with other.at(node.origin):
                    results: Sequence[Value] = tuple(self.emit(match, other, values))
                if len(results) != len(node.outputs):
                    raise Invalid(f"emit returned {len(results)} values for the {len(node.outputs)} results of {node}")
            else:
                names = [n if n not in other.tensors else other.fresh(n) for n in node.outputs]
                results = other.append(node.op, tuple(values[i].name for i in node.inputs), names, node.origin)
            values.update(zip(node.outputs, results, strict=True))
        return without_dead_code(graph.finish(other, {old: value.name for old, value in values.items()}))


@dataclass(frozen=True, eq=False)
class Measured:
    """A match that always applies and whose bytes are measured on the result, which a function computes."""

    transformation: Pass
    graph: Graph
    where: str
    arrays: tuple[str, ...]
    result: Callable[[], Graph]
    slow: bool = False
    """Whether the result is too expensive to compute the bytes of many matches."""
    refusal: None = None

    @cached_property
    def after(self) -> Graph:
        """The result."""
        return self.result()

    @cached_property
    def traffic(self) -> Dim:
        """Bytes that applying adds (negative: saves)."""
        return simplify(traffic(self.after).bytes - traffic(self.graph).bytes)

    def apply(self) -> Graph:
        """The graph with the pass applied here alone."""
        return self.after


def applied(before: Graph, after: Graph) -> int:
    """The number of matches that a pass applied; 1 for a change by a pass that does not count them."""
    if after is before:
        return 0
    if after.applied > before.applied:
        return after.applied - before.applied
    one, other = ([(n.op, n.inputs, n.outputs) for n in g.nodes] for g in (before, after))
    same = one == other and (before.outputs, before.writes) == (after.outputs, after.writes)
    return 0 if same else 1


def without_dead_code(graph: Graph) -> Graph:
    """The graph without operators whose results are unused."""
    kept, _ = required(graph.nodes, graph.results)
    other = graph.copy()
    other.nodes = kept
    results = {name for node in kept for name in node.outputs}
    other.tensors = {n: t for n, t in graph.tensors.items() if n in results or n in graph.inputs}
    return other


def checked(transformation: Pass, graph: Graph, rest: Sequence[Pass] = ()) -> Graph:
    """Run a pass, also inside branches and loops, and verify. Raises `PassFailed`, which names the pass, where it
    raises an error or returns a graph that is not valid.

    `rest` are the passes that follow; there are none for a pass that runs by itself.
    """
    with named(transformation):
        result = transformation.run_before(graph, rest) if rest else transformation.run(graph)
        check_signature(transformation, graph, result)
        result = within(result, lambda body: checked(transformation, body, rest))
        if result is graph:
            return graph
        result = mended(result)
        verify(result)
        return result


@contextlib.contextmanager
def named(transformation: Pass) -> Iterator[None]:
    """Errors inside as ones that name the pass. Those that say why a request cannot be met stay as they are."""
    try:
        yield
    except (PassFailed, Refused, *EXPECTED):
        raise
    except Exception as error:
        ours = type(transformation).__module__.partition(".")[0] == __name__.partition(".")[0]
        if isinstance(error, DacemlError):
            message, where, advice = f"the pass {transformation}: {error.message}", error.where, error.advice
        else:
            message, where, advice = f"the pass {transformation} raised {type(error).__name__}: {error}", "", ""
        raise PassFailed(message, ours=ours, where=where, advice=advice) from error


def check_signature(transformation: Pass, before: Graph, after: object) -> None:
    """Raises `Invalid` where the result of a pass is no graph, or one with other inputs or results.

    Passes of the level `distribution` may change these: each rank has a part of the optimizer's state.
    """
    if not isinstance(after, Graph):
        raise Invalid(f"it returns a graph, and returned {type(after).__name__}")
    if after is before or transformation.level == "distribution":
        return
    lost = before.writes.keys() - after.writes.keys()
    if lost and all(roots(before)[before.writes[target]] == target for target in lost):
        before = before.copy()  # an array that is written over itself need not be
        before.writes = {target: name for target, name in before.writes.items() if target not in lost}
    kinds = zip(("inputs", "outputs", "writes"), _signature(before), _signature(after), strict=True)
    for what, one, other in kinds:
        if len(one) != len(other) or not all(map(_alike, one, other)):
            raise Invalid(f"a pass keeps the {what} of a graph: {_shown(one)} before it, {_shown(other)} after it")


_Named = tuple[str, Tensor | None]


def _signature(graph: Graph) -> tuple[list[_Named], ...]:
    """Inputs, outputs, and writes: types, after the names that passes keep."""
    inputs: list[_Named] = [(name, entry.tensor) for name, entry in graph.inputs.items()]
    outputs: list[_Named] = [("", graph.tensors.get(name)) for name in graph.outputs]
    return inputs, outputs, [(target, graph.tensors.get(name)) for target, name in graph.writes.items()]


def _alike(one: _Named, other: _Named) -> bool:
    if one[1] is None or other[1] is None:  # which `verify` reports
        return True
    return one[0] == other[0] and one[1].dtype is other[1].dtype and same_shape(one[1].shape, other[1].shape)


def _shown(arrays: Sequence[_Named]) -> str:
    texts = [f"{name}: {tensor}" if name else str(tensor) for name, tensor in arrays[:_SHOWN]]
    return ", ".join(texts + ["..."] * (len(arrays) > _SHOWN)) or "none"


_SHOWN = 6
"""How many arrays a message lists."""
