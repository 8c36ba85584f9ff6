"""FactorMatmuls: two matmuls with a common operand become one matmul of the sum of the other operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.aliases import root_of
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, hint, simplify


@dataclass(frozen=True)
class FactorMatmuls(Rewrite):
    """Apply the distributive law to two matmuls with a common operand, where that moves fewer bytes.

        a, b -> [matmul] -> p;  p, c, b -> [matmul_add] -> y     =>     a + c -> s;  s, b -> [matmul] -> y

    The same on the left: a b + a d is a (b + d). The gradient of a recommender's pairwise dot-product interactions is
    such a sum, of a matrix and its transpose. The result changes by rounding alone. Bytes: p is neither written nor
    read and the common operand is read once; the sum is written and read.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        matmul = uses.producers.get(node.inputs[0]) if isinstance(node.op, MatmulAdd) else None
        if matmul is None or not isinstance(matmul.op, Matmul):
            return None
        for common in (1, 0):
            if matmul.inputs[common] == node.inputs[1 + common]:
                return {"matmul": matmul, "common": common}
        return None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, matmul = match.uses, match.bindings["matmul"]
        yield uses.only_reader(matmul.outputs[0], match.root), f"the matmul %{matmul.outputs[0]} has another reader"
        added = hint(self.traffic(match))
        yield added < 0, f"the sum of the operands would move {added:.0f} bytes more"

    def traffic(self, match: Match) -> Dim:
        uses, matmul = match.uses, match.bindings["matmul"]
        one, other = _others(match)
        again = 0 if _array(uses, one) == _array(uses, other) else uses.bytes(other)
        sums = uses.bytes(one) + again + 2 * uses.bytes(one)
        saved = uses.bytes(one, other) + uses.bytes(matmul.inputs[match.bindings["common"]])
        return simplify(sums - saved - 2 * uses.bytes(matmul.outputs[0]))

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        one, other = _others(match)
        common = values[match.bindings["matmul"].inputs[match.bindings["common"]]]
        total = values[one] + values[other]
        return (total @ common if match.bindings["common"] else common @ total,)


def _others(match: Match) -> tuple[str, str]:
    """The operands that are not common to both matmuls."""
    place = 1 - match.bindings["common"]
    return match.bindings["matmul"].inputs[place], match.root.inputs[1 + place]


def _array(uses: Uses, name: str) -> str:
    """The array whose memory `name` shares."""
    return root_of(uses.producers, name)
