"""What is wrong on purpose: a pass, an operator's derivative, and an operator whose reference is not PyTorch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daceml_train.frontends.torch.extension import torch_function
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.operator import Builder, Operator, Value
from daceml_train.passes.base import Match, Pass, Rewrite, Uses
from daceml_train.tensor import Tensor


@dataclass(frozen=True)
class WrongSubtraction(Rewrite):
    """a, b -> [sub] -> y     =>     b, a -> [sub] -> y   (wrong)"""

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        return {} if node.op.label == "sub" else None

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        a, b = match.root.inputs
        return (values[b] - values[a],)


@dataclass(frozen=True)
class Crash(Pass):
    """x -> [tanh] -> y     =>     an error"""

    level = "fusion"

    def run(self, graph: Graph) -> Graph:
        if any("tanh" in str(node.op) for node in graph.nodes):
            raise ValueError("no tanh, please")
        return graph


@dataclass(frozen=True)
class Cube(Operator):
    """x * x * x, whose derivative lacks a factor."""

    name = "cube_with_a_wrong_derivative"

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        return operands

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        (x,) = operands
        return (x * x * x,)

    def vjp(self, b: Builder, x: Value, grad_y: Value) -> Value:
        return grad_y * x * x * 2.0


cube = torch_function(Cube, "daceml_planted::cube")
