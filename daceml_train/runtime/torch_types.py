"""PyTorch's names of element types."""

import torch

from daceml_train.tensor import DType

_TYPES: dict[DType, torch.dtype] = {dtype: getattr(torch, dtype.name) for dtype in DType}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The `torch.dtype` of an element type."""
    return _TYPES[dtype]
