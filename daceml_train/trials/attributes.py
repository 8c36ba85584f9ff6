"""The attributes of modules and their classes: Python objects that a forward pass changes, from trial to trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from daceml_train.errors import Invalid
from daceml_train.trials.encoding import Decoder, Encoder, Objects
from daceml_train.trials.values import PLAIN, digest_of, same

_OWN = frozenset(vars(torch.nn.Module())) - {"training"} | {"_compiled_call_impl", "_daceml_train"}
"""What PyTorch keeps in a module: parameters, buffers and modules are looked at by name, hooks are the user's code."""
_DEPTH = 2
"""How far objects within objects are looked at that no snapshot has."""


class Attributes:
    """Those of some modules, by the paths of the modules and by their names."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self.modules, self.objects = modules, Objects()
        self.classes = {f"class {k.__module__}.{k.__qualname__}": k for m in modules.values() for k in _own_classes(m)}
        self._opaque: dict[str, Any] = {}
        """The attributes, or parts of them, that the last snapshot left out, by place."""
        self._marks: dict[str, Any] = {}
        """What is compared of them, as they were when a step began."""

    def each(self) -> Iterator[tuple[str, str, Any]]:
        """The path of the module, the name, and the value."""
        for path, module in self.modules.items():
            for name, value in list(vars(module).items()):
                if name not in _OWN:
                    yield path, name, value

    def _every(self) -> Iterator[tuple[str, str, Any]]:
        """The same, and the data of the user's classes of modules."""
        yield from self.each()
        for path, kind in self.classes.items():
            for name, value in list(vars(kind).items()):
                if not name.startswith("__") and not callable(value) and not hasattr(type(value), "__get__"):
                    yield path, name, value

    def _set(self, path: str, name: str, value: Any) -> None:
        if path in self.classes:
            setattr(self.classes[path], name, value)
        else:
            vars(self.modules[path])[name] = value

    def _delete(self, path: str, name: str) -> None:
        if path in self.classes:
            delattr(self.classes[path], name)
        else:
            del vars(self.modules[path])[name]

    def snapshot(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
        """Descriptions of all attributes; `tensors` are parameters and buffers by name."""
        encode = self._encoder(tensors)
        found: dict[str, dict[str, Any]] = {path: {} for path in (*self.modules, *self.classes)}
        for path, name, value in self._every():
            found[path][name] = encode(value, f"{path}.{name}")
        self._opaque = encode.opaque
        if self.objects.lasting is None:
            self.objects.lasting = encode.met
        return found

    def restore(self, saved: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> None:
        """Make all attributes what they were; those that are so already stay the same objects."""
        encode, decode = self._encoder(tensors, copy=False), Decoder(self.objects)
        missing = {(path, name): None for path, names in saved.items() for name in names}
        other: list[tuple[str, str, Any]] = []
        owners: dict[int, int] = {}
        for path, name, value in self._every():
            decode.place(value, saved[path].get(name))
        for path, name, value in self._every():
            described = saved[path].get(name, self)
            if described is self:
                self._delete(path, name)
                continue
            del missing[path, name]
            if type(value) in PLAIN:
                equal = same(value, described)
            else:
                equal = owners.setdefault(id(value), id(described)) == id(described)
                equal = equal and same(encode(value, f"{path}.{name}"), described)
                equal = equal and (decode.known(described) is None or decode.known(described) is value)
                if equal:
                    decode.knows(described, value)
            if not equal:
                other.append((path, name, value))
        for path, name, now in [*other, *((path, name, None) for path, name in missing)]:
            self._set(path, name, decode(saved[path][name], now))

    # ---- what is not saved --------------------------------------------------------------------------------------
    def begin(self, first: bool) -> None:
        """Note what steps must leave as it is, because no snapshot has it; `first`: it may be there since now."""
        if first or self._opaque:
            self._marks = {place: _mark(value) for place, value in self._unsaved().items()}

    def check(self) -> None:
        """Raise `Invalid` where a step has changed what no snapshot has."""
        for place, value in self._unsaved().items() if self._marks or self._opaque else ():
            if place not in self._marks or _mark(value) != self._marks[place]:
                what = f"a step changed {place.removeprefix('model.')}, {type(value).__qualname__}, which is not saved"
                advice = "keep numbers, texts, tensors, arrays, generators, or containers and data classes of them"
                raise Invalid(what, advice=advice)

    def _unsaved(self) -> dict[str, Any]:
        encode = Encoder(self.objects, copy=False)
        for path, name, value in self._every():
            encode(value, f"{path}.{name}")
        return encode.opaque

    def _encoder(self, tensors: Mapping[str, torch.Tensor], copy: bool = True) -> Encoder:
        self.objects.name({**tensors, **{f"module {path}": module for path, module in self.modules.items()}})
        return Encoder(self.objects, copy)


def _own_classes(module: torch.nn.Module) -> list[type]:
    """The classes of a module that are not PyTorch's or Python's."""
    return [k for k in type(module).__mro__ if k.__module__.partition(".")[0] not in ("torch", "builtins", "abc")]


def of_modules(modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """The content of modules: parameters, buffers, and attributes."""
    named = {path: dict((*m._parameters.items(), *m._buffers.items())) for path, m in modules.items()}
    tensors = {f"{path}.{name}": t for path, own in named.items() for name, t in own.items() if t is not None}
    held = {name: tensor.detach() for name, tensor in tensors.items()}
    return {"tensors": held, "attributes": Attributes(modules).snapshot(tensors)}


def _mark(value: Any, depth: int = _DEPTH) -> Any:
    """What is compared of an object that no snapshot has: itself, and what it holds."""
    held = {} if isinstance(value, type) else {n: v for n, v in getattr(value, "__dict__", {}).items() if n not in _OWN}
    if isinstance(value, torch.nn.Module):
        held |= dict(value.named_buffers())
    if isinstance(value, torch.Tensor):
        held["elements"] = value.detach().as_subclass(torch.Tensor)
    encode = Encoder(Objects(), copy=False)
    content = digest_of({name: encode(entry, name) for name, entry in held.items()})
    inner = tuple(_mark(entry, depth - 1) if depth else id(entry) for entry in encode.opaque.values())
    return id(value), content, inner, repr(value) if type(value).__module__ == "itertools" else ""


__all__ = ["Attributes", "of_modules"]
