"""Match, Preview, Step: a place where a pass applies, what applying it would do, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from daceml_train.analysis.memory import number
from daceml_train.errors import message_of
from daceml_train.exploration.session.state import State
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.kernel import described
from daceml_train.passes.base import Candidate, Measured, Pass
from daceml_train.transformations.at_place import AtPlace, place_of

COUNTED = 5_000
"""Matches times operators up to which bytes are counted, although each count has to apply a pass."""


SHOWN = 8
"""Removed and added operators that a preview's text shows, each."""


class _Told:
    """A notebook shows it as it prints."""

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, eq=False, repr=False)
class Match(_Told):
    """One place where a pass applies or is refused, in one state of a session."""

    candidate: Candidate
    state: State = field(repr=False)
    steps: int
    """The number of applied steps when it was found."""
    counted: bool = True
    """Whether its bytes are known without a preview."""

    @property
    def transformation(self) -> Pass:
        """The pass with its options."""
        return self.candidate.transformation

    @property
    def name(self) -> str:
        """The pass's name."""
        return self.transformation.name

    @property
    def level(self) -> str:
        """The pass's level."""
        return self.transformation.level

    @property
    def graph(self) -> Graph:
        """The graph that the pass sees: of level `forward`, the forward pass before differentiation."""
        return self.state.forward if self.level == "forward" else self.state.graph

    @property
    def where(self) -> str:
        """The place, by the names of the arrays produced there."""
        return self.candidate.where

    @property
    def arrays(self) -> tuple[str, ...]:
        """Arrays that the matched operators produce; none for a match of the whole graph."""
        return self.candidate.arrays

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The matched operators."""
        producers = self._makers
        return tuple({id(n): n for name in self.arrays if (n := producers.get(name)) is not None}.values())

    @cached_property
    def _place(self) -> tuple[str, str]:
        return place_of(self._makers, self.candidate)

    @property
    def _makers(self) -> dict[str, Node]:
        return self.state.forward_producers if self.level == "forward" else self.state.producers

    @property
    def module(self) -> str:
        """The user's module that the operators belong to."""
        return self._place[0]

    @property
    def operators(self) -> str:
        """The matched operators, in the order of the graph."""
        return self._place[1]

    @property
    def source(self) -> str:
        """The user's source line."""
        return next((n.origin.source for n in reversed(self.nodes) if n.origin.source), "")

    @property
    def refusal(self) -> str | None:
        """Why the pass must not be applied here, or None."""
        return self._judged[0]

    @property
    def bytes(self) -> int | None:
        """Bytes that applying adds (negative: saves) in the graph that the pass sees; None: only a preview knows."""
        return self._judged[1]

    @cached_property
    def _judged(self) -> tuple[str | None, int | None]:
        """Refusal and bytes. A pass that fails here counts as refused, so that the others can be listed."""
        if self.level == "forward" and self.state.differentiated:
            return "it runs before differentiation, and a later pass was applied already: undo that first", None
        try:
            if not self.counted:
                return self.candidate.refusal, None
            if isinstance(self.candidate, Measured):
                return None, self.state.change(self.level, self.candidate.after)
            return self.candidate.refusal, number(self.candidate.traffic)
        except Exception as error:
            return f"the pass fails here: {message_of(error)}", None

    @property
    def anchored(self) -> Pass:
        """The pass that finds this place in another capture: by module and operators, not by names in the graph."""
        return AtPlace.of(self.graph, self.candidate) if self.arrays else self.transformation

    def __str__(self) -> str:
        change = "" if self.bytes is None else f", {self.bytes:+,} bytes"
        refused = f", refused: {self.refusal}" if self.refusal else ""
        return f"{self.transformation} at {self.where}{change}{refused}"


@dataclass(frozen=True, eq=False, repr=False)
class Preview(_Told):
    """What applying would do. `reason` says why it is impossible; then there is no state after."""

    match: Match | None
    transformation: Pass
    before: State = field(repr=False)
    after: State | None = field(repr=False)
    reason: str | None = None

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes moved, before and after."""
        return self.before.bytes, self._after.bytes

    @property
    def peak(self) -> tuple[int, int]:
        """The peak of live bytes, before and after."""
        return self.before.peak, self._after.peak

    @property
    def flops(self) -> tuple[int, int]:
        """Operations, before and after."""
        return self.before.flops, self._after.flops

    @property
    def operators(self) -> tuple[int, int]:
        """Operators, before and after."""
        return len(self.before.graph.nodes), len(self._after.graph.nodes)

    @cached_property
    def removed(self) -> tuple[Node, ...]:
        """Removed or changed operators, before the change."""
        return _missing(self.before.graph, self._after.graph)

    @cached_property
    def added(self) -> tuple[Node, ...]:
        """Added or changed operators, after the change."""
        return _missing(self._after.graph, self.before.graph)

    @property
    def _after(self) -> State:
        return self.before if self.after is None else self.after

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.transformation}: {self.reason}"
        lines = [f"{self.transformation}{f' at {self.match.where}' if self.match else ''}"]
        for name in ("bytes", "peak", "flops", "operators"):
            before, after = getattr(self, name)
            lines.append(f"  {name:9} {before:>15,} -> {after:>15,} ({after - before:+,})")
        lines += [f"  - {_shown(node)}" for node in self.removed[:SHOWN]] + [
            f"  + {_shown(node)}" for node in self.added[:SHOWN]
        ]
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class Step(_Told):
    """A pass that was applied, at one place or everywhere."""

    number: int
    """Its position in the history, from 1."""
    transformation: Pass
    kept: Pass
    """Its representation in a pipeline: the pass, or `at_place` with module and operators."""
    level: str
    where: str
    """The place; empty for a pass that was applied everywhere."""
    matches: int
    """The number of applied matches."""
    seconds: float
    before: State = field(repr=False)
    after: State = field(repr=False)
    module: str = ""
    operators: str = ""
    source: str = ""

    @property
    def name(self) -> str:
        """The pass's name."""
        return self.transformation.name

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes moved, before and after."""
        return self.before.bytes, self.after.bytes

    @property
    def peak(self) -> tuple[int, int]:
        """The peak of live bytes, before and after."""
        return self.before.peak, self.after.peak

    @property
    def flops(self) -> tuple[int, int]:
        """Operations, before and after."""
        return self.before.flops, self.after.flops

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else f", {self.matches} matches"
        before, after = self.bytes
        return f"{self.number}. {self.transformation}{place}: {before:,} -> {after:,} bytes"


def counted(candidates: int, operators: int, candidate: Candidate) -> bool:
    """Whether it pays to count the bytes of one of so many matches before a preview is requested."""
    if not isinstance(candidate, Measured):
        return True
    return not candidate.slow and candidates * operators <= COUNTED


def _missing(graph: Graph, other: Graph) -> tuple[Node, ...]:
    """Operators of `graph` that `other` does not have."""
    producers = other.producers()
    there = ((node, producers.get(node.outputs[0])) for node in graph.nodes)
    return tuple(n for n, o in there if o is None or (n is not o and (n.op, n.inputs) != (o.op, o.inputs)))


def _shown(node: Node) -> str:
    outputs = ", ".join(f"%{name}" for name in node.outputs)
    read = ", ".join(f"%{name}" for name in node.inputs)
    return f"{outputs} = {described(node.op)}({read})"
