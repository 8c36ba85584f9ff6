"""ATen's elementwise operators: what each computes, with PyTorch's type promotion."""

from __future__ import annotations

import functools
import math
from typing import Any

from daceml_train.frontends.torch.capture.requirements import required
from daceml_train.frontends.torch.rules.numbers import element
from daceml_train.frontends.torch.rules.translate import RULES, Translator, promote, rule
from daceml_train.ops.operator import Value
from daceml_train.tensor import DType

Number = Any


def _float(t: Translator) -> DType:
    """The type in which a function with real results is computed: that of the result."""
    return t.type.dtype


def _unary(t: Translator, x: Value, *, kind: str) -> Value:
    return x.cast(_float(t)).unary(kind)


for _name, _kind in {
    "neg": "neg",
    "abs": "abs",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "exp": "exp",
    "expm1": "expm1",
    "log": "log",
    "log1p": "log1p",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "atan": "atan",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "asin": "asin",
    "acos": "acos",
    "asinh": "asinh",
    "acosh": "acosh",
    "atanh": "atanh",
    "exp2": "exp2",
    "log2": "log2",
    "log10": "log10",
    "erf": "erf",
    "relu": "relu",
    "silu": "silu",
    "reciprocal": "reciprocal",
    "square": "square",
    "hardsigmoid": "hardsigmoid",
    "hardswish": "hardswish",
    "sinh": "sinh",
    "cosh": "cosh",
}.items():
    RULES[f"aten.{_name}.default"] = functools.partial(_unary, kind=_kind)


def _rounding(t: Translator, x: Value, *, kind: str) -> Value:
    return x.unary(kind) if x.dtype.is_float else x


for _kind in ("floor", "ceil", "round", "trunc"):
    RULES[f"aten.{_kind}.default"] = functools.partial(_rounding, kind=_kind)


@rule("sign.default", "sgn.default")
def _sign(t: Translator, x: Value) -> Value:
    return x if x.dtype is DType.bool else x.unary("sign")


def _binary(t: Translator, a: Number, b: Number, *, kind: str) -> Value:
    dtype = t.type.dtype
    return t.emit(kind, t.value(a, dtype), t.value(b, dtype))


for _kind in ("mul", "div"):
    RULES[f"aten.{_kind}.Tensor"] = RULES[f"aten.{_kind}.Scalar"] = functools.partial(_binary, kind=_kind)
for _kind in ("maximum", "minimum", "atan2", "hypot"):
    RULES[f"aten.{_kind}.default"] = functools.partial(_binary, kind=_kind)


RULES["aten.copysign.Tensor"] = RULES["aten.copysign.Scalar"] = functools.partial(_binary, kind="copysign")


@rule("binary_cross_entropy.default")
def _binary_cross_entropy(
    t: Translator, x: Value, target: Value, weight: Value | None = None, reduction: int = 1
) -> Value:
    for operand, what in ((x, "input"), (target, "target")):
        inside = t.emit("logical_and", operand.compare("ge", 0), operand.compare("le", 1))
        holds = required(t, inside, f"all elements of {what} should be between 0 and 1")
        x = holds.where(x, 0.0)
    losses = t.emit("bce", x, target)
    losses = losses if weight is None else losses * weight
    dims = tuple(range(len(losses.shape)))
    return losses if reduction == 0 or not dims else losses.mean(dims) if reduction == 1 else losses.sum(dims)


def _compare(t: Translator, a: Number, b: Number, *, kind: str) -> Value:
    dtype = promote(a, b)
    return t.emit(kind, t.value(a, dtype), t.value(b, dtype))


for _kind in ("eq", "ne", "lt", "le", "gt", "ge"):
    RULES[f"aten.{_kind}.Tensor"] = RULES[f"aten.{_kind}.Scalar"] = functools.partial(_compare, kind=_kind)


def _truth(t: Translator, x: Value) -> Value:
    return x if x.dtype is DType.bool else x.compare("ne", 0)


def _logical(t: Translator, *operands: Value, kind: str) -> Value:
    return t.emit(kind, *(_truth(t, x) for x in operands))


for _kind in ("logical_and", "logical_or", "logical_not"):
    RULES[f"aten.{_kind}.default"] = functools.partial(_logical, kind=_kind)
RULES["aten.logical_xor.default"] = functools.partial(_logical, kind="ne")


def _bitwise(t: Translator, *operands: Number, kind: str, truth: str) -> Value:
    dtype = t.type.dtype
    return t.emit(truth if dtype is DType.bool else kind, *(t.value(x, dtype) for x in operands))


for _kind, _truths in {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "ne"}.items():
    for _overload in ("Tensor", "Scalar", "Scalar_Tensor"):
        RULES[f"aten.{_kind}.{_overload}"] = functools.partial(_bitwise, kind=_kind, truth=_truths)
RULES["aten.bitwise_not.default"] = functools.partial(_bitwise, kind="bitwise_not", truth="logical_not")


def _shift(t: Translator, a: Number, b: Number, *, kind: str) -> Value | None:
    dtype = t.type.dtype
    return None if dtype in (DType.bool, DType.uint8) or dtype.is_float else _binary(t, a, b, kind=kind)


for _name, _kind in {"left": "shift_left", "right": "shift_right"}.items():
    for _overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor"):
        RULES[f"aten.bitwise_{_name}_shift.{_overload}"] = functools.partial(_shift, kind=_kind)


def _special(t: Translator, x: Value, *, kind: str) -> Value:
    return x.unary(kind) if x.dtype.is_float else t.full(False, x.shape, DType.bool)


for _kind in ("isnan", "isinf"):
    RULES[f"aten.{_kind}.default"] = functools.partial(_special, kind=_kind)


def _sum_of(t: Translator, a: Number, b: Number, alpha: Number, kind: str) -> Value:
    dtype = t.type.dtype
    second = t.value(b, dtype)
    if alpha != 1:
        second = t.value(b * alpha, dtype) if not isinstance(b, Value) else second * t.value(alpha, dtype)
    first = t.value(a, dtype)
    if dtype is DType.bool:
        return t.emit("logical_or", first, second)
    return t.emit(kind, first, second)


@rule("add.Tensor", "add.Scalar")
def _add(t: Translator, a: Number, b: Number, alpha_: Number = 1, alpha: Number = 1) -> Value:
    return _sum_of(t, a, b, alpha if alpha != 1 else alpha_, "add")


@rule("sub.Tensor", "sub.Scalar")
def _sub(t: Translator, a: Number, b: Number, alpha_: Number = 1, alpha: Number = 1) -> Value:
    return _sum_of(t, a, b, alpha if alpha != 1 else alpha_, "sub")


@rule("rsub.Tensor", "rsub.Scalar")
def _rsub(t: Translator, a: Number, b: Number, alpha_: Number = 1, alpha: Number = 1) -> Value:
    dtype = t.type.dtype
    factor = alpha if alpha != 1 else alpha_
    first = t.value(a, dtype)
    return t.emit("sub", t.value(b, dtype), first if factor == 1 else first * t.value(factor, dtype))


@rule("pow.Tensor_Scalar")
def _pow_scalar(t: Translator, x: Value, exponent: Number) -> Value:
    x = x.cast(t.type.dtype)
    if x.dtype.is_float or (isinstance(exponent, int) and exponent >= 0):
        match exponent:
            case 0:
                return t.connected(t.full(1, x.shape, x.dtype), x)
            case 1:
                return x
            case 2:
                return x.unary("square")
            case 3:
                return x.unary("square") * x
            case -1:
                return x.unary("reciprocal")
            case 0.5:
                return x.unary("sqrt")
            case -0.5:
                return x.unary("rsqrt")
    return t.emit("pow", x, t.value(exponent, x.dtype))


@rule("pow.Tensor_Tensor", "pow.Scalar")
def _pow(t: Translator, a: Number, b: Number) -> Value:
    return _binary(t, a, b, kind="pow")


@rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(t: Translator, condition: Value, a: Number, b: Number) -> Value:
    dtype = t.type.dtype
    return t.emit("where", _truth(t, condition), element(t, a, dtype), element(t, b, dtype))


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(t: Translator, x: Value, mask: Value, value: Number) -> Value:
    return t.emit("where", _truth(t, mask), element(t, value, x.dtype), x)


# Piecewise functions select with `where`, so that the derivative at a kink is PyTorch's.


@rule("clamp.default", "clamp.Tensor")
def _clamp(t: Translator, x: Value, min: Number = None, max: Number = None) -> Value:
    dtype = t.type.dtype
    bounds = [element(t, bound, dtype) for bound in (min, max) if bound is not None]
    kind = "clamp" if len(bounds) == 2 else "clamp_max" if min is None else "clamp_min"
    return t.emit(kind, x.cast(dtype), *bounds) if bounds else x.cast(dtype)


@rule("clamp_min.default", "clamp_min.Tensor")
def _clamp_min(t: Translator, x: Value, bound: Number) -> Value:
    return _clamp(t, x, bound)


@rule("clamp_max.default", "clamp_max.Tensor")
def _clamp_max(t: Translator, x: Value, bound: Number) -> Value:
    return _clamp(t, x, None, bound)


@rule("hardtanh.default")
def _hardtanh(t: Translator, x: Value, low: Number = -1, high: Number = 1) -> Value:
    return t.emit("hardtanh", x, element(t, low, x.dtype), element(t, high, x.dtype))


@rule("relu6.default")
def _relu6(t: Translator, x: Value) -> Value:
    return _hardtanh(t, x, 0, 6)


@rule("threshold.default")
def _threshold(t: Translator, x: Value, threshold: Number, value: Number) -> Value:
    return t.emit("where", x.compare("le", threshold), element(t, value, x.dtype), x)


@rule("leaky_relu.default")
def _leaky_relu(t: Translator, x: Value, slope: float = 0.01) -> Value | None:
    if not math.isfinite(slope):
        return None
    return x.compare("gt", 0).where(x, x * slope)


@rule("elu.default")
def _elu(t: Translator, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value | None:
    if not all(map(math.isfinite, (alpha, scale, input_scale))):
        return None
    if scale == input_scale == 1 and alpha == 1:
        return x.unary("elu")
    negative = x.compare("le", 0)
    below = negative.where(x * input_scale, 0.0).unary("elu") * negative.where(t.value(alpha * scale, x.dtype), 0.0)
    return negative.where(below, x * scale)


@rule("celu.default")
def _celu(t: Translator, x: Value, alpha: float = 1.0) -> Value | None:
    return _elu(t, x, alpha, 1, 1 / alpha) if alpha != 0 and math.isfinite(alpha) else None


@rule("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self")
def _xlogy(t: Translator, a: Number, b: Number) -> Value:
    return _binary(t, a, b, kind="xlogy")


@rule("special_xlog1py.default", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar")
def _xlog1py(t: Translator, a: Number, b: Number) -> Value:
    return _binary(t, a, b, kind="xlog1py")


@rule("addcmul.default")
def _addcmul(t: Translator, x: Value, a: Value, b: Value, *, value: Number = 1) -> Value:
    return _with_term(t, x, a, b, value, "scaled_mul")


@rule("prims.fma.default")
def _fma(t: Translator, a: Value, b: Number, c: Number) -> Value:
    """TorchDynamo's form of an in-place `addcmul` by a number that changes."""
    dtype = t.type.dtype
    return t.value(c, dtype) + t.emit("mul", t.value(a, dtype), t.value(b, dtype))


@rule("addcdiv.default")
def _addcdiv(t: Translator, x: Value, a: Value, b: Value, *, value: Number = 1) -> Value:
    return _with_term(t, x, a, b, value, "scaled_div")


def _with_term(t: Translator, x: Value, a: Value, b: Value, value: Number, kind: str) -> Value:
    dtype = t.type.dtype
    return x.cast(dtype) + t.emit(kind, a.cast(dtype), b.cast(dtype), t.value(value, dtype))


@rule("special_entr.default")
def _entr(t: Translator, x: Value) -> Value:
    return x.cast(_float(t)).unary("entr")


@rule("log_sigmoid_forward.default")
def _log_sigmoid(t: Translator, x: Value) -> tuple[Value, None]:
    """The second result is for PyTorch's own derivative."""
    return x.unary("logsigmoid"), None


@rule("_prelu_kernel.default")
def _prelu(t: Translator, x: Value, weight: Value) -> Value:
    return t.emit("prelu", x, weight)


@rule("logit.default")
def _logit(t: Translator, x: Value, eps: float | None = None) -> Value | None:
    if eps is not None and math.isnan(eps):
        return None
    x = x.cast(_float(t))
    if eps is not None and eps >= 0:
        low, high = t.value(eps, x.dtype), t.value(1 - eps, x.dtype)
        inside = t.emit("where", t.emit("gt", x, high), high, x)
        x = t.emit("where", t.emit("lt", x, low), low, inside)  # above 0.5, `low` is the upper bound, and prevails
    return x.unary("logit")


@rule("softplus.default")
def _softplus(t: Translator, x: Value, beta: float = 1, threshold: float = 20) -> Value | None:
    if beta == 0 or not math.isfinite(beta) or not math.isfinite(threshold):
        return None
    scaled = x * beta
    return scaled.compare("gt", threshold).where(x, scaled.unary("softplus") * (1 / beta))


@rule("mish.default")
def _mish(t: Translator, x: Value) -> Value:
    return x.unary("mish")


@rule("gelu.default")
def _gelu(t: Translator, x: Value, approximate: str = "none") -> Value:
    return x.unary("gelu_tanh" if approximate == "tanh" else "gelu_erf")


def _logaddexp(t: Translator, a: Number, b: Number, *, base: float = 1.0) -> Value:
    """`base` is the logarithm of the base."""
    x, y = (v if base == 1 else v * base for v in (t.value(o, t.type.dtype) for o in (a, b)))
    result = t.emit("logaddexp", x, y)
    return result if base == 1 else result * (1 / base)


def _ignoring_nan(t: Translator, a: Number, b: Number, *, kind: str) -> Value:
    """The larger or smaller number; where one is NaN, the other. On a tie PyTorch's derivative is the first one's."""
    dtype = t.type.dtype
    x, y = t.value(a, dtype), t.value(b, dtype)
    first = t.emit(kind, x, y)
    if dtype.is_float:
        first = t.emit("logical_or", first, y.unary("isnan"))
    return t.emit("where", first, x, y)


RULES["aten.logaddexp.default"] = _logaddexp
RULES["aten.logaddexp2.default"] = functools.partial(_logaddexp, base=math.log(2))
RULES["aten.fmax.default"] = functools.partial(_ignoring_nan, kind="ge")
RULES["aten.fmin.default"] = functools.partial(_ignoring_nan, kind="le")


# ---- copies and casts: values only, so a copy is the value itself ------------------------------------------------


@rule(
    "clone.default",
    "alias.default",
    "alias_copy.default",
    "detach_copy.default",
    "lift_fresh_copy.default",
    "lift_fresh.default",
    "contiguous.default",
)
def _same(t: Translator, x: Value, **options: Any) -> Value:
    return x


@rule("_to_copy.default", "prims.convert_element_type.default", "to.dtype")
def _cast(t: Translator, x: Value | Number, *position: Any, **options: Any) -> Value:
    return x.cast(t.type.dtype) if isinstance(x, Value) else t.value(x, t.type.dtype)


@rule("copy.default")
def _copy(t: Translator, target: Value, source: Value, non_blocking: bool = False) -> Value:
    return source.cast(target.dtype).expand(target.shape)


@rule("prims.device_put.default")
def _device_put(t: Translator, x: Value, *options: Any, **more: Any) -> Value:
    return x


@rule("fill.Scalar", "fill.Tensor")
def _fill(t: Translator, x: Value, value: Number) -> Value:
    return t.connected(element(t, value, x.dtype).expand(x.shape), x)
