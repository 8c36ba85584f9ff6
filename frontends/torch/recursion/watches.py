"""Watches: what a record depends on besides its operands, which user code may change between two nodes.

A record of a block stands for code that read modules, methods, and functions of PyTorch. The dicts that have them are
compared by the number of their last change, which CPython counts; those that user code changes at each node, as where
it counts calls in an attribute of the model, by the entries that were read.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import types
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as base

from daceml_train.frontends.torch.recursion import columns

ABSENT: Any = object()
"""Stands for an entry that a dict does not have."""
_CHANGE = 24
"""Where in a dict of CPython 3.11 and 3.12 the number of its last change is."""
CONTENTS = 32
"""How many contents of PyTorch are compared with the present one; one before these has a number of its own again."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")
_CLASSES: weakref.WeakKeyDictionary[type, dict[str, Any]] = weakref.WeakKeyDictionary()


def of_class(kind: type) -> dict[str, Any]:
    """The dict of a class itself, of which `vars` shows a view."""
    found = _CLASSES.get(kind)
    if found is None:
        (found,) = gc.get_referents(vars(kind))
        _CLASSES[kind] = found
    return found


@functools.cache
def library() -> tuple[dict[str, Any], ...]:
    """What all code that calls PyTorch depends on."""
    files = [vars(m) for m in (torch, torch.nn.functional, torch.special, torch.linalg, torch._C._nn)]
    return (*files, of_class(torch.nn.Module), of_class(torch.Tensor), *[getattr(base, f"_global{h}") for h in _HOOKS])


class Reads:
    """What code has read; see `Watch`. `noisy` has the identities of dicts that change though what is read does not."""

    def __init__(self, noisy: Collection[int] = ()) -> None:
        self.noisy = noisy
        self.loose: dict[int, dict[str, Any]] = {}
        """Dicts of which only some entries were read."""
        self.dicts: dict[int, dict[str, Any]] = {id(d): d for d in library()}
        self.entries: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self.functions: dict[int, tuple[Any, ...]] = {}

    def whole(self, found: dict[str, Any]) -> None:
        """Any entry of a dict."""
        self.dicts[id(found)] = found

    def entry(self, found: dict[str, Any], name: str) -> Any:
        """One entry of a dict, or that there is none."""
        value = found.get(name, ABSENT)
        if id(found) in self.noisy:
            self.entries[id(found), name] = found, name, value
        else:
            self.dicts[id(found)] = self.loose[id(found)] = found
        return value

    def function(self, found: types.FunctionType) -> None:
        """The code and the defaults of a function."""
        self.functions[id(found)] = found, found.__code__, found.__defaults__, found.__kwdefaults__
        if found.__kwdefaults__:
            self.whole(found.__kwdefaults__)

    def files(self, function: types.FunctionType, names: Iterable[str]) -> None:
        """Names of a function's file."""
        for name in names:
            self.entry(function.__globals__, name)

    def module(self, m: torch.nn.Module) -> None:
        """All of a module of PyTorch."""
        for found in (vars(m), *(getattr(m, name) for name in (*_TABLES, *_HOOKS))):
            self.whole(found)
        for kind in type(m).__mro__[:-1]:
            self.whole(of_class(kind))

    def attribute(self, m: torch.nn.Module, name: str) -> None:
        """An attribute of a module of the user's."""
        own = vars(m)
        if self.entry(own, name) is not ABSENT:
            return
        for kind in type(m).__mro__:
            if kind is torch.nn.Module:
                break  # the whole of it is in `library`
            if self.entry(of_class(kind), name) is not ABSENT:
                return
        for table in _TABLES:
            if self.entry(self.entry(own, table), name) is not ABSENT:
                return


class Watch:
    """Whether what code has read is unchanged since a record was made, or since the record was found to hold."""

    __slots__ = ("address", "dicts", "entries", "functions", "loose", "pairs")

    def __init__(self, reads: Reads) -> None:
        self.dicts, self.loose = tuple(reads.dicts.values()), frozenset(reads.loose)
        self.entries, self.functions = tuple(reads.entries.values()), tuple(reads.functions.values())
        self.pairs = np.zeros((len(self.dicts), 2), dtype=np.int64)
        """Per dict, where the number of its last change is, and that number."""
        self.address: int = self.pairs.ctypes.data
        self.pairs[:, 0] = [id(d) + _CHANGE for d in self.dicts]
        self.arm()

    def arm(self) -> None:
        """Note that the dicts are as they have to be."""
        if (function := columns.native("arm")) is not None:
            function(self.address, len(self.dicts))
        else:
            self.pairs[:, 1] = [_number(at) for at in self.pairs[:, 0].tolist()]

    def unchanged(self) -> bool:
        """Whether no dict has changed."""
        if (function := columns.native("unchanged")) is not None:
            found: bool = function(self.address, len(self.dicts))
            return found
        return all(_number(at) == number for at, number in self.pairs.tolist())

    def holds(self) -> bool:
        """Whether nothing has changed."""
        if not self.unchanged() or any(d.get(name, ABSENT) is not value for d, name, value in self.entries):
            return False
        return not self.functions or all(
            f.__code__ is code and f.__defaults__ is defaults and f.__kwdefaults__ is by_name
            for f, code, defaults, by_name in self.functions
        )

    def noise(self) -> set[int]:
        """The identities of dicts that have changed, of which only some entries were read."""
        found = [d for d, (at, number) in zip(self.dicts, self.pairs.tolist(), strict=True) if _number(at) != number]
        return set(map(id, found)) & self.loose


def _number(at: int) -> int:
    return ctypes.c_int64.from_address(at).value


class Contents:
    """What `library` and classes of PyTorch contain, as a number that is equal while that is the same."""

    def __init__(self) -> None:
        self.seen: dict[int, list[dict[str, Any]]] = {}
        """By number, those that were met last."""
        self.count = 0
        self.watches: dict[tuple[type, ...], tuple[Watch, int]] = {}

    def of(self, kinds: tuple[type, ...]) -> int:
        """The number for these classes."""
        watch, number = self.watches.get(kinds, (None, 0))
        if watch is not None and watch.unchanged():
            return number
        reads = Reads()
        for kind in kinds:
            for owner in kind.__mro__[:-1]:
                reads.whole(of_class(owner))
        watch = Watch(reads)
        now = [dict(d) for d in watch.dicts]
        number = next((k for k, then in self.seen.items() if _same(then, now)), self.count)
        self.count = max(self.count, number + 1)
        known = self.seen.pop(number, now)
        for then, own in zip(known, now, strict=True):
            then.update(own)  # what was added since
        self.seen[number] = known
        if len(self.seen) > CONTENTS:
            del self.seen[next(iter(self.seen))]
        self.watches[kinds] = watch, number
        return number


def _same(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> bool:
    """Whether the functions and classes that were there then are there now."""
    return len(then) == len(now) and all(map(_same_dict, then, now))


def _called(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def _same_dict(then: dict[str, Any], now: dict[str, Any]) -> bool:
    return all(now.get(name, ABSENT) is value for name, value in then.items() if _called(value))
