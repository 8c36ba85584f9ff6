"""Inputs for a model from ONNX: from files, or generated where a report needs some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from daceml_train.errors import Invalid
from daceml_train.frontends.onnx import elements
from daceml_train.frontends.onnx.module import OnnxModule


def from_files(module: OnnxModule, files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Tensors by input name from `.npy` files; the name may be left out where a model has one input.

    Raises `Invalid` for a name that is not an input, and for a file without an array.
    """
    found = {}
    for name, path in files.items():
        if not name and len(module.input_names) == 1:
            name = module.input_names[0]
        if name not in module.input_names:
            known = ", ".join(module.input_names)
            raise Invalid(f"{name or str(path)!r} names no input of the model; its inputs are: {known}")
        try:
            array = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise Invalid(f"{path} holds no NumPy array: {error}") from None
        found[name] = torch.from_numpy(np.ascontiguousarray(array))
    return found


def complete(
    module: OnnxModule, given: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """All inputs in order: those given, and for the others random numbers, or zeros for integers.

    Symbolic extents (`batch`) take their value from `sizes`, else 1. Raises `Invalid` for an input without a shape.
    """
    stored = {entry.name for entry in module.held}
    graph = module.skeleton.graph
    known = stored | {tensor.name for tensor in graph.initializer}
    declared = [value for value in graph.input if value.name not in known]
    tensors = []
    for name, value in zip(module.input_names, declared, strict=True):
        kind = value.type.tensor_type
        if name in given:
            tensors.append(given[name])
        elif not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise Invalid(f"input {name!r} declares no shape; give it")
        else:
            extents = kind.shape.dim
            shape = [d.dim_value if d.HasField("dim_value") else sizes.get(d.dim_param, 1) for d in extents]
            element = elements.dtype(kind.elem_type, f"input {name!r}")
            random = torch.randn(shape) if element.is_floating_point else torch.zeros(shape)
            tensors.append(random.to(element))
    return tuple(tensors)
