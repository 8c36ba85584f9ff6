"""Interpret: the meaning of a graph in NumPy, with floats in float64: the oracle that compiled programs are held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Node
from daceml_train.graph.leaves import leaves
from daceml_train.graph.sizes import bind, solve
from daceml_train.ops.fallback import Aten
from daceml_train.ops.operator import Array
from daceml_train.tensor import DType, Tensor


@dataclass(frozen=True)
class Results:
    """What a graph computes: its outputs in order, the new value of each written input, and every array by name."""

    outputs: tuple[Array, ...]
    writes: dict[str, Array]
    values: dict[str, Array]
    sizes: dict[str, int]


def interpret(graph: Graph, inputs: Mapping[str, Any]) -> Results:
    """Run `graph` on arrays; composites run through their lowering, symbols take their values from the shapes.

    Floats become float64, complex numbers complex128; integers and booleans keep their type. Raises `Invalid` where
    an input does not fit, or where an operator's reference contradicts its shape rule.
    """
    given = {name: np.asarray(value) for name, value in inputs.items()}
    sizes = solve(graph.inputs, {name: value.shape for name, value in given.items()})
    lowered = leaves(graph)
    scope = {name: _widen(name, value, graph.inputs[name].tensor) for name, value in given.items()}
    for node in lowered.graph.nodes:
        op = bind(node.op, sizes)
        made = op.evaluate(*(scope[i] for i in node.inputs))
        for name, value in zip(node.outputs, made, strict=True):
            if not isinstance(op, Aten):  # its shapes are PyTorch's claims, wrong for embedding_bag's bookkeeping
                _check(node, value, bind(lowered.graph.tensors[name], sizes))
            scope[name] = value
    values = {name: scope[inner] for name, inner in lowered.names.items()}
    outputs = tuple(values[name] for name in graph.outputs)
    return Results(outputs, {target: values[name] for target, name in graph.writes.items()}, values, sizes)


def wide(dtype: DType) -> np.dtype[Any]:
    """The NumPy type in which values of an element type are computed here."""
    if not dtype.is_float:
        return np.dtype(dtype.numpy)
    return np.dtype("complex128" if dtype.short[0] == "c" else "float64")


def _widen(name: str, value: Array, tensor: Tensor) -> Array:
    kinds = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "c": "biufc"}[wide(tensor.dtype).kind]
    if value.dtype.kind not in kinds:
        raise Invalid(f"input {name!r} expects {tensor}; given an array of {value.dtype}")
    return value.astype(wide(tensor.dtype))


def _check(node: Node, value: Array, tensor: Tensor) -> None:
    if value.shape != tensor.shape or value.dtype != wide(tensor.dtype):
        raise Invalid(
            f"{node}: the reference makes {value.dtype} of {list(value.shape)}, the shape rule says {tensor}",
            where=str(node.origin),
        )
