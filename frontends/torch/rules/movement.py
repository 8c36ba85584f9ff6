"""ATen's views, copies of parts, and factory functions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from daceml_train.errors import Unsupported
from daceml_train.frontends.torch import types
from daceml_train.frontends.torch.capture.prepass import MARK
from daceml_train.frontends.torch.rules.size_numbers import Unproven, extent, holds, integer
from daceml_train.frontends.torch.rules.translate import RULES, Translator, rule
from daceml_train.ops.operator import Value
from daceml_train.tensor import Dim, DType, product, same, simplify


@rule("detach.default", "detach_.default")
def _detach(t: Translator, x: Value) -> Value:
    """The user's, or that of a `no_grad` region; `torch.func` inserts others, which mean nothing here."""
    inside = t.node.meta.get("custom", {}).get(MARK) == "functorch"
    return x if inside or not x.dtype.is_float else t.emit("detach", x)


@rule("daceml_train.graft.default")
def _graft(t: Translator, source: Value, x: Value) -> Value:
    return t.emit("graft", source, x)


@rule("daceml_train.overwrite.default")
def _overwrite(t: Translator, before: Value, x: Value) -> Value:
    return t.emit("overwrite", before, x)


@rule(
    "view.default",
    "reshape.default",
    "_unsafe_view.default",
    "squeeze.default",
    "squeeze.dim",
    "squeeze.dims",
    "unsqueeze.default",
    "flatten.using_ints",
    "_reshape_alias.default",
    "prims.collapse_view.default",
)
def _view(t: Translator, x: Value, *arguments: Any) -> Value:
    return x.view(t.type.shape)


@rule("expand.default")
def _expand(t: Translator, x: Value, *arguments: Any, implicit: bool = False) -> Value:
    return x.expand(t.type.shape)


@rule("prims.broadcast_in_dim.default")
def _broadcast_in_dim(t: Translator, x: Value, shape: Sequence[Dim], dims: Sequence[int]) -> Value:
    sizes = [x.shape[dims.index(d)] if d in dims else 1 for d in range(len(shape))]
    return x.view(sizes).expand(t.type.shape)


def _axis(dim: int, rank: int) -> int:
    return dim % max(rank, 1)


@rule("permute.default", "prims.transpose.default")
def _permute(t: Translator, x: Value, dims: Sequence[int]) -> Value:
    return x.permute([_axis(d, len(x.shape)) for d in dims])


@rule("transpose.int")
def _transpose(t: Translator, x: Value, first: int, second: int) -> Value:
    dims = list(range(len(x.shape)))
    if dims:
        first, second = _axis(first, len(dims)), _axis(second, len(dims))
        dims[first], dims[second] = second, first
    return x.permute(dims)


@rule("t.default")
def _t(t: Translator, x: Value) -> Value:
    return x.permute(tuple(reversed(range(len(x.shape)))))


def _bound(t: Translator, argument: int, dim: int, position: Dim | None, size: Dim) -> Dim:
    """The first element of a slice as PyTorch reads `position`: negative from the end, then clamped to the size.

    The signs of sizes are those that PyTorch's trace has found, which are conditions of the program.
    """
    if position is None:
        return 0
    given, total = integer(t.node, argument, position), extent(t.node, 0, dim, size)
    if holds(given < 0):
        given, position = given + total, size + position
    if holds(given < 0):
        return 0
    return size if holds(given > total) else simplify(position)


def _positions(t: Translator, start: Value, size: Dim, count: Dim, step: int = 1) -> Value:
    """The positions of a slice that begins at a number of the program."""
    start = start.cast(DType.int64)
    start = start.compare("lt", 0).where(start + t.value(size, DType.int64), start)
    first = start.compare("lt", 0).where(0, start)
    steps = t.emit("iota", shape=(count,), dim=0, dtype=DType.int64, start=0, step=step)
    return first.view((1,)) + steps


@rule("slice.Tensor")
def _slice(
    t: Translator, x: Value, dim: int = 0, start: Dim | Value | None = None, end: Any = None, step: int = 1
) -> Value:
    dim = _axis(dim, len(x.shape))
    count = t.type.shape[dim]
    if same(count, 0):
        return t.connected(t.full(0, t.type.shape, x.dtype), x)
    if same(count, x.shape[dim]):
        return x
    if isinstance(start, Value):
        found: Value = RULES["aten.index_select.default"](t, x, dim, _positions(t, start, x.shape[dim], count, step))
        return found
    first = _bound(t, 2, dim, start, x.shape[dim])
    return x.slice(dim, first, simplify(first + (count - 1) * step + 1), step)


@rule("select.int")
def _select(t: Translator, x: Value, dim: int, index: Dim | Value) -> Value:
    dim = _axis(dim, len(x.shape))
    if isinstance(index, Value):
        found: Value = RULES["aten.index_select.default"](t, x, dim, _positions(t, index, x.shape[dim], 1))
        return found
    first = _bound(t, 2, dim, index, x.shape[dim])
    return x.slice(dim, first, simplify(first + 1)).view(t.type.shape)


@rule("narrow.default")
def _narrow(t: Translator, x: Value, dim: int, start: Dim | Value, length: Dim) -> Value:
    return _slice(t, x, dim, start)


@rule("unbind.int")
def _unbind(t: Translator, x: Value, dim: int = 0) -> tuple[Value, ...]:
    dim = _axis(dim, len(x.shape))
    shape = (*x.shape[:dim], *x.shape[dim + 1 :])
    return tuple(x.slice(dim, i, i + 1).view(shape) for i in range(len(t.types)))


@rule("split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor", "unsafe_split_with_sizes.default")
def _split(t: Translator, x: Value, sizes: Any, dim: int = 0) -> tuple[Value, ...]:
    dim = _axis(dim, len(x.shape))
    parts: list[Value] = []
    start: Dim = 0
    for expected in t.types:
        assert expected is not None
        stop = simplify(start + expected.shape[dim])
        parts.append(x if same(expected.shape[dim], x.shape[dim]) else x.slice(dim, start, stop))
        start = stop
    return tuple(parts)


@rule("cat.default")
def _cat(t: Translator, xs: Sequence[Value], dim: int = 0) -> Value:
    dtype, rank = t.type.dtype, len(t.type.shape)
    dim = _axis(dim, rank)
    parts = [x.cast(dtype) for x in xs if len(x.shape) == rank and not same(x.shape[dim], 0)]
    empty = [x for x in xs if len(x.shape) != rank or same(x.shape[dim], 0)]
    if not parts:
        return t.connected(t.full(0, t.type.shape, dtype), *empty)
    return t.connected(parts[0] if len(parts) == 1 else t.emit("concat", *parts, dim=dim), *empty)


@rule("stack.default")
def _stack(t: Translator, xs: Sequence[Value], dim: int = 0) -> Value:
    shape = t.type.shape
    dim = _axis(dim, len(shape))
    single = (*shape[:dim], 1, *shape[dim + 1 :])
    parts = [x.cast(t.type.dtype).view(single) for x in xs]
    return parts[0] if len(parts) == 1 else t.emit("concat", *parts, dim=dim)


@rule("constant_pad_nd.default")
def _pad(t: Translator, x: Value, amounts: Sequence[Dim], value: float = 0) -> Value:
    rank = len(x.shape)
    pads: list[tuple[Dim, Dim]] = [(0, 0)] * rank
    for i in range(len(amounts) // 2):
        dim = rank - 1 - i
        low, high = (_cut_and_padding(t, place, amounts[place]) for place in (2 * i, 2 * i + 1))
        start, stop = low[0], simplify(x.shape[dim] - high[0])
        if not (same(start, 0) and same(stop, x.shape[dim])):
            x = x.slice(dim, start, stop)
        pads[dim] = low[1], high[1]
    if all(same(p, 0) for pair in pads for p in pair):
        return x
    filler = bool(value) if x.dtype is DType.bool else float(value) if x.dtype.is_float else int(value)
    return t.emit("pad", x, pads=tuple(pads), value=filler)


def _cut_and_padding(t: Translator, place: int, amount: Dim) -> tuple[Dim, Dim]:
    """What an amount of padding removes, if it is negative, and what it adds."""
    negative = holds(integer(t.node, (1, place), amount) < 0)
    return (simplify(-amount), 0) if negative else (0, amount)


@rule("flip.default", "prims.rev.default")
def _flip(t: Translator, x: Value, dims: Sequence[int]) -> Value:
    axes = tuple(sorted({_axis(d, len(x.shape)) for d in dims})) if x.shape else ()
    return t.emit("flip", x, dims=axes) if axes else x


@rule("repeat.default")
def _repeat(t: Translator, x: Value, repeats: Sequence[Dim]) -> Value:
    lead = len(repeats) - len(x.shape)
    shape = (*(1,) * lead, *x.shape)
    if any(same(r, 0) for r in repeats):
        return t.connected(t.full(0, t.type.shape, x.dtype), x)
    apart = tuple(size for s in shape for size in (1, s))
    wide = tuple(size for r, s in zip(repeats, shape, strict=True) for size in (r, s))
    return x.view(apart).expand(wide).view(t.type.shape)


@rule("slice_scatter.default")
def _slice_scatter(
    t: Translator,
    x: Value,
    source: Value,
    dim: int = 0,
    start: Dim | Value | None = None,
    end: Any = None,
    step: int = 1,
) -> Value | None:
    dim = _axis(dim, len(x.shape))
    if isinstance(start, Value):
        places = _positions(t, start, x.shape[dim], source.shape[dim], step)
        found: Value | None = RULES["aten.index_copy.default"](t, x, dim, places, source.cast(x.dtype))
        return found
    if step != 1:
        return None
    first, size = _bound(t, 3, dim, start, x.shape[dim]), x.shape[dim]
    stop = size if end is None else _bound(t, 4, dim, end, size)
    if not same(source.shape[dim], 0) and not same(stop - first, source.shape[dim]):
        raise Unproven(f"slice_scatter of {source.shape[dim]} elements into {simplify(stop - first)}")
    return _scattered(t, x, source, dim, first)


def _scattered(t: Translator, x: Value, source: Value, dim: int, first: Dim) -> Value:
    """`x` with `source` in the place of its elements from `first` on."""
    size, stop = x.shape[dim], simplify(first + source.shape[dim])
    parts = [x.slice(dim, 0, first)] if not same(first, 0) else []
    parts += [source.cast(x.dtype)] if not same(source.shape[dim], 0) else []
    parts += [x.slice(dim, stop, size)] if not same(stop, size) else []
    if len(parts) == 1:  # the other one has no element in the result
        return t.connected(parts[0], source if same(source.shape[dim], 0) else x)
    result = t.emit("concat", *parts, dim=dim)
    return t.connected(result, source) if same(source.shape[dim], 0) else result


@rule("select_scatter.default")
def _select_scatter(t: Translator, x: Value, source: Value, dim: int, index: Dim | Value) -> Value | None:
    dim = _axis(dim, len(x.shape))
    row = source.view((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    if isinstance(index, Value):
        return _slice_scatter(t, x, row, dim, index)
    return _scattered(t, x, row, dim, _bound(t, 3, dim, index, x.shape[dim]))


@rule("as_strided.default")
def _as_strided(
    t: Translator, x: Value, size: Sequence[Dim], stride: Sequence[Dim], storage_offset: Dim | None = None
) -> Value | None:
    """Through memory: the operand is flattened in PyTorch's layout, and read in order or at computed offsets."""
    example = t.node.all_input_nodes[0].meta["val"]
    order = types.order_of(example)
    if order is None or not same(types.size(example.storage_offset()), 0):
        raise Unsupported("as_strided of a tensor that is not dense")
    flat = x.permute(order or range(len(x.shape))).view((product(x.shape),))
    offset = 0 if storage_offset is None else storage_offset
    result = types.order_of(t.node.meta["val"])
    if result is not None and same(offset, 0) and same(product(t.type.shape), flat.shape[0]):
        result = result or tuple(range(len(size)))
        return flat.view([t.type.shape[d] for d in result]).permute([result.index(d) for d in range(len(size))])
    places = t.value(offset, DType.int64).view((1,) * len(size))
    for dim, step in enumerate(stride):
        shape = tuple(size[dim] if d == dim else 1 for d in range(len(size)))
        places = places + t.emit("iota", shape=shape, dim=dim, dtype=DType.int64, start=0, step=1) * t.value(
            step, DType.int64
        )
    return t.emit("embedding", flat.view((*flat.shape, 1)), places.expand(t.type.shape)).view(t.type.shape)


@rule("roll.default")
def _roll(t: Translator, x: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts, dims = ([v] if isinstance(v, int) else list(v) for v in (shifts, dims))
    y = x if dims else x.view((x.tensor.size,))
    for shift, dim in zip(shifts, dims or [0], strict=True):
        y = _rolled(t, y, shift, _axis(dim, len(y.shape))) if y.shape else y
    return y.view(x.shape)


def _rolled(t: Translator, x: Value, shift: Dim, dim: int) -> Value:
    size = x.shape[dim]
    if same(size, 0):
        return x
    first = simplify(size - shift % size) if isinstance(size, int) else simplify(size - shift if shift > 0 else -shift)
    if same(first, size) or same(first, 0):
        return x
    return t.emit("concat", x.slice(dim, first, size), x.slice(dim, 0, first), dim=dim)


def _bordered(t: Translator, x: Value, amounts: Sequence[int], *, kind: str) -> Value | None:
    """Padding by the elements at the tensor's border, one dimension after the other."""
    if 0 in x.shape:
        return None
    rank = len(x.shape)
    for i in range(len(amounts) // 2):
        dim, size = rank - 1 - i, x.shape[rank - 1 - i]
        low, high = amounts[2 * i], amounts[2 * i + 1]
        if not all(isinstance(n, int) for n in (low, high)):
            return None
        inner = x.slice(dim, max(-low, 0), simplify(size - max(-high, 0))) if min(low, high) < 0 else x
        before, after = _borders(t, x, dim, max(low, 0), max(high, 0), kind)
        parts = [part for part in (before, inner, after) if part is not None]
        x = parts[0] if len(parts) == 1 else t.emit("concat", *parts, dim=dim)
    return x


def _borders(t: Translator, x: Value, dim: int, low: int, high: int, kind: str) -> tuple[Value | None, Value | None]:
    size = x.shape[dim]

    def repeated(start: Dim, count: int) -> Value:
        shape = tuple(count if d == dim else n for d, n in enumerate(x.shape))
        return x.slice(dim, start, simplify(start + 1)).expand(shape)

    def mirrored(start: Dim, count: int) -> Value:
        return t.emit("flip", x.slice(dim, start, simplify(start + count)), dims=(dim,))

    if kind == "replicate":
        return repeated(0, low) if low else None, repeated(simplify(size - 1), high) if high else None
    return mirrored(1, low) if low else None, mirrored(simplify(size - 1 - high), high) if high else None


for _dims in (1, 2, 3):
    RULES[f"aten.reflection_pad{_dims}d.default"] = functools.partial(_bordered, kind="reflect")
    RULES[f"aten.replication_pad{_dims}d.default"] = functools.partial(_bordered, kind="replicate")


@rule("diagonal.default")
def _diagonal(t: Translator, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value | None:
    rank = len(x.shape)
    dim1, dim2 = _axis(dim1, rank), _axis(dim2, rank)
    x = x.permute([*(d for d in range(rank) if d not in (dim1, dim2)), dim1, dim2])
    *outer, rows, columns = x.shape
    count = t.type.shape[-1]
    if not all(isinstance(n, int) for n in (rows, columns, count)):
        return None
    if count == 0 or 0 in x.shape:
        return t.connected(t.full(0, t.type.shape, x.dtype), x)
    start = offset if offset >= 0 else -offset * columns
    flat = x.view((*outer, rows * columns))
    return flat.slice(len(outer), start, start + (count - 1) * (columns + 1) + 1, columns + 1)


@rule("unfold.default")
def _unfold(t: Translator, x: Value, dim: int, size: int, step: int) -> Value:
    if not x.shape:
        return x.view((1,)).slice(0, 0, size)
    dim, shape = _axis(dim, len(x.shape)), t.type.shape
    count = shape[dim]
    windows = [x.slice(dim, i, simplify(i + (count - 1) * step + 1), step) for i in range(size)]
    if not windows or 0 in shape:
        return t.connected(t.full(0, shape, x.dtype), x)
    lying = (*shape[:-1], 1)
    parts = [w.view(lying) for w in windows]
    return parts[0] if len(parts) == 1 else t.emit("concat", *parts, dim=len(shape) - 1)


_VIEWS = """
diagonal.default expand.default permute.default select.int slice.Tensor split.Tensor
split_with_sizes.default squeeze.default squeeze.dim squeeze.dims t.default transpose.int unbind.int unfold.default
unsqueeze.default view.default
"""
for _name in _VIEWS.split():
    _packet, _overload = _name.split(".")
    RULES[f"aten.{_packet}_copy.{_overload}"] = RULES[f"aten.{_name}"]
