"""Control flow: operators whose bodies are programs of operators: a branch, a loop over slices, a loop on a condition.

A body is a small SSA program (`Body`); values from its surroundings are operands, so a body captures nothing. Its types
follow from the operands', and all operands and results are row-major.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from daceml_train.errors import Invalid
from daceml_train.ops.fallback import Aten, Body
from daceml_train.ops.operator import Operator
from daceml_train.tensor import Dim, DType, Tensor, same, same_shape


class ControlFlow(Operator):
    """Base of the operators with bodies. Each body runs as a program of its own; see `lowering.lower`."""

    operands: ClassVar[tuple[str, ...]] = ("*xs",)
    results = ("*ys",)
    vendor = True
    may_raise = True

    @property
    @abstractmethod
    def bodies(self) -> tuple[Body, ...]:
        """The bodies, in a fixed order."""

    @abstractmethod
    def with_bodies(self, *bodies: Body) -> Self:
        """The same operator with other bodies of the same arguments and results."""

    @abstractmethod
    def arguments(self, operands: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        """Per body, the types of its arguments. Raises `Invalid` for operands that do not fit."""

    @property
    def random(self) -> bool:
        """Whether a body draws from PyTorch's generator."""
        return any(draws(s.op) for body in self.bodies for s in body.statements)

    def yielded(self, operands: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Per body, the types of its yields, row-major."""
        pairs = zip(self.bodies, self.arguments(operands), strict=True)
        return [tuple(map(dense, results(self.label, body, given))) for body, given in pairs]

    def flops(self, *operands: Tensor) -> Dim:
        given = self.arguments(operands)
        return sum((body_flops(body, types) for body, types in zip(self.bodies, given, strict=True)), start=0)


def draws(op: Operator) -> bool:
    """Whether an operator draws from PyTorch's generator, so it must be neither repeated nor removed."""
    return isinstance(op, Aten | ControlFlow) and op.random


def dense(tensor: Tensor) -> Tensor:
    """The row-major type with the same sizes."""
    return tensor if tensor.order is None else Tensor(tensor.shape, tensor.dtype)


def body_types(label: str, body: Body, given: Sequence[Tensor]) -> dict[str, Tensor]:
    """The type of every value of a body. Raises `Invalid` for a body that is not a valid program on these arguments."""
    if len(given) != len(body.arguments):
        raise Invalid(f"a body of {label} takes {len(body.arguments)} values, given {len(given)}")
    types = dict(zip(body.arguments, given, strict=True))
    if len(types) != len(given):
        raise Invalid(f"two arguments of a body of {label} have one name")
    for statement in body.statements:
        for name in statement.inputs:
            if name not in types:
                raise Invalid(f"in a body of {label}, {statement} reads {name}, which nothing before it produces")
        outputs = statement.op.infer(*(types[i] for i in statement.inputs))
        if len(outputs) != len(statement.outputs) or not types.keys().isdisjoint(statement.outputs):
            raise Invalid(f"in a body of {label}, {statement} produces {len(outputs)} values, or one a second time")
        types.update(zip(statement.outputs, outputs, strict=True))
    return types


def results(label: str, body: Body, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The types of a body's yields."""
    types = body_types(label, body, given)
    for name in body.yields:
        if name is None or name not in types:
            raise Invalid(f"a body of {label} yields {name}, which it does not produce")
    return tuple(types[name] for name in body.yields if name is not None)


def body_flops(body: Body, given: Sequence[Tensor]) -> Dim:
    """Floating-point operations of one run of a body."""
    types = body_types("a loop", body, given)
    return sum((s.op.flops(*(types[i] for i in s.inputs)) for s in body.statements), start=0)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two types differ at most in memory order."""
    return a.dtype is b.dtype and same_shape(a.shape, b.shape)


def shown(types: Sequence[Tensor]) -> str:
    """Types as messages show them."""
    return ", ".join(map(str, types)) or "nothing"


@dataclass(frozen=True)
class Cond(ControlFlow):
    """`then` if the 0-d boolean first operand is true, else `orelse`, on the other operands. Only one of them runs."""

    name = "cond"
    operands = ("condition", "*xs")
    then: Body
    orelse: Body

    @property
    def bodies(self) -> tuple[Body, ...]:
        return self.then, self.orelse

    def with_bodies(self, *bodies: Body) -> Self:
        return replace(self, then=bodies[0], orelse=bodies[1])

    def arguments(self, operands: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        if not operands or operands[0].dtype is not DType.bool or operands[0].rank:
            raise Invalid(f"cond takes a 0-d boolean first, given {shown(operands[:1])}")
        return (tuple(map(dense, operands[1:])),) * 2

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        then, orelse = self.yielded(operands)
        if len(then) != len(orelse) or not all(map(alike, then, orelse)):
            raise Invalid(f"one branch of cond returns {shown(then)}, the other {shown(orelse)}")
        return then


@dataclass(frozen=True)
class Scan(ControlFlow):
    """A loop of `trips` steps; each step takes one slice of the sliced operands along their first dimension.

    Operands: `carried` first states, `sliced` arrays of `trips` slices, then what every step reads. The body takes the
    states, a slice of each, and the rest; it yields the next states and then values that are stacked along a new
    first dimension. Results: the last states and the stacks. `reverse` runs from the last slice to the first; the
    number of a step is that of its slice.
    """

    name = "scan"
    body: Body
    carried: int
    sliced: int
    trips: Dim
    reverse: bool = False

    @property
    def bodies(self) -> tuple[Body, ...]:
        return (self.body,)

    def with_bodies(self, *bodies: Body) -> Self:
        return replace(self, body=bodies[0])

    def arguments(self, operands: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        states, slices = operands[: self.carried], operands[self.carried : self.carried + self.sliced]
        if len(states) + len(slices) != self.carried + self.sliced:
            raise Invalid(f"scan takes {self.carried} states and {self.sliced} arrays, given {len(operands)} operands")
        for x in slices:
            if not x.rank or not same(x.shape[0], self.trips):
                raise Invalid(f"scan of {self.trips} steps takes arrays with as many slices, given {x}")
        cut = (Tensor(x.shape[1:], x.dtype) for x in slices)
        return ((*map(dense, states), *cut, *map(dense, operands[self.carried + self.sliced :])),)

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        (outputs,) = self.yielded(operands)
        states = tuple(map(dense, operands[: self.carried]))
        if len(outputs) < self.carried or not all(map(alike, states, outputs)):
            raise Invalid(f"scan carries {shown(states)}, its body returns {shown(outputs[: self.carried])}")
        return (*states, *(Tensor((self.trips, *t.shape), t.dtype) for t in outputs[self.carried :]))

    def flops(self, *operands: Tensor) -> Dim:
        return self.trips * super().flops(*operands)


@dataclass(frozen=True)
class While(ControlFlow):
    """A loop that applies `body` to the first `carried` operands, then to its own results, while `condition` is true.

    Both bodies take the states and then the other operands, which every step reads. Results: the last states. The
    number of steps depends on data, so bytes and operations are those of one step, and it has no derivative.
    """

    name = "while"
    condition: Body
    body: Body
    carried: int

    @property
    def bodies(self) -> tuple[Body, ...]:
        return self.condition, self.body

    def with_bodies(self, *bodies: Body) -> Self:
        return replace(self, condition=bodies[0], body=bodies[1])

    def arguments(self, operands: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ...]:
        if len(operands) < self.carried:
            raise Invalid(f"while carries {self.carried} states, given {len(operands)} operands")
        return (tuple(map(dense, operands)),) * 2

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        asked, outputs = self.yielded(operands)
        if len(asked) != 1 or asked[0].dtype is not DType.bool or asked[0].rank:
            raise Invalid(f"the condition of while returns {shown(asked)}, not a 0-d boolean")
        states = tuple(map(dense, operands[: self.carried]))
        if len(outputs) != self.carried or not all(map(alike, states, outputs)):
            raise Invalid(f"while carries {shown(states)}, its body returns {shown(outputs)}")
        return states
