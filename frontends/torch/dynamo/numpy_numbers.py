"""NumPy's functions of arrays and numbers that are inputs: a counter beside an array is no constant of the program.

TorchDynamo runs NumPy's functions by PyTorch's, and makes tensors of the numbers among their operands as of constants.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._numpy import _dtypes_impl, _normalizations

from daceml_train.frontends.torch.traces import Traces

_SYMBOLIC = (torch.SymInt, torch.SymFloat)


def _tensor(number: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), number, dtype=dtype, device="cpu")


@functools.cache
def _install() -> None:
    types: Any = _dtypes_impl
    arrays: Any = _normalizations
    operands, array = types.nep50_to_tensors, arrays.normalize_array_like

    @functools.wraps(operands)
    def nep50_to_tensors(x1: Any, x2: Any, handle_weaks: bool, function_name: str) -> Any:
        pair = [x1, x2]
        numbers = [i for i, x in enumerate(pair) if isinstance(x, _SYMBOLIC)] if traces.depth else []
        for i in numbers:
            kind, other = types._dtype_for_scalar(type(pair[i])), pair[1 - i]
            weak = handle_weaks and isinstance(other, torch.Tensor)
            fits = weak and types._category(kind) <= types._category(other.dtype)
            if fits and not other.dtype.is_floating_point and other.dtype is not torch.int64:
                return operands(x1, x2, handle_weaks, function_name)  # which integers of few bits may not hold
            pair[i] = _tensor(pair[i], other.dtype if fits else types.get_default_dtype_for(kind))
        if numbers and all(isinstance(x, torch.Tensor) for x in pair):
            return tuple(pair)
        return operands(*pair, handle_weaks and not numbers, function_name)

    @functools.wraps(array)
    def normalize_array_like(x: Any, parm: Any = None) -> Any:
        fills = parm is not None and parm.name == "fill_value"  # of which PyTorch asks a tensor for its number
        if traces.depth and isinstance(x, _SYMBOLIC) and not fills:
            return _tensor(x, types.get_default_dtype_for(types._dtype_for_scalar(type(x))))
        return array(x, parm)

    types.nep50_to_tensors, arrays.normalize_array_like = nep50_to_tensors, normalize_array_like
    arrays.normalizers["ArrayLike"] = normalize_array_like


traces = Traces(_install)
"""Traces in which they are."""
