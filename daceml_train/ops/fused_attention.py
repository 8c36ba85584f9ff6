"""Attention as users write it, with masks and dropout, without the T x S matrix in memory.

It differs from `attention` in rows without visible keys, which produce NaN, as the softmax of such a row does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.attention import TOKEN_MAJOR, ScaledDotProduct
from daceml_train.ops.operator import Array, Builder, Value
from daceml_train.ops.random import DropoutGiven, Uniform
from daceml_train.tensor import Dim, DType, Tensor, broadcast, same_shape, show_shape, simplify


@dataclass(frozen=True, kw_only=True)
class Masked(ScaledDotProduct):
    """Common base of the operator and its gradient.

    Scores are `scale * q k^T`, to which masks are applied in order, each of which broadcasts to [B, H, T, S]: a mask
    whose entry in `fills` is None is added; otherwise it is boolean, and `fill` replaces the scores where it is true.
    With `p`, weights are dropped as by `dropout` with this stream; the seed then precedes the masks. With `given`, so
    do the seed and a 0-d f64 probability, as of `dropout_given`.
    """

    scale: float
    fills: tuple[float | None, ...] = ()
    p: float = 0.0
    stream: int = 0
    given: bool = False

    @property
    def before(self) -> int:
        """The number of operands between v and the masks: seed and probability."""
        return 2 if self.given else 1 if self.p else 0

    def check_rest(self, q: Tensor, k: Tensor, v: Tensor, rest: Sequence[Tensor]) -> None:
        """Raise `Invalid` unless q, k, v and the masks fit."""
        self.check(q, k, v, ())
        masks = rest[self.before :]
        if q.dtype not in (DType.float32, DType.float64) or self.causal or not 0 <= self.p < 1:
            raise Invalid(f"{self.label} expects f32 or f64, p below 1, and causality as a mask, given {q}, {self}")
        expected = (Tensor((), DType.int64), Tensor((), DType.float64))[: self.before]
        seeded = tuple(rest[: self.before]) == expected and not (self.given and self.p)
        if len(masks) != len(self.fills) or not seeded:
            seed = ("", "a seed and ", "a seed, a probability and ")[self.before]
            raise Invalid(f"{self.label} expects {seed}{len(self.fills)} masks, given {rest}")
        scores = (*q.shape[:3], k.shape[2])
        for mask, fill in zip(masks, self.fills, strict=True):
            fits = mask.rank <= 4 and same_shape(broadcast(mask.shape, scores), scores)
            if not fits or mask.dtype is not (q.dtype if fill is None else DType.bool):
                raise Invalid(f"{self.label} expects a mask that broadcasts to {show_shape(scores)}, given {mask}")

    def weights(self, q: Array, k: Array, rest: Sequence[Array]) -> tuple[Array, Array, Array]:
        """Softmax, its logsumexp, and the factors of dropout."""
        s = self.scale * (q @ np.swapaxes(k, -1, -2))
        for mask, fill in zip(rest[self.before :], self.fills, strict=True):
            s = s + mask if fill is None else np.where(mask, fill, s)
        top = s.max(-1, keepdims=True)
        top = np.where(np.isneginf(top), 0, top)
        with np.errstate(divide="ignore", invalid="ignore"):
            e = np.exp(s - top)
            total = e.sum(-1, keepdims=True)
            y, level = e / total, (np.log(total) + top)[..., 0]
        if not self.before:
            return y, level, np.ones(())
        (drawn,) = Uniform(s.shape, self.stream).evaluate(rest[0])
        p = float(rest[1]) if self.given else self.p
        return y, level, np.where(drawn >= threshold(p), 1 / (1 - p), 0.0)


def threshold(p: float) -> float:
    """The least number that is kept, as in `dropout`: exact in float32."""
    return math.ceil(p * 2**24) / 2**24


@dataclass(frozen=True, kw_only=True)
class FusedAttention(Masked):
    """`dropout(softmax(masked scores)) v`: q [B, H, T, E], k, v [B, H, S, E]; results y like q, logsumexp [B, H, T]."""

    name = "fused_attention"
    operands = ("q", "k", "v", "*rest")
    results = ("y", "logsumexp")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *rest = operands
        self.check_rest(q, k, v, rest)
        return Tensor(q.shape, q.dtype, TOKEN_MAJOR), Tensor(q.shape[:3], q.dtype)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        q, k, v, *rest = operands
        weights, level, kept = self.weights(q, k, rest)
        return (weights * kept) @ v, level

    def vjp(
        self,
        b: Builder,
        q: Value,
        k: Value,
        v: Value,
        rest: tuple[Value, ...],
        y: Value,
        logsumexp: Value,
        grad_y: Value | None,
        grad_logsumexp: Value | None,
    ) -> tuple[Value | None, ...]:
        if grad_y is None or grad_logsumexp is not None:
            raise Unsupported("the derivative of attention's logsumexp")
        op = FusedAttentionGrad(scale=self.scale, fills=self.fills, p=self.p, stream=self.stream, given=self.given)
        gq, gk, gv = b.emit(op, grad_y, q, k, v, y, logsumexp, *rest)
        masks: list[Value | None] = [None] * self.before
        if any(fill is None for fill in self.fills):
            change = self.score_gradient(b, q, k, v, rest, y, logsumexp, grad_y)
            seen = change
            for mask, fill in reversed(list(zip(rest[self.before :], self.fills, strict=True))):
                masks.insert(self.before, seen if fill is None else None)
                seen = seen if fill is None else mask.where(0.0, seen)
        else:
            masks += [None] * len(self.fills)
        return gq, gk, gv, tuple(masks)  # type: ignore[return-value]

    def score_gradient(
        self, b: Builder, q: Value, k: Value, v: Value, rest: tuple[Value, ...], y: Value, logsumexp: Value, g: Value
    ) -> Value:
        """The cotangent of the masked scores, [B, H, T, S]; it is dead code if no mask needs it."""
        flat = {
            name: t.view((simplify(t.shape[0] * t.shape[1]), *t.shape[2:]))
            for name, t in zip("qkvg", (q, k, v, g), strict=True)
        }
        shape = (*q.shape[:3], k.shape[2])
        s = (flat["q"] @ flat["k"].T).view(shape) * self.scale
        for mask, fill in zip(rest[self.before :], self.fills, strict=True):
            s = s + mask if fill is None else mask.where(fill, s)
        weights = (s - logsumexp.view((*q.shape[:3], 1))).unary("exp")
        change = (flat["g"] @ flat["v"].T).view(shape)
        if self.given:
            change = change.apply(DropoutGiven(self.stream), rest[0], rest[1])
        elif self.p:
            keep = rest[0].apply(Uniform(shape, self.stream)).compare("ge", threshold(self.p))
            change = keep.where(change * (1 / (1 - self.p)), 0.0)
        return weights * (change - (g * y).sum((3,), keepdim=True))

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(_pairs(*operands[:2]) * (4 * operands[0].shape[3] + 14 + 45 * bool(self.before)))


@dataclass(frozen=True, kw_only=True)
class FusedAttentionGrad(Masked):
    """The gradients of `fused_attention` for q, k and v, from the cotangent of y. It has no derivative of its own."""

    name = "fused_attention_grad"
    operands = ("grad", "q", "k", "v", "y", "logsumexp", "*rest")
    results = ("gq", "gk", "gv")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grad, q, k, v, _, logsumexp, *rest = operands
        self.check_rest(q, k, v, rest)
        if not same_shape(grad.shape, q.shape) or not same_shape(logsumexp.shape, q.shape[:3]):
            raise Invalid(f"{self.label} expects a cotangent like {q}, given {grad}, logsumexp {logsumexp}")
        gq, gk, gv = (Tensor(t.shape, t.dtype, TOKEN_MAJOR) for t in (q, k, v))
        return gq, gk, gv

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        grad, q, k, v, y, _, *rest = operands
        weights, _, kept = self.weights(q, k, rest)
        back = grad @ np.swapaxes(v, -1, -2) * kept
        change = self.scale * weights * (back - (grad * y).sum(-1, keepdims=True))
        for mask, fill in zip(rest[self.before :], self.fills, strict=True):
            change = change if fill is None else np.where(mask, 0, change)  # the fill is not a score
        return change @ k, np.swapaxes(change, -1, -2) @ q, np.swapaxes(weights * kept, -1, -2) @ grad

    def flops(self, *operands: Tensor) -> Dim:
        return simplify(_pairs(*operands[1:3]) * (10 * operands[1].shape[3] + 14 + 45 * bool(self.before)))


def _pairs(q: Tensor, k: Tensor) -> Dim:
    return simplify(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
