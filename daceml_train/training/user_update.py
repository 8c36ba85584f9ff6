"""Gradients that code of the user's reads: hooks of parameters, and optimizers that the user wrote.

TorchDynamo traces such code together with the loss, so that it is a part of the captured graph:

    loss -> loss_gradients -> hooks -> final_gradients -> update
            ^ the reverse pass          ^ loss scaling and clipping

What the two marks stand for takes their places here. Where only hooks are the user's, the graph ends with
`final_gradients`, and an update of ours follows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from daceml_train.analysis.reachability import descendants
from daceml_train.autodiff.reverse import reaching
from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.gradient import FinalGradients, LossGradients
from daceml_train.ops.operator import Value


def reads_gradients(graph: Graph) -> bool:
    """Whether code of the user's in this captured graph reads gradients."""
    return any(isinstance(node.op, LossGradients) for node in graph.nodes)


@dataclass(frozen=True)
class UserCode:
    """A captured graph that is divided at its marks."""

    graph: Graph
    """The forward pass, with the outputs and writes of the whole graph, whose names are taken."""
    begin: Node
    hooks: Sequence[Node]
    """What is computed of the gradients before they are final."""
    final: Node
    update: Sequence[Node]
    """What is computed of the final gradients."""

    @staticmethod
    def of(graph: Graph) -> UserCode:
        """The parts of a captured graph. Raises `Unsupported` where it has its marks not once each."""
        begins = [node for node in graph.nodes if isinstance(node.op, LossGradients)]
        finals = [node for node in graph.nodes if isinstance(node.op, FinalGradients)]
        if len(begins) != 1 or len(finals) != 1 or begins[0].inputs[0] != graph.outputs[0]:
            raise Unsupported("a step whose gradients are not those of its loss, once")
        (begin,), (final,) = begins, finals
        late, last = descendants(graph.nodes, begin.outputs), descendants(graph.nodes, final.outputs)
        between = [n for n in graph.nodes if not late.isdisjoint(n.outputs) and n is not begin and n is not final]
        forward = graph.copy()
        forward.nodes = [node for node in graph.nodes if late.isdisjoint(node.outputs)]
        hooks = [node for node in between if last.isdisjoint(node.outputs)]
        return UserCode(forward, begin, hooks, final, [node for node in between if not last.isdisjoint(node.outputs)])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters whose gradients the user's code reads, in order."""
        return self.begin.inputs[1:]

    def expect(self, leaves: Sequence[str]) -> None:
        """Raise `Unsupported` unless the code reads the gradients of all leaves that get one, and of no others."""
        if self.connects(leaves) != set(self.parameters):
            raise Unsupported("other parameters get gradients than in the first step, in which the optimizer began")

    def connects(self, leaves: Collection[str]) -> set[str]:
        """Those of the leaves that get a gradient of the loss."""
        connected = reaching(self.graph, self.graph.outputs[:1]) if leaves else set()
        return {name for name in leaves if name in connected}

    def hooked(self, found: Mapping[str, Value]) -> dict[str, Value]:
        """Append the hooks on these gradients of the parameters; returns the final ones."""
        names = dict(zip(self.begin.outputs, (found[p].name for p in self.parameters), strict=True))
        self._append(self.hooks, names)
        finals = (self.graph.value(names.get(name, name)) for name in self.final.inputs)
        return dict(zip(self.parameters, finals, strict=True))

    def append_update(self, found: Mapping[str, Value], skip: Value | None) -> None:
        """Append the user's update by these final gradients of the parameters; if `skip` is true, nothing changes."""
        names = dict(zip(self.final.outputs, (found[p].name for p in self.parameters), strict=True))
        self._append(self.update, names)
        graph = self.graph
        graph.writes = {target: names.get(name, name) for target, name in graph.writes.items()}
        graph.outputs = [names.get(name, name) for name in graph.outputs]
        updated = {name for node in self.update for name in node.outputs} | set(names.values())
        for target, name in graph.writes.items() if skip is not None else ():
            if name in updated:
                assert skip is not None
                graph.write(target, skip.where(graph.value(target), graph.value(name)))

    def _append(self, nodes: Sequence[Node], names: Mapping[str, str]) -> None:
        for node in nodes:
            for name in node.outputs:
                del self.graph.tensors[name]
            self.graph.append(node.op, tuple(names.get(n, n) for n in node.inputs), node.outputs, node.origin)
