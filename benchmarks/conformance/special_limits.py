"""How far a result may be from eager execution's: rounding, and what eager execution leaves to its own formulas.

Every exception belongs to one entry and has its reason; the page lists them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.conformance.bits import Limit
from benchmarks.conformance.samples import label

ULPS = 4
"""Units in the last place, for all entries."""
SUM = 8
"""Where elements are added up, in an order that is nobody's: epsilons of the largest element, or of 1."""

_ROUNDED = {
    "asin": (64, 0), "acos": (64, 0), "atan2": (64, 0), "atanh": (128, 0), "expm1": (32, 0), "sinh": (32, 0),
    "cosh": (32, 0), "nn.functional.elu": (32, 0), "nn.functional.celu": (32, 0), "nn.functional.selu": (32, 0),
    "lerp": (32, 1), "ldexp": (8, 0), "tan": (8, 0), "div.no_rounding_mode": (8, 0), "true_divide": (8, 0),
    "__rdiv__": (32, 0), "sigmoid": (4, 1), "nn.functional.silu": (4, 1), "nn.functional.mish": (4, 2),
    "tanh": (4, 4), "nn.functional.softplus": (4, 1), "nn.functional.hardswish": (4, 1), "nn.functional.gelu": (4, 1),
    "logaddexp2": (64, 0), "log10": (4, 1), "nn.functional.tanhshrink": (4, 4),
    "special.ndtr": (4, 1), "special.erfcx": (4, 2),
}  # fmt: skip
"""Entry -> units in the last place, and epsilons where functions cancel or underflow (1 - tanh(x)^2, x sigmoid(x),
1 + erf(x), 2 x erfcx(x) - 2 / sqrt(pi))."""
_SUMMED = {
    "nn.functional.normalize": 16,
    "nn.functional.group_norm": 16,
    "nn.functional.layer_norm": 256,
    "native_layer_norm": 256,
    "mul": 16,
    "__rmul__": 16,
}
"""Entry -> epsilons of the largest element: a negative or infinite eps leaves a difference of nearly equal numbers; the
gradient of a factor that is a number is -2.7, a sum of 50 terms of up to 15."""

_TERMS = "the gradient is a sum of terms whose zeros have signs of their own; eager groups the terms in another way"
_STARTS = "eager adds to a zero, which makes zero of -0; the first element is taken as it is here"
_PART = "eager multiplies zero by the cotangent, whose sign it takes; no gradient flows to what is not chosen here"
_NORMALIZATIONS = """
native_batch_norm _native_batch_norm_legit _batch_norm_with_update nn.functional.batch_norm native_layer_norm
nn.functional.layer_norm nn.functional.group_norm native_group_norm nn.functional.instance_norm nn.functional.rms_norm
nn.functional.huber_loss
"""
_CHOSEN = "nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss norm.inf native_dropout_backward"
SIGNS = (
    dict.fromkeys(_NORMALIZATIONS.split(), _TERMS)
    | dict.fromkeys(("cumsum", "cumulative_trapezoid"), _STARTS)
    | dict.fromkeys(_CHOSEN.split(), _PART)
)
"""Entry -> why signs of its zeros are not compared."""

_WELFORD = "eager's one-pass mean makes NaN of infinity less infinity where the sum of the elements is infinite"
_AFFINE = (
    "eager multiplies by weight / deviation and adds what is left of the mean, two infinities for infinite weights"
)
NONFINITE = (
    dict.fromkeys(("var_mean", "std_mean", "native_layer_norm", "native_group_norm"), _WELFORD)
    | {"nn.functional.instance_norm": _AFFINE}
    | {"_softmax_backward_data": "eager's derivative of this derivative groups three terms in another way"}
)
"""Entry -> why NaN and infinities may stand for one another."""


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Tensor:
    return x + a / b * value


TRACED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "addcdiv": (_addcdiv, "TorchDynamo divides first, and multiplies the quotient, which may overflow, by `value`"),
}
"""Entry -> what TorchDynamo traces instead of it, which is right, too, and how it differs."""

GRADIENTS = {
    "prod": "eager divides the result by each element where no element is zero, which is NaN for infinite ones, and "
    "gives zeros where several are, also beside NaN; here each element's gradient is what the others multiply to",
}
"""Entry -> why its gradients are not compared at special values."""

_NARROW = """
frexp nn.functional.triplet_margin_loss nn.functional.triplet_margin_with_distance_loss nn.functional.pairwise_distance
"""
INTERPRETED = dict.fromkeys(
    _NARROW.split(),
    "float32 within another type's computation overflows in eager execution; the interpreter computes in double",
) | {
    "nn.functional.gaussian_nll_loss": "its clamp without a gradient is only seen in graphs of TorchDynamo's",
    "linspace.tensor_overload": "integers of 19 digits come from steps in double, which eager rounds in another order",
}
"""Entry -> why it is not run in the interpreted stages; the compiled ones run it."""


def limit(op: Any, adds: bool) -> Limit:
    """What is allowed for an entry; `adds`: whether elements are added up, in the result or for a gradient."""
    name = label(op)
    ulps, epsilons = _ROUNDED.get(name, (ULPS, 0))
    result = Limit(ulps, _SUMMED.get(name, SUM), largest=True) if adds else Limit(ulps, epsilons)
    return dataclasses.replace(
        result, signs=name not in SIGNS, nonfinite=name in NONFINITE, gradients=name not in GRADIENTS
    )
