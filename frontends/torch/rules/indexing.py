"""ATen's operators that gather or scatter by index arrays, and those along a dimension: order, sums, extrema."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from daceml_train.frontends.torch.rules.numbers import element
from daceml_train.frontends.torch.rules.translate import RULES, Translator, rule
from daceml_train.ops.indexing import indexed
from daceml_train.ops.operator import Value
from daceml_train.tensor import Dim, DType, product, same

INDICES = (DType.int64, DType.int32)


def _axis(dim: int, rank: int) -> int:
    return dim % max(rank, 1)


@rule("index.Tensor", "_unsafe_index.Tensor")
def _index(t: Translator, x: Value, indices: Sequence[Value | None]) -> Value | None:
    dims = tuple(d for d, index in enumerate(indices) if index is not None)
    arrays = [index for index in indices if index is not None]
    if not arrays or any(a.dtype not in INDICES for a in arrays):
        return None  # masks: the result's size depends on data
    return t.emit("index", x, *arrays, dims=dims)


@rule("index_select.default")
def _index_select(t: Translator, x: Value, dim: int, index: Value) -> Value:
    y = t.emit("index", _column(x), _column(index), dims=(_axis(dim, len(x.shape)),))
    return y.view(t.type.shape)


@rule("take.default")
def _take(t: Translator, x: Value, index: Value) -> Value:
    return t.emit("index", x.view((x.tensor.size,)), index, dims=(0,))


@rule("gather.default")
def _gather(t: Translator, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value | None:
    index = index.cast(DType.int64)  # PyTorch accepts other types and ranks where nothing is indexed
    if 0 in index.shape:
        return t.connected(t.full(0, index.shape, x.dtype), x)
    if not x.shape or not index.shape:
        if not (same(x.tensor.size, 1) or len(x.shape) == 1):
            return None
        y = t.emit("gather", _column(x), _column(index), dim=0)
        return y.view(index.shape)
    return t.emit("gather", x, index, dim=_axis(dim, len(x.shape)))


def _column(x: Value) -> Value:
    """A 0-d value as one of one dimension."""
    return x if x.shape else x.view((1,))


def _scattered(t: Translator, x: Value, dim: int, index: Value, values: Value, accumulate: bool) -> Value | None:
    dim, index = _axis(dim, len(x.shape)), index.cast(DType.int64)
    if 0 in index.shape:
        return t.connected(x, values)
    if not x.shape or not index.shape:
        if len(x.shape) > 1 or len(index.shape) > 1 or len(values.shape) > 1:
            return None
        x, index, values = _column(x), _column(index), _column(values)
    for d, size in enumerate(index.shape):  # larger values contribute only their first elements
        if not same(values.shape[d], size):
            values = values.slice(d, 0, size)
    return t.emit("scatter", x, index, values, dim=dim, accumulate=accumulate).view(t.type.shape)


@rule("scatter.src")
def _scatter(t: Translator, x: Value, dim: int, index: Value, src: Value) -> Value | None:
    return _scattered(t, x, dim, index, src.cast(x.dtype), False)


@rule("scatter.value")
def _scatter_value(t: Translator, x: Value, dim: int, index: Value, value: Any) -> Value | None:
    return _scattered(t, x, dim, index, t.value(value, x.dtype).expand(index.shape), False)


@rule("scatter_add.default")
def _scatter_add(t: Translator, x: Value, dim: int, index: Value, src: Value) -> Value | None:
    return _scattered(t, x, dim, index, src, True)


def put(
    t: Translator, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value | None:
    """`x` with `values` at index arrays; None where they are masks."""
    dims = tuple(d for d, index in enumerate(indices) if index is not None)
    arrays = [index for index in indices if index is not None]
    if not arrays or any(a.dtype not in INDICES for a in arrays):
        return None
    shape = indexed(x.tensor, [a.tensor for a in arrays], dims)
    lead = len(values.shape) - len(shape)  # values may have further dimensions of size 1 in front
    values = values.view(values.shape[lead:]) if lead > 0 else values
    return t.emit("index_put", x, values.cast(x.dtype).expand(shape), *arrays, dims=dims, accumulate=accumulate)


@rule("index_put.default", "_unsafe_index_put.default")
def _index_put(
    t: Translator, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value | None:
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype is not DType.bool:
        return put(t, x, indices, values, accumulate)
    rest = len(x.shape) - len(mask.shape)
    values = values.cast(x.dtype)
    if len(values.shape) > rest and not same(values.shape[0], 1):  # one row for each place that the mask chooses
        if len(values.shape) != rest + 1:
            return None
        rows = values.expand((values.shape[0], *x.shape[len(mask.shape) :]))
        start = t.full(0, x.shape, x.dtype) if accumulate else x
        y = t.emit("masked_put", start, mask, rows)
        return x + y if accumulate else y
    row = values.view(values.shape[1:]) if len(values.shape) > rest else values
    whole = mask.view((*mask.shape, *(1,) * rest))
    return t.emit("where", whole, x + row if accumulate else row, x)


def _at(dim: int, index: Value) -> list[Value | None]:
    """Index arrays that name positions along one dimension."""
    return [*[None] * dim, _column(index)]


def _along(t: Translator, x: Value, dim: int, index: Value, source: Value, accumulate: bool = False) -> Value | None:
    x, dim = _column(x), _axis(dim, len(x.shape))
    source = source if len(source.shape) == len(x.shape) else source.view((1,) * len(x.shape))
    result = put(t, x, _at(dim, index), source, accumulate)
    return None if result is None else result.view(t.type.shape)


@rule("index_add.default")
def _index_add(t: Translator, x: Value, dim: int, index: Value, source: Value, *, alpha: Any = 1) -> Value | None:
    return _along(t, x, dim, index, source if alpha == 1 else source * t.value(alpha, source.dtype), True)


@rule("index_copy.default")
def _index_copy(t: Translator, x: Value, dim: int, index: Value, source: Value) -> Value | None:
    return _along(t, x, dim, index, source)


@rule("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(t: Translator, x: Value, dim: int, index: Value, value: Any) -> Value | None:
    """By a mask over the dimension: a position that occurs twice is filled once."""
    dim = _axis(dim, len(x.shape))
    size = x.shape[dim] if x.shape else 1
    named = put(t, t.full(False, (size,), DType.bool), [_column(index)], t.value(True, DType.bool))
    if named is None:
        return None
    mask = named.view(tuple(n if d == dim else 1 for d, n in enumerate(x.shape)))
    return t.emit("where", mask, element(t, value, x.dtype), x)


# ---- along a dimension ---------------------------------------------------------------------------------------------


@rule("masked_scatter.default")
def _masked_scatter(t: Translator, x: Value, mask: Value, source: Value) -> Value | None:
    """The n-th true element of the mask takes the n-th element of the source; fewer of them are an invalid index."""
    shape, size = t.type.shape, product(t.type.shape)
    if mask.dtype is not DType.bool or same(source.tensor.size, 0) or same(size, 0):
        return None
    mask = RULES["aten.expand.default"](t, mask, shape)
    flat = mask.view((size,))
    places = t.emit("cumsum", flat.cast(DType.int64), dim=0) - 1
    chosen = t.emit("index", source.view((source.tensor.size,)), flat.where(places, 0), dims=(0,))
    return t.emit("where", mask, chosen.view(shape), x)


@rule("cumsum.default")
def _cumsum(t: Translator, x: Value, dim: int, *, dtype: Any = None) -> Value:
    x = x.cast(t.type.dtype)
    return t.emit("cumsum", x, dim=_axis(dim, len(x.shape))) if x.shape else x


@rule("sort.default")
def _sort(t: Translator, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, ...] | None:
    return t.emit_all("sort", x, dim=_axis(dim, len(x.shape)), descending=descending) if x.shape else None


@rule("sort.stable")
def _sort_stable(
    t: Translator, x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Value, ...] | None:
    return _sort(t, x, dim, descending)


@rule("argsort.stable")
def _argsort(t: Translator, x: Value, *, stable: bool = True, dim: int = -1, descending: bool = False) -> Value | None:
    result = _sort(t, x, dim, descending)
    return None if result is None else result[1]


@rule("topk.default")
def _topk(
    t: Translator, x: Value, k: Dim, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, ...] | None:
    if not x.shape:
        return None
    return t.emit_all("topk", x, count=k, dim=_axis(dim, len(x.shape)), largest=largest, ordered=sorted)


def _extremum(t: Translator, x: Value, dim: int, keepdim: bool = False, *, kind: str) -> tuple[Value, ...] | None:
    dim = _axis(dim, len(x.shape))
    if not x.shape:
        return x, t.full(0, (), DType.int64)
    if 0 in x.shape:
        return None
    return t.emit_all("extremum", x, kind=kind, dim=dim, keepdim=keepdim)


def _position(t: Translator, x: Value, dim: int | None = None, keepdim: bool = False, *, kind: str) -> Value | None:
    if not x.shape or 0 in x.shape:
        return None
    flat = x.view((x.tensor.size,)) if dim is None else x
    where = 0 if dim is None else _axis(dim, len(x.shape))
    return t.emit_all("extremum", flat, kind=kind, dim=where)[1].view(t.type.shape)


for _kind in ("max", "min"):
    RULES[f"aten.{_kind}.dim"] = functools.partial(_extremum, kind=_kind)
    RULES[f"aten.arg{_kind}.default"] = functools.partial(_position, kind=_kind)
