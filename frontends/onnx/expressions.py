"""What the importer works with: constants, expressions in the generated source, and what nodes give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import AttributeProto, helper

from daceml_train.errors import DacemlError, Invalid, Unsupported
from daceml_train.frontends.onnx import elements, host

LITERAL = 64
"""Constants of up to this many elements may be literals in the source."""


FOLDED = 1 << 20
"""Nodes over constants are evaluated at import where results stay below this many elements, or the operands'."""


GREATEST = 1 << 40
"""An array of more elements is refused at import: it is a sign of a damaged model, since no machine can store it."""


@dataclass
class Constant:
    """A value known at import: an initializer, or the result of a computation on constants."""

    name: str
    load: Callable[[], torch.Tensor]
    path: str = ""
    """Its path in the module; empty until an expression needs it as a tensor."""
    trainable: bool = False
    elements: int = 0
    _value: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor:
        if self._value is None:
            self._value = self.load()
        return self._value

    @property
    def literal(self) -> bool:
        """Whether it can be a literal in the source, as a Python number or list."""
        kinds = (torch.int64, torch.int32, torch.bool, torch.float32, torch.float64, torch.uint8, torch.int8)
        return not self.trainable and self.elements <= LITERAL and self.value.dtype in kinds


@dataclass(frozen=True)
class Expression:
    """A value that the source computes: a tensor (or a sequence of them), or a value of the host."""

    text: str
    element: torch.dtype | None = None
    """The element type that a host value represents; None for tensors."""
    shape_like: bool = False
    """A host value that counts dimensions, so that arrays of that size are small."""


Operand = Constant | Expression | None


@dataclass
class Imported:
    """The source of `forward`, its namespace, and the state of the module."""

    source: str
    namespace: dict[str, Any]
    inputs: list[str]
    outputs: list[str]
    constants: list[Constant]


class _Source(str):
    """Text of the generated source, as opposed to a string attribute."""


def expect(x: torch.Tensor, name: str, element: torch.dtype, extents: tuple[int | None, ...] | None) -> None:
    """Check an input against its declaration. Raises `Invalid`, which names the input."""
    if not isinstance(x, torch.Tensor):
        raise Invalid(f"input {name!r} is a {type(x).__name__}, the model takes a tensor of {element}")
    if x.dtype != element:
        raise Invalid(f"input {name!r} has elements of {x.dtype}, the model takes {element}")
    if extents is None:
        return
    if x.dim() != len(extents):
        raise Invalid(f"input {name!r} has shape {tuple(x.shape)}, the model takes rank {len(extents)}: {extents}")
    for at, extent in enumerate(extents):
        if extent is not None and x.shape[at] != extent:
            raise Invalid(f"input {name!r} has shape {tuple(x.shape)}, the model takes {extents}")


def _attribute(attribute: AttributeProto, folder: Path | None) -> Any:
    value = helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.STRING:
        return value.decode("utf-8", "replace")
    if attribute.type == AttributeProto.STRINGS:
        return tuple(item.decode("utf-8", "replace") for item in value)
    if attribute.type == AttributeProto.TENSOR:
        return elements.tensor(value, folder)
    if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
        return tuple(value)
    if attribute.type in (AttributeProto.INT, AttributeProto.FLOAT):
        return value
    raise Unsupported(f"attribute {attribute.name!r} has a type that is not read: {attribute.type}")


def _constant(node: onnx.NodeProto) -> torch.Tensor:
    if len(node.attribute) != 1:
        raise Invalid(f"a Constant has one attribute, this one has {len(node.attribute)}")
    attribute = node.attribute[0]
    if attribute.name == "sparse_value":
        return _dense(attribute.sparse_tensor)
    if attribute.name in ("value_string", "value_strings"):
        raise Unsupported("computation on strings is not supported")
    value = _attribute(attribute, None)
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float32 if "float" in attribute.name else torch.int64)


def _dense(sparse: onnx.SparseTensorProto) -> torch.Tensor:
    values, indices = elements.tensor(sparse.values), elements.tensor(sparse.indices)
    shape = tuple(sparse.dims)
    count = 1
    for extent in shape:
        count *= extent
    if count > FOLDED * 64:
        raise Unsupported(f"the sparse tensor {sparse.values.name!r} of shape {shape} is too large to be made dense")
    dense = torch.zeros(shape, dtype=values.dtype)
    if indices.dim() == 1:
        dense.view(-1)[indices] = values
    else:
        dense[tuple(indices.t())] = values
    return dense


def _estimate(node: onnx.NodeProto, operands: Sequence[Operand]) -> int:
    """The number of result elements of a node over constants, where operand values rather than shapes determine it."""
    at = {"ConstantOfShape": 0, "Expand": 1, "Tile": 1, "Resize": 3}.get(node.op_type)
    if node.op_type == "Range" and all(isinstance(operand, Constant) for operand in operands):
        start, limit, delta = (float(operand.value) for operand in operands[:3] if isinstance(operand, Constant))
        return int(abs((limit - start) / delta)) + 1 if delta else 0
    if at is None or at >= len(operands) or not isinstance(operands[at], Constant):
        return 0
    sizes = operands[at]
    assert isinstance(sizes, Constant)
    count = 1
    for extent in host.integers(sizes.value.tolist()):
        count *= max(int(extent), 1)
    if node.op_type == "Tile" and isinstance(operands[0], Constant):
        count *= max(operands[0].elements, 1)
    if count > GREATEST:
        raise Invalid(f"the node produces an array of {count} elements")
    return count


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _advice(error: DacemlError) -> str:
    return str(error).partition("; ")[2] if not error.where else ""
