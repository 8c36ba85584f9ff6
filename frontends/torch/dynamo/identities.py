"""What an object is, in words that mean the same in another process.

TorchDynamo's guards know functions, classes and modules by their addresses. In another process a function is the same
one if its code is, a class if all that it and its bases define is, and a module by its name.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from typing import Any

import torch

_NUMBERS = (bool, int, float, complex, str, bytes, range, slice)
_PLAIN: tuple[type, ...] = (*_NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_SINGLE = (None, Ellipsis, NotImplemented)
_OF_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_DESCRIPTORS = (*_OF_C, types.GetSetDescriptorType, types.MemberDescriptorType)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops._OpNamespace, torch._ops._Ops)
_UNUSED = frozenset(("__dict__", "__weakref__", "__doc__", "_abc_impl", "__firstlineno__"))
"""Entries of a class that no code reads, or that processes differ in."""
_HEAP = 1 << 9
"""The flag of classes that Python code defines (`Py_TPFLAGS_HEAPTYPE`)."""


class Identities:
    """The identities of objects, each computed once; objects are kept so that no other one gets their address."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str | None]] = {}

    def of(self, value: Any) -> str | None:
        """What identifies a value; None for an object that only its own process has, such as an instance.

        Tensors of one kind are alike, whatever their sizes, on which there are guards.
        """
        found = self._known.get(id(value))
        if found is None:
            self._known[id(value)] = value, None  # for objects that contain themselves
            found = self._known[id(value)] = value, self._of(value)
        return found[1]

    def kind(self, value: Any) -> str:
        """What identifies a value, or else its class."""
        found = self.of(value)
        return found if found is not None else f"an object of {self.of(type(value))}"

    def _of(self, value: Any) -> str | None:
        kind = type(value)
        if kind in _PLAIN or any(value is single for single in _SINGLE):
            return repr(value)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return f"module {value.__name__}"
        if isinstance(value, enum.Enum):
            return f"{self.of(kind)}.{value.name}"
        if isinstance(value, torch.Tensor):
            keys = torch._C._dispatch_keys(value)
            return f"{self.of(kind)} {value.dtype} {value.ndim} {value.requires_grad} {keys}"
        if kind in (tuple, list):
            parts = [self.of(part) for part in value]
            return None if None in parts else f"{kind.__name__} {parts}"
        return self._callable(value, kind)

    def _callable(self, value: Any, kind: type) -> str | None:
        if kind is types.CodeType:
            return digest(value)
        if kind is types.FunctionType:
            return f"function {value.__module__}.{value.__qualname__} {digest(value.__code__)}"
        if kind is types.MethodType:
            return f"method {self.of(value.__func__)} of {self.of(type(value.__self__))}"
        if kind is types.BuiltinFunctionType:
            owner = value.__self__
            owned = self.of(owner) if isinstance(owner, type | types.ModuleType) else self.of(type(owner))
            return f"builtin {value.__module__}.{value.__qualname__} of {owned}"
        if isinstance(value, _DESCRIPTORS):
            return f"descriptor {value.__objclass__.__qualname__}.{value.__name__}"
        if kind in (staticmethod, classmethod):
            return f"{kind.__name__} {self.of(value.__func__)}"
        if kind is property:
            return f"property {[self.kind(f) for f in (value.fget, value.fset, value.fdel)]}"
        if kind in _OPERATORS:
            return f"{kind.__name__} {getattr(value, 'name', '') if kind is torch._ops._OpNamespace else value}"
        return None

    def _class(self, value: type) -> str:
        name = f"class {value.__module__}.{value.__qualname__}"
        self._known[id(value)] = value, name  # methods may mention their class
        content = hashlib.sha256()
        for base in value.__mro__:
            content.update(f"{base.__module__}.{base.__qualname__}\n".encode())
            for entry, what in sorted(vars(base).items()) if base.__flags__ & _HEAP else ():
                if entry not in _UNUSED:
                    content.update(f"{entry} {self.kind(what)}\n".encode())
        return f"{name} {content.hexdigest()}"


@functools.lru_cache(maxsize=8192)
def digest(code: types.CodeType) -> str:
    """What a code object computes; two with the same digest differ in names of functions, lines, and files at most."""
    content = hashlib.sha256(code.co_code)
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, counts, code.co_exceptiontable):
        content.update(f"{part!r}\n".encode())
    for constant in code.co_consts:
        content.update(f"{_constant(constant)}\n".encode())
    return content.hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return digest(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):  # whose order differs from process to process
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return repr(value)
