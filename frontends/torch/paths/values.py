"""The arguments and results of PyTorch's functions: their tensors, their memory, and the line that is running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


def memory(tensor: Tensor) -> int:
    """What identifies the memory of a tensor; inside `torch.func` it has none of its own."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return id(tensor)
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def plain_data(value: Any) -> bool:
    """Whether this is a tensor without a gradient, outside of `torch.func`."""
    return type(value) is Tensor and not value.requires_grad and torch._C._functorch.peek_interpreter_stack() is None


def numeric(array: Any) -> bool:
    """Whether an array holds numbers."""
    return array.dtype.kind in "biufc"


def tensors(value: Any) -> list[Tensor]:
    """The tensors in an argument."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, tuple | list):
        for entry in value:
            _collect(entry, found)
    elif type(value) is dict:
        for entry in value.values():
            _collect(entry, found)
    elif type(value) is slice:
        _collect((value.start, value.stop, value.step), found)


def mapped(value: Any, tensor: Callable[[Tensor], Any]) -> Any:
    """An argument with other tensors."""
    if isinstance(value, Tensor):
        return tensor(value)
    if type(value) in (tuple, list):
        return type(value)(mapped(v, tensor) for v in value)
    if type(value) is dict:
        return {key: mapped(v, tensor) for key, v in value.items()}
    if type(value) is slice:
        return slice(*(mapped(v, tensor) for v in (value.start, value.stop, value.step)))
    return value


def plain(found: Any) -> Any:
    """A result as tuples and lists: a named tuple of PyTorch's is a tuple."""
    return tuple(found) if isinstance(found, tuple) and type(found) is not tuple else found


def mode() -> str:
    """What a call depends on besides its arguments; empty for nothing."""
    if torch._C._is_any_autocast_enabled() or torch.is_inference_mode_enabled():
        return "a region of autocast or inference mode"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a transform of torch.func"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return "saved_tensors_hooks"
    return ""


def place() -> str:
    """The user's line that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, _TORCH)):
        frame = frame.f_back
    return "" if frame is None else f" (at {Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
