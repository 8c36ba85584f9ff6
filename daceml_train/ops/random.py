"""Random numbers as a function of (seed, stream, element index): recomputed in the backward pass, never stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Builder, Operator, Value
from daceml_train.ops.reduction import require_float
from daceml_train.tensor import Dim, DType, Shape, Tensor, simplify

MULTIPLIER, WEYL, ROUNDS = 0xD256D193, 0x9E3779B9, 10
"""Constants of Philox2x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011)."""
_MASK = (1 << 64) - 1
BLOCK = 1 << 14
"""Indices whose rounds are computed together: their words stay in the cache."""


def key(seed: int, stream: int) -> tuple[int, int]:
    """(key, offset), the low and high 32 bits of SplitMix64's finaliser on `seed + golden * (stream + 1)`."""
    z = (seed + 0x9E3779B97F4A7C15 * (stream + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z & 0xFFFFFFFF, z >> 32


def philox(index: Array, seed: int, stream: int) -> tuple[Array, Array]:
    """Two 32-bit words per index: Philox2x32-10 with the stream's key on the counter (low, high xor offset)."""
    k, offset = key(seed, stream)
    flat = np.ravel(index).astype(np.uint64)
    words = [np.empty_like(flat), np.empty_like(flat)]
    for start in range(0, flat.size, BLOCK):
        block = slice(start, start + BLOCK)
        words[0][block], words[1][block] = _rounds(flat[block], k, offset)
    return words[0].reshape(index.shape), words[1].reshape(index.shape)


def _rounds(index: Array, k: int, offset: int) -> tuple[Array, Array]:
    low, high = index & np.uint64(0xFFFFFFFF), (index >> np.uint64(32)) ^ np.uint64(offset)
    for _ in range(ROUNDS):
        wide = low * np.uint64(MULTIPLIER)
        low, high = (wide >> np.uint64(32)) ^ np.uint64(k) ^ high, wide & np.uint64(0xFFFFFFFF)
        k = (k + WEYL) & 0xFFFFFFFF
    return low, high


@dataclass(frozen=True)
class Uniform(Operator):
    """Numbers in [0, 1), a function of the 0-d int64 `seed`, of `stream`, and of the row-major element index.

    float32: `(low >> 8) * 2**-24`; float64: `((low >> 5) * 2**26 + (high >> 6)) * 2**-53`, with the words of `philox`.
    Integer operations count as flops.
    """

    name = "uniform"
    operands = ("seed",)
    zero_gradient = True
    shape: Shape
    stream: int = 0
    dtype: DType = DType.float32

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        _check_seed("uniform", operands[0])
        if self.dtype not in (DType.float32, DType.float64):
            raise Invalid(f"uniform produces f32 or f64, not {self.dtype.short}; cast the result")
        return (Tensor(self.shape, self.dtype),)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        shape = tuple(int(s) for s in self.shape)
        low, high = philox(np.arange(math.prod(shape), dtype=np.uint64), int(operands[0]), self.stream)
        if self.dtype is DType.float32:
            u = (low >> np.uint64(8)).astype(np.float64) * 2.0**-24
        else:
            u = ((low >> np.uint64(5)) * np.uint64(1 << 26) + (high >> np.uint64(6))).astype(np.float64) * 2.0**-53
        return (u.reshape(shape),)

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((4 * ROUNDS + 2) * self.infer(*operands)[0].size)


def _check_seed(label: str, seed: Tensor) -> None:
    if seed.rank or seed.dtype is not DType.int64:
        raise Invalid(f"{label} expects a 0-d i64 seed, given {seed}")


@dataclass(frozen=True)
class Dropout(Operator):
    """`x / (1 - p)` where `uniform >= p`, else 0. The gradient is dropout of the cotangent with the same seed."""

    name = "dropout"
    operands = ("x", "seed")
    p: float = 0.5
    stream: int = 0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, seed = operands
        require_float(x, "dropout")
        _check_seed("dropout", seed)
        if not 0 <= self.p <= 1:
            raise Invalid(f"dropout expects a probability, given {self.p}")
        return (x,)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        x, seed = operands
        threshold = math.ceil(self.p * 2**24) / 2**24  # exact in float32, and equivalent: u is a multiple of 2**-24
        keep = seed.apply(Uniform(x.shape, self.stream)).compare("ge", threshold)
        return (keep.where(x * (1 / (1 - self.p) if self.p < 1 else 0.0), 0.0),)

    def vjp(self, b: Builder, seed: Value, grad_y: Value) -> tuple[Value, None]:
        return grad_y.apply(self, seed), None

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((4 * ROUNDS + 5) * operands[0].size)


@dataclass(frozen=True)
class DropoutGiven(Operator):
    """`dropout` whose probability is an operand: a 0-d float64 number, above 0 and below 1."""

    name = "dropout_given"
    operands = ("x", "seed", "p")
    stream: int = 0

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        x, seed, p = operands
        require_float(x, "dropout_given")
        _check_seed("dropout_given", seed)
        if p != Tensor((), DType.float64):
            raise Invalid(f"dropout_given expects a 0-d f64 probability, given {p}")
        return (x,)

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        x, seed, p = operands
        threshold = ((p * 2.0**24).unary("ceil") * 2.0**-24).cast(DType.float32)  # exact, see `dropout`
        keep = seed.apply(Uniform(x.shape, self.stream))._binary("ge", threshold)
        wide = x.dtype if x.dtype in (DType.float32, DType.float64) else DType.float32  # as a constant: unrounded
        return (keep.where((x.cast(wide) * (1.0 / (1.0 - p)).cast(wide)).cast(x.dtype), 0.0),)

    def vjp(self, b: Builder, seed: Value, p: Value, grad_y: Value) -> tuple[Value, None, None]:
        return grad_y.apply(self, seed, p), None, None

    def flops(self, *operands: Tensor) -> Dim:
        return simplify((4 * ROUNDS + 5) * operands[0].size)
