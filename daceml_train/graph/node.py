"""Node and Input: the elements of a graph."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from daceml_train.ops.operator import Operator, Origin
from daceml_train.tensor import Tensor

SEED = "seed"
"""The input for the seed of a call's random numbers; no other array has this name."""


class Role(enum.Enum):
    """What an input is to the user."""

    input = "input"
    parameter = "parameter"
    buffer = "buffer"
    state = "state"
    """Optimizer state or hyper-parameter, bound by the runtime."""
    saved = "saved"
    """Saved by the forward pass for the backward pass."""
    cotangent = "cotangent"


@dataclass(frozen=True)
class Input:
    """An input array: its type, its role, and the user's name for it (`layer.0.weight`)."""

    tensor: Tensor
    role: Role = Role.input
    path: str = ""


@dataclass(frozen=True, eq=False)
class Node:
    """An application of an operator: the names of its operands and results."""

    op: Operator
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origin: Origin = Origin()

    def __str__(self) -> str:
        result, read = (", ".join(f"%{name}" for name in names) for names in (self.outputs, self.inputs))
        return f"{result} = {self.op.label}({read})"
