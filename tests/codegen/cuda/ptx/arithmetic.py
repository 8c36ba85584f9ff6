"""What PTX instructions compute, on arrays with one element per thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.codegen.cuda.ptx.memory import Fault
from tests.codegen.cuda.ptx.program import TYPES

Array = np.ndarray
WIDER = {"s16": np.int32, "u16": np.uint32, "s32": np.int64, "u32": np.uint64}
ROUNDED: dict[str, Callable[[Array], Array]] = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}


def _float(x: Array) -> bool:
    return x.dtype.kind == "f"


def _minimum(x: Array, y: Array) -> Array:
    return np.fmin(x, y) if _float(x) else np.minimum(x, y)


def _maximum(x: Array, y: Array) -> Array:
    return np.fmax(x, y) if _float(x) else np.maximum(x, y)


def _quotient(x: Array, y: Array) -> Array:
    if _float(x):
        return x / y
    y = np.where(y == 0, 1, y).astype(y.dtype)
    if x.dtype.kind == "u":
        return x // y
    magnitude = np.abs(x.astype(np.int64)) // np.abs(y.astype(np.int64))
    return np.where((x < 0) != (y < 0), -magnitude, magnitude).astype(x.dtype)


def _left(x: Array, count: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    return np.where(count >= bits, 0, x << np.minimum(count, bits - 1).astype(x.dtype)).astype(x.dtype)


def _right(x: Array, count: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    shifted = x >> np.minimum(count, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(count >= bits, 0, shifted).astype(x.dtype)


UNARY: dict[str, Callable[[Array], Array]] = {
    "rcp": lambda x: x.dtype.type(1) / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "neg": lambda x: -x if _float(x) else np.zeros_like(x) - x,
    "abs": np.abs,
    "not": np.invert,
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _quotient,
    "rem": lambda x, y: np.fmod(x, np.where(y == 0, 1, y).astype(y.dtype)),
    "min": _minimum,
    "max": _maximum,
    "copysign": lambda sign, x: np.copysign(x, sign),
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": _left,
    "shr": _right,
}


def fused(x: Array, y: Array, z: Array, parts: Sequence[str]) -> Array:
    """x y + z, rounded once."""
    if x.dtype == np.float64:
        return (x.astype(np.longdouble) * y + z).astype(np.float64)
    exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
    result = exact.astype(np.float32)
    if "rm" in parts:
        result = np.where(result.astype(np.float64) > exact, np.nextafter(result, np.float32(-np.inf)), result)
    return result


def high(x: Array, y: Array) -> Array:
    """The upper half of a product."""
    if x.dtype.itemsize == 4:
        wide = np.int64 if x.dtype.kind == "i" else np.uint64
        return ((x.astype(wide) * y.astype(wide)) >> wide(32)).astype(x.dtype)
    products = [(int(a) * int(b)) >> 64 & (1 << 64) - 1 for a, b in zip(x, y, strict=True)]
    return np.array(products, np.uint64).view(x.dtype)


def compared(how: str, x: Array, y: Array) -> Array:
    """`setp`."""
    if not _float(x):
        how = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how)
        return ORDERS[how](x, y)
    unordered = np.isnan(x) | np.isnan(y)
    if how in ("nan", "num"):
        return unordered if how == "nan" else ~unordered
    found = ORDERS[how[:2]](x, y)
    return found | unordered if len(how) == 3 else found & ~unordered


ORDERS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def converted(parts: Sequence[str], x: Array) -> Array:
    """`cvt`; 16-bit floats are bit patterns."""
    *how, to, source = parts
    if source == "f16":
        x = x.view(np.float16).astype(np.float32)
    elif source == "bf16":
        x = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if to == "bf16":
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)
    if to == "f16":
        return x.astype(np.float16).view(np.uint16)
    wanted = TYPES[to]
    if _float(x):
        for mode in how:
            x = ROUNDED[mode](x) if mode in ROUNDED else x
        if "sat" in how:
            x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype)
        if wanted.kind in "iu":
            limits = np.iinfo(wanted)
            x = np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), float(limits.min), float(limits.max)))
    return x.astype(wanted)


def inserted(x: Array, into: Array, position: Array, length: Array) -> Array:
    """`bfi`."""
    mask = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)) << position.astype(np.uint64)
    moved = x.astype(np.uint64) << position.astype(np.uint64)
    return (into.astype(np.uint64) & ~mask | moved & mask).astype(x.dtype)


def function(text: str, arguments: Sequence[Array]) -> Array:
    """A call of one of CUDA's functions that are not inlined."""
    if "accurate_pow" in text:
        return np.power(np.abs(arguments[0]), arguments[1])
    raise Fault(f"an unknown function: {text}")
