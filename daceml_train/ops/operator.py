"""Operator: the single definition of an operator's properties, and the Builder through which it emits others.

An operator is a frozen dataclass whose fields are its attributes. Its methods are in the order signature, shapes,
lowering, VJP, cost. `Value` is a tensor in a graph under construction; arithmetic on it emits elementwise operators.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import sympy

from daceml_train.errors import Duplicate, Invalid, nearest
from daceml_train.plugins import OPERATORS, load_plugins
from daceml_train.tensor import Dim, DType, Shape, Tensor

Array = np.ndarray[Any, Any]


class Computed(NamedTuple):
    """An operator of the user's model that a node computes all or a part of. It serves names only."""

    module: str
    operator: str
    phase: str = "forward"
    """`forward`, `backward`, or `update`, whose operator names the parameter, too."""


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: the user's module path (`encoder.layer.3`) and source line (`model.py:12`).

    `computes` are operators that are not to be read off the node itself, because it is a piece of one, its derivative,
    or several in one kernel. It is no part of an origin's identity, and graphs' texts leave it out.
    """

    module: str = ""
    source: str = ""
    computes: tuple[Computed, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return " ".join(part for part in (self.module, self.source) if part)

    def of(self, operator: str, phase: str = "forward") -> Origin:
        """The origin of a piece of `operator`, unless it is known to be a piece of another one."""
        return self if self.computes else replace(self, computes=(Computed(self.module, operator, phase),))


class Builder(Protocol):
    """The interface through which an operator's lowering and VJP emit other operators."""

    def emit(self, op: Operator, *operands: Value) -> tuple[Value, ...]:
        """Append `op` applied to `operands`; returns its results."""
        ...


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor in a graph under construction: its builder, its name there, and its type."""

    builder: Builder
    name: str
    tensor: Tensor

    @property
    def shape(self) -> Shape:
        """Sizes of the tensor."""
        return self.tensor.shape

    @property
    def dtype(self) -> DType:
        """Element type of the tensor."""
        return self.tensor.dtype

    def apply(self, op: Operator, *others: Value) -> Value:
        """The only result of `op` on this value and `others`."""
        (result,) = self.builder.emit(op, self, *others)
        return result

    def _binary(self, kind: str, other: Value | float, swap: bool = False) -> Value:
        b = other if isinstance(other, Value) else self.constant(other)
        first, second = (b, self) if swap else (self, b)
        (result,) = self.builder.emit(make(kind), first, second)
        return result

    def constant(self, value: float) -> Value:
        """A 0-d constant of this value's element type."""
        (result,) = self.builder.emit(make("full", value=value, shape=(), dtype=self.dtype))
        return result

    def __add__(self, other: Value | float) -> Value:
        return self._binary("add", other)

    __radd__ = __add__

    def __sub__(self, other: Value | float) -> Value:
        return self._binary("sub", other)

    def __rsub__(self, other: float) -> Value:
        return self._binary("sub", other, swap=True)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("mul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary("div", other)

    def __rtruediv__(self, other: float) -> Value:
        return self._binary("div", other, swap=True)

    def __neg__(self) -> Value:
        return self.unary("neg")

    def __matmul__(self, other: Value) -> Value:
        return self.apply(make("matmul"), other)

    def unary(self, kind: str) -> Value:
        """The elementwise operator `kind` of this value, such as `exp`."""
        return self.apply(make(kind))

    def compare(self, kind: str, other: Value | float) -> Value:
        """`eq`, `ne`, `lt`, `le`, `gt` or `ge` with another value: a boolean tensor."""
        return self._binary(kind, other)

    def where(self, yes: Value | float, no: Value | float) -> Value:
        """`yes` where this boolean value is true, else `no`; at least one of them is a Value."""
        like = yes if isinstance(yes, Value) else no
        assert isinstance(like, Value)
        a = yes if isinstance(yes, Value) else like.constant(yes)
        b = no if isinstance(no, Value) else like.constant(no)
        return self.apply(make("where"), a, b)

    def cast(self, dtype: DType) -> Value:
        """This value in another element type; itself if it already has that type."""
        return self if dtype is self.dtype else self.apply(make("cast", dtype=dtype))

    def reduce(self, kind: str, dims: Sequence[int], keepdim: bool = False) -> Value:
        """`sum`, `max`, `min` or `prod` over `dims`."""
        return self.apply(make("reduce", kind=kind, dims=tuple(dims), keepdim=keepdim))

    def sum(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        """Sum over `dims`."""
        return self.reduce("sum", dims, keepdim)

    def mean(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        """Mean over `dims`."""
        return self.apply(make("mean", dims=tuple(dims), keepdim=keepdim))

    def view(self, shape: Sequence[Dim]) -> Value:
        """The same elements in row-major order under another shape; itself if the shape is the same."""
        return self if tuple(shape) == self.shape else self.apply(make("view", shape=tuple(shape)))

    def permute(self, dims: Sequence[int]) -> Value:
        """Dimensions reordered: result dimension i is this value's dimension `dims[i]`."""
        return self if tuple(dims) == tuple(range(len(dims))) else self.apply(make("permute", dims=tuple(dims)))

    def expand(self, shape: Sequence[Dim]) -> Value:
        """Broadcast to `shape`."""
        return self if tuple(shape) == self.shape else self.apply(make("expand", shape=tuple(shape)))

    def slice(self, dim: int, start: Dim, stop: Dim, step: int = 1) -> Value:
        """Elements `start:stop:step` along `dim`."""
        return self.apply(make("slice", dim=dim, start=start, stop=stop, step=step))

    @property
    def T(self) -> Value:
        """The last two dimensions exchanged."""
        rank = len(self.shape)
        return self.permute((*range(rank - 2), rank - 1, rank - 2))


REGISTRY: dict[str, Callable[..., Operator]] = {}
"""Operator name in texts -> constructor taking the attributes as keywords."""


def register(name: str, constructor: Callable[..., Operator]) -> None:
    """Register `name`. A duplicate raises an error that names both owners; a redefined class replaces itself."""
    other = REGISTRY.get(name)
    if other is not None and owner(other) != owner(constructor):
        raise Duplicate("operator", name, owner(other), owner(constructor))
    REGISTRY[name] = constructor


def owner(constructor: Callable[..., Operator]) -> str:
    """Where a constructor comes from, for messages."""
    name = getattr(constructor, "__qualname__", None)
    return f"{constructor.__module__}.{name}" if name else repr(constructor)


def make(name: str, **attributes: Any) -> Operator:
    """The operator called `name` with these attributes. Raises `Invalid` for an unknown name."""
    if name not in REGISTRY:
        load_plugins(OPERATORS)
    if name not in REGISTRY:
        close = nearest(name, REGISTRY)
        raise Invalid(f"no operator is called {name!r}{close}", advice=f"known: {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name](**attributes)


class Operator:
    """Base of all operators; subclasses are frozen dataclasses.

    A leaf has `evaluate` (its meaning on NumPy arrays); a composite has `lower` (its meaning as other operators).
    A subclass with a class attribute `name` registers itself under it; a *vendor* leaf runs as a library call,
    the others inside generated kernels.
    """

    name: ClassVar[str]
    operands: ClassVar[tuple[str, ...]] = ("x",)
    """Names of the inputs; a last name that starts with `*` takes any number."""
    results: ClassVar[tuple[str, ...]] = ("y",)
    vendor: ClassVar[bool] = False
    may_raise: ClassVar[bool] = False
    """Whether its library call raises an error for some data: an index out of range, a check that fails."""
    updates: tuple[tuple[int, int], ...] = ()
    """Pairs (position of a result, position of an operand): that result is stored over that operand."""
    own_sizes: ClassVar[frozenset[sympy.Symbol]] = frozenset()
    """Size symbols that an operator with bodies binds itself, each time that it runs one."""
    zero_gradient: ClassVar[bool] = False
    """True where the derivative is zero almost everywhere (rounding, comparison, indices)."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if isinstance(cls.__dict__.get("name"), str):
            register(cls.name, cls)

    @property
    def label(self) -> str:
        """The name in texts and pictures."""
        return self.name

    def attributes(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in order, as the text form shows them."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Types of the results. Raises `Invalid` on operands that do not fit."""
        raise NotImplementedError(f"{self.label} has no shape rule")

    @property
    def is_composite(self) -> bool:
        """Whether this operator is defined by other operators (`lower`) rather than by `evaluate`."""
        return type(self).lower is not Operator.lower

    def lower(self, b: Builder, *operands: Value) -> Sequence[Value]:
        """The results, computed by simpler operators."""
        raise NotImplementedError(f"{self.label} is a leaf")

    def lowered(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        """What `lower` returns. Raises `Invalid`, which names the operator, for anything but values."""
        results = self.lower(b, *operands)
        if not isinstance(results, Sequence) or not all(isinstance(result, Value) for result in results):
            given = [type(r).__name__ for r in results] if isinstance(results, Sequence) else type(results).__name__
            advice = "return (value,)" if isinstance(results, Value) else "return the values that its operators compute"
            raise Invalid(f"lower of {self.label} returns a sequence of values, and returned {given}", advice=advice)
        return tuple(results)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        """The results on NumPy arrays; floats are float64."""
        advice = "define lower, of simpler operators, or evaluate, on NumPy arrays"
        raise Invalid(f"{self.label} has neither lower nor evaluate", advice=advice)

    vjp: ClassVar[Callable[..., Any] | None] = None
    """A composite without one is differentiated through its lowering.

    `vjp(self, b, ...)`: one cotangent (or None) per operand, or a single Value for one operand.

    Further parameters are named after operands, results and `grad_<result>`: they declare what the backward pass reads.
    A variadic operand arrives as a tuple and its cotangent is a tuple. `grad_<result>` is None if the result has
    no cotangent (this happens only for operators with several results). Cotangents may have the broadcast shape: the
    reverse pass sums them to the operand's.
    """

    def flops(self, *operands: Tensor) -> Dim:
        """Floating-point operations."""
        return sum((t.size for t in self.infer(*operands)), start=0)

    def reorders(self, *operands: Tensor) -> Dim:
        """Bytes that a library call moves to convert operands and results to its own layouts and back."""
        return 0


@functools.cache
def vjp_parameters(vjp: Callable[..., Any]) -> tuple[str, ...]:
    """The names of the operands, results and cotangents that an operator class's `vjp` reads."""
    return tuple(inspect.signature(vjp).parameters)[2:]
