"""The trainable initializers: those that the exporter marks as parameters, else those that are weight operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx
from onnx import TensorProto

from daceml_train.errors import Invalid, nearest

Trainable = Callable[[str], bool] | Iterable[str] | bool | None

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

_WEIGHTS: dict[str, tuple[int, ...]] = {
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Gemm": (0, 1, 2),
    "MatMul": (0, 1),
    "Einsum": (0, 1, 2),
    "Gather": (0,),
    "GatherND": (0,),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3, 4),
    "SkipSimplifiedLayerNormalization": (2, 3),
    "EmbedLayerNormalization": (2, 3, 4, 5, 6),
    "FusedMatMul": (0, 1),
    "BiasGelu": (1,),
    "FastGelu": (1,),
    "Attention": (1, 2),
    "LSTM": (1, 2, 3, 7),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
    "PRelu": (1,),
    "Add": (0, 1),
    "Sub": (1,),
    "Mul": (0, 1),
    "Div": (0, 1),
    "Concat": (0, 1, 2, 3),
}
"""Operands that are weights, by operator. For elementwise operators only arrays count, not single numbers."""

_THROUGH = {"Identity", "Transpose", "Reshape", "Cast", "Squeeze", "Unsqueeze", "Expand", "Flatten", "Slice"}
"""Operators whose result is still a weight."""

_ELEMENTWISE = {"Add", "Sub", "Mul", "Div", "Concat"}


def trainable(graph: onnx.GraphProto, choice: Trainable) -> set[str]:
    """The names of initializers that become parameters.

    `choice`: None for the default; True for every floating-point one, False for none; names, or a predicate over names.
    Raises `Invalid` for a name that is not a floating-point initializer.
    """
    floats = {tensor.name for tensor in graph.initializer if tensor.data_type in FLOATS}
    if choice is None:
        sizes = {tensor.name: list(tensor.dims) for tensor in graph.initializer if tensor.name in floats}
        noted = {value.name: _note(value) for value in graph.value_info if value.name in floats}
        standing = _standing_as_weights(graph, sizes)
        return {
            name for name in floats if (noted.get(name) or ("PARAMETER" if name in standing else "")) == "PARAMETER"
        }
    if isinstance(choice, bool):
        return floats if choice else set()
    if callable(choice):
        return {name for name in floats if choice(name)}
    several = isinstance(choice, Iterable) and not isinstance(choice, str | bytes)
    if not several or not all(isinstance(name, str) for name in choice):
        raise Invalid(f"trainable is names, a predicate over names, True, False or None, given {choice!r}")
    names = set(choice)
    if unknown := sorted(names - floats):
        close = nearest(unknown[0], floats)
        raise Invalid(f"trainable names {unknown[0]!r}, which is not a floating-point initializer of the model{close}")
    return names


_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""The metadata in which `torch.onnx.export` notes whether an initializer was a parameter, a buffer or a constant."""


def _note(value: onnx.ValueInfoProto) -> str:
    return next((entry.value for entry in value.metadata_props if entry.key == _KIND), "")


def _standing_as_weights(graph: onnx.GraphProto, sizes: dict[str, list[int]]) -> set[str]:
    found: set[str] = set()
    _collect(graph, {name: name for name in sizes}, sizes, found)
    return found


def _collect(graph: onnx.GraphProto, roots: dict[str, str], sizes: dict[str, list[int]], found: set[str]) -> None:
    """`roots` maps a value to the initializer of which it is another form."""
    for node in graph.node:
        if node.op_type in _THROUGH and node.input and node.input[0] in roots:
            roots[node.output[0]] = roots[node.input[0]]
        for at in _WEIGHTS.get(node.op_type, ()):
            root = roots.get(node.input[at]) if at < len(node.input) else None
            if root is not None and (sizes[root] if node.op_type not in _ELEMENTWISE else _several(sizes[root])):
                found.add(root)
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                _collect(inner, dict(roots), sizes, found)


def _several(extents: list[int]) -> bool:
    return any(extent > 1 for extent in extents)
