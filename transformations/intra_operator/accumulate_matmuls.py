"""AccumulateMatmuls: BLAS adds a matmul to an array directly, instead of storing it first."""

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
    """A matmul and the array through which a reader sees it: its result or a view of the result."""

    node: Node
    seen: str

    @staticmethod
    def of(uses: Uses, name: str) -> MatmulTerm | None:
        """The matmul whose result is `name`, or of whose result `name` is a view."""
        node = uses.producers.get(name)
        if node is not None and isinstance(node.op, ViewOp):
            node = uses.producers.get(node.inputs[0])
        return MatmulTerm(node, name) if node is not None and isinstance(node.op, Matmul) else None

    def only_reader(self, uses: Uses, reader: Node) -> bool:
        """Whether `reader` is the only reader of the matmul."""
        result = self.node.outputs[0]
        if self.seen != result and not uses.only_reader(result, uses.producers[self.seen]):
            return False
        return uses.only_reader(self.seen, reader)


@dataclass(frozen=True)
class AccumulateMatmuls(Rewrite):
    """Add a matmul to an array of the same size in one call; a view of the matmul counts as the matmul.

        a, b -> [matmul] -> p;  c, p -> [add] -> y     =>     c, a, b -> [matmul_add] -> y

    Bytes: p is neither written nor read. A sum of n matmuls becomes one matmul and n - 1 accumulations. If an
    elementwise operator produces c for this sum alone (a decayed momentum, for example), one kernel computes c, the
    sum and what follows, so nothing would be gained; such a match is refused.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Elementwise) or node.op.kind != "add":
            return None
        tensors = uses.graph.tensors
        if not all(same_shape(tensors[i].shape, tensors[node.outputs[0]].shape) for i in node.inputs):
            return None
        first, second = node.inputs
        choices = [(p, c) for i, c in ((second, first), (first, second)) if (p := MatmulTerm.of(uses, i))]
        if not choices:
            return None
        # of two matmuls, take one that nothing else reads, preferably the second: the first then holds the sum
        matmul, c = next(((p, c) for p, c in choices if p.only_reader(uses, node)), choices[0])
        return {"matmul": matmul, "c": c}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, matmul, c = match.uses, match.bindings["matmul"], match.bindings["c"]
        name = matmul.node.outputs[0]
        yield matmul.only_reader(uses, match.root), f"the matmul %{name} has another reader"
        yield c != matmul.seen, f"the matmul %{name} is added to itself"
        yield (
            not pointwise(uses, c) or not uses.only_reader(c, match.root),
            f"%{c} is produced by an elementwise operator for this sum alone, which can read the matmul %{name}",
        )
        yield matmul.seen == name or dense(uses, c), f"%{c} would have to be copied to view it as the matmul %{name}"

    def traffic(self, match: Match) -> Dim:
        return -2 * match.uses.bytes(match.bindings["matmul"].node.outputs[0])

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        matmul, graph = match.bindings["matmul"].node, match.uses.graph
        a, b = (values[i] for i in matmul.inputs)
        c = values[match.bindings["c"]].view(graph.tensors[matmul.outputs[0]].shape)
        (y,) = builder.emit(MatmulAdd(), c, a, b)
        return (y.view(graph.tensors[match.root.outputs[0]].shape),)


def pointwise(uses: Uses, name: str) -> bool:
    """Whether an elementwise operator produces an array, unless it adds a matmul and so may be accumulated itself."""
    producer = uses.producers.get(name)
    if producer is None or not isinstance(producer.op, Elementwise | Cast):
        return False
    return producer.op.label != "add" or not any(MatmulTerm.of(uses, i) for i in producer.inputs)
