"""Stages: a graph that TorchDynamo broke off, divided at results that are computed from each other.

User code goes on after a graph break, and may hook a result, ask for the gradient by it, or change it in place. That
means what it means in PyTorch only if a later result depends on an earlier one for autograd, too. One compiled function
for all of them hides that; so each such result ends a stage, which is compiled by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from daceml_train.frontends.torch.capture.nodes import changed_in_place
from daceml_train.frontends.torch.results import example_of

MOST = 16
"""Stages of one graph; with more, as for the features of every layer, it stays whole."""


@dataclass
class Stage:
    """A part of a graph: what it takes and returns, by the graph's nodes."""

    module: fx.GraphModule
    inputs: list[fx.Node]
    outputs: list[fx.Node]


@dataclass
class Stages:
    """A graph as a sequence of compiled stages."""

    inputs: list[fx.Node]
    results: list[Any]
    """The nodes of the graph's results, or constants."""
    stages: list[Stage]
    compiled: list[Any] = field(default_factory=list)

    @property
    def runs(self) -> int:
        """How often it has run."""
        return int(self.compiled[0].runs)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """The results, from the values of the placeholders."""
        values = dict(zip(self.inputs, arguments, strict=True))
        for stage, run in zip(self.stages, self.compiled, strict=True):
            found = run(*[values[node] for node in stage.inputs])
            values.update(zip(stage.outputs, found, strict=True))
        return tuple(values[r] if isinstance(r, fx.Node) else r for r in self.results)

    def compile(self, examples: Sequence[Any], compile_stage: Callable[..., Any]) -> None:
        """Compile the stages; `examples` are those of the placeholders."""
        given = dict(zip(self.inputs, examples, strict=True))
        for stage in self.stages:
            self.compiled.append(compile_stage(stage.module, [given.get(n, example_of(n)) for n in stage.inputs]))


def stages_of(module: fx.GraphModule) -> Stages | None:
    """The stages of a graph; None if it is whole: no graph break follows, or no result depends on another one."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not torch.is_grad_enabled():
        return None
    nodes = list(module.graph.nodes)
    (end,) = (node for node in nodes if node.op == "output")
    results = list(end.args[0]) if isinstance(end.args[0], tuple | list) else [end.args[0]]
    cuts = _cuts(nodes, results)
    if any(isinstance(r, fx.Node) and r.op == "get_attr" for r in results):
        return None
    if not cuts or len(cuts) >= MOST or any(map(_is_stateful, nodes)):
        return None
    divided = _divided(module, nodes, results, cuts)
    crossing = {node for stage in divided for node in (*stage.inputs, *stage.outputs)}
    if not all(isinstance(example_of(node), Tensor | torch.SymInt | torch.SymFloat | int) for node in crossing):
        return None
    return Stages([node for node in nodes if node.op == "placeholder"], results, divided)


def _cuts(nodes: Sequence[fx.Node], results: Sequence[Any]) -> list[int]:
    """The positions of results that have a gradient and on which another result with a gradient depends."""
    place = {node: at for at, node in enumerate(nodes)}
    ends = {r for r in results if isinstance(r, fx.Node) and r.op != "placeholder" and _has_gradient(r)}
    read = set[fx.Node]()  # by a result that has a gradient, directly or not
    for node in reversed(nodes):
        if node in ends or node in read:
            read.update(node.all_input_nodes)
    return sorted(place[node] for node in ends & read)


def _has_gradient(node: fx.Node) -> bool:
    example = example_of(node)
    return isinstance(example, Tensor) and example.requires_grad


def _is_stateful(node: fx.Node) -> bool:
    """Whether a node changes tensors or modes, whose meaning for later nodes ends with a stage."""
    name = str(getattr(node.target, "__name__", node.target))
    modes = name.startswith(("_enter_", "_exit_", "_set_grad_enabled", "_vmap", "_grad_", "_saved_tensors_hooks"))
    return node.op not in ("placeholder", "output") and (modes or changed_in_place(node) is not None)


def _divided(
    module: fx.GraphModule, nodes: Sequence[fx.Node], results: Sequence[Any], cuts: Sequence[int]
) -> list[Stage]:
    """The nodes up to each cut, and those after the last one, as graphs of their own."""
    bounds = [-1, *cuts, len(nodes)]
    stage_of = {
        node: k
        for k, (start, stop) in enumerate(itertools.pairwise(bounds))
        for node in nodes[start + 1 : stop + 1]
        if node.op not in ("placeholder", "output", "get_attr")
    }
    wanted = {r for r in results if isinstance(r, fx.Node)}
    stages = []
    for number in range(len(cuts) + 1):
        own = [node for node, k in stage_of.items() if k == number]
        read = dict.fromkeys(n for node in own for n in node.all_input_nodes if stage_of.get(n) != number)
        inputs = [n for n in read if n.op != "get_attr"]
        outputs = [n for n in own if n in wanted or any(stage_of.get(user, number) > number for user in n.users)]
        if own:
            stages.append(Stage(_graph(module, own, read, outputs), inputs, outputs))
    return stages


def _graph(
    module: fx.GraphModule, own: Sequence[fx.Node], read: dict[fx.Node, None], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in read:
        if node.op == "get_attr":
            copies[node] = graph.node_copy(node)
            continue
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        if hasattr(node, "_dynamo_source"):
            copies[node]._dynamo_source = node._dynamo_source
    for node in own:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    created = fx.GraphModule(module, graph)
    created.meta.update(module.meta)
    return created
