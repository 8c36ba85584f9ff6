"""Which tensors that outlive a call share memory in PyTorch: programs give each memory of its own."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from daceml_train.frontends.torch.paths.trie import Result
from daceml_train.frontends.torch.paths.values import memory

Place = tuple[int, Any]
"""The memory of a tensor, and where in it the elements are."""


def places_of(results: Mapping[Result, Tensor]) -> dict[Result, Place]:
    """Where the tensors of results are."""
    return {r: (memory(t), (t.dtype, t.shape, t.stride(), t.storage_offset())) for r, t in results.items()}


def kept_of(results: Mapping[Result, weakref.ref[Tensor]]) -> list[Result]:
    """The results that user code keeps: those that live, but for tensors that a view of them keeps.

    Where user code keeps such a tensor as well, the next call along the path finds out.
    """
    living = {result: tensor for result, found in results.items() if (tensor := found()) is not None}
    bases = {id(tensor._base) for tensor in living.values() if tensor._base is not None}
    return [result for result, tensor in living.items() if id(tensor) not in bases]


def shared(places: Mapping[Result, Place], outside: Collection[int], loss: Result, kept: Iterable[Result]) -> str:
    """Why a program cannot compute the loss and what user code keeps as PyTorch does; nothing if it can.

    `outside` is the memory of what the model did not compute; that of the loss is the caller's alone.
    """
    if loss in places and places[loss][0] in outside:
        return "the loss is a view of a parameter or of another tensor that the model does not compute"
    seen: dict[int, Any] = {}
    for own, elements in (places[result] for result in kept if result in places):
        if own in outside:
            return "user code keeps a view of a parameter or of another tensor that the model does not compute"
        if seen.setdefault(own, elements) != elements:
            return "user code keeps two different views of one memory"
    return ""


def same_elements(places: Mapping[Result, Place], kept: Iterable[Result]) -> dict[Result, Result]:
    """By kept result the first one that is the same memory, such as `h` for `h.detach()`."""
    first: dict[Any, Result] = {}
    return {result: first.setdefault(places.get(result, id(result)), result) for result in kept}
