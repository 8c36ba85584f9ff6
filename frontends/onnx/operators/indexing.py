"""Operators that choose or place elements by index."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from daceml_train.frontends.onnx.host import Host, integer
from daceml_train.frontends.onnx.operators.unsigned import narrow, wide
from daceml_train.frontends.onnx.rules import rule


def _inside(indices: Tensor, extent: int) -> Tensor:
    """Indices as int64 in 0 ≤ i < extent; ONNX counts negative ones from the end."""
    at = indices.to(torch.int64)
    return torch.where(at < 0, at + extent, at)


@rule("Gather")
def gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis = axis % x.dim()
    at = _inside(indices, x.shape[axis])
    if axis == 0 and x.dim() == 2 and x.is_floating_point():
        return torch.nn.functional.embedding(at, x)
    chosen = x.index_select(axis, at.reshape(-1))
    return chosen.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


@rule("GatherElements", since=11)
def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(x, axis, _inside(indices, x.shape[axis]))


@rule("GatherND", since=11)
def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    depth = indices.shape[-1]
    batch = x.shape[:batch_dims]
    rows = math.prod(batch)
    data = x.reshape(rows, *x.shape[batch_dims:])
    at = indices.reshape(rows, -1, depth)
    places = tuple(_inside(at[..., j], x.shape[batch_dims + j]) for j in range(depth))
    chosen = data[(torch.arange(rows)[:, None], *places)]
    return chosen.reshape(indices.shape[:-1] + x.shape[batch_dims + depth :])


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@rule("ScatterElements", "Scatter", since=9)
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    at = _inside(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, at, updates)
    return x.scatter_reduce(axis, at, updates, _REDUCE[reduction])


@rule("ScatterND", since=11)
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """On rows: the last dimension of `indices` names one of the leading dimensions' flat index."""
    depth = indices.shape[-1]
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64)
    outside = torch.zeros(indices.shape[:-1], dtype=torch.bool)
    for j in range(depth):
        place = _inside(indices[..., j], x.shape[j])
        outside = outside | (place < 0) | (place >= x.shape[j])
        flat = flat * x.shape[j] + place
    width = math.prod(x.shape[depth:])
    rows = x.reshape(math.prod(x.shape[:depth]), width)
    flat = torch.where(outside, rows.shape[0], flat)  # which is refused, and not another row
    at = flat.reshape(-1)
    new = updates.reshape(at.shape[0], width)
    if reduction == "none":
        return rows.index_copy(0, at, new).reshape(x.shape)
    if reduction == "add":
        return rows.index_add(0, at, new).reshape(x.shape)
    return rows.scatter_reduce(0, at[:, None].expand_as(new), new, _REDUCE[reduction]).reshape(x.shape)


@rule("TensorScatter", since=24)
def tensor_scatter(
    past: Tensor, update: Tensor, write: Tensor | None = None, *, axis: int = -2, mode: str = "linear"
) -> Tensor:
    """Writes `update` into a cache at each batch entry's own position along `axis`."""
    axis = axis % past.dim()
    first = torch.zeros(past.shape[0], dtype=torch.int64) if write is None else write.to(torch.int64)
    at = first[:, None] + torch.arange(update.shape[axis])
    at = at % past.shape[axis] if mode == "circular" else at
    shape = [1] * past.dim()
    shape[0], shape[axis] = at.shape
    return past.scatter(axis, at.reshape(shape).expand(update.shape), update)


@rule("OneHot", since=9, host="depth")
def one_hot(indices: Tensor, depth: Host, values: Tensor, *, axis: int = -1) -> Tensor:
    count = int(integer(depth))
    rank = indices.dim() + 1
    at = indices.to(torch.int64)
    at = torch.where(at < 0, at + count, at).unsqueeze(axis % rank)
    classes = torch.arange(count).reshape([count if d == axis % rank else 1 for d in range(rank)])
    return torch.where(at == classes, values[1], values[0])


@rule("NonZero", since=9)
def non_zero(x: Tensor) -> Tensor:
    return torch.nonzero(x).t()


@rule("TopK", since=10, host="k")
def top_k(x: Tensor, k: Host, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Tensor, Tensor]:
    """By a stable sort: of equal elements, ONNX takes the one with the lower index."""
    values, at = torch.sort(wide(x, True), dim=axis, descending=bool(largest), stable=True)
    return narrow(values.narrow(axis, 0, integer(k)), x.dtype, ordered=True), at.narrow(axis, 0, integer(k))


@rule("TopK")
def top_k_by_attribute(x: Tensor, *, k: int, axis: int = -1) -> tuple[Tensor, Tensor]:
    return top_k(x, k, axis=axis)


@rule("Compress", since=9)
def compress(x: Tensor, condition: Tensor, *, axis: int | None = None) -> Tensor:
    data, along = (x.reshape(-1), 0) if axis is None else (x, axis)
    return data.index_select(along, torch.nonzero(condition).reshape(-1))


@rule("Unique", since=11)
def unique(x: Tensor, *, axis: int | None = None, sorted: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsorted means in the order of first occurrence."""
    data, along = (x.reshape(-1), 0) if axis is None else (x, axis % x.dim())
    values, inverse, counts = torch.unique(
        wide(data, True), sorted=True, return_inverse=True, return_counts=True, dim=along
    )
    extent = data.shape[along]
    first = torch.full((counts.shape[0],), extent, dtype=torch.int64)
    first = first.scatter_reduce(0, inverse, torch.arange(extent), "amin")
    if not sorted:
        order = torch.argsort(first)
        rank = torch.argsort(order)
        values, first, counts, inverse = values.index_select(along, order), first[order], counts[order], rank[inverse]
    return narrow(values, x.dtype, ordered=True), first, inverse, counts
