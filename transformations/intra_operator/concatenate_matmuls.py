"""ConcatenateMatmuls: a sum of many small matmuls becomes one matmul of the concatenated operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul, MatmulAdd
from daceml_train.ops.movement import Concat, Permute
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, same_shape

TRANSPOSED = Permute((1, 0))


@dataclass(frozen=True)
class ConcatenateMatmuls(Rewrite):
    """Replace a chain of accumulated matmuls by one matmul of the concatenated operands.

        s1 = a1 b1;  s2 = s1 + a2 b2;  ...;  y = s(n-1) + an bn      =>      y = [a1 a2 ... an] [b1; b2; ...; bn]

    The gradient of a weight that is used at every step of a sequence is such a chain, whose sum is read and written at
    every step. Bytes: 2 (n - 1) fewer sums, one more copy of the operands. At least `least` matmuls are joined.
    """

    level = "intra_operator"
    least: int = 4

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, MatmulAdd) or uses.graph.tensors[node.outputs[0]].rank != 2:
            return None
        if self.continues(uses, node):
            return None
        chain = [node]
        while (below := uses.producers.get(chain[-1].inputs[0])) is not None and isinstance(below.op, MatmulAdd):
            if not uses.only_reader(below.outputs[0], chain[-1]):
                break
            chain.append(below)
        factors = [(n.inputs[1], n.inputs[2]) for n in reversed(chain)]
        bottom: str | None = chain[-1].inputs[0]
        first = uses.producers.get(chain[-1].inputs[0])
        if first is not None and isinstance(first.op, Matmul) and uses.only_reader(first.outputs[0], chain[-1]):
            factors.insert(0, (first.inputs[0], first.inputs[1]))
            bottom = None
        return {"factors": factors, "bottom": bottom} if len(factors) >= self.least else None

    def continues(self, uses: Uses, node: Node) -> bool:
        """Whether `node` is inside a longer chain; the end of that chain is the root of the match."""
        (y,) = node.outputs
        readers = uses.readers[y]
        if y in uses.visible or len(readers) != 1:
            return False
        return isinstance(readers[0].op, MatmulAdd) and readers[0].inputs[0] == y and y not in readers[0].inputs[1:]

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        bottom, tensors = match.bindings["bottom"], match.uses.graph.tensors
        shape = tensors[match.root.outputs[0]].shape
        plain = bottom is None or same_shape(tensors[bottom].shape, shape)
        yield plain, f"the chain begins with one row %{bottom}, not with a matrix"
        gained = self.traffic(match)
        fewer = gained < 0 if isinstance(gained, int) else bool(gained.is_negative)
        yield fewer, f"copying the operands of %{match.root.outputs[0]} moves as many bytes as its sums"

    def traffic(self, match: Match) -> Dim:
        uses, factors = match.uses, match.bindings["factors"]
        copies: Dim = sum((uses.bytes(a) + uses.bytes(b) for a, b in factors), start=0)
        return 2 * copies - 2 * (len(factors) - 1) * uses.bytes(match.root.outputs[0])

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        factors, uses = match.bindings["factors"], match.uses
        a = self.side_by_side(uses, builder, values, [a for a, _ in factors], 1)
        b = self.side_by_side(uses, builder, values, [b for _, b in factors], 0)
        if match.bindings["bottom"] is None:
            return builder.emit(Matmul(), a, b)
        return builder.emit(MatmulAdd(), values[match.bindings["bottom"]], a, b)

    def side_by_side(
        self, uses: Uses, builder: Graph, values: Mapping[str, Value], names: Sequence[str], dim: int
    ) -> Value:
        """The operands in one array; transposed ones are concatenated as stored and transposed afterward."""
        nodes = [uses.producers.get(name) for name in names]
        transposed = [n for n in nodes if n is not None and n.op == TRANSPOSED]
        if len(transposed) == len(names):
            (joined,) = builder.emit(Concat(1 - dim), *(values[n.inputs[0]] for n in transposed))
            return joined.T
        (joined,) = builder.emit(Concat(dim), *(values[name] for name in names))
        return joined
