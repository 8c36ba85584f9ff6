"""AccumulateMatmuls: a product is added where the sum stands, as BLAS does, instead of being stored first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.elementwise import Cast, Elementwise
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, same_shape
from daceml_train.transformations.intra_operator.density import dense


@dataclass(frozen=True)
class MatmulTerm:
    """A matrix product and the array under which a reader sees it: the product itself or a uses of it."""

    node: Node
    seen: str

    @staticmethod
    def behind(uses: Uses, name: str) -> MatmulTerm | None:
        """The product that `name` is, or is a uses of."""
        node = uses.producers.get(name)
        if node is not None and isinstance(node.op, ViewOp):
            node = uses.producers.get(node.inputs[0])
        return MatmulTerm(node, name) if node is not None and isinstance(node.op, Matmul) else None

    def only_reader(self, uses: Uses, reader: Node) -> bool:
        """Whether `reader` is all that sees the product."""
        made = self.node.outputs[0]
        if self.seen != made and not uses.only_reader(made, uses.producers[self.seen]):
            return False
        return uses.only_reader(self.seen, reader)


@dataclass(frozen=True)
class AccumulateMatmuls(Rewrite):
    """Add a matrix product to an array of its size in one call; a uses of the product counts as the product.

        a, b -> [matmul] -> p;  c, p -> [add] -> y     =>     c, a, b -> [matmul_add] -> y

    Bytes: p is neither written nor read. A sum of n products becomes one product and n - 1 accumulations. Where c is
    made by an elementwise operator for this sum alone, as a decayed momentum is, one kernel makes c, the sum and what
    follows, and nothing is gained; such a match is refused.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Elementwise) or node.op.kind != "add":
            return None
        tensors = uses.graph.tensors
        if not all(same_shape(tensors[i].shape, tensors[node.outputs[0]].shape) for i in node.inputs):
            return None
        first, second = node.inputs
        choices = [(p, c) for i, c in ((second, first), (first, second)) if (p := MatmulTerm.behind(uses, i))]
        if not choices:
            return None
        # of two products, the one that nothing else reads, rather the second: the first then holds the sum
        product, c = next(((p, c) for p, c in choices if p.only_reader(uses, node)), choices[0])
        return {"product": product, "c": c}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, product, c = match.uses, match.bindings["product"], match.bindings["c"]
        name = product.node.outputs[0]
        yield product.only_reader(uses, match.root), f"the product %{name} has another reader"
        yield c != product.seen, f"the product %{name} is added to itself"
        yield (
            not pointwise(uses, c) or not uses.only_reader(c, match.root),
            f"%{c} is made by an elementwise operator for this sum alone, whose kernel can read the product %{name}",
        )
        yield product.seen == name or dense(uses, c), f"%{c} would have to be copied to uses it as the product %{name}"

    def traffic(self, match: Match) -> Dim:
        return -2 * match.uses.bytes(match.bindings["product"].node.outputs[0])

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        product, graph = match.bindings["product"].node, match.uses.graph
        a, b = (values[i] for i in product.inputs)
        c = values[match.bindings["c"]].view(graph.tensors[product.outputs[0]].shape)
        (y,) = builder.emit(MatmulAdd(), c, a, b)
        return (y.view(graph.tensors[match.root.outputs[0]].shape),)


def pointwise(uses: Uses, name: str) -> bool:
    """Whether an elementwise operator makes an array that is no sum with a product, which may be accumulated itself."""
    maker = uses.producers.get(name)
    if maker is None or not isinstance(maker.op, Elementwise | Cast):
        return False
    return maker.op.label != "add" or not any(MatmulTerm.behind(uses, i) for i in maker.inputs)
