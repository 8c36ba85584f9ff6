"""ONNX element types and tensors as PyTorch's."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from daceml_train.errors import Invalid, Unsupported

_DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT64: torch.int64,
    TensorProto.INT32: torch.int32,
    TensorProto.INT16: torch.int16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.UINT16: torch.uint16,
    TensorProto.UINT32: torch.uint32,
    TensorProto.UINT64: torch.uint64,
    TensorProto.BOOL: torch.bool,
    TensorProto.COMPLEX64: torch.complex64,
    TensorProto.COMPLEX128: torch.complex128,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
    TensorProto.FLOAT8E8M0: torch.float8_e8m0fnu,
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_NARROW: dict[int, torch.dtype] = {
    TensorProto.INT4: torch.int8,
    TensorProto.UINT4: torch.uint8,
    TensorProto.INT2: torch.int8,
    TensorProto.UINT2: torch.uint8,
    TensorProto.FLOAT4E2M1: torch.float8_e4m3fn,
}
"""Types below eight bits, and a type that represents all of their values."""
BITS: dict[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT2: 2, TensorProto.UINT2: 2}
_WIDTHS = BITS | {TensorProto.FLOAT4E2M1: 4}
_BITS: dict[int, Any] = {1: np.uint8, 2: np.int16}
"""NumPy has no bfloat16 or float8: such an array is converted through integers of its width."""


def dtype(number: int, what: str = "a tensor") -> torch.dtype:
    """PyTorch's element type of an ONNX one; a wider one for types below eight bits. `Unsupported` for strings."""
    if number in _NARROW:
        return _NARROW[number]
    if number not in _DTYPES:
        name = TensorProto.DataType.Name(number) if number in TensorProto.DataType.values() else str(number)
        raise Unsupported(f"{what} has ONNX element type {name}, which PyTorch cannot hold")
    return _DTYPES[number]


def number(element: torch.dtype) -> int:
    """The ONNX element type of a PyTorch one. Raises `Unsupported` where ONNX has none."""
    if element not in _NUMBERS:
        raise Unsupported(f"ONNX has no element type for {element}")
    return int(_NUMBERS[element])


def tensor(proto: TensorProto, folder: Path | None = None) -> torch.Tensor:
    """The values of a stored tensor. External data is mapped into memory, copied only when something writes to it.

    `folder` contains external data. Raises `Unsupported` for an element type, `Invalid` for damaged data.
    """
    element = dtype(proto.data_type, f"tensor {proto.name!r}")
    shape = tuple(proto.dims)
    if any(extent < 0 for extent in shape):
        raise Invalid(f"tensor {proto.name!r} has a negative extent: {shape}")
    if external_data_helper.uses_external_data(proto):
        return _external(proto, element, shape, folder)
    try:
        array = numpy_helper.to_array(proto)
    except Exception as error:
        raise Invalid(f"the data of tensor {proto.name!r} does not fit its shape {shape}: {error}") from None
    if proto.data_type in _NARROW:
        return torch.from_numpy(array.astype(np.float32)).to(element)
    return from_numpy(array, element)


def from_numpy(array: np.ndarray[Any, Any], element: torch.dtype) -> torch.Tensor:
    """A tensor that owns a copy of `array`'s elements."""
    if array.dtype.name.startswith(("bfloat", "float8")):
        bits = torch.from_numpy(np.array(array.view(_BITS[array.dtype.itemsize]), copy=True))
        return bits.view(element)
    return torch.from_numpy(np.array(array, copy=True, order="C"))


def to_numpy(values: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements as a NumPy array, with `ml_dtypes` for bfloat16 and float8."""
    values = values.detach().cpu().contiguous()
    name = str(values.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        width = {1: torch.uint8, 2: torch.int16}[values.dtype.itemsize]
        return values.view(width).numpy().view(getattr(ml_dtypes, name))
    return values.numpy()


def packed(array: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
    """The elements as ONNX stores them: several of a type narrower than a byte in one."""
    if number not in _NARROW:
        return array
    narrow = array.astype(np.float32).astype(helper.tensor_dtype_to_np_dtype(number))
    return np.frombuffer(numpy_helper.from_array(narrow).raw_data, np.uint8)


def bounds(number: int, held: torch.dtype) -> tuple[int, int]:
    """The least and greatest integer of an ONNX type, or of the type that represents it if that is unknown (0)."""
    if number in BITS:
        bits = BITS[number]
        return (0, 2**bits - 1) if held is torch.uint8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    info = torch.iinfo(held)
    return info.min, info.max


def _external(proto: TensorProto, element: torch.dtype, shape: tuple[int, ...], folder: Path | None) -> torch.Tensor:
    info = _information(proto)
    file = external_file(info.location, proto.name, folder)
    count = int(np.prod(shape, dtype=object)) if shape else 1
    width = _WIDTHS.get(proto.data_type, 8 * element.itemsize)
    offset, size = int(info.offset or 0), -(-count * width // 8)
    if info.length is not None and int(info.length) != size:
        raise Invalid(f"external data of {proto.name!r} has {info.length} bytes where shape {shape} needs {size}")
    if offset + size > file.stat().st_size:
        raise Invalid(f"external data of {proto.name!r} ends beyond {file.name}, the file may be truncated")
    if info.checksum and info.checksum.lower() != _sha1(file, file.stat().st_mtime_ns):
        raise Invalid(f"the checksum of external data of {proto.name!r} is not that of {file.name}: it was changed")
    if not count:
        return torch.empty(shape, dtype=element)
    raw = np.memmap(file, dtype=np.uint8, mode="c", offset=offset, shape=(size,))
    if proto.data_type in _NARROW:
        return tensor(TensorProto(data_type=proto.data_type, dims=shape, raw_data=raw.tobytes()), folder)
    flat = torch.from_numpy(raw)
    if offset % element.itemsize:
        flat = flat.clone()
    return flat.view(element).view(shape)


def _information(proto: TensorProto) -> Any:
    """The location of external data. Raises `Invalid` for an offset or a length that is not a size."""
    for entry in proto.external_data:
        if entry.key in ("offset", "length") and not entry.value.isdecimal():
            raise Invalid(f"external data of {proto.name!r} has the {entry.key} {entry.value!r}, not a size")
    return external_data_helper.ExternalDataInfo(proto)


@functools.lru_cache(maxsize=64)
def _sha1(file: Path, modified: int) -> str:
    """ONNX's checksum of the whole file, computed once per file and modification time."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha1").hexdigest()


def external_file(location: str, name: str, folder: Path | None) -> Path:
    """The file of external data. Raises `Invalid` for one that may be outside the model's folder, or is missing."""
    if folder is None:
        raise Invalid(f"tensor {name!r} is stored in {location!r}; give the model's path, so that it can be found")
    path = Path(location)
    if path.is_absolute() or not location:
        raise Invalid(f"tensor {name!r} is stored at the absolute or empty path {location!r}, which is refused")
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise Invalid(f"tensor {name!r} is stored at {location!r}, outside the model's folder, which is refused")
    if not file.is_file():
        raise Invalid(f"tensor {name!r} is stored in {location!r}, which is not in {folder}")
    if file.stat().st_nlink > 1:  # like a symlink, it may lead outside, and its target is unknown
        raise Invalid(
            f"tensor {name!r} is stored at {location!r}, a file with several names (hard links), which is refused",
            advice="copy it",
        )
    return file
