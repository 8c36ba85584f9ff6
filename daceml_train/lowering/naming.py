"""Naming: what the nodes of a graph compute and where, as the user would say it: `layer1.0.bn2 + relu`.

A module that stands for one operator, arithmetic aside, gives its path; an operator of a module with several, or with
modules inside, gives its own name after that. What follows in the same kernel leaves out the path that it shares with
what is first, and arithmetic where the same module computes more than that.
Names are for people: kernels are shared by many places and models, so no name is a part of a kernel's source or key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from daceml_train.graph.graph import Graph
from daceml_train.ops.kernel import computed, described
from daceml_train.ops.operator import Computed

_TEXT = """
add sub mul div neg pow square sqrt rsqrt abs maximum minimum where eq ne lt le gt ge logical_and logical_or logical_not
view permute expand slice cast full iota reorder concat reduce.sum reduce.max require copy
"""
ARITHMETIC = frozenset(_TEXT.split())
"""Labels of operators that name nothing where there is another one."""
MOST = 3
"""Operators named of one kernel."""


def names(graph: Graph) -> list[str]:
    """A name per node."""
    found = [computed(node.op, node.origin) for node in graph.nodes]
    modules = _Modules.of([part for parts in found for part in parts])
    return [_name(parts, modules) or described(node.op) for node, parts in zip(graph.nodes, found, strict=True)]


@dataclass(frozen=True)
class _Modules:
    containers: Set[str]
    operators: Mapping[str, Set[str]]

    @staticmethod
    def of(parts: Sequence[Computed]) -> _Modules:
        containers: set[str] = set()
        operators: dict[str, set[str]] = {}
        for part in parts:
            if part.phase != "update":
                operators.setdefault(part.module, set()).add(part.operator)
        for module in operators:
            while module := module.rpartition(".")[0]:
                if module in containers:
                    break
                containers.add(module)
        return _Modules(containers, operators)

    def single(self, module: str) -> bool:
        """Whether a module stands for one operator."""
        return bool(module) and module not in self.containers and len(self.operators[module] - ARITHMETIC) <= 1


def _name(parts: Sequence[Computed], modules: _Modules) -> str:
    """The name of what computes these operators; empty for none."""
    telling = {part.module for part in parts if part.operator not in ARITHMETIC}
    parts = [part for part in parts if part.operator not in ARITHMETIC or part.module not in telling]
    texts: dict[str, None] = {}
    first = next((part.module for part in parts if part.phase != "update"), "")
    around = first if first in modules.containers else first.rpartition(".")[0]
    backward = bool(parts) and all(part.phase == "backward" for part in parts)
    for part in parts:
        if part.phase == "update":
            text = part.operator
        else:
            text = _text(part, modules, "" if not texts else around, first if texts else None)
            if part.phase == "backward" and not backward:
                text += " backward"
        texts[text] = None
    named = list(texts)
    more = f" + {len(named) - MOST} more" if len(named) > MOST else ""
    return " + ".join(named[:MOST]) + more + (" backward" if backward else "")


def _text(part: Computed, modules: _Modules, around: str, first: str | None) -> str:
    """One operator, without the path of the module `around` it; of the module that came first, its name alone."""
    module = part.module
    if modules.single(module):
        return module.removeprefix(f"{around}.") if around else module
    if not module or module in (around, first):
        return part.operator
    shown = module.removeprefix(f"{around}.") if around else module
    return f"{shown} {part.operator}"
