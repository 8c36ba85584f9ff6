"""NumPy's functions and numbers: a counter beside an array is no constant of the program, and a mean is a number.

TorchDynamo runs NumPy's functions by PyTorch's, and makes tensors of the numbers among their operands as of constants.
What NumPy computes of rank 0 is a number (`numpy.float64`), which formats and compares as a float; TorchDynamo makes
arrays of all results.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.utils import numpy_method_wrapper, numpy_operator_wrapper, numpy_to_tensor_wrapper
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._numpy import _dtypes_impl, _normalizations

from daceml_train.frontends.torch.results import example_of
from daceml_train.frontends.torch.traces import Traces

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_NAMES = """
array asarray asanyarray ascontiguousarray full zeros ones empty full_like zeros_like ones_like empty_like
broadcast_to squeeze reshape transpose atleast_1d
"""
_CREATING = frozenset(_NAMES.split())
"""Functions and methods whose results of rank 0 are arrays."""
_KEEPING = frozenset(["astype", "copy", "view"])
"""Those whose results are what their first operand is."""


def _tensor(number: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((), number, dtype=dtype, device="cpu")


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def as_numpy(result: torch.Tensor) -> Any:
    """A result of rank 0 as NumPy's number."""
    return result.numpy(force=True)[()]


def _is_number(value: Any) -> bool:
    """Whether this is a result of rank 0 that is a number in NumPy."""
    node = value.as_proxy().node
    return getattr(example_of(node), "ndim", None) == 0 and _gives_number(node)


def _gives_number(node: fx.Node) -> bool:
    match node.target:
        case numpy_operator_wrapper():
            return True
        case numpy_to_tensor_wrapper() as wrapped:
            name = wrapped.f.__name__
        case numpy_method_wrapper() as wrapped:
            name = wrapped.method
        case _:
            return False
    if name in _KEEPING and node.all_input_nodes:
        return _gives_number(node.all_input_nodes[0])
    return name not in _CREATING


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

    generators: Any = PyCodegen
    add, load = generators.add_graph_output, generators.load_import_from

    @functools.wraps(add)
    def add_graph_output(self: Any, value: Any) -> Any:
        self.loads_number = traces.depth and isinstance(value, NumpyNdarrayVariable) and _is_number(value)
        return add(self, value)

    @functools.wraps(load)
    def load_import_from(self: Any, module_name: str, object_name: str) -> None:
        if object_name == "to_numpy_helper" and self.loads_number:
            module_name, object_name = as_numpy.__module__, as_numpy.__name__
        load(self, module_name, object_name)

    generators.add_graph_output, generators.load_import_from = add_graph_output, load_import_from
    types.nep50_to_tensors, arrays.normalize_array_like = nep50_to_tensors, normalize_array_like
    arrays.normalizers["ArrayLike"] = normalize_array_like


traces = Traces(_install)
"""Traces in which they are."""
