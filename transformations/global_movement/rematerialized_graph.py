"""The rematerialized graph: chosen operators run a second time, before the first reader of the stage."""

from __future__ import annotations

from dataclasses import replace

from daceml_train.analysis.memory import number
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.errors import Refused
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.kernel import Kernel
from daceml_train.tensor import Tensor
from daceml_train.transformations.global_movement.dead_code import trimmed
from daceml_train.transformations.global_movement.liveness import Liveness
from daceml_train.transformations.global_movement.remat_plan import RematPlan


def rebuilt(graph: Graph, items: Liveness, choice: RematPlan) -> Graph:
    """The graph in which the items of `choice.again` are rematerialized in their stages."""
    return _Rebuild(graph, items, choice).run()


SMALL = 16
"""A result that is this many times smaller than another one of its kernel is kept, not rematerialized."""


def from_kept(graph: Graph, node: Node, again: Node) -> Node:
    """Rematerialize the results of kernel `node` from small ones that are kept: a normalization from its moments.

        x -> kernel(mean(x), x - mean) -> m, y      again:      x, m -> kernel(x - m) -> y'

    `again` is the node with the operands to read. Where the reduced kernel cannot be generated, the whole one runs.
    """
    if not isinstance(node.op, Kernel):
        return again
    sizes = [number(graph.tensors[name].bytes) for name in node.outputs]
    made_alone = {s.outputs[0] for s in node.op.statements if len(s.outputs) == 1}
    kept = {
        value: name
        for value, name, size in zip(node.op.yields, node.outputs, sizes, strict=True)
        if SMALL * size <= max(sizes) and value in made_alone
    }
    if not kept:
        return again
    arguments = (*node.op.arguments, *kept)
    statements = tuple(s for s in node.op.statements if s.outputs[0] not in kept)
    body = Kernel(arguments, statements, tuple(y for y in node.op.yields if y not in kept))
    outputs = tuple(name for name in node.outputs if name not in kept.values())
    part = trimmed(Node(body, (*again.inputs, *kept.values()), outputs, node.origin), body, outputs)
    assert isinstance(part.op, Kernel)
    read = dict(zip(arguments, (*node.inputs, *kept.values()), strict=True))
    tensors = [graph.tensors[read[argument]] for argument in part.op.arguments]
    try:
        analyze(part.op, [Tensor(t.shape, t.dtype) for t in tensors])
    except Refused:
        return again
    return part


class _Rebuild:
    def __init__(self, graph: Graph, items: Liveness, choice: RematPlan) -> None:
        self.graph, self.items, self.choice = graph, items, choice
        self.makers = graph.producers()
        self.item_of = {name: i for i, node in enumerate(items.nodes) for name in node.outputs}
        self.other = graph.empty()
        self.current: dict[str, str] = {}
        """Array of the graph -> its latest version."""
        self.made_in: dict[str, int] = {}
        """Array -> the stage in which its latest version was produced."""
        self.views: dict[tuple[str, str], str] = {}
        """(alias or constant, version of its operand) -> its copy."""
        self.shown: set[str] = set()
        """Aliases and constants that keep their name in the new graph."""
        self.other.tensors.update(graph.tensors)  # so that fresh names are new

    def run(self) -> Graph:
        for item, node in enumerate(self.items.nodes):
            stage = self.choice.stage_of[item]
            inputs = tuple(self.version(name, stage) for name in node.inputs)
            self.other.nodes.append(Node(node.op, inputs, node.outputs, node.origin))
            for name in node.outputs:
                self.current[name], self.made_in[name] = name, stage
        for name in self.graph.results:
            if name not in self.item_of:
                self.version(name, -1)
        result = {name for node in self.other.nodes for name in node.outputs} | set(self.graph.inputs)
        self.other.tensors = {name: t for name, t in self.other.tensors.items() if name in result}
        return self.graph.finish(self.other, {})

    def version(self, name: str, stage: int) -> str:
        """The array to read for `name` in a stage; it is rematerialized where the choice says so."""
        todo = [self.root(name)]
        while todo:  # an explicit stack: chains of operators are long
            top = todo[-1]
            if not self.due(top, stage):
                todo.pop()
                continue
            node = self.makers[top]
            missing = [r for r in map(self.root, node.inputs) if self.due(r, stage)]
            if missing:
                todo += missing
                continue
            again = replace(node, inputs=tuple(self.latest(i) for i in node.inputs))
            again = from_kept(self.graph, node, again)
            outputs = tuple(self.fresh(n) for n in again.outputs)
            self.other.nodes.append(replace(again, outputs=outputs))
            self.current.update(zip(again.outputs, outputs, strict=True))
            self.made_in.update((old, stage) for old in node.outputs)
        return self.latest(name)

    def root(self, name: str) -> str:
        """The array under aliases that are no items."""
        while name in self.makers and name not in self.item_of and self.makers[name].inputs:
            name = self.makers[name].inputs[0]
        return name

    def due(self, name: str, stage: int) -> bool:
        """Whether an array must be rematerialized now."""
        item = self.item_of.get(name)
        return item is not None and (item, stage) in self.choice.again and self.made_in[name] < stage

    def latest(self, name: str) -> str:
        """The latest version of an array; its aliases and constants are copied as needed."""
        chain = []
        while name in self.makers and name not in self.item_of:
            chain.append(name)
            if not self.makers[name].inputs:
                break
            name = self.makers[name].inputs[0]
        found = self.current.get(name, name)
        for alias in reversed(chain):
            node = self.makers[alias]
            key = alias, found if node.inputs else ""
            if key not in self.views:
                result = self.fresh(alias) if alias in self.shown else alias
                self.shown.add(alias)
                self.views[key] = result
                self.other.nodes.append(Node(node.op, (found,) if node.inputs else (), (result,), node.origin))
            found = self.views[key]
        return found

    def fresh(self, name: str) -> str:
        result = self.other.fresh(f"{name}_again")
        self.other.tensors[result] = self.graph.tensors[name]
        return result
