"""Writing a trained model back: its original file, with the present values of the module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto

from daceml_train.errors import Invalid
from daceml_train.frontends.onnx import elements
from daceml_train.frontends.onnx.module import OnnxModule
from daceml_train.storage.named_by_user import file_of

GREATEST_FILE = 2**31 - 1024
"""Protocol buffers are limited to 2 GiB: beyond it, weights go to a separate file."""


def save_onnx(model: torch.nn.Module, path: str | os.PathLike[str], *, external: bool | None = None) -> Path:
    """Write the model with its present weights and buffers to `path`; return the written file.

    Names, metadata, operator sets and nodes are those of the model that was loaded. Values go to `<path>.data` if
    `external`, by default if they did in the loaded model or if one file would exceed 2 GiB. Raises `Invalid`
    for a module that did not come from ONNX.
    """
    if not isinstance(model, OnnxModule):
        raise Invalid(f"save_onnx takes a model that came from ONNX, given {type(model).__name__}")
    if all(external is not known for known in (None, True, False)):
        raise Invalid(f"external is True, False or None, given {external!r}")
    target = file_of(path, "an ONNX model")
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    values = {entry.name: state[entry.path].detach() for entry in model.held}
    proto = onnx.ModelProto()
    proto.CopyFrom(model.skeleton)
    was_external = any(t.data_location == TensorProto.EXTERNAL for t in proto.graph.initializer)
    size = sum(value.numel() * value.element_size() for value in values.values())
    outside = external if external is not None else was_external or size > GREATEST_FILE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Invalid(f"the ONNX model cannot be written: {error}") from None
    temporary = target.with_name(target.name + ".part")
    data = target.with_name(target.name + ".data")
    try:
        if outside:
            with data.with_name(data.name + ".part").open("wb") as stream:
                _fill(proto, values, stream, data.name)
        else:
            _fill(proto, values, None, "")
        temporary.write_bytes(proto.SerializeToString())
        if outside:
            data.with_name(data.name + ".part").replace(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
        data.with_name(data.name + ".part").unlink(missing_ok=True)
    return target


def _fill(proto: onnx.ModelProto, values: dict[str, torch.Tensor], stream: Any, location: str) -> None:
    for tensor in proto.graph.initializer:
        if tensor.name not in values:
            continue
        value = values[tensor.name]
        if tuple(value.shape) != tuple(tensor.dims):
            raise Invalid(
                f"{tensor.name!r} has shape {tuple(value.shape)} now, the model declares {tuple(tensor.dims)}"
            )
        array = np.ascontiguousarray(elements.to_numpy(value.to(elements.dtype(tensor.data_type))))
        array = elements.packed(array, tensor.data_type)
        for name in (
            "float_data",
            "int32_data",
            "int64_data",
            "double_data",
            "uint64_data",
            "raw_data",
            "external_data",
        ):
            tensor.ClearField(name)
        if stream is None:
            tensor.data_location = TensorProto.DEFAULT
            tensor.raw_data = array.tobytes()
            continue
        stream.write(b"\0" * (-stream.tell() % 64))
        begin = stream.tell()
        array.tofile(stream)
        tensor.data_location = TensorProto.EXTERNAL
        for key, text in (("location", location), ("offset", str(begin)), ("length", str(array.nbytes))):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, text
