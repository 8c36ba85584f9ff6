"""What functions of the user refer to: a search compares it once, so it must not change while trials are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from daceml_train.errors import Invalid
from daceml_train.trials.state import generators, restore_generators
from daceml_train.trials.values import digest_of

_SAMPLE = 1024
"""How many elements of a tensor are compared."""
_ADVICE = "data(step, settings) is a function of these two and of the generators of PyTorch, Python, and NumPy"


class Watched:
    """The tensors and arrays that `data` and `evaluate` refer to, as they were when trials began."""

    def __init__(self, found: Iterable[Any]) -> None:
        self._marks = {id(value): (value, _mark(value)) for value in found if _has_content(value)}
        self._asked = False

    def check(self, role: str) -> None:
        """Raise `Invalid` if the content has changed: points that are trained and later ones do not belong together."""
        for value, mark in self._marks.values():
            if _mark(value) != mark:
                what = f"{role} refers to {_described(value)} that has changed since Stages(...) was created"
                raise Invalid(what, advice="leave it as it is, or create another Stages: its points are others")

    def ask_twice(self, data: Callable[[int, dict[str, Any]], Any], step: int, settings: Mapping[str, Any]) -> None:
        """Raise `Invalid` if `data` returns other arguments for equal ones. Later calls of this method ask nothing.

        What it writes itself, such as a buffer for batches, is not compared from now on.
        """
        if self._asked:
            return
        state = generators()
        first = _digest(data(step, dict(settings)))
        restore_generators(state)
        second = _digest(data(step, dict(settings)))
        restore_generators(state)
        if first != second:
            what = f"data({step}, ...) returned other arguments when it was called a second time"
            raise Invalid(what, advice=_ADVICE)
        self._marks = {key: entry for key, entry in self._marks.items() if _mark(entry[0]) == entry[1]}
        self._asked = True


def _has_content(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")


def _mark(value: torch.Tensor | np.ndarray) -> tuple[Any, ...]:
    """What is compared: the shape, some elements, and a tensor's own count of its changes."""
    if isinstance(value, np.ndarray):
        elements = value.reshape(-1)
        return value.shape, elements[:: 1 + elements.size // _SAMPLE].tobytes()
    version = None if value.is_inference() else value._version
    if value.layout is not torch.strided:
        return value.shape, version
    flat = value.detach().reshape(-1)
    return value.shape, version, digest_of(flat[:: 1 + flat.numel() // _SAMPLE])


def _described(value: torch.Tensor | np.ndarray) -> str:
    kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
    return f"{kind} of shape {tuple(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"


def _digest(arguments: Any) -> str:
    """A hash of the tensors, numbers, and containers among the arguments of a step."""
    return digest_of(_comparable(arguments))


def _comparable(value: Any) -> Any:
    if isinstance(value, np.ndarray) and _has_content(value):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Mapping):
        return {str(key): _comparable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_comparable(entry) for entry in value]
    if isinstance(value, torch.Tensor):
        return value if value.layout is torch.strided else value.to_dense()
    return value if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


__all__ = ["Watched"]
