"""ConcatenateTransposed: what is concatenated and then transposed is written once, in the order in which it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.aliases import view_strides
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.movement import Concat, Permute
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, Tensor


@dataclass(frozen=True)
class ConcatenateTransposed(Rewrite):
    """Transpose the operands of a concatenation whose result is transposed and read as rows.

        a, b -> [concat] -> y -> [permute] -> p -> [view] -> v
            =>      a, b -> [permute] -> a', b' -> [concat] -> p -> [view] -> v

    The view of a transposed array is a copy; the concatenation copies its operands anyway and can read them in any
    order. The gradients of queries, keys and values that one matmul computed are such a case.
    Bytes: y is not read and written a second time.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        turned = uses.producers.get(node.inputs[0]) if isinstance(node.op, ViewOp) else None
        if turned is None or not isinstance(turned.op, Permute):
            return None
        joined = uses.producers.get(turned.inputs[0])
        if joined is None or not isinstance(joined.op, Concat) or joined.op.placed:
            return None
        y, p, v = (uses.graph.tensors[n] for n in (turned.inputs[0], *turned.outputs, *node.outputs))
        strides = Tensor(y.shape).strides
        copied = view_strides(p.shape, tuple(strides[d] for d in turned.op.dims), v.shape) is None
        plain = v.order is None and view_strides(p.shape, Tensor(p.shape).strides, v.shape) is not None
        return {"turned": turned, "joined": joined} if y.order is None and copied and plain else None

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        turned, joined = match.bindings["turned"], match.bindings["joined"]
        (y,), (p,) = joined.outputs, turned.outputs
        yield match.uses.only_reader(y, turned), f"%{y} has other readers, which want it as it is"
        yield match.uses.only_reader(p, match.root), f"%{p} has other readers, which want it as it is"

    def traffic(self, match: Match) -> Dim:
        return -2 * match.uses.graph.tensors[match.root.outputs[0]].bytes

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        turned, joined = match.bindings["turned"], match.bindings["joined"]
        dims, along = turned.op.dims, turned.op.dims.index(joined.op.dim)
        operands = [values[name].permute(dims) for name in joined.inputs]
        first, *others = (x.apply(ViewOp(x.shape)) for x in operands)  # so that the result is row-major in p's order
        return (first.apply(Concat(along), *others).apply(match.root.op),)
