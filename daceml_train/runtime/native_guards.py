"""What is compared before every training step, natively: identities, shared storages, what is attached to leaves."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from ctypes import c_int, c_int64, c_void_p
from typing import Any, TypeAlias

import torch

from daceml_train.runtime.native_library import library

_Container: TypeAlias = "dict[Any, Any] | list[Any]"


class IdentityGuard:
    """Whether dictionaries and lists still contain the same objects in the same order, and those that are tensors
    the same memory, which `torch.utils.swap_tensors` exchanges; `empty` ones nothing.

    A container that is empty now is not looked at, unless it is given as `empty`. Values under the keys `free` may be
    any objects.
    """

    def __init__(
        self, containers: Iterable[_Container], empty: Iterable[_Container] = (), free: Collection[str] = ()
    ) -> None:
        native = library()
        kept = [c for c in containers if c]
        each = [[(None, value) for value in c] if isinstance(c, list) else list(dict.items(c)) for c in kept]
        self.values = [value for items in each for _, value in items]
        """The objects, which are kept alive: no other object gets their address."""
        self.containers = [*kept, *empty]
        counts = [*map(len, each), *[0] * (len(self.containers) - len(kept))]
        compared = [(value, key not in free) for items in each for key, value in items]
        addresses = [v._cdata if looked_at and isinstance(v, torch.Tensor) else 0 for v, looked_at in compared]
        self._handle = native.identities_create(
            (c_void_p * len(counts))(*map(id, self.containers)),
            (c_int * len(counts))(*[isinstance(c, list) for c in self.containers]),
            (c_int64 * len(counts))(*counts),
            len(counts),
            (c_void_p * len(compared))(*[id(value) if looked_at else 0 for value, looked_at in compared]),
            (c_void_p * len(compared))(*addresses),
            len(compared),
        )
        weakref.finalize(self, native.identities_destroy, self._handle)
        self.holds: Callable[[], int] = functools.partial(native.identities_hold, self._handle)
        """Whether all is as it was."""


class SharedStorage:
    """Whether one of the tensors at some positions of an array of `tensor._cdata` shares its storage with others."""

    def __init__(self, array: ctypes.Array[c_void_p], positions: Sequence[int], others: Sequence[torch.Tensor]) -> None:
        kept = list(others)
        addresses = (c_void_p * len(kept))(*[t._cdata for t in kept])
        given = (c_int * len(positions))(*positions)
        shared = library().tensors_shared
        self.found: Callable[[], int] = functools.partial(shared, array, given, len(given), addresses, len(kept))
        self._kept = kept


GRADIENT, HOOK = 1, 2


class Leaves:
    """Tensors on which others may have left a gradient or a hook."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses = (c_void_p * len(self._tensors))(*[t._cdata for t in self._tensors])
        attached = library().tensors_attached
        self.attached: Callable[[], int] = functools.partial(attached, self._addresses, len(self._tensors))
        """`GRADIENT` if any of them has a gradient, and `HOOK` if a hook is or was registered on any of them."""
