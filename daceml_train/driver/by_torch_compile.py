"""Which of this package's backends compiled the graphs of a `torch.compile(model, backend="daceml_train")`.

PyTorch calls a backend with a graph and nothing else, so the object that stands for the call of `torch.compile` is
found on the stack; it keeps the backend, so that all graphs of one model have one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch._dynamo

from daceml_train.driver.module import Backend
from daceml_train.driver.settings import Settings

_ATTRIBUTE = "_daceml_train_backend"
_FRAMES = 4
"""How many callers are asked: PyTorch's object calls the function that the entry point names."""


def backend_of_call(settings: Callable[[], Settings]) -> Backend:
    """The backend of the call of `torch.compile` that asks for a graph; a new one where nobody stands for it."""
    caller: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if caller is None:
            break
        owner = caller.f_locals.get("self")
        if isinstance(owner, torch._TorchCompileWrapper):
            found: Backend | None = getattr(owner, _ATTRIBUTE, None)
            if found is None:
                found = Backend(settings())
                setattr(owner, _ATTRIBUTE, found)
            return found
        caller = caller.f_back
    return Backend(settings())


def compiled_by(function: Any) -> tuple[str, str, Backend | None] | None:
    """What was given to `torch.compile`, by name, the name of its backend, and that backend if it is this package's.

    None for what does not come from `torch.compile`. Before the first call, there is no backend.
    """
    if isinstance(function, torch._dynamo.OptimizedModule):
        name, callback = type(function._orig_mod).__name__, getattr(function.dynamo_ctx, "callback", None)
    elif (source := getattr(function, "_torchdynamo_orig_callable", None)) is not None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        name, callback = source.__name__, cells["callback"].cell_contents if "callback" in cells else None
    else:
        return None
    while not isinstance(callback, torch._TorchCompileWrapper):
        inner = getattr(callback, "_torchdynamo_orig_backend", None)
        if inner is None:
            return name, str(getattr(callback, "compiler_name", getattr(callback, "__name__", "another"))), None
        callback = inner
    return name, callback.compiler_name, getattr(callback, _ATTRIBUTE, None)
