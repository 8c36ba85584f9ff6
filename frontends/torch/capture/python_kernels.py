"""PyTorch's kernels in Python, which stand above any table of decompositions: traces take others in their place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import DispatchKey

from daceml_train.frontends.torch.capture import margin_losses, resampling
from daceml_train.frontends.torch.dynamo.dropouts import dropout

_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@functools.cache
def _kernels() -> Mapping[Any, Callable[..., Any] | None]:
    return {**margin_losses.KERNELS, **resampling.kernels(), torch.ops.aten.dropout.default: dropout}


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Traces take kernels of this project, or the operator itself, in place of PyTorch's decompositions."""
    before = {operator: {key: operator.py_kernels.get(key) for key in _KEYS} for operator in _kernels()}
    for operator, kernel in _kernels().items():
        _install(operator, {key: kernel if before[operator][key] is not None else None for key in _KEYS})
    try:
        yield
    finally:
        for operator, kernels in before.items():
            _install(operator, kernels)


def _install(operator: Any, kernels: Mapping[DispatchKey, Callable[..., Any] | None]) -> None:
    for key, kernel in kernels.items():
        if kernel is None:
            operator.py_kernels.pop(key, None)
        else:
            operator.py_kernels[key] = kernel
    operator._dispatch_cache.clear()
