"""Python objects as plain values, and back: what the attributes of a module may be between two trials.

Containers, arrays, generators, data classes, and names of functions have a description, a dictionary with a kind, which
a file can hold and which runs no code when it is read. Objects that several places share are shared in the description
and after it. What has no description is left in place, and is looked at only to see whether it changes.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from daceml_train.errors import Invalid
from daceml_train.trials.values import PLAIN, alike, digest_of

KIND = "kind of object"
"""The entry of a description that tells it from a user's dictionary."""
OPAQUE = "opaque"
"""The kind of what has no description."""
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
"""Classes whose objects are their fields."""
_FACTORIES = {kind.__name__: kind for kind in (int, float, list, dict, set)}


class Objects:
    """The objects of this process that descriptions refer to: tensors and modules by name, and opaque ones by place."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        """Tensors and modules of the model."""
        self.names: dict[int, str] = {}
        """Their names by identity."""
        self.opaque: dict[str, Any] = {}
        self.lasting: dict[int, Any] | None = None
        """Those that the model had at the first snapshot, by identity: the user's functions may hold them, too, and
        write settings into them.
        """

    def name(self, found: Mapping[str, Any]) -> None:
        """Take note of the tensors and modules of this moment."""
        self.by_name = dict(found)
        self.names = {id(value): name for name, value in found.items()}


class Encoder:
    """Describes values of one moment; one object has one description, wherever it is found."""

    def __init__(self, objects: Objects, copy: bool = True) -> None:
        self.objects, self.copy = objects, copy
        self.opaque: dict[str, Any] = {}
        """What has no description, by place."""
        self._known: dict[int, tuple[Any, Any]] = {}
        self._active: set[int] = set()

    def __call__(self, value: Any, where: str) -> Any:
        """The description of a value, which is found at the place `where`."""
        if type(value) in PLAIN:
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        if id(value) in self._active:
            return self._opaque(value, where)
        self._active.add(id(value))
        try:
            found = self._described(value, where)
        finally:
            self._active.discard(id(value))
        self._known[id(value)] = value, found  # kept, so that the identity stays this object's
        return found

    @property
    def met(self) -> dict[int, Any]:
        """What was described, by identity."""
        return {key: value for key, (value, _) in self._known.items()}

    def _described(self, value: Any, where: str) -> Any:
        if id(value) in self.objects.names:
            return _of("named", name=self.objects.names[id(value)])
        if type(value) is torch.Tensor:
            return value.detach().clone() if self.copy else value.detach()
        if type(value) in (list, tuple):
            return type(value)(self(entry, f"{where}[{place}]") for place, entry in enumerate(value))
        if type(value) is dict and all(type(name) in (str, int) for name in value) and KIND not in value:
            return {name: self(entry, f"{where}[{name!r}]") for name, entry in value.items()}
        for kind in (_containers, _numbers, _generators, _fields, _names):
            if (found := kind(value, lambda entry, at: self(entry, f"{where}{at}"))) is not None:
                return found
        return self._opaque(value, where)

    def _opaque(self, value: Any, where: str) -> Any:
        self.opaque[where] = value
        self.objects.opaque.setdefault(where, value)
        return _of(OPAQUE, where=where)


Inner = Callable[[Any, str], Any]
"""Describes a part of a value, given its place within."""


def _of(kind: str, **fields: Any) -> dict[str, Any]:
    return {KIND: kind, **fields}


def _containers(value: Any, inner: Inner) -> dict[str, Any] | None:
    kind = type(value)
    if kind is collections.deque:
        return _of("deque", entries=[inner(e, f"[{n}]") for n, e in enumerate(value)], most=value.maxlen)
    if kind in (set, frozenset):
        entries = sorted((inner(entry, f"[{entry!r}]") for entry in value), key=digest_of)
        return _of(kind.__name__, entries=entries)
    if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
        factory = getattr(value, "default_factory", None)
        if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
            return None
        pairs = [[inner(key, ".key"), inner(entry, f"[{key!r}]")] for key, entry in value.items()]
        return _of(kind.__name__, entries=pairs, factory=None if factory is None else factory.__name__)
    if kind is torch.Size:
        return _of("size", entries=list(value))
    if kind in (range, slice):
        return _of(kind.__name__, entries=[inner(part, ".part") for part in (value.start, value.stop, value.step)])
    return None


def _numbers(value: Any, inner: Inner) -> dict[str, Any] | None:
    if isinstance(value, np.generic | np.ndarray) and type(value).__module__ == "numpy":
        array = np.asarray(value)
        if array.dtype.kind not in "biufcSUmM" or type(value) is np.memmap:
            return None
        scalar = isinstance(value, np.generic)
        return _of("array", dtype=array.dtype.str, shape=list(array.shape), raw=_bytes(array.tobytes()), scalar=scalar)
    if type(value) is complex:
        return _of("complex", entries=[value.real, value.imag])
    if type(value) in (bytes, bytearray):
        return _of(type(value).__name__, raw=_bytes(bytes(value)))
    if isinstance(value, torch.dtype | torch.device):
        return _of(type(value).__name__, name=str(value).removeprefix("torch."))
    return None


def _generators(value: Any, inner: Inner) -> dict[str, Any] | None:
    if type(value) is torch.Generator:
        return _of("generator", device=str(value.device), state=value.get_state())
    if type(value) is random.Random:
        version, words, following = value.getstate()
        return _of("random", state=[version, torch.tensor(words, dtype=torch.int64), following])
    if type(value) is np.random.Generator:
        return _of("numpy generator", state=inner(dict(value.bit_generator.state), ".state"))
    if type(value) is np.random.RandomState:
        return _of("numpy random", state=inner(dict(value.get_state(legacy=False)), ".state"))
    return None


def _fields(value: Any, inner: Inner) -> dict[str, Any] | None:
    """Objects that are their fields, and whose class has a name that leads to it."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return _of("member", type=named, name=value.name) if (named := _name(kind)) else None
    if not (kind in NAMESPACES or dataclasses.is_dataclass(kind) or _is_named_tuple(value)):
        return None
    if (named := _name(kind)) is None:
        return None
    fields = {name: inner(entry, f".{name}") for name, entry in own_fields(value).items()}
    return _of("fields", type=named, fields=fields)


def own_fields(value: Any) -> dict[str, Any]:
    """The fields of a named tuple, dataclass, or namespace by name."""
    if _is_named_tuple(value):
        return dict(value._asdict())
    slots = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {f.name: getattr(value, f.name) for f in slots if hasattr(value, f.name)} | getattr(value, "__dict__", {})


def _names(value: Any, inner: Inner) -> dict[str, Any] | None:
    kinds = (type, types.FunctionType, types.BuiltinFunctionType)
    return _of("name", name=named) if isinstance(value, kinds) and (named := _name(value)) else None


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def _name(value: Any) -> str | None:
    """The module and the name of a class or a function, if they lead to it."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    for text in (f"{module}:{name}", f"{module}:{name.rpartition('.')[2]}"):  # torch.relu has a longer name of its own
        if _found(text) is value:
            return text
    return None


def _found(text: str) -> Any:
    """What a module that is imported already has under a name."""
    module, _, name = text.partition(":")
    try:
        return functools.reduce(getattr, name.split("."), sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _bytes(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


class Decoder:
    """Creates values from descriptions; those that share a part of a description share the object.

    Generators, and of lasting objects tensors, arrays, lists, dictionaries, and those that are their fields, are set to
    what is described: who holds them sees it.
    """

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self._known: dict[int, Any] = {}
        self._descriptions: dict[int, Any] = {}
        """The description at the place of each lasting object, by the object's identity."""
        self._lasting: dict[int, Any] = {}
        """The lasting object that becomes what is described, by the identity of the description."""

    def place(self, now: Any, described: Any) -> None:
        """Note that `now` is at the place of a description, before anything is created."""
        if id(now) not in (self.objects.lasting or ()):
            return
        if id(now) in self._descriptions:
            if (other := self._descriptions[id(now)]) is not described:  # one object where there were two
                self._lasting.pop(id(other), None)
            return
        self._descriptions[id(now)] = described
        if _can_become(now, described):
            self._lasting.setdefault(id(described), now)
        for part, of_part in _parts(now, described):
            self.place(part, of_part)

    def knows(self, described: Any, value: Any) -> None:
        """Where this description is found from now on, the object is `value`."""
        self._known[id(described)] = value

    def known(self, described: Any) -> Any:
        """The object of a description, or None if there is none yet."""
        return self._known.get(id(described))

    def __call__(self, described: Any, now: Any = None) -> Any:
        """The value; `now` is what is at its place, if that is a generator."""
        if type(described) in PLAIN:
            return described
        if id(described) not in self._known:
            lasting = self._lasting.get(id(described))
            found = self._value(described, now) if lasting is None else self._set(lasting, described)
            self._known[id(described)] = found
        return self._known[id(described)]

    def _set(self, lasting: Any, described: Any) -> Any:
        """A lasting object, which is from now on what is described."""
        if isinstance(described, torch.Tensor):
            with torch.no_grad():
                lasting.copy_(described)
        elif type(lasting) is np.ndarray:
            lasting[...] = self._value(described, None)
        elif type(lasting) is list:
            lasting[:] = map(self, described)
        elif type(lasting) is dict:
            entries = {name: self(entry) for name, entry in described.items()}
            lasting.clear()
            lasting.update(entries)
        else:
            _set_fields(lasting, {name: self(entry) for name, entry in described["fields"].items()})
        return lasting

    def _value(self, described: Any, now: Any) -> Any:
        if isinstance(described, torch.Tensor):
            return described.detach().clone()
        if isinstance(described, list | tuple):
            return type(described)(map(self, described))
        if KIND not in described:
            return {name: self(entry) for name, entry in described.items()}
        kind = described[KIND]
        for make in (self._reference, self._container, self._number, self._generator, self._object):
            found = make(kind, described, now)
            if found is not None:
                return found
        raise Invalid(f"a checkpoint refers to {described}, which this process does not have")

    def _reference(self, kind: str, described: Any, now: Any) -> Any:
        if kind == "named":
            return self.objects.by_name.get(described["name"])
        if kind == OPAQUE:
            return self.objects.opaque.get(described["where"])
        if kind == "name":
            return _found(described["name"])
        return _found(described["type"])[described["name"]] if kind == "member" else None

    def _container(self, kind: str, described: Any, now: Any) -> Any:
        entries = [self(entry) for entry in described.get("entries", ())]
        if kind == "deque":
            return collections.deque(entries, described["most"])
        if kind == "defaultdict":
            return collections.defaultdict(_FACTORIES.get(described["factory"]), map(tuple, entries))
        made: dict[str, Callable[[Any], Any]] = {
            "set": set,
            "frozenset": frozenset,
            "dict": dict,
            "OrderedDict": collections.OrderedDict,
            "Counter": lambda pairs: collections.Counter(dict(pairs)),
            "size": torch.Size,
            "slice": lambda parts: slice(*parts),
            "range": lambda parts: range(*parts),
            "complex": lambda parts: complex(*parts),
        }
        return made[kind](entries) if kind in made else None

    def _number(self, kind: str, described: Any, now: Any) -> Any:
        if kind == "array":
            flat = np.frombuffer(described["raw"].numpy().tobytes(), described["dtype"])
            array = flat.reshape(described["shape"])
            return array[()] if described["scalar"] else array.copy()
        if kind in ("bytes", "bytearray"):
            return (bytes if kind == "bytes" else bytearray)(described["raw"].numpy().tobytes())
        if kind == "dtype":
            return getattr(torch, described["name"])
        return torch.device(described["name"]) if kind == "device" else None

    def _generator(self, kind: str, described: Any, now: Any) -> Any:
        if kind == "generator":
            kept = isinstance(now, torch.Generator) and str(now.device) == described["device"]
            generator = now if kept else torch.Generator(described["device"])
            generator.set_state(described["state"])
            return generator
        if kind == "random":
            version, words, following = described["state"]
            python = now if type(now) is random.Random else random.Random()
            python.setstate((version, tuple(words.tolist()), following))
            return python
        if kind == "numpy generator":
            state = self(described["state"])
            name = state["bit_generator"]
            kept = isinstance(now, np.random.Generator) and now.bit_generator.state["bit_generator"] == name
            numpy = now if kept else np.random.Generator(getattr(np.random, name)())
            numpy.bit_generator.state = state
            return numpy
        if kind == "numpy random":
            legacy = now if type(now) is np.random.RandomState else np.random.RandomState()
            legacy.set_state(self(described["state"]))
            return legacy
        return None

    def _object(self, kind: str, described: Any, now: Any) -> Any:
        own = _found(described["type"]) if kind == "fields" else None
        if own is None:
            return None
        fields = {name: self(entry) for name, entry in described["fields"].items()}
        if issubclass(own, tuple):
            return own(**fields)
        value = own.__new__(own)
        _set_fields(value, fields)
        return value


def _can_become(value: Any, described: Any) -> bool:
    """Whether an object can be set to what is described, without a new one."""
    if isinstance(described, torch.Tensor):
        strided = type(value) is torch.Tensor and alike(value, described) and value.is_contiguous()
        return strided and not value.requires_grad and not value.is_inference()
    if not isinstance(described, dict) or KIND not in described:
        return type(value) in (list, dict) and type(value) is type(described)
    if described[KIND] == "array" and type(value) is np.ndarray:
        alike_arrays = value.dtype.str == described["dtype"] and list(value.shape) == described["shape"]
        return alike_arrays and value.flags.writeable
    return described[KIND] == "fields" and not isinstance(value, tuple) and _name(type(value)) == described["type"]


def _parts(value: Any, described: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of an object, each with the description at its place."""
    if isinstance(described, list | tuple) and type(value) is type(described):
        yield from zip(value, described, strict=False)
    elif isinstance(described, dict):
        fields = described.get("fields", {}) if KIND in described else described
        own = value if type(value) is dict else own_fields(value)
        yield from ((own[name], entry) for name, entry in fields.items() if name in own)


def _set_fields(value: Any, fields: Mapping[str, Any]) -> None:
    for name in own_fields(value).keys() - fields:
        object.__delattr__(value, name)
    for name, entry in fields.items():
        object.__setattr__(value, name, entry)


__all__ = ["KIND", "NAMESPACES", "OPAQUE", "Decoder", "Encoder", "Objects", "own_fields"]
