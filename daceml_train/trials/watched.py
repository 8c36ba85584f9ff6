"""What functions of the user refer to: a search compares it once, so it must not change while trials are trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from daceml_train.errors import Invalid
from daceml_train.trials.fingerprints import Seen, hashes_of
from daceml_train.trials.state import generators, restore_generators
from daceml_train.trials.values import digest_of

_SAMPLE = 1024
"""How many elements of a tensor are compared."""
_QUESTIONS = 8
"""For how many steps data is called twice."""
_CHANGED = "leave it as it is, or create another Stages: its points are others"
_ADVICE = "data(step, settings) is a function of these two and of the generators of PyTorch, Python, and NumPy"


class Watched:
    """What `data` or `evaluate` refers to, as it was when trials began.

    `found` are the tensors and arrays among it, whose content is looked at in each segment. All else is compared from
    one call of the user's to the next: what changes within a call, the function itself has written.
    """

    def __init__(self, role: str, function: Any, found: Iterable[Any], own: Iterable[Any]) -> None:
        self.role, self.function, self._own = role, function, list(own)
        self._marks = {id(value): (value, _mark(value)) for value in found if _has_content(value)}
        self._parts = {} if function is None else hashes_of(function, self._own)
        self._asked: set[int] = set()

    def begin(self) -> None:
        """Raise `Invalid` if what the function refers to has changed since the last call."""
        now = self._now()
        for name, part in self._parts.items():
            if now.get(name) != part:
                what = f"{self.role} refers to {name.rpartition(': ')[2]}, which has changed since Stages(...)"
                raise Invalid(f"{what} was created", advice=_CHANGED)

    def end(self) -> None:
        """Leave out from now on what has changed within a call."""
        now = self._now()
        self._parts = {name: part for name, part in self._parts.items() if now.get(name) == part}

    def _now(self) -> dict[str, str]:
        return hashes_of(self.function, self._own) if self._parts else {}

    def check(self) -> None:
        """Raise `Invalid` if the content has changed: points that are trained and later ones do not belong together."""
        for value, mark in self._marks.values():
            if _mark(value) != mark:
                what = f"{self.role} refers to {_described(value)} that has changed since Stages(...) was created"
                raise Invalid(what, advice=_CHANGED)

    def ask_twice(self, step: int, settings: Mapping[str, Any]) -> None:
        """Raise `Invalid` if `data` returns other arguments for equal ones, or moves generators in another way.

        Steps are asked for once each, the first `_QUESTIONS` of them. What `data` writes itself, such as a buffer for
        batches, is not compared from now on.
        """
        if step in self._asked or len(self._asked) >= _QUESTIONS:
            return
        state, found = generators(), []
        for _ in range(2):
            restore_generators(state)
            arguments = _digest(self.function(step, dict(settings)))
            found.append((arguments, digest_of(generators())))
        restore_generators(state)
        if found[0] != found[1]:
            drew = "" if found[0][0] != found[1][0] else "and drew other numbers "
            what = "returned other arguments" if not drew else "returned equal arguments"
            raise Invalid(f"data({step}, ...) {what} {drew}when it was called a second time", advice=_ADVICE)
        self._marks = {key: entry for key, entry in self._marks.items() if _mark(entry[0]) == entry[1]}
        self._asked.add(step)


def watched(functions: Mapping[str, Any], seen: Mapping[str, Seen], own: Iterable[Any]) -> dict[str, Watched]:
    """What is watched of `data` and `evaluate`: all that they refer to, except `own` and what `apply` may write."""
    written = {key: value for key, value in seen["apply"].items() if _has_content(value)}
    held = [*own, *written.values()]
    return {
        role: Watched(role, functions[role], (v for k, v in seen[role].items() if k not in written), held)
        for role in ("data", "evaluate")
    }


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


__all__ = ["Watched", "watched"]
