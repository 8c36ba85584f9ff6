"""What the captured code finds by an expression of its own, followed from call to call."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from daceml_train.driver.bound_optimizer import is_unresolved
from daceml_train.errors import Unsupported
from daceml_train.runtime.gpu.plan import same_strides

ARRAY = "___from_numpy"
"""What TorchDynamo calls for a tensor with an array's memory; it is another one at each call."""


def tensor_of(array: Any) -> torch.Tensor | None:
    """A tensor with the memory of an array; None for a number of NumPy's, which has none that lasts."""
    return torch.as_tensor(array, device="cpu") if isinstance(array, np.ndarray) else None


@dataclass
class SourceGuard:
    """Source guard: a tensor, or a number in one, that the captured code finds by an expression of its own.

    What the user's code replaces (`self.state = h.detach()`) is another tensor of the same type at each call.
    """

    code: types.CodeType
    globals: dict[str, Any]
    tensor: torch.Tensor
    number: bool
    position: int
    strides: tuple[int, ...]
    moving: bool
    """Whether another tensor of the same type may stand there."""
    copied: bool
    """Whether each call reads a copy in these strides: the tensor is not dense."""

    def holds(self, scope: dict[str, Any]) -> bool:
        """Whether a tensor that fits is still there; a number is updated."""
        found = eval(self.code, {**self.globals, "L": scope})
        if self.number:
            self.tensor.fill_(found)
            return True
        if found is self.tensor:
            return True
        if not self.moving or not _alike(found, self.tensor):
            return False
        self.tensor = found
        return True


def _alike(found: Any, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the type of the one that was captured, and no history that gradients would flow into."""
    if type(found) is not type(tensor) or found.requires_grad or found.dtype is not tensor.dtype:
        return False
    return found.shape == tensor.shape and found.stride() == tensor.stride() and found.device == tensor.device


def follow(
    source: str,
    scope: dict[str, Any],
    known: dict[str, Any],
    tensor: torch.Tensor,
    position: int,
    strides: tuple[int, ...],
    moving: bool,
) -> SourceGuard:
    """What follows this tensor, by an expression over `L` and the names that are `known`.

    Raises `Unsupported` where the next call could not find it.
    """
    try:
        code = compile(source, "<captured>", "eval")
        found = eval(code, {**known, "L": scope})
    except Exception as error:
        raise Unsupported(f"a tensor that cannot be found at the next call ({source})") from error
    number = isinstance(found, float | int) and tensor.ndim == 0
    shared = source.startswith(ARRAY) and moving and _alike(found, tensor)
    if not number and found is not tensor and not shared:
        raise Unsupported(f"a tensor that each call creates ({source})")
    if not number and tensor.requires_grad and not tensor.is_leaf:
        raise Unsupported(f"a tensor that carries a gradient from before the step ({source})")
    moving = moving and not number and not tensor.requires_grad
    copied = not same_strides(tensor, strides) or is_unresolved(tensor)
    return SourceGuard(code, known, tensor, number, position, strides, moving, copied)
