"""Encoding: programs as plain data, and back, without running anything that the data names.

Pickle calls whatever its text says. Here a text contains JSON values and objects of classes that are listed below or
declared by `storable`; an object is created without its constructor, and its fields are set. All else is refused.

A text is `[classes, nodes]`: `classes` are rows `[name, field, ...]`, `nodes` are rows `[tag, ...]` in which `[i]` is
node i and every other value is itself. A node refers to earlier ones only; the last one is the root. Sharing is
preserved: one object stays one object.
"""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import sympy
import torch

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.cuda.geometry import Geometry
from daceml_train.codegen.cuda.launch import CudaCode, CudaPart
from daceml_train.codegen.cuda.plan import CudaLoops, CudaPlan
from daceml_train.codegen.kernel.arrays import Array, Arrays
from daceml_train.codegen.kernel.domain import Domain, Leaf, Result, Split
from daceml_train.codegen.kernel.loops import Axis, Layout, Loops
from daceml_train.codegen.kernel.plan import Plan
from daceml_train.codegen.kernel.staging import Columns, Rows, Stage, Staging
from daceml_train.codegen.kernel.values import Values
from daceml_train.errors import DacemlError
from daceml_train.graph.graph import Role
from daceml_train.lowering.aten import Call, Keywords, Placeholder
from daceml_train.lowering.aten import Result as CallResult
from daceml_train.lowering.cost import Cost
from daceml_train.lowering.program import (
    Added,
    Allocation,
    Buffer,
    BufferView,
    CallLaunch,
    Cells,
    ControlLaunch,
    CopyLaunch,
    Gather,
    KernelLaunch,
    LaneRules,
    Packing,
    Program,
    ProgramInput,
)
from daceml_train.ops.elementwise import Cast, Elementwise, Full, Iota
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.movement import Expand, Flip, Pad, Permute, Reorder, Slice, View
from daceml_train.ops.operator import Origin
from daceml_train.ops.random import Uniform
from daceml_train.ops.read import Read
from daceml_train.ops.reduction import Reduce
from daceml_train.storage.storable import CLASSES, storable
from daceml_train.tensor import DType, Tensor, symbol

_FUNCTIONS: dict[str, Any] = {
    f.__name__: f
    for f in (sympy.Add, sympy.Mul, sympy.Pow, sympy.Min, sympy.Max, sympy.floor, sympy.ceiling, sympy.Mod, sympy.Abs)
}
_TORCH: dict[type, tuple[str, ...]] = {
    torch.dtype: (),
    torch.memory_format: (),
    torch.layout: (),
}
"""Kinds of PyTorch's constants, which are its attributes by name."""


class Unencodable(DacemlError):
    """A value that is not plain data, or a text that `encode` did not write."""


for _kind in (
    Call,
    Keywords,
    Placeholder,
    CallResult,
    Array,
    Arrays,
    Geometry,
    CudaCode,
    CudaPart,
    CudaLoops,
    CudaPlan,
    Domain,
    Leaf,
    Result,
    Split,
    KernelCode,
    Axis,
    Layout,
    Loops,
    Columns,
    Staging,
    Rows,
    Stage,
    Plan,
    Values,
    Role,
    Cast,
    Elementwise,
    Full,
    Iota,
    Origin,
    Uniform,
    Reduce,
    Kernel,
    Statement,
    Read,
    View,
    Permute,
    Reorder,
    Expand,
    Slice,
    Pad,
    Flip,
    Cost,
    CallLaunch,
    Cells,
    Gather,
    Added,
    ControlLaunch,
    CopyLaunch,
    Allocation,
    KernelLaunch,
    LaneRules,
    Packing,
    BufferView,
    Program,
    ProgramInput,
    Buffer,
    DType,
    Tensor,
):
    storable(_kind)


def encode(value: Any) -> bytes:
    """A value as a text. Raises `Unencodable` that names the class that may not be stored."""
    encoder = _Encoder()
    whole = encoder.value(value)
    return json.dumps([encoder.classes, encoder.nodes, whole], separators=(",", ":")).encode()


def decode(text: bytes) -> Any:
    """The value that `encode` was given. Raises `Unencodable` for a text that it did not write."""
    try:
        classes, nodes, whole = json.loads(text)
        return _decoded(classes, nodes, whole)
    except Unencodable:
        raise
    except Exception as error:
        raise Unencodable(f"a stored program is damaged ({type(error).__name__}: {error})") from None


def _state(value: Any) -> dict[str, Any]:
    """The fields of an object, wherever its class stores them."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


class _Encoder:
    def __init__(self) -> None:
        self.classes: list[list[str]] = []
        self.nodes: list[list[Any]] = []
        self._class: dict[tuple[str, ...], int] = {}
        self._seen: dict[int, int] = {}
        """Identity of an object -> its node; -1 while its fields are encoded."""
        self._alive: list[Any] = []  # so that no identity is used twice

    def value(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str, float):
            return value
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = -1
            self._alive.append(value)
            node = self._node(value, kind)
            number = self._seen[id(value)] = len(self.nodes)
            self.nodes.append(node)
        elif number < 0:
            raise Unencodable(f"a {kind.__qualname__} contains itself")
        return [number]

    def _node(self, value: Any, kind: type) -> list[Any]:
        each = self.value
        if kind is tuple:
            return ["t", *map(each, value)]
        if kind is list:
            return ["l", *map(each, value)]
        if kind is dict:
            return ["d", *(each(item) for pair in value.items() for item in pair)]
        if kind in (set, frozenset):
            return ["f" if kind is frozenset else "s", *map(each, sorted(value, key=repr))]
        if kind is bytes:
            return ["b", base64.b64encode(value).decode()]
        if kind is complex:
            return ["c", value.real, value.imag]
        if isinstance(value, sympy.Basic):
            return self._expression(value)
        if kind in _TORCH:
            return ["torch", str(value).removeprefix("torch.")]
        if kind is torch.device:
            return ["device", str(value)]
        if kind is MethodType:
            return ["m", each(value.__self__), value.__func__.__name__]
        name = f"{kind.__module__}:{kind.__qualname__}"
        if CLASSES.get(name) is not kind:
            raise Unencodable(f"objects of {name} are not plain data")
        if isinstance(value, enum.Enum):
            return ["e", name, value.name]
        state = _state(value)
        row = (name, *state)
        number = self._class.setdefault(row, len(self.classes))
        if number == len(self.classes):
            self.classes.append(list(row))
        return ["o", number, *map(each, state.values())]

    def _expression(self, value: Any) -> list[Any]:
        if isinstance(value, sympy.Integer):
            return ["i", int(value)]
        if isinstance(value, sympy.Rational):
            return ["q", int(value.p), int(value.q)]
        if isinstance(value, sympy.Float):
            return ["n", str(value), int(value._prec)]
        if type(value) is sympy.Symbol:
            plain = value == symbol(value.name)
            return ["y", value.name] if plain else ["y", value.name, self.value(dict(value._assumptions_orig))]
        function = value.func.__name__
        if _FUNCTIONS.get(function) is not value.func:
            raise Unencodable(f"the function {function} of {value} does not occur in sizes")
        return ["x", function, *map(self.value, value.args)]


def _decoded(classes: list[list[str]], nodes: list[list[Any]], whole: Any) -> Any:
    known = []
    for name, *fields in classes:
        if name not in CLASSES:
            raise Unencodable(f"a stored program names {name}, whose objects are not plain data")
        known.append((CLASSES[name], fields))
    values: list[Any] = []

    def each(value: Any) -> Any:
        return values[value[0]] if type(value) is list else value

    for node in nodes:
        tag, *rest = node
        if tag == "o":
            kind, fields = known[rest[0]]
            if len(fields) != len(rest) - 1:
                raise Unencodable(f"a stored {kind.__qualname__} has other fields")
            values.append(_object(kind, fields, [values[v[0]] if type(v) is list else v for v in rest[1:]]))
        else:
            values.append(_READERS[tag](rest, each))
    return each(whole)


def _object(kind: type, fields: list[str], values: list[Any]) -> Any:
    if issubclass(kind, enum.Enum):
        raise Unencodable(f"{kind.__qualname__} is an enumeration")
    new = object.__new__(kind)
    if hasattr(new, "__dict__"):
        new.__dict__.update(zip(fields, values, strict=True))
    else:
        for name, value in zip(fields, values, strict=True):
            object.__setattr__(new, name, value)
    return new


Each = Callable[[Any], Any]


def _dictionary(rest: list[Any], each: Each) -> dict[Any, Any]:
    items = [each(item) for item in rest]
    return dict(zip(items[::2], items[1::2], strict=True))


def _method(rest: list[Any], each: Each) -> Any:
    owner, name = each(rest[0]), rest[1]
    found = getattr(type(owner), name)
    if f"{type(owner).__module__}:{type(owner).__qualname__}" not in CLASSES or not callable(found):
        raise Unencodable(f"a stored program names {type(owner).__qualname__}.{name}")
    return MethodType(found, owner)


def _member(rest: list[Any], each: Each) -> Any:
    kind = CLASSES[rest[0]]
    if not issubclass(kind, enum.Enum):
        raise Unencodable(f"{rest[0]} is not an enumeration")
    return kind[rest[1]]


def _constant(rest: list[Any], each: Each) -> Any:
    value = getattr(torch, rest[0])
    if type(value) not in _TORCH:
        raise Unencodable(f"torch.{rest[0]} is not a constant")
    return value


def _symbol(rest: list[Any], each: Each) -> Any:
    return symbol(rest[0]) if len(rest) == 1 else sympy.Symbol(rest[0], **each(rest[1]))


_READERS: Mapping[str, Callable[[list[Any], Each], Any]] = {
    "t": lambda rest, each: tuple([each(item) for item in rest]),
    "l": lambda rest, each: [each(item) for item in rest],
    "d": _dictionary,
    "f": lambda rest, each: frozenset(each(item) for item in rest),
    "s": lambda rest, each: {each(item) for item in rest},
    "b": lambda rest, each: base64.b64decode(rest[0]),
    "c": lambda rest, each: complex(*rest),
    "i": lambda rest, each: sympy.Integer(rest[0]),
    "q": lambda rest, each: sympy.Rational(*rest),
    "n": lambda rest, each: sympy.Float(rest[0], precision=rest[1]),
    "y": _symbol,
    "x": lambda rest, each: _FUNCTIONS[rest[0]](*(each(item) for item in rest[1:])),
    "torch": _constant,
    "device": lambda rest, each: torch.device(rest[0]),
    "m": _method,
    "e": _member,
}
