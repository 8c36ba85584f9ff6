"""Inputs for a model from ONNX: from files, or generated where a report needs some."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from onnx import ValueInfoProto

from daceml_train.errors import Invalid, nearest
from daceml_train.frontends.onnx import elements
from daceml_train.frontends.onnx.module import OnnxModule


def from_files(module: OnnxModule, files: Sequence[tuple[str, Path]]) -> dict[str, torch.Tensor]:
    """Tensors by input name from `.npy` files; the name may be empty where a model has one input.

    Raises `Invalid` for a name that is not an input, for two files of one input, and for a file without an array.
    """
    found: dict[str, torch.Tensor] = {}
    known = module.input_names
    for name, path in files:
        if not name and len(known) == 1:
            name = known[0]
        if not name:
            raise Invalid(f"the model has the inputs {', '.join(known)}", advice=f"say which: {known[0]}={path}")
        if name not in known:
            advice = f"its inputs are: {', '.join(known)}"
            raise Invalid(f"{name!r} names no input of the model{nearest(name, known)}", advice=advice)
        if name in found:
            raise Invalid(f"two files are given for the input {name!r}, the second is {path}")
        found[name] = _array(path)
    return found


def _array(path: Path) -> torch.Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise Invalid(f"{path} holds no NumPy array: {error}") from None
    if not isinstance(array, np.ndarray):
        raise Invalid(f"{path} is an archive of arrays", advice="write the one that is meant with numpy.save")
    try:
        return torch.from_numpy(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
    except TypeError:
        raise Invalid(f"{path} has elements of type {array.dtype}, of which PyTorch has no tensors") from None


def complete(
    module: OnnxModule, given: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> tuple[torch.Tensor, ...]:
    """All inputs in order: those given, and for the others random numbers, or zeros for integers.

    Symbolic extents (`batch`) take their value from `sizes`, else from the first input that is given, else 1. Raises
    `Invalid` for an input without a shape, for sizes that the model or the given inputs do not have, and where memory
    does not suffice.
    """
    stored = {entry.name for entry in module.held}
    graph = module.skeleton.graph
    known = stored | {tensor.name for tensor in graph.initializer}
    declared = [value for value in graph.input if value.name not in known]
    by_name = dict(zip(module.input_names, declared, strict=True))
    extents = _extents(by_name, given, sizes)
    tensors = []
    for name, value in by_name.items():
        kind = value.type.tensor_type
        if name in given:
            tensors.append(given[name])
        elif not value.type.HasField("tensor_type") or not kind.HasField("shape"):
            raise Invalid(f"input {name!r} declares no shape; give it")
        else:
            shape = [d.dim_value if d.HasField("dim_value") else extents.get(d.dim_param, 1) for d in kind.shape.dim]
            tensors.append(_made_up(name, shape, elements.dtype(kind.elem_type, f"input {name!r}")))
    return tuple(tensors)


def _extents(
    declared: Mapping[str, ValueInfoProto], given: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> dict[str, int]:
    """The symbolic extents of inputs: those of `sizes`, and of the inputs that are given."""
    shapes = {name: value.type.tensor_type.shape.dim for name, value in declared.items()}
    known = list(dict.fromkeys(d.dim_param for dims in shapes.values() for d in dims if d.dim_param))
    for name in sizes:
        if name not in known:
            has = f"they have {', '.join(known)}" if known else "all of their extents are numbers"
            raise Invalid(f"no input of the model has an extent {name!r}{nearest(name, known)}", advice=has)
    found = dict(sizes)
    for name, tensor in given.items():
        for d, size in zip(shapes[name], tensor.shape, strict=False):
            if d.dim_param and found.setdefault(d.dim_param, size) != size and d.dim_param in sizes:
                asked = f"the extent {d.dim_param!r} is said to be {sizes[d.dim_param]}"
                raise Invalid(f"{asked}, and the input {name!r} that is given has shape {list(tensor.shape)}")
    return found


def _made_up(name: str, shape: Sequence[int], element: torch.dtype) -> torch.Tensor:
    size = math.prod(shape) * max(4, element.itemsize)
    if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        advice = "choose smaller extents"
        raise Invalid(f"the input {name!r} of shape {list(shape)} does not fit into memory", advice=advice)
    random = torch.randn(shape) if element.is_floating_point else torch.zeros(shape)
    return random.to(element)
