"""PyTorch's names of element types."""

import torch

from daceml_train.tensor import DType


def torch_dtype(dtype: DType) -> torch.dtype:
    """The `torch.dtype` of an element type."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found
