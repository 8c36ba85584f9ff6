"""FactorMatmuls: two products with a common factor are one, of the sum of the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.aliases import is_alias
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, hint, simplify


@dataclass(frozen=True)
class FactorMatmuls(Rewrite):
    """Multiply the sum of two factors with what both are multiplied with, where that is less to read and write.

        a, b -> [matmul] -> p;  p, c, b -> [matmul_add] -> y     =>     a + c -> s;  s, b -> [matmul] -> y

    The same on the left: a b + a d is a (b + d). The gradient of products of vectors with each other, which are the
    interactions of a recommender, is such a sum, of a matrix and its transpose. The result changes by rounding alone.
    Bytes: p is neither written nor read and the common factor read once; the sum is written and read.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        product = uses.producers.get(node.inputs[0]) if isinstance(node.op, MatmulAdd) else None
        if product is None or not isinstance(product.op, Matmul):
            return None
        for common in (1, 0):
            if product.inputs[common] == node.inputs[1 + common]:
                return {"product": product, "common": common}
        return None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, product = match.uses, match.bindings["product"]
        yield uses.only_reader(product.outputs[0], match.root), f"the product %{product.outputs[0]} has another reader"
        added = hint(self.traffic(match))
        yield added < 0, f"the sum of the factors would move {added:.0f} bytes more"

    def traffic(self, match: Match) -> Dim:
        uses, product = match.uses, match.bindings["product"]
        one, other = _others(match)
        again = 0 if _array(uses, one) == _array(uses, other) else uses.bytes(other)
        sums = uses.bytes(one) + again + 2 * uses.bytes(one)
        saved = uses.bytes(one, other) + uses.bytes(product.inputs[match.bindings["common"]])
        return simplify(sums - saved - 2 * uses.bytes(product.outputs[0]))

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        one, other = _others(match)
        common = values[match.bindings["product"].inputs[match.bindings["common"]]]
        total = values[one] + values[other]
        return (total @ common if match.bindings["common"] else common @ total,)


def _others(match: Match) -> tuple[str, str]:
    """The factors that are not common to both products."""
    place = 1 - match.bindings["common"]
    return match.bindings["product"].inputs[place], match.root.inputs[1 + place]


def _array(uses: Uses, name: str) -> str:
    """The array whose memory `name` is."""
    while (node := uses.producers.get(name)) is not None and is_alias(node.op):
        name = node.inputs[0]
    return name
