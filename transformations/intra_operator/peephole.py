"""Peephole: one topological sweep in which each rule sees operands that are already rewritten.

A rule looks from an operator to the producers of its operands, never to its readers, and returns the value that
replaces the result. Operators that a rule emits go through the rules as well, so one sweep reaches the fixed point.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from daceml_train.analysis.aliases import root_of
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.elementwise import Elementwise, Full
from daceml_train.ops.operator import Operator, Value
from daceml_train.passes.base import Candidate, Measured, Pass, without_dead_code
from daceml_train.tensor import Tensor, same, same_shape

Kind = TypeVar("Kind", bound=Operator)


@dataclass(frozen=True)
class Site:
    """An operator that is about to be appended: its operands and the types of its results."""

    op: Operator
    operands: tuple[Value, ...]
    result: Tensor
    sweep: Sweep

    @property
    def x(self) -> Value:
        """The first operand."""
        return self.operands[0]

    def made_by(self, value: Value, kind: type[Kind]) -> tuple[Kind, tuple[Value, ...]] | None:
        """The operator of class `kind` that produces `value`, and its operands."""
        node = self.sweep.makers.get(value.name)
        if node is None or not isinstance(node.op, kind):
            return None
        return node.op, tuple(self.sweep.value(name) for name in node.inputs)

    def of_kind(self, value: Value, kind: str) -> tuple[Value, ...] | None:
        """The operands of the elementwise operator `kind` that produces `value`."""
        results = self.made_by(value, Elementwise)
        return results[1] if results and results[0].kind == kind else None

    def constant(self, value: Value) -> float | int | bool | None:
        """The real number that every element of `value` provably equals; None also for expressions over sizes."""
        node = self.sweep.makers.get(root_of(self.sweep.makers, value.name))
        if node is None or not isinstance(node.op, Full) or not isinstance(node.op.value, bool | int | float):
            return None
        return None if value.dtype.short[0] == "c" else node.op.value


Rule: TypeAlias = Callable[[Site], Value | None]
"""A function whose docstring draws `before => after`; None where the picture does not fit."""
Rules: TypeAlias = Mapping[str, Sequence[Rule]]
"""Operator label -> rules in the order of trial; those under `elementwise` apply to every elementwise operator."""


class Sweep:
    """A builder that applies the rules to each operator before it appends it to a graph."""

    def __init__(self, graph: Graph, rules: Rules) -> None:
        self.graph, self.rules = graph, rules
        self.answered = False
        """Whether a rule rewrote the last operator given to `append`."""
        self.makers: dict[str, Node] = {}
        self.notes: dict[str, Any] = {}
        """Values that a rule computed for an array and reuses later."""

    def value(self, name: str) -> Value:
        """The array called `name`; arithmetic on it emits through this builder."""
        return Value(self, name, self.graph.tensors[name])

    def emit(self, op: Operator, *operands: Value) -> tuple[Value, ...]:
        """Append `op`, or its rewritten form."""
        return self.append(op, operands, ())

    def append(
        self, op: Operator, operands: tuple[Value, ...], names: Sequence[str], keep: bool = False
    ) -> tuple[Value, ...]:
        """Append `op`, or its rewritten form; results of an unchanged operator get `names` where those are free.

        With `keep`, rules are tried, but the operator is appended unchanged whatever they return.
        """
        answer = self._answer(op, operands)
        self.answered = answer is not None
        if answer is not None and not keep:
            self.graph.applied += 1
            return (answer,)
        chosen = [n if n not in self.graph.tensors else self.graph.fresh(n) for n in names]
        results = self.graph.append(op, tuple(v.name for v in operands), chosen)
        self.makers.update((v.name, self.graph.nodes[-1]) for v in results)
        return tuple(self.value(v.name) for v in results)

    def _answer(self, op: Operator, operands: tuple[Value, ...]) -> Value | None:
        """The result of the first rule that matches `op`."""
        rules = self.rules.get(op.label, ())
        if isinstance(op, Elementwise):
            rules = (*rules, *self.rules.get("elementwise", ()))
        if rules:
            (result,) = op.infer(*(v.tensor for v in operands))
            site = Site(op, operands, result, self)
            for rule in rules:
                answer = rule(site)
                if answer is not None and equivalent(answer.tensor, result):
                    return answer
        return None


@dataclass(frozen=True)
class Peephole(Pass):
    """A pass that is a table of rules."""

    level = "intra_operator"

    @abstractmethod
    def rules(self) -> Rules:
        """The table."""

    def run(self, graph: Graph) -> Graph:
        return self.sweep(graph, None, [])

    def matches(self, graph: Graph) -> list[Candidate]:
        """Operators that a rule would rewrite in the current graph."""
        found: list[int] = []
        self.sweep(graph, (), found)

        def match(index: int) -> Measured:
            node = graph.nodes[index]
            return Measured(self, graph, str(node), node.outputs, lambda: self.sweep(graph, (index,), []))

        return [match(index) for index in found]

    def sweep(self, graph: Graph, chosen: Container[int] | None, found: list[int]) -> Graph:
        """Apply the rules to the nodes at positions `chosen` (None: all); `found` collects the positions that match."""
        sweep = Sweep(graph.empty(), self.rules())
        now = {name: sweep.value(name) for name in graph.inputs}
        for index, node in enumerate(graph.nodes):
            keep = chosen is not None and index not in chosen
            with sweep.graph.at(node.origin):
                results = sweep.append(node.op, tuple(now[i] for i in node.inputs), node.outputs, keep)
            if sweep.answered:
                found.append(index)
            now.update(zip(node.outputs, results, strict=True))
        return without_dead_code(graph.finish(sweep.graph, {old: value.name for old, value in now.items()}))


def equivalent(a: Tensor, b: Tensor) -> bool:
    """Whether two types have the same sizes, elements, and memory order up to dimensions of size 1."""
    return a.dtype is b.dtype and same_shape(a.shape, b.shape) and memory_order(a) == memory_order(b)


def memory_order(x: Tensor) -> tuple[int, ...]:
    """The dimensions larger than 1 as they lie in memory, outermost first."""
    return tuple(d for d in (x.order or range(x.rank)) if not same(x.shape[d], 1))
