"""ATen's dropout, and dropout whose probability is an input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import guard_float

from daceml_train.frontends.torch.capture.rng_draws import mask_of
from daceml_train.frontends.torch.rules.translate import Translator, rule
from daceml_train.ops.operator import Value
from daceml_train.tensor import DType, Tensor


@rule("native_dropout.default")
def _dropout(t: Translator, x: Value, p: float, train: bool | None) -> tuple[Value, Value | None]:
    if not train or p == 0:
        return x, t.full(True, x.shape, DType.bool)
    if t.randomness == "eager":
        return _dropout_as_eager(t, x, p)
    stream = t.stream()
    y = t.emit("dropout", x, t.seed(), p=float(p), stream=stream)
    if len(t.node.users) == 1:
        return y, None  # nothing reads the mask
    threshold = math.ceil(p * 2**24) / 2**24
    drawn = t.emit("uniform", t.seed(), shape=x.shape, stream=stream, dtype=DType.float32)
    return y, drawn.compare("ge", threshold)


@rule("daceml_train.dropout.default")
def _dropout_given(t: Translator, x: Value, p: Any) -> Value:
    """Dropout whose probability may be an input."""
    if not isinstance(p, Value):
        argument = t.node.args[1]
        held = argument.meta["val"] if isinstance(argument, fx.Node) else argument
        constant = _burned_in(held)
        if t.randomness == "eager":
            return _dropout_as_eager(t, x, constant)[0]
        return t.emit("dropout", x, t.seed(), p=constant, stream=t.stream())
    if t.randomness == "eager":
        return _given_as_eager(t, x, p)
    return t.emit("dropout_given", x, t.seed(), p.cast(DType.float64), stream=t.stream())


def _burned_in(number: Any) -> float:
    """A number as a constant, with a guard if it is an input."""
    return guard_float(number) if isinstance(number, torch.SymFloat) else float(number)


def _dropout_as_eager(t: Translator, x: Value, p: float) -> tuple[Value, Value]:
    """As ATen does it: nothing is drawn where the result is known."""
    if p == 1 or 0 in x.shape:
        return x * 0.0, t.full(False, x.shape, DType.bool)
    operand = t.node.args[0]
    assert isinstance(operand, fx.Node)
    kept = t.drawn(mask_of(operand, 1 - p), Tensor(x.shape, x.dtype))
    return x * (kept / (1 - p)), kept.compare("ne", 0.0)


def _given_as_eager(t: Translator, x: Value, p: Value) -> Value:
    """The same with a probability that is an input, which the draw reads before the program runs."""
    if 0 in x.shape:
        return x * 0.0
    operand, held = t.node.args
    assert isinstance(operand, fx.Node) and isinstance(held, fx.Node)
    kept = t.drawn(mask_of(operand, t.outside(1 - held.meta["val"])), Tensor(x.shape, x.dtype))
    wide = x.dtype if x.dtype in (DType.float32, DType.float64) else DType.float32  # as a constant: unrounded
    return x * (kept.cast(wide) / (1.0 - p.cast(DType.float64)).cast(wide)).cast(x.dtype)
