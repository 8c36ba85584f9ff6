"""FoldBatchNorm: normalization by known statistics is folded into the preceding weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from daceml_train.analysis.aliases import is_alias
from daceml_train.analysis.weights_only import HELD
from daceml_train.graph.graph import Graph, Node
from daceml_train.ops.contraction import Matmul
from daceml_train.ops.convolution import Convolution
from daceml_train.ops.elementwise import Elementwise
from daceml_train.ops.normalization import BatchNormInference
from daceml_train.ops.operator import Value
from daceml_train.passes.base import Match, Rewrite, Uses
from daceml_train.tensor import Dim, DType, same_shape

EXACT = (DType.float32, DType.float64)


@dataclass(frozen=True)
class FoldBatchNorm(Rewrite):
    """Fold normalization by given statistics into the weights and bias of the preceding convolution or matmul.

        x, w[, c] -> [convolution] -> y;  y, mean, var, g, b -> [batch_norm_inference] -> z
            =>  x, w * s, (c - mean) * s + b -> [convolution] -> z      with s = g / sqrt(var + eps)

    The algebra is exact, since a convolution is linear in its weights. The remaining arithmetic depends on parameters
    alone, so an inference program computes it once (`analysis.weights_only`).
    Bytes: y is neither read nor written a second time; weights are read and written once more where they are not
    prepared in advance.
    """

    level = "intra_operator"

    def match(self, uses: Uses, node: Node) -> Mapping[str, Any] | None:
        if not isinstance(node.op, BatchNormInference):
            return None
        result, bias = uses.producers.get(node.inputs[0]), None
        if result is not None and isinstance(result.op, Elementwise) and result.op.kind == "add":
            for matmul, other in (result.inputs, result.inputs[::-1]):
                producer = uses.producers.get(matmul)
                if producer is not None and isinstance(producer.op, Matmul) and _row(uses, other, result.outputs[0]):
                    return {"linear": producer, "bias": other, "between": (result,)}
        if result is None or not isinstance(result.op, Convolution | Matmul):
            return None
        bias = result.inputs[2] if len(result.inputs) > 2 else None
        return {"linear": result, "bias": bias, "between": ()}

    def legality(self, match: Match) -> Iterator[tuple[bool, str]]:
        uses, linear = match.uses, match.bindings["linear"]
        chain = [linear, *match.bindings["between"], match.root]
        for result, reader in itertools.pairwise(chain):
            yield uses.only_reader(result.outputs[0], reader), f"%{result.outputs[0]} has another reader"
        y = uses.graph.tensors[linear.outputs[0]]
        yield y.dtype in EXACT, f"%{linear.outputs[0]} has 16-bit elements, so the weights would be rounded once more"
        yield not isinstance(linear.op, Matmul) or y.rank == 2, f"%{linear.outputs[0]} is a batch of matmuls"
        grouped = isinstance(linear.op, Convolution) and linear.op.transposed and linear.op.groups > 1
        yield not grouped, f"%{linear.outputs[0]} is produced by a grouped transposed convolution"
        for name in (*linear.inputs[1:], *match.root.inputs[1:], *filter(None, (match.bindings["bias"],))):
            yield _held(uses, name), f"%{name} does not depend on parameters alone"

    def traffic(self, match: Match) -> Dim:
        return match.uses.change(self.sweep(match.uses.graph, {id(match.root): match}))

    def emit(self, match: Match, builder: Graph, values: Mapping[str, Value]) -> Iterable[Value]:
        linear, bias = match.bindings["linear"], match.bindings["bias"]
        _, mean, variance, *weight_bias = (values[name] for name in match.root.inputs)
        x, w = values[linear.inputs[0]], values[linear.inputs[1]]
        scale = (variance.cast(x.dtype) + match.root.op.eps).unary("rsqrt")  # type: ignore[attr-defined]
        if weight_bias:
            scale = scale * weight_bias[0].cast(x.dtype)
        shift = -mean.cast(x.dtype) if bias is None else values[bias].view(scale.shape) - mean.cast(x.dtype)
        shift = shift * scale
        if len(weight_bias) > 1:
            shift = shift + weight_bias[1].cast(x.dtype)
        if isinstance(linear.op, Matmul):
            return (x @ (w * scale.view((1, *scale.shape))) + shift.view((1, *shift.shape)),)
        axis = 1 if linear.op.transposed else 0
        along = tuple(size if d == axis else 1 for d, size in enumerate(w.shape))
        return (x.apply(linear.op, w * scale.view(along), shift),)


def _row(uses: Uses, name: str, result: str) -> bool:
    """Whether array `name` is a single row that is added to every row of `result`."""
    row, matrix = uses.graph.tensors[name].shape, uses.graph.tensors[result].shape
    sizes = row[1:] if len(row) == 2 else row
    return len(matrix) == 2 and same_shape(sizes, matrix[1:]) and (len(row) == 1 or row[0] == 1)


def _held(uses: Uses, name: str) -> bool:
    """Whether an array is computed from parameters and buffers that the graph does not write."""
    graph = uses.graph
    if name in graph.inputs:
        return graph.inputs[name].role in HELD and name not in graph.writes
    producer = uses.producers[name]
    simple = is_alias(producer.op) or isinstance(producer.op, Elementwise)
    return simple and all(_held(uses, operand) for operand in producer.inputs)
