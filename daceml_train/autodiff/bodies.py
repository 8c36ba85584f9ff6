"""Bodies of control flow with their derivatives appended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from daceml_train.analysis.reachability import required
from daceml_train.errors import Unsupported
from daceml_train.graph.graph import Graph, Node, Role
from daceml_train.ops.control import dense, draws
from daceml_train.ops.elementwise import Full
from daceml_train.ops.operator import Value
from daceml_train.tensor import Tensor

Differentiate = Callable[[Graph, Mapping[str, Value], Sequence[str]], dict[str, Value | None]]
"""The type of `reverse.differentiate`, which differentiates bodies, too."""
Cotangents = Sequence[Value | None]


@dataclass
class Derivative:
    """A body with its derivative appended: per requested argument, the cotangent, or None if it is not reached."""

    graph: Graph
    arguments: list[str]
    seeds: list[str]
    """Inputs for the given cotangents."""
    found: dict[str, Value | None]


def derivative(body: Graph, given: Sequence[int], wanted: Sequence[str], differentiate: Differentiate) -> Derivative:
    """Differentiate the yields of `body` at the positions `given`; their cotangents are additional inputs."""
    graph, of, seeds = body.copy(), dict[str, Value](), []
    arguments = list(graph.inputs)
    for position in given:
        name = graph.outputs[position]
        seed = graph.input(graph.fresh(f"grad_{name}"), dense(graph.tensors[name]), Role.cotangent)
        seeds.append(seed.name)
        of[name] = of[name] + seed if name in of else seed
    return Derivative(graph, arguments, seeds, differentiate(graph, of, wanted) if of else {})


def pruned(graph: Graph, keep: Sequence[str]) -> Graph:
    """The graph with only the nodes that its outputs need; inputs in `keep` remain even if unused.

    Raises `Unsupported` if random numbers would have to be drawn a second time.
    """
    nodes, _ = required(graph.nodes, graph.outputs)
    for node in nodes:
        if draws(node.op):
            raise Unsupported(f"a derivative that needs the random numbers of {node.op.label} a second time")
    other = Graph(graph.name)
    for name in keep:
        other.input(name, graph.tensors[name])
    other.nodes = nodes
    other.tensors.update({name: graph.tensors[name] for node in nodes for name in node.outputs})
    other.outputs = list(graph.outputs)
    return other


def inputs_read(graph: Graph) -> set[str]:
    """The inputs that outputs depend on."""
    _, read = required(graph.nodes, graph.outputs)
    return read.intersection(graph.inputs)


def zeros(graph: Graph, tensor: Tensor) -> Value:
    """An array of zeros."""
    return graph.emit(Full(0.0, tensor.shape, tensor.dtype))[0]


def operand_types(graph: Graph, node: Node) -> list[Tensor]:
    """The types of a node's operands."""
    return [graph.tensors[i] for i in node.inputs]
