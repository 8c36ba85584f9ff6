"""Tensor: the type of an array: symbolic shape, element type, memory layout, bytes."""

from __future__ import annotations

import builtins
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy

from daceml_train.errors import Invalid

Dim: TypeAlias = Any
"""A size: a Python int, or a SymPy expression over symbols from `symbol` (SymPy has no type annotations)."""
Shape: TypeAlias = tuple[Dim, ...]


class DType(enum.Enum):
    """Element types: value is (short name in texts, bytes, C++ type, NumPy type of the same meaning)."""

    float32 = ("f32", 4, "float", "float32")
    float64 = ("f64", 8, "double", "float64")
    bfloat16 = ("bf16", 2, "__bf16", "float32")
    float16 = ("f16", 2, "_Float16", "float16")
    int64 = ("i64", 8, "int64_t", "int64")
    int32 = ("i32", 4, "int32_t", "int32")
    int16 = ("i16", 2, "int16_t", "int16")
    int8 = ("i8", 1, "int8_t", "int8")
    uint8 = ("u8", 1, "uint8_t", "uint8")
    bool = ("b1", 1, "bool", "bool")
    complex64 = ("c64", 8, "dace::complex64", "complex64")
    complex128 = ("c128", 16, "dace::complex128", "complex128")

    __hash__ = object.__hash__  # by identity: Enum's own hashes the name, in Python

    @property
    def short(self) -> str:
        """The name in graph texts, such as `f32`."""
        return self.value[0]

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return self._value_[1]  # `value` is a descriptor in Python

    @property
    def c(self) -> str:
        """The C++ type in generated kernels."""
        return self.value[2]

    @property
    def numpy(self) -> str:
        """The NumPy type in which the interpreter stores such values."""
        return self.value[3]

    @property
    def is_float(self) -> builtins.bool:  # plain `bool` is a member here
        """Whether values of this type can carry a gradient (complex ones included)."""
        return self.short[0] in "fc" or self is DType.bfloat16

    @property
    def is_complex(self) -> builtins.bool:
        """Whether values of this type are complex: PyTorch's operators compute with them, kernels do not."""
        return self.short[0] == "c"

    def wrapped(self, number: Any) -> Any:
        """A Python integer as elements of this type hold it: modulo 2^bits, as C++ converts. Other numbers as given."""
        if type(number) is not int or self.is_float or self is DType.bool:
            return number
        bits, signed = 8 * self.bytes, self.short[0] == "i"
        number &= (1 << bits) - 1
        return number - (1 << bits) if signed and number >> (bits - 1) else number

    @staticmethod
    def parse(short: str) -> DType:
        """The type named `short` in a graph text."""
        for dtype in DType:
            if dtype.short == short:
                return dtype
        raise Invalid(f"no element type is called {short!r}", advice=f"known: {', '.join(d.short for d in DType)}")


def symbol(name: str) -> sympy.Symbol:
    """The size symbol named `name`: a positive integer."""
    return sympy.Symbol(name, integer=True, positive=True)


def evaluate(size: Dim, values: Mapping[str, int]) -> int:
    """The size with numbers substituted for its symbols, looked up by name.

    The mapping for SymPy is built from the symbols that occur in the size: a symbol created from a bare name
    lacks the assumptions of `symbol`, equals none of them, and would replace nothing.
    """
    if isinstance(size, int):
        return size
    compiled = _compiled(size)
    if compiled is not None:
        return int(compiled(values))
    return int(size.xreplace({s: sympy.Integer(values[s.name]) for s in size.free_symbols}))


def evaluate_all(sizes: Sequence[sympy.Expr]) -> Callable[[Mapping[str, int]], list[int | None]]:
    """One Python function for the values of many sizes; it leaves None for each that only SymPy evaluates."""
    texts = ", ".join(str(_text(size)) for size in sizes)
    found: Callable[[Mapping[str, int]], list[int | None]] = eval(f"lambda values: [{texts}]")
    return found


@functools.lru_cache(maxsize=4096)
def _compiled(size: sympy.Expr) -> Callable[[Mapping[str, int]], int] | None:
    """A size as a Python function, a hundred times as fast as SymPy; None for one that only SymPy evaluates."""
    text = _text(size)
    if text is None:
        return None
    found: Callable[[Mapping[str, int]], int] = eval(f"lambda values: {text}")
    return found


@functools.lru_cache(maxsize=4096)
def _text(size: sympy.Expr) -> str | None:
    """A size in Python's integers: a polynomial, or one of floors, ceilings, remainders, maxima and minima of such."""
    if size.is_Integer:
        return f"({size})"
    if size.is_Symbol:
        return f"values[{size.name!r}]"
    if size.is_Pow:
        return f"{base}**{size.exp}" if size.exp.is_Integer and size.exp > 0 and (base := _text(size.base)) else None
    if isinstance(size, sympy.floor | sympy.ceiling):
        whole, divisor = sympy.fraction(sympy.together(size.args[0]))
        if not divisor.is_Integer or (text := _text(whole)) is None:
            return None
        return f"({text}//{divisor})" if isinstance(size, sympy.floor) else f"(-(-{text}//{divisor}))"
    form, between = next((found for kind, found in _FORMS.items() if isinstance(size, kind)), ("", ""))
    parts = [_text(part) for part in size.args]
    return None if not form or None in parts else form.format(between.join(map(str, parts)))


_FORMS = {
    sympy.Add: ("({})", " + "),
    sympy.Mul: ("({})", "*"),
    sympy.Max: ("max({})", ", "),
    sympy.Min: ("min({})", ", "),
    sympy.Mod: ("({})", " % "),
}
"""How each function of SymPy is written in Python, and what is between its arguments."""


def simplify(size: Dim) -> Dim:
    """The size as an int if it is one, else expanded so that equal sizes compare equal."""
    if isinstance(size, int):
        return size
    expanded = sympy.expand(size)
    if expanded.has(sympy.floor):
        expanded = sympy.expand(expanded.replace(sympy.floor, _floor))
    return int(expanded) if expanded.is_Integer else expanded


def _floor(argument: sympy.Expr) -> sympy.Expr:
    """`floor` with fewer nested floors: `floor((floor(u) + k) / n)` is `floor((u + k) / n)` for integers k, n."""
    for term in sympy.Add.make_args(argument):
        factor, inner = term.as_coeff_Mul()
        whole = isinstance(inner, sympy.floor) and factor.is_positive and factor.p == 1
        if whole and ((argument - term) * factor.q).is_integer:
            return _floor(sympy.expand(argument - term + factor * inner.args[0]))
    return sympy.floor(argument)


def product(sizes: Iterable[Dim]) -> Dim:
    """The product of sizes; 1 for none."""
    result: Dim = 1
    for size in sizes:
        result = result * size
    return simplify(result)


def hint(size: Dim) -> float:
    """An estimate of a size, for heuristics: every symbol counts as 64."""
    return float(size) if isinstance(size, int) else float(size.subs(dict.fromkeys(size.free_symbols, 64)))


def same(a: Dim, b: Dim) -> bool:
    """Whether two sizes are equal for all values of their symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(a == b) or simplify(a - b) == 0


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Whether two shapes are equal, size by size."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def broadcast(*shapes: Sequence[Dim]) -> Shape:
    """The shape to which `shapes` broadcast (NumPy's rule). Raises `Invalid` if they do not."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Dim] = []
    for position in range(rank):
        size: Dim = 1
        for shape in shapes:
            index = position - rank + len(shape)
            if index < 0 or same(shape[index], 1):
                continue
            if not same(size, 1) and not same(size, shape[index]):
                raise Invalid(f"shapes {', '.join(map(show_shape, shapes))} do not broadcast")
            size = shape[index]
        result.append(size)
    return tuple(result)


def show_shape(shape: Sequence[Dim]) -> str:
    """A shape as texts show it: `[8, s0, 64]`."""
    return "[" + ", ".join(str(s) for s in shape) + "]"


def contiguous_strides(shape: Sequence[Dim], order: Sequence[int] | None = None) -> tuple[Dim, ...]:
    """Strides in elements of a dense array with memory order `order`, outermost dimension first."""
    order = range(len(shape)) if order is None else order
    strides: list[Dim] = [1] * len(shape)
    step: Dim = 1
    for d in reversed(list(order)):
        strides[d] = step
        step = simplify(step * shape[d]) if not (isinstance(shape[d], int) and shape[d] == 0) else step
    return tuple(strides)


def channels_last(rank: int) -> tuple[int, ...]:
    """The memory order with the channels (the second dimension) innermost."""
    return (0, *range(2, rank), 1)


def same_memory(shape: Sequence[Dim], a: Sequence[int] | None, b: Sequence[int] | None) -> bool:
    """Whether two orders store every element at the same offset: dimensions of size 1 may be anywhere."""
    first, second = ([d for d in (order or range(len(shape))) if not same(shape[d], 1)] for order in (a, b))
    return first == second


@dataclass(frozen=True)
class Tensor:
    """An array's type: sizes, element type, and the order of its dimensions in memory (outermost first).

    `order` is None for row-major; channels-last of four dimensions is (0, 2, 3, 1). Arrays are dense.
    """

    shape: Shape
    dtype: DType = DType.float32
    order: tuple[int, ...] | None = None

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> Dim:
        """Number of elements."""
        return product(self.shape)

    @property
    def bytes(self) -> Dim:
        """Bytes of the array."""
        return simplify(self.size * self.dtype.bytes)

    @property
    def strides(self) -> tuple[Dim, ...]:
        """Strides in elements."""
        return contiguous_strides(self.shape, self.order)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """The size symbols that occur in the shape."""
        return {s for size in self.shape if not isinstance(size, int) for s in size.free_symbols}

    def __str__(self) -> str:
        order = "" if self.order is None else "@" + "".join(map(str, self.order))
        return f"{self.dtype.short}{show_shape(self.shape)}{order}"
