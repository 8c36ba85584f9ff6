"""AtPlace: one match of a pass, identified by module path and operators instead of the names in a graph.

A rewrite that a user applied by hand becomes part of a pipeline this way. It is found in another capture of the model
or in a model that shares modules with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from daceml_train.analysis.phases import PHASES, known_phases
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.kernel import described
from daceml_train.passes import notation
from daceml_train.passes.base import Candidate, Pass
from daceml_train.tensor import Dim


@dataclass(frozen=True)
class AtPlace(Pass):
    """Apply a pass to a single match: number `occurrence` among those with this module and these operators.

    matches m0, m1, m2 of a pass      =>      m1 applied

    `apply` is the pass as pipelines' texts write it. `operators` lists the operators of the match in graph order;
    `module` is the user's module that the last of them belongs to. Empty values match anything. `phase` is `forward`,
    `backward` or `update` for a match within one of them: where the forward and backward pass are two graphs, it is
    searched in its own. Without such a match, or if it is refused, the graph is unchanged.
    """

    level = "intra_operator"
    apply: str = "simplify()"
    module: str = ""
    operators: str = ""
    occurrence: int = 0
    phase: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.transformation, AtPlace):
            raise Invalid("at_place cannot apply at_place")
        if self.occurrence < 0:
            raise Invalid(f"occurrence counts from 0, given {self.occurrence}")
        if self.phase not in ("", *PHASES):
            raise Invalid(f"phase is one of {', '.join(PHASES)}, given {self.phase!r}")
        object.__setattr__(self, "level", self.transformation.level)

    @property
    def transformation(self) -> Pass:
        """The pass whose match is applied."""
        return notation.parse_pass(self.apply)

    def run(self, graph: Graph) -> Graph:
        found = self.find(graph)
        return graph if found is None or found.refusal is not None else found.apply()

    def matches(self, graph: Graph) -> Sequence[Candidate]:
        """The match, refused or not, if it exists."""
        found = self.find(graph)
        return [] if found is None else [Placed(self, found)]

    def find(self, graph: Graph) -> Candidate | None:
        """The match that the options identify, or None."""
        return next(iter(self.places(graph)[self.occurrence : self.occurrence + 1]), None)

    def missing(self, graph: Graph) -> str:
        """Why there is no match, or why it is refused; empty where it applies."""
        found = self.places(graph)
        if len(found) > self.occurrence:
            return found[self.occurrence].refusal or ""
        name, inside = self.transformation.name, f" in module {self.module!r}" if self.module else ""
        inside += f" of the {self.phase} pass" if self.phase in ("forward", "backward") else ""
        if found:
            operators = self.operators or "any operator"
            return f"{name} has {len(found)} places at {operators}{inside}, not {self.occurrence + 1}"
        if self.module and not any(self.module == node.origin.module for node in graph.nodes):
            return f"no operator belongs to module {self.module!r}"
        there = replace(self, operators="").places(graph)
        if not there:
            return f"{name} finds no place{inside}"
        return f"{name} finds no place at {self.operators}{inside}, but {len(there)} at other operators"

    def places(self, graph: Graph) -> list[Candidate]:
        """All matches of the pass with this module and these operators, in the order of the pass."""
        producers, phase_of = graph.producers(), _phases(graph)
        return [m for m in self.transformation.matches(graph) if self.fits(producers, m, phase_of)]

    def fits(self, producers: dict[str, Node], match: Candidate, phase_of: Mapping[str, str]) -> bool:
        """Whether a match has this module, phase and these operators; `makers` are the graph's producers."""
        module, operators = place_of(producers, match)
        if self.phase and phase_of and _phase(phase_of, match) != self.phase:
            return False
        return self.module in ("", module) and self.operators in ("", operators)

    @staticmethod
    def of(graph: Graph, match: Candidate) -> AtPlace:
        """The pass that finds `match`, one of those that its pass lists for `graph`."""
        module, operators = place_of(graph.producers(), match)
        anywhere = AtPlace(str(match.transformation), module, operators, phase=_phase(_phases(graph), match))
        same = [(m.where, m.arrays) for m in anywhere.places(graph)]
        return replace(anywhere, occurrence=same.index((match.where, match.arrays)))


def place_of(producers: dict[str, Node], match: Candidate) -> tuple[str, str]:
    """The module of a match's last operator that has one, and the operators of the match."""
    nodes = list({id(n): n for name in match.arrays if (n := producers.get(name)) is not None}.values())
    modules = [node.origin.module for node in nodes if node.origin.module]
    return modules[-1] if modules else "", ", ".join(described(node.op) for node in nodes)


def _phases(graph: Graph) -> dict[str, str]:
    """Array -> phase of the operator that produces it; empty if the graph does not tell."""
    known = known_phases(graph)
    return {} if known is None else {o: p for node, p in zip(graph.nodes, known, strict=True) for o in node.outputs}


def _phase(phase_of: Mapping[str, str], match: Candidate) -> str:
    """The phase that all operators of a match belong to; empty if there are several."""
    found = {phase_of.get(name, "") for name in match.arrays}
    return found.pop() if len(found) == 1 else ""


@dataclass(frozen=True)
class Placed:
    """A match of the inner pass, presented as one of `AtPlace`."""

    transformation: AtPlace
    found: Candidate

    @property
    def where(self) -> str:
        """The match, identified by the names of the arrays it produces."""
        return self.found.where

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays that the matched operators produce."""
        return self.found.arrays

    @property
    def refusal(self) -> str | None:
        """Why the pass must not be applied here, or None."""
        return self.found.refusal

    @property
    def traffic(self) -> Dim:
        """Bytes that applying adds (negative: saves)."""
        return self.found.traffic

    def apply(self) -> Graph:
        """The graph with the match applied."""
        return self.found.apply()
