"""Reductions, arguments of extrema, and running sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from daceml_train.frontends.onnx.operators.unsigned import magnitude, narrow, quotient, wide
from daceml_train.frontends.onnx.rules import rule

Reduce = Callable[[Tensor, list[int], bool], Tensor]


def _product(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    x = wide(x)
    for dim in sorted((d % x.dim() for d in dims), reverse=True):
        x = torch.prod(x, dim, keepdim=keep)
    return x


def _extremum(function: Callable[..., Tensor], sign: float) -> Reduce:
    """An extremum over no elements is the type's own bound, of opposite sign."""

    def reduce(x: Tensor, dims: list[int], keep: bool) -> Tensor:
        if x.numel():
            return narrow(function(wide(x, True), dims, keep), x.dtype, ordered=True)
        if x.dtype is torch.bool:
            bound: float = sign > 0
        else:
            bound = (
                sign * math.inf
                if x.is_floating_point()
                else getattr(torch.iinfo(x.dtype), "max" if sign > 0 else "min")
            )
        chosen = {d % x.dim() for d in dims}
        shape = [1 if i in chosen else extent for i, extent in enumerate(x.shape) if keep or i not in chosen]
        return torch.full(shape, bound, dtype=x.dtype)

    return reduce


def _sum(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return torch.sum(wide(x), dims, keep)


def _whole_mean(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    """The mean of integers, rounded towards zero."""
    total, count = _sum(x, dims, keep), _count(x, dims)
    if x.dtype is torch.uint64:
        return quotient(total.to(x.dtype), torch.tensor(count).to(x.dtype))
    return torch.div(total, count, rounding_mode="trunc")


def _exact(total: Tensor, x: Tensor) -> Tensor:
    """The sum of integers `x` as float64, of which float32 does not hold all."""
    return total if x.is_floating_point() else total.to(x.dtype).double()


def _squares(x: Tensor, dims: list[int], keep: bool) -> Tensor:
    return _sum(torch.square(wide(x)), dims, keep)


_REDUCTIONS: dict[str, tuple[Reduce, Callable[[Tensor], Tensor]]] = {
    "ReduceSum": (_sum, lambda x: x),
    "ReduceMean": (
        lambda x, d, k: torch.mean(x, d, k) if x.is_floating_point() else _whole_mean(x, d, k),
        lambda x: x,
    ),
    "ReduceMax": (_extremum(torch.amax, -1), lambda x: x),
    "ReduceMin": (_extremum(torch.amin, 1), lambda x: x),
    "ReduceProd": (_product, lambda x: x),
    "ReduceL1": (lambda x, d, k: _sum(magnitude(x), d, k), magnitude),
    "ReduceL2": (lambda x, d, k: torch.sqrt(_exact(_squares(x, d, k), x)), magnitude),
    "ReduceSumSquare": (_squares, lambda x: torch.square(wide(x)).to(x.dtype)),
    "ReduceLogSum": (lambda x, d, k: torch.log(_exact(_sum(x, d, k), x)), torch.log),
    "ReduceLogSumExp": (lambda x, d, k: torch.logsumexp(x, d, k), lambda x: x),
}
"""Each reduction, and its elementwise remainder if no axis is reduced."""


def _count(x: Tensor, dims: list[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _by_operand(reduce: Reduce, alone: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def reduction(
        x: Tensor, axes: list[int] | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        if not axes:
            if noop_with_empty_axes:
                return alone(x)
            axes = list(range(x.dim()))
        return reduce(x, list(axes), bool(keepdims)).to(x.dtype)

    return reduction


def _by_attribute(reduce: Reduce) -> Callable[..., Tensor]:
    def reduction(x: Tensor, *, axes: tuple[int, ...] | None = None, keepdims: int = 1) -> Tensor:
        return reduce(x, list(axes or range(x.dim())), bool(keepdims)).to(x.dtype)

    return reduction


for _name, (_reduce, _alone) in _REDUCTIONS.items():
    rule(_name, since=13 if _name == "ReduceSum" else 18, host="axes")(_by_operand(_reduce, _alone))
    rule(_name)(_by_attribute(_reduce))


def _argument(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def argument(x: Tensor, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
        x = wide(x, True)
        if select_last_index:
            return x.shape[axis] - 1 - function(x.flip(axis), axis, keepdim=bool(keepdims))
        return function(x, axis, keepdim=bool(keepdims))

    return argument


rule("ArgMax")(_argument(torch.argmax))
rule("ArgMin")(_argument(torch.argmin))


def _running(function: Callable[[Tensor, int], Tensor], neutral: float) -> Callable[..., Tensor]:
    def running(x: Tensor, axis: int, *, exclusive: int = 0, reverse: int = 0) -> Tensor:
        ordered = wide(x.flip(axis) if reverse else x)
        result = function(ordered, axis)
        if exclusive:
            length = x.shape[axis]
            first = torch.full_like(ordered.narrow(axis, 0, min(length, 1)), neutral)
            result = torch.cat([first, result.narrow(axis, 0, max(length - 1, 0)).to(ordered.dtype)], axis)
        result = result.to(x.dtype)
        return result.flip(axis) if reverse else result

    return running


rule("CumSum", since=11, host="axis")(_running(torch.cumsum, 0))
rule("CumProd", since=26, host="axis")(_running(torch.cumprod, 1))
