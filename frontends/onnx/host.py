"""Values of the host: Python numbers and nested lists of them, in place of small tensors such as shapes.

Shapes, axes and repeats are computed on these while the model runs, so that a size which varies stays a symbol, and
PyTorch sees `x.reshape([n, 8, 64])` where ONNX has a chain of tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from daceml_train.errors import Invalid

Host = Any
"""A number, or a list of these, nested as deep as the tensor that it represents has dimensions."""


def integers(value: Host) -> list[int]:
    """A host value as a flat list."""
    if not isinstance(value, list | tuple):
        return [value]
    return [item for part in value for item in integers(part)]


def integer(value: Host) -> Any:
    """The single number of a host value. Raises `Invalid` if there are several."""
    flat = integers(value)
    if len(flat) != 1:
        raise Invalid(f"an operand that must be one number has {len(flat)}")
    return flat[0]


def shape_of(value: Host) -> list[int]:
    """The extents of a host value."""
    extents = []
    while isinstance(value, list | tuple):
        extents.append(len(value))
        if not value:
            break
        value = value[0]
    return extents


_SPLITTER = float((1 << 29) + 1)
"""Multiplying by it and subtracting twice rounds 53 bits to 24 (Veltkamp, 1968)."""

_GREATEST = 2.0**127
"""What can be multiplied by it."""


def single(value: Host) -> Host:
    """Numbers rounded to float32, as ONNX computes them; Python's are wider. A symbolic number stays as it is."""
    if isinstance(value, list | tuple):
        return [single(item) for item in value]
    if not isinstance(value, float) or not -_GREATEST < value < _GREATEST:
        return value
    large = value * _SPLITTER
    return large - (large - value)


def as_tensor(value: Host, element: torch.dtype) -> torch.Tensor:
    """A host value as a tensor."""
    return torch.tensor(value, dtype=element)


def as_host(value: torch.Tensor) -> Host:
    """A tensor's elements on the host. They depend on data, so a compiled graph ends here."""
    return value.tolist()
