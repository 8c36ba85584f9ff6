"""Scaled dot-product attention without the T x S matrix in memory (Dao et al., "FlashAttention", 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.operator import Array, Builder, Operator, Value, make
from daceml_train.ops.reduction import wide, wide_type
from daceml_train.tensor import Dim, DType, Tensor, broadcast, same, same_shape, show_shape, simplify

TOKEN_MAJOR = (0, 2, 1, 3)
"""The memory order of results: [B, T, H, E], which models join to [B, T, H * E]; PyTorch's kernels write in it."""


@dataclass(frozen=True, kw_only=True)
class ScaledDotProduct(Operator):
    """Common base of attention and its gradient. `scale` None is 1 / sqrt(E); causal: query t sees keys 0..t."""

    vendor = True
    causal: bool = False
    scale: float | None = None

    def factor(self, q: Tensor) -> float:
        """The scale as a number."""
        if self.scale is not None:
            return self.scale
        if not isinstance(q.shape[-1], int):
            raise Unsupported(f"{self.label} without a scale on the symbolic head size {q.shape[-1]}")
        return 1 / math.sqrt(q.shape[-1])

    def check(self, q: Tensor, k: Tensor, v: Tensor, mask: tuple[Tensor, ...]) -> None:
        """Raise `Invalid` unless q is [B, H, T, E], k and v [B, H, S, E], and the mask broadcasts to [B, H, T, S]."""
        fits = q.rank == k.rank == 4 and same_shape(k.shape, v.shape) and q.dtype is k.dtype is v.dtype
        if not fits or not all(same(q.shape[d], k.shape[d]) for d in (0, 1, 3)) or 0 in (*q.shape[1:], *k.shape[1:]):
            raise Invalid(f"{self.label} expects q [B, H, T, E], k and v [B, H, S, E], not empty, given {q}, {k}, {v}")
        scores = (*q.shape[:3], k.shape[2])
        if len(mask) > 1 or any(m.dtype is not q.dtype or m.rank not in (2, 4) for m in mask):
            given = ", ".join(map(str, mask))
            raise Invalid(
                f"{self.label} expects at most one mask of rank 2 or 4 and type {q.dtype.short}, given {given}"
            )
        if any(not same_shape(broadcast(m.shape, scores), scores) for m in mask):
            raise Invalid(f"{self.label} expects a mask that broadcasts to {show_shape(scores)}, given {mask[0]}")

    def scores(self, q: Array, k: Array, mask: tuple[Array, ...]) -> Array:
        """`scale * q k^T + mask`, -inf where a key is masked out."""
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        s = scale * (q @ np.swapaxes(k, -1, -2)) + (mask[0] if mask else 0.0)
        return np.where(np.tri(*s.shape[-2:]) > 0, s, -np.inf) if self.causal else s

    def flops(self, *operands: Tensor) -> Dim:
        q, k = (operands[1], operands[2]) if self.name == "attention_grad" else operands[:2]
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        products = 5 if self.name == "attention_grad" else 2
        return simplify(pairs * (2 * products * q.shape[3] + 14))


@dataclass(frozen=True, kw_only=True)
class Attention(ScaledDotProduct):
    """`softmax(scale * q k^T + mask) v`: q [B, H, T, E], k, v [B, H, S, E], an optional mask [T, S] or [B, H, T, S].

    Sizes of the mask may be 1. Results: y like q, with the heads of a token together, and logsumexp [B, H, T] of the
    scores, float32 for 16-bit q. A row without visible keys produces zeros, and logsumexp 0.
    """

    name = "attention"
    operands = ("q", "k", "v", "*mask")
    results = ("y", "logsumexp")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *mask = operands
        self.check(q, k, v, tuple(mask))
        return Tensor(q.shape, q.dtype, TOKEN_MAJOR), Tensor(q.shape[:3], wide_type(q.dtype), (0, 2, 1))

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        q, k, v, *mask = operands
        s = self.scores(q, k, tuple(mask))
        top = s.max(-1, keepdims=True)
        blind = np.isneginf(top)
        e = np.exp(s - np.where(blind, 0, top))
        total = np.where(blind, 1, e.sum(-1, keepdims=True))
        return (e / total) @ v, np.where(blind, 0, np.log(total) + top)[..., 0]

    def vjp(
        self,
        b: Builder,
        q: Value,
        k: Value,
        v: Value,
        mask: tuple[Value, ...],
        y: Value,
        logsumexp: Value,
        grad_y: Value | None,
        grad_logsumexp: Value | None,
    ) -> tuple[Value, Value, Value, tuple[Value, ...]]:
        if grad_y is None or grad_logsumexp is not None:
            raise Unsupported("the derivative of attention's logsumexp")
        op = AttentionGrad(causal=self.causal, scale=self.scale)
        gq, gk, gv = b.emit(op, grad_y, q, k, v, y, logsumexp, *mask)
        return gq, gk, gv, tuple(self.mask_gradient(b, q, k, v, m, y, logsumexp, grad_y) for m in mask)

    def mask_gradient(
        self, b: Builder, q: Value, k: Value, v: Value, m: Value, y: Value, logsumexp: Value, g: Value
    ) -> Value:
        """`p (g v^T - rowsum(g y))` with p the softmax: a T x S matrix, which is dead code if it has no reader."""
        flat = {
            name: t.view((simplify(t.shape[0] * t.shape[1]), *t.shape[2:]))
            for name, t in zip("qkvg", (q, k, v, g), strict=True)
        }
        shape = (*q.shape[:3], k.shape[2])
        s = wide(flat["q"] @ flat["k"].T).view(shape) * self.factor(q.tensor) + wide(m)
        p = (s - logsumexp.view((*q.shape[:3], 1))).unary("exp")
        if self.causal:
            row, column = (_index(b, shape[d], d - 2) for d in (2, 3))
            p = column.compare("le", row).where(p, 0.0)
        change = wide(flat["g"] @ flat["v"].T).view(shape) - (wide(g) * wide(y)).sum((3,), keepdim=True)
        return (p * change).cast(m.dtype)


def _index(b: Builder, size: Dim, dim: int) -> Value:
    """0, 1, ... as a column (dim 0) or a row (dim 1)."""
    (index,) = b.emit(make("iota", shape=(size, 1) if dim == 0 else (1, size), dim=dim, dtype=DType.int32))
    return index


@dataclass(frozen=True, kw_only=True)
class AttentionGrad(ScaledDotProduct):
    """The gradients of `attention` for q, k and v, from the cotangent of y. It has no derivative of its own."""

    name = "attention_grad"
    operands = ("grad", "q", "k", "v", "y", "logsumexp", "*mask")
    results = ("gq", "gk", "gv")

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        grad, q, k, v, _, logsumexp, *mask = operands
        self.check(q, k, v, tuple(mask))
        if not same_shape(grad.shape, q.shape) or not same_shape(logsumexp.shape, q.shape[:3]):
            raise Invalid(f"attention_grad expects a cotangent like {q}, given {grad}, logsumexp {logsumexp}")
        gq, gk, gv = (Tensor(t.shape, t.dtype, TOKEN_MAJOR) for t in (q, k, v))
        return gq, gk, gv

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        grad, q, k, v, y, logsumexp, *mask = operands
        p = np.exp(self.scores(q, k, tuple(mask)) - logsumexp[..., None])
        change = p * (grad @ np.swapaxes(v, -1, -2) - (grad * y).sum(-1, keepdims=True))
        scale = 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale
        return scale * change @ k, scale * np.swapaxes(change, -1, -2) @ q, np.swapaxes(p, -1, -2) @ grad
