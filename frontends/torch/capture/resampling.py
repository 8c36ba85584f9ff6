"""Resampling in a trace: one operator, with a kernel and a derivative, where PyTorch's decompositions gather."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import upsample_compute_output_size

_NAMES = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
"""


def _by_scale(operator: Any, input: Tensor, output_size: Any, *flags: Any) -> Tensor:
    """`operator.vec`, whose last argument is the scales, as `operator.default`, which is given the size as well."""
    *corners, scales = flags
    size = upsample_compute_output_size(input.size(), output_size, scales)
    result: Tensor = operator.default(input, size, *corners, *(scales or [None] * len(size)))
    return result


def kernels() -> Mapping[Any, Callable[..., Any] | None]:
    """Operator overload -> its Python kernel in traces; None: that of C++, which stays a node."""
    operators = [getattr(torch.ops.aten, name) for name in _NAMES.split()]
    return {operator.vec: functools.partial(_by_scale, operator) for operator in operators} | {
        operator.default: None for operator in operators
    }
