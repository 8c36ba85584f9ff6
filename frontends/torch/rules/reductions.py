"""ATen's reductions and matmuls."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import sympy

from daceml_train.frontends.torch.rules.size_numbers import Unproven
from daceml_train.frontends.torch.rules.translate import RULES, Translator, rule
from daceml_train.ops.operator import Value
from daceml_train.tensor import DType


def _dims(x: Value, dims: int | Sequence[int] | None) -> tuple[int, ...]:
    """Dimensions as the graph's operators take them: non-negative, ascending; all for None or none given."""
    rank = len(x.shape)
    if isinstance(dims, int):
        dims = [dims]
    return tuple(sorted({d % rank for d in dims} if dims and rank else range(rank)))


@rule("sum.default", "sum.dim_IntList")
def _sum(t: Translator, x: Value, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return _reduced(t, x.cast(t.type.dtype), "sum", dims, keepdim)


def _reduced(t: Translator, x: Value, kind: str, dims: Any, keepdim: bool) -> Value:
    return x.reduce(kind, _dims(x, dims), keepdim) if x.shape else x


@rule("count_nonzero.dim_IntList", "count_nonzero.default")
def _count_nonzero(t: Translator, x: Value, dims: Any = None) -> Value:
    truth = x if x.dtype is DType.bool else x.compare("ne", 0)
    return _reduced(t, truth.cast(t.type.dtype), "sum", dims, False)


@rule("prod.default", "prod.dim_int")
def _prod(t: Translator, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return _reduced(t, x.cast(t.type.dtype), "prod", dim, keepdim)


@rule("mean.default", "mean.dim")
def _mean(t: Translator, x: Value, dims: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    x = x.cast(t.type.dtype)
    return x.mean(_dims(x, dims), keepdim) if x.shape else x


def _extreme(t: Translator, x: Value, dims: Any = None, keepdim: bool = False, *, kind: str) -> Value | None:
    return None if 0 in x.shape else _reduced(t, x, kind, dims, keepdim)


def _extreme_of_all(t: Translator, x: Value, *, kind: str) -> Value | None:
    """As `amax`, except for its gradient where the result is NaN: it goes to the elements that are NaN, evenly."""
    if 0 in x.shape or not x.shape or not x.dtype.is_float or not t.active(x):
        return _extreme(t, x, kind=kind)
    absent = x.unary("isnan")
    found = _reduced(t, absent.where(math.inf if kind == "min" else -math.inf, x), kind, None, False)
    count = _reduced(t, absent.cast(x.dtype), "sum", None, False)
    total = _reduced(t, absent.where(x, 0.0), "sum", None, False)
    some = count.compare("gt", 0)
    return some.where(total / some.where(count, 1.0), found)


for _name, _kind in {"amax": "max", "amin": "min"}.items():
    RULES[f"aten.{_name}.default"] = functools.partial(_extreme, kind=_kind)
    RULES[f"aten.{_kind}.default"] = functools.partial(_extreme_of_all, kind=_kind)


def _truths(t: Translator, x: Value, dims: Any = None, keepdim: bool = False, *, kind: str) -> Value:
    truth = x if x.dtype is DType.bool else x.compare("ne", 0)
    if 0 in x.shape:
        return t.full(kind == "min", t.type.shape, t.type.dtype)
    return _reduced(t, truth, kind, dims, keepdim).cast(t.type.dtype)


for _name, _kind in {"any": "max", "all": "min"}.items():
    for _overload in ("default", "dim", "dims"):
        RULES[f"aten.{_name}.{_overload}"] = functools.partial(_truths, kind=_kind)


@rule("logsumexp.default")
def _logsumexp(t: Translator, x: Value, dims: Any, keepdim: bool = False) -> Value | None:
    x = x.cast(t.type.dtype)
    return t.emit("logsumexp", x, dims=_dims(x, dims), keepdim=keepdim) if x.shape else x


@rule("var.correction")
def _var(t: Translator, x: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Value | None:
    if not x.shape:
        return None
    correction = 1 if correction is None else correction
    if isinstance(correction, sympy.Expr):
        raise Unproven(f"a variance with the correction {correction}")
    return t.emit("variance", x, dims=_dims(x, dims), correction=correction, keepdim=keepdim)


@rule("std.correction")
def _std(t: Translator, x: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Value | None:
    variance = _var(t, x, dims, correction=correction, keepdim=keepdim)
    return None if variance is None else _safe_sqrt(variance)


@rule("var_mean.correction", "std_mean.correction")
def _var_mean(
    t: Translator, x: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[Value, Value] | None:
    variance = _var(t, x, dims, correction=correction, keepdim=keepdim)
    if variance is None:
        return None
    spread = _safe_sqrt(variance) if "std" in str(t.node.target) else variance
    return spread, x.mean(_dims(x, dims), keepdim)


def _safe_sqrt(x: Value) -> Value:
    """The square root with gradient 0 at 0, as PyTorch's norms and deviations have it."""
    zero = x.compare("eq", 0)
    return zero.where(0.0, zero.where(1.0, x).unary("sqrt"))


@rule("linalg_vector_norm.default")
def _vector_norm(
    t: Translator, x: Value, order: float = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value | None:
    if 0 in x.shape:
        return None
    x = x.cast(t.type.dtype)
    match float(order):
        case 2.0:
            return _safe_sqrt(_reduced(t, x.unary("square"), "sum", dims, keepdim))
        case 1.0:
            return _reduced(t, x.unary("abs"), "sum", dims, keepdim)
        case 0.0:
            return _reduced(t, x.compare("ne", 0).cast(x.dtype), "sum", dims, keepdim)
        case math.inf:
            return _extreme_size(t, x, "max", dims, keepdim)
        case order if order == -math.inf:
            return _extreme_size(t, x, "min", dims, keepdim)
        case _ if not x.shape:
            return x.unary("abs")
    return None


def _extreme_size(t: Translator, x: Value, kind: str, dims: Any, keepdim: bool) -> Value:
    """The largest or smallest absolute value; where it is NaN, its gradient is zero."""
    if not t.active(x):
        return _reduced(t, x.unary("abs"), kind, dims, keepdim)
    absent = x.unary("isnan")
    found = _reduced(t, absent.where(0.0 if kind == "max" else math.inf, x.unary("abs")), kind, dims, keepdim)
    return _reduced(t, absent, "max", dims, keepdim).where(math.nan, found)


# ---- matmuls -----------------------------------------------------------------------------------------------------


@rule("mm.default", "bmm.default")
def _matmul(t: Translator, a: Value, b: Value) -> Value:
    return a @ b


def _plus(t: Translator, y: Value, c: Value, beta: float, alpha: float) -> Value:
    """`alpha * y + beta * c`; a factor of zero ignores `c`, also where it is NaN."""
    if alpha != 1:
        y = y * t.value(alpha, y.dtype)
    if beta == 0:
        return t.connected(y.expand(t.type.shape), c)
    return y + (c if beta == 1 else c * t.value(beta, c.dtype))


@rule("addmm.default", "baddbmm.default")
def _addmm(t: Translator, c: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    return _plus(t, a @ b, c, beta, alpha)


@rule("addbmm.default")
def _addbmm(t: Translator, c: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    return _plus(t, (a @ b).sum((0,)), c, beta, alpha)


@rule("addr.default")
def _addr(t: Translator, c: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value | None:
    if not t.type.dtype.is_float:
        return None
    c, a, b = (x.cast(t.type.dtype) for x in (c, a, b))
    return _plus(t, a.view((*a.shape, 1)) * b.view((1, *b.shape)), c, beta, alpha)


@rule("mv.default")
def _mv(t: Translator, a: Value, b: Value) -> Value:
    return (a @ b.view((*b.shape, 1))).view(t.type.shape)


@rule("addmv.default")
def _addmv(t: Translator, c: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    return _plus(t, (a @ b.view((*b.shape, 1))).view(a.shape[:1]), c, beta, alpha)


@rule("dot.default")
def _dot(t: Translator, a: Value, b: Value) -> Value:
    return (a * b).sum((0,))
