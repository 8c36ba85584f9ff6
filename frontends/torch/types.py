"""PyTorch's types in the graph's: element types, symbolic sizes, memory order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch.utils._sympy import functions as torch_sympy

from daceml_train.errors import Unsupported
from daceml_train.tensor import Dim, DType, Shape, Tensor, contiguous_strides, hint, same, simplify, symbol

DTYPES: dict[torch.dtype, DType] = {getattr(torch, dtype.name): dtype for dtype in DType}
TORCH_DTYPES: dict[DType, torch.dtype] = {ours: theirs for theirs, ours in DTYPES.items()}


def element_type(dtype: torch.dtype) -> DType:
    """The graph's element type. Raises `Unsupported` for a type without an equivalent."""
    if dtype not in DTYPES:
        raise Unsupported(f"the element type {dtype}", advice=f"known: {', '.join(d.name for d in DType)}")
    return DTYPES[dtype]


@contextlib.contextmanager
def determined(symbols: Iterable[str]) -> Iterator[None]:
    """Admit these sizes, which depend on data: the shapes of operands determine them."""
    token = _determined.set(frozenset(symbols))
    try:
        yield
    finally:
        _determined.reset(token)


def some_determined() -> bool:
    """Whether sizes that depend on data are admitted."""
    return bool(_determined.get())


_determined: ContextVar[frozenset[str]] = ContextVar("determined", default=frozenset())


def size(value: Any) -> Dim:
    """A size as an int or an expression over the graph's symbols. Raises `Unsupported` for one that depends on data."""
    if isinstance(value, torch.SymInt):
        return expression(value.node.shape_env.replace(value.node.expr))
    return int(value)


def sizes(values: Sequence[Any]) -> Shape:
    """Sizes of a shape, see `size`."""
    return tuple(size(v) for v in values)


_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "CleanDiv": lambda a, b: a / b,
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "Mod": lambda a, b: a - b * sympy.floor(a / b),
    "PythonMod": lambda a, b: a - b * sympy.floor(a / b),
    "Max": sympy.Max,
    "Min": sympy.Min,
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "ToFloat": lambda a: a,
    "FloorToInt": sympy.floor,
    "CeilToInt": sympy.ceiling,
    "TruncToInt": lambda a: sympy.floor(a),
    "PowByNatural": lambda a, b: a**b,
    "FloatPow": lambda a, b: a**b,
    "OpaqueUnaryFn_sqrt": sympy.sqrt,
}
"""PyTorch's integer functions (of non-negative sizes) in SymPy's own."""


def expression(value: Any) -> Dim:
    """PyTorch's size expression over the graph's symbols."""
    value = sympy.sympify(value)
    if value.is_Symbol:
        if value.name[0] in "uz" and value.name not in _determined.get():
            raise Unsupported(f"a size or number that depends on data ({value.name})")
        return symbol(value.name)
    if not value.args:
        return int(value) if value.is_Integer else value
    operands = [sympy.sympify(expression(a)) for a in value.args]
    name = type(value).__name__
    if name in _FUNCTIONS:
        return simplify(_FUNCTIONS[name](*operands))
    if isinstance(value, sympy.Add | sympy.Mul | sympy.Pow):
        return simplify(value.func(*operands))
    if getattr(torch_sympy, name, None) is not None:
        raise Unsupported(f"a size computed by {name} ({value})")
    return simplify(value.func(*operands))


def tensor(example: torch.Tensor, laid_out: bool = False) -> Tensor:
    """The type of an example; with `laid_out` also its memory order, if it is dense."""
    shape = sizes(example.shape)
    order = order_of(example) if laid_out else None
    return Tensor(shape, element_type(example.dtype), order or None)


def order_of(example: torch.Tensor) -> tuple[int, ...] | None:
    """The memory order of a dense tensor's dimensions, outermost first; () for row-major, None if not dense."""
    shape, strides = sizes(example.shape), sizes(example.stride())

    def follows(order: Sequence[int]) -> bool:
        dense = contiguous_strides(shape, order)
        return all(same(n, 1) or same(a, b) for n, a, b in zip(shape, strides, dense, strict=True))

    if any(n == 0 for n in shape) or follows(range(len(shape))):
        return ()
    hints = [_hint(s) for s in example.stride()]
    order = tuple(sorted(range(len(shape)), key=lambda d: -hints[d]))
    return order if follows(order) else None


def _hint(value: Any) -> int:
    if not isinstance(value, torch.SymInt):
        return int(value)
    return int(value.node.hint if value.node.has_hint() else hint(size(value)))
