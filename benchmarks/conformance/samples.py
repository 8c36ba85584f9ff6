"""PyTorch's OpInfo database: its entries, their samples, and what is left out by declaration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db

# It seeds PyTorch's generator before each call, which breaks Dynamo's graphs.
common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)

_UNINITIALISED = "empty empty_like new_empty new_empty_strided empty_strided empty_permuted"
_RANDOM = """
bernoulli cauchy exponential geometric log_normal multinomial normal uniform rand_like randint randint_like randn
randn_like pca_lowrank svd_lowrank nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d
nn.functional.dropout3d nn.functional.feature_alpha_dropout nn.functional.fractional_max_pool2d
nn.functional.fractional_max_pool3d nn.functional.rrelu
"""
LEFT_OUT: dict[str, str] = dict.fromkeys(_UNINITIALISED.split(), "returns uninitialized memory") | dict.fromkeys(
    _RANDOM.split(), "draws random numbers, and draws others than PyTorch does"
)
"""Entry name -> why its results cannot be compared. Other samples that draw are found by running them twice."""

THROUGH_OPTIMIZE: dict[str, str] = {
    "nn.functional.linear_cross_entropy": "its Python code asks whether its arguments require gradients",
}
"""Entry name -> why all its samples go through TorchDynamo and `optimize`, which is too slow to do for all entries."""


def label(op: Any) -> str:
    """An entry's name and variant."""
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def entries(dtype: torch.dtype = torch.float32, differentiable: bool = True) -> list[Any]:
    """The database's entries that take `dtype`; `differentiable`: only those that have a gradient."""
    return [op for op in op_db if dtype in op.dtypes and (op.supports_autograd or not differentiable)]


def samples(op: Any, dtype: torch.dtype, requires_grad: bool) -> Iterator[Any]:
    """The samples of an entry, the same ones at every call."""
    torch.manual_seed(0)
    return iter(op.sample_inputs("cpu", dtype, requires_grad=requires_grad))


def doubled(value: Any) -> Any:
    """A tensor in double precision, if it is one of floating-point numbers."""
    if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
        wide = torch.complex128 if value.is_complex() else torch.float64
        return value.detach().to(wide).requires_grad_(value.requires_grad)
    return value
