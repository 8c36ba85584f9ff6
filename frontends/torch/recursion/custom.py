"""Functions of autograd that users write, and PyTorch's own for hooks, run in PyTorch: they take and give values."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from daceml_train.frontends.torch.recursion.lazy import known, record_by, recording

_APPLY = torch.autograd.Function.__dict__["apply"].__func__
_LOCK = threading.Lock()
_USERS = {"recordings": 0}


@functools.wraps(_APPLY)
def _apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """What PyTorch's `apply` returns for the values; the function's own operators are not recorded."""
    recorder = recording()
    if recorder is None:
        return _APPLY(kind, *args, **kwargs)
    recorder.events += 1
    if not kind.__module__.startswith("torch."):
        recorder.note(f"{kind.__name__}, a function of autograd, within a recursion: PyTorch runs it")
    args, kwargs = known(args), known(kwargs)
    record_by(None)
    try:
        with torch._C.DisableTorchFunction():
            return _APPLY(kind, *args, **kwargs)
    finally:
        record_by(recorder)


@contextmanager
def on_values() -> Iterator[None]:
    """Give values in place of lazy tensors to `torch.autograd.Function.apply`, which calls no `__torch_function__`."""
    with _LOCK:
        _USERS["recordings"] += 1
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        with _LOCK:
            _USERS["recordings"] -= 1
            if not _USERS["recordings"]:
                torch.autograd.Function.apply = classmethod(_APPLY)  # type: ignore[assignment,method-assign]
