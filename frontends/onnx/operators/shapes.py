"""Shape arithmetic: operators on values of the host, in Python's own numbers and lists."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from daceml_train.errors import Invalid
from daceml_train.frontends.onnx.host import Host, integers, shape_of
from daceml_train.frontends.onnx.rules import on_host, rule


@rule("Shape", shape_only=True)
def shape(x: torch.Tensor, *, start: int = 0, end: int | None = None) -> Host:
    return list(x.shape)[slice(start, end)]


@rule("Size", shape_only=True)
def size(x: torch.Tensor) -> Host:
    return x.numel()


@on_host("Shape")
def shape_on_host(x: Host, *, start: int = 0, end: int | None = None) -> Host:
    return shape_of(x)[slice(start, end)]


@on_host("Size")
def size_on_host(x: Host) -> Host:
    return math.prod(shape_of(x))


def _map(function: Callable[..., Any], *values: Host) -> Host:
    """Elementwise, broadcasting as NumPy does."""
    rank = max(len(shape_of(value)) for value in values)
    return _zip(function, [_raised(value, rank) for value in values])


def _raised(value: Host, rank: int) -> Host:
    for _ in range(rank - len(shape_of(value))):
        value = [value]
    return value


def _zip(function: Callable[..., Any], values: Sequence[Host]) -> Host:
    if not isinstance(values[0], list | tuple):
        return function(*values)
    length = next((len(value) for value in values if len(value) != 1), 1)
    parts = [value * length if len(value) == 1 else value for value in values]
    return [_zip(function, [part[i] for part in parts]) for i in range(length)]


def _truncated(a: Any, b: Any) -> Any:
    if isinstance(a, float) or isinstance(b, float):
        return a / b if not isinstance(b, float | int) or b else a * math.copysign(math.inf, b)
    if b == 0:
        raise Invalid("shape arithmetic divides by zero")
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _truncated,
    "Neg": operator.neg,
    "Abs": abs,
    "Max": lambda *xs: _folded(max, xs),
    "Min": lambda *xs: _folded(min, xs),
    "Floor": lambda x: math.floor(x) if isinstance(x, float) else x,
    "Ceil": lambda x: math.ceil(x) if isinstance(x, float) else x,
    "Sqrt": lambda x: x**0.5 if not isinstance(x, float | int) or x >= 0 else math.nan,
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "And": lambda a, b: a and b,
    "Or": lambda a, b: a or b,
    "Not": operator.not_,
    "Where": lambda c, a, b: a if c else b,
}


def _folded(function: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = function(result, value)
    return result


def _elementwise(function: Callable[..., Any]) -> Callable[..., Host]:
    def elementwise(*values: Host, **_: Any) -> Host:
        return _map(function, *values)

    return elementwise


for _name, _function in _ELEMENTWISE.items():
    on_host(_name)(_elementwise(_function))


@on_host("Mod")
def modulo(a: Host, b: Host, *, fmod: int = 0) -> Host:
    return _map(lambda x, y: x - y * _truncated(x, y) if fmod else x % y, a, b)


@on_host("Identity")
def identity(x: Host) -> Host:
    return x


@on_host("Cast")
def cast(x: Host, *, to: int, saturate: int = 1, round_mode: str = "up") -> Host:
    kinds: dict[int, Callable[[Any], Any]] = {1: _float, 11: _float, 6: _int, 7: _int, 9: bool}
    return _map(kinds[to], x)


CASTS = frozenset((1, 11, 6, 7, 9))
"""The element types (float, double, int32, int64, bool) that a host value is cast to."""


def _int(x: Any) -> Any:
    return int(x) if isinstance(x, float | bool) else x


def _float(x: Any) -> Any:
    return float(x) if isinstance(x, int) else x


@on_host("Gather")
def gather(x: Host, indices: Host, *, axis: int = 0) -> Host:
    rank = len(shape_of(x))
    return _gathered(x, indices, axis % rank)


def _gathered(x: Host, indices: Host, axis: int) -> Host:
    if axis:
        return [_gathered(part, indices, axis - 1) for part in x]
    return _map(lambda i: x[i], indices) if not isinstance(indices, list) else [_gathered(x, i, 0) for i in indices]


@on_host("Concat")
def concat(*xs: Host, axis: int = 0) -> Host:
    axis = axis % len(shape_of(xs[0]))
    if axis:
        return [concat(*parts, axis=axis - 1) for parts in zip(*xs, strict=True)]
    return list(itertools.chain.from_iterable(xs))


@on_host("Slice")
def cut(x: Host, starts: Host, ends: Host, axes: Host = None, steps: Host = None) -> Host:
    begins, stops = integers(starts), integers(ends)
    chosen = integers(axes) if axes is not None else list(range(len(begins)))
    strides = integers(steps) if steps is not None else [1] * len(begins)
    rank = len(shape_of(x))
    for begin, stop, axis, stride in zip(begins, stops, chosen, strides, strict=True):
        # Below every index, a start or an end counts from before the first element where the stride is negative.
        last = None if stride < 0 and stop < -_LONG else stop
        x = _cut(x, slice(begin, last, stride), axis % rank)
    return x


_LONG = 1 << 30


def _cut(x: Host, part: slice, axis: int) -> Host:
    return [_cut(item, part, axis - 1) for item in x] if axis else x[part]


@on_host("Unsqueeze")
def unsqueeze(x: Host, axes: Host) -> Host:
    chosen = integers(axes)
    rank = len(shape_of(x)) + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = _unsqueezed(x, axis)
    return x


def _unsqueezed(x: Host, axis: int) -> Host:
    return [_unsqueezed(item, axis - 1) for item in x] if axis else [x]


@on_host("Squeeze")
def squeeze(x: Host, axes: Host = None) -> Host:
    extents = shape_of(x)
    if axes is None:
        chosen = [i for i, extent in enumerate(extents) if extent == 1]
    else:
        chosen = [axis % len(extents) for axis in integers(axes)]
    for axis in sorted(chosen, reverse=True):
        x = _squeezed(x, axis)
    return x


def _squeezed(x: Host, axis: int) -> Host:
    return [_squeezed(item, axis - 1) for item in x] if axis else x[0]


@on_host("Reshape")
def reshape(x: Host, extents: Host, *, allowzero: int = 0) -> Host:
    flat: list[Any] = integers(x)
    wanted = integers(extents)
    if -1 in wanted:
        rest = -math.prod(wanted)
        wanted = [len(flat) // rest if extent == -1 else extent for extent in wanted]
    for extent in reversed(wanted[1:]):
        flat = [flat[i : i + extent] for i in range(0, len(flat), extent)]
    return flat if wanted else flat[0]


def _reduced(function: Callable[[list[Any]], Any], x: Host, axes: Host, keepdims: int, noop: int) -> Host:
    rank = len(shape_of(x))
    chosen = {axis % rank for axis in integers(axes)} if axes else set() if noop else set(range(rank))
    for axis in sorted(chosen, reverse=True):
        x = _along(function, x, axis, bool(keepdims))
    return x


def _along(function: Callable[[list[Any]], Any], x: Host, axis: int, keep: bool) -> Host:
    if axis:
        return [_along(function, part, axis - 1, keep) for part in x]
    result = _map(lambda *items: function(list(items)), *x)
    return [result] if keep else result


@on_host("ReduceProd")
def product(x: Host, axes: Host = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Host:
    return _reduced(math.prod, x, axes, keepdims, noop_with_empty_axes)


@on_host("ReduceSum")
def total(x: Host, axes: Host = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Host:
    return _reduced(sum, x, axes, keepdims, noop_with_empty_axes)


@on_host("ReduceMax")
def greatest(x: Host, axes: Host = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Host:
    return _reduced(lambda items: _folded(max, items), x, axes, keepdims, noop_with_empty_axes)


@on_host("ConstantOfShape")
def constant_of_shape(extents: Host, *, value: Any = None) -> Host:
    item = 0.0 if value is None else value
    return _filled(integers(extents), item)


def _filled(extents: list[int], item: Any) -> Host:
    return [_filled(extents[1:], item) for _ in range(extents[0])] if extents else item
