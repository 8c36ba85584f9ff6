"""Dropout that drops nothing returns its input, as in eager execution: PyTorch's decomposition returns a copy.

An input changed through such a result, or returned as one, would otherwise be another tensor in TorchDynamo's trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._dynamo import symbolic_convert

from daceml_train.frontends.torch.traces import Traces, for_backend


@functools.cache
def _install() -> None:
    operator: Any = torch.ops.aten.dropout.default
    for key in (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd):
        operator.py_kernels[key] = _or_original(operator.py_kernels[key])
    operator._dispatch_cache.clear()


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout as ATen has it."""
    return x if not train or p == 0 else torch.ops.aten.native_dropout(x, p, train)[0]


def _or_original(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def kernel(x: Tensor, p: float, train: bool) -> Tensor:
        return (dropout if _is_ours() else original)(x, p, train)

    return kernel


def _is_ours() -> bool:
    """Whether this thread traces for this package."""
    if traces.depth:
        return True
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    return translator is not None and for_backend(translator.output.compiler_fn)


traces = Traces(_install)
"""Traces in which it does."""
