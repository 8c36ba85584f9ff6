"""Kernel: a fusion group, an operator whose body is a small SSA program of leaves that is compiled to one function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from daceml_train.errors import Invalid
from daceml_train.ops.operator import Array, Computed, Operator, Origin
from daceml_train.tensor import Dim, Tensor

_SILENT = frozenset({"view", "permute", "expand", "slice", "full", "cast"})


@dataclass(frozen=True)
class Statement:
    """`outputs = op(inputs)` inside a body; names are local to it."""

    op: Operator
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.outputs)} = {self.op.label}({', '.join(self.inputs)})"


@dataclass(frozen=True)
class Kernel(Operator):
    """A fusion group. `arguments` names its inputs, `yields` the values that are stored.

    `updates` lists pairs (position in `yields`, position in `arguments`): that result is stored over that argument,
    of which every statement reads only the element being written.
    """

    name = "kernel"
    operands = ("*xs",)
    arguments: tuple[str, ...]
    statements: tuple[Statement, ...]
    yields: tuple[str, ...]
    updates: tuple[tuple[int, int], ...] = ()

    def types(self, *operands: Tensor) -> dict[str, Tensor]:
        """The type of every value of the body."""
        if len(operands) != len(self.arguments):
            raise Invalid(f"kernel takes {len(self.arguments)} operands, not {len(operands)}")
        types = dict(zip(self.arguments, operands, strict=True))
        for statement in self.statements:
            inferred = statement.op.infer(*(types[i] for i in statement.inputs))
            types.update(zip(statement.outputs, inferred, strict=True))
        return types

    def infer(self, *operands: Tensor) -> tuple[Tensor, ...]:
        types = self.types(*operands)
        return tuple(types[y] for y in self.yields)

    def evaluate(self, *operands: Array) -> tuple[Array, ...]:
        scope = dict(zip(self.arguments, operands, strict=True))
        for statement in self.statements:
            results = statement.op.evaluate(*(scope[i] for i in statement.inputs))
            scope.update(zip(statement.outputs, results, strict=True))
        return tuple(scope[y] for y in self.yields)

    def flops(self, *operands: Tensor) -> Dim:
        types = self.types(*operands)
        total: Dim = 0
        for s in self.statements:
            total = total + s.op.flops(*(types[i] for i in s.inputs))
        return total


def canonical(
    arguments: Sequence[str], statements: Sequence[Statement], yields: Sequence[str]
) -> tuple[Kernel, dict[str, str]]:
    """The kernel with values renamed `x0, x1, ...` and `v0, v1, ...`, so equivalent bodies are equal; the renaming."""
    names = {a: f"x{i}" for i, a in enumerate(arguments)}
    for statement in statements:
        for output in statement.outputs:
            names[output] = f"v{len(names) - len(arguments)}"
    renamed = tuple(
        Statement(s.op, tuple(names[i] for i in s.inputs), tuple(names[o] for o in s.outputs)) for s in statements
    )
    return Kernel(tuple(names[a] for a in arguments), renamed, tuple(names[y] for y in yields)), names


def described(op: Operator) -> str:
    """The operators of a kernel with their counts, or the label of a single one."""
    if not isinstance(op, Kernel):
        return op.label
    counted = Counter(s.op.label for s in op.statements if s.op.label not in _SILENT)
    if not counted:
        return "copy"
    return " ".join(f"{label}*{count}" if count > 1 else label for label, count in counted.items())


def computed(op: Operator, origin: Origin) -> tuple[Computed, ...]:
    """The operators of the user's model that a node computes; none for one that moves no data by itself."""
    if origin.computes or isinstance(op, Kernel):
        return origin.computes
    return () if op.label in _SILENT else (Computed(origin.module, op.label),)
