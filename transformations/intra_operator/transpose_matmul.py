"""TransposeMatmul: a transposed matmul is the matmul of the transposed operands in the opposite order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.movement import Permute
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim


@dataclass(frozen=True)
class TransposeMatmul(Rewrite):
    """Let the library write a matmul in the orientation in which it is used.

        a, b -> [matmul] -> t -> [permute] -> y      =>      b, a -> [permute each] -> [matmul] -> y

    The gradient of a linear layer's weight is computed transposed; written in the weight's own order, it is added to
    the weight without strided access. Transposing an operand is free: libraries read either order.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Permute) or node.op.dims not in ((1, 0), (0, 2, 1)):
            return None
        matmul = uses.producers.get(node.inputs[0])
        return {"matmul": matmul} if matmul is not None and isinstance(matmul.op, Matmul) else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        (t,) = match.bindings["matmul"].outputs
        yield match.uses.only_reader(t, match.root), f"%{t} is also used untransposed"

    def traffic(self, match: Match) -> Dim:
        return 0

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        a, b = (values[name] for name in match.bindings["matmul"].inputs)
        return (b.T @ a.T,)
