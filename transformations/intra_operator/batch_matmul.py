"""Batched matmuls that share one matrix become one matmul of larger matrices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.movement import Expand, Permute
from daceml_train.ops.movement import View as ViewOp
from daceml_train.ops.operator import Value
from daceml_train.ops.reduction import Reduce
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, product, same, same_shape
from daceml_train.transformations.intra_operator.density import dense

TRANSPOSED = Permute((0, 2, 1))


@dataclass(frozen=True)
class MergeBatch(Rewrite):
    """Multiply all matrices of a batch by their common right operand in one matmul.

        x[B, M, K];  w[K, N] -> [expand] -> [B, K, N];  [matmul] -> y     =>     x as [B M, K], w -> [matmul] -> y

    Bytes: unchanged, since w is read once either way. BLAS then runs on one large matrix instead of B small ones.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Matmul) or uses.graph.tensors[node.outputs[0]].rank != 3:
            return None
        common = common_matrix(uses, node.inputs[1])
        return None if common is None else {"x": node.inputs[0], "w": common[0], "transposed": common[1]}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        x = match.bindings["x"]
        yield dense(match.uses, x), f"%{x} would have to be copied to view it as one matrix"

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        x, w = values[match.bindings["x"]], values[match.bindings["w"]]
        w = w.view(w.shape[-2:])
        rows = x.view((product(x.shape[:2]), x.shape[2]))
        y = rows @ (w.T if match.bindings["transposed"] else w)
        return (y.view(match.uses.graph.tensors[match.root.outputs[0]].shape),)


def common_matrix(uses: Uses, name: str) -> tuple[str, bool] | None:
    """The array of the single matrix that is broadcast along the batch, and whether it is transposed."""
    transposed = False
    while (node := uses.producers.get(name)) is not None:
        x, y = uses.graph.tensors[node.inputs[0]] if node.inputs else None, uses.graph.tensors[name]
        if x is None:
            break
        if node.op == TRANSPOSED:
            transposed = not transposed
        elif isinstance(node.op, Expand):
            whole = x.rank >= 2 and same_shape(x.shape[-2:], y.shape[-2:])
            return (node.inputs[0], transposed) if whole and all(same(s, 1) for s in x.shape[:-2]) else None
        elif not isinstance(node.op, ViewOp) or x.rank < 3 or not same_shape(x.shape[-2:], y.shape[-2:]):
            break
        name = node.inputs[0]
    return None


@dataclass(frozen=True)
class MergeSummedBatch(Rewrite):
    """Sum the matmuls of a batch within one matmul; this is the gradient of an operand that the batch shares.

        x[B, M, K] transposed, g[B, M, N] -> [matmul] -> p[B, K, N] -> [sum over B] -> y[K, N]
        =>  x as [B M, K] transposed, g as [B M, N] -> [matmul] -> y

    Bytes: p is neither written nor read.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, Reduce) or node.op.kind != "sum":
            return None
        p = uses.producers.get(node.inputs[0])
        batch = len(node.op.dims)
        if node.op.dims != tuple(range(batch)) or uses.graph.tensors[node.inputs[0]].rank != batch + 2:
            return None
        apart = None
        if p is not None and isinstance(p.op, ViewOp):
            apart, p = p, uses.producers.get(p.inputs[0])
        if p is None or not isinstance(p.op, Matmul):
            return None
        seen, result = uses.graph.tensors[node.inputs[0]], uses.graph.tensors[p.outputs[0]]
        if result.rank != 3 or not same_shape(seen.shape[-2:], result.shape[-2:]):
            return None
        turned = uses.producers.get(p.inputs[0])
        x = turned.inputs[0] if turned is not None and turned.op == TRANSPOSED else None
        return {"p": p, "apart": apart, "x": x, "g": p.inputs[1]}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, bindings, g = match.uses, match.bindings, match.bindings["g"]
        p, apart = bindings["p"], bindings["apart"]
        alone = uses.only_reader(p.outputs[0], apart or match.root)
        if apart is not None:
            alone = alone and uses.only_reader(apart.outputs[0], match.root)
        yield alone, f"the matmul %{p.outputs[0]} has another reader"
        free = bindings["x"] is not None and dense(uses, bindings["x"])
        yield free, f"%{p.inputs[0]} is no transposed array without gaps: viewing it as one matrix would copy it"
        yield dense(uses, g), f"%{g} would have to be copied to view it as one matrix"

    def traffic(self, match: Match) -> Dim:
        return -2 * match.uses.bytes(match.bindings["p"].outputs[0])

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        x, g = (values[match.bindings[name]] for name in ("x", "g"))
        rows, cotangents = (v.view((product(v.shape[:2]), v.shape[2])) for v in (x, g))
        return ((rows.T @ cotangents).view(match.uses.graph.tensors[match.root.outputs[0]].shape),)
