"""What is recorded: runs of operators between two values of the recursion, and their structures as paths of a tree."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, Protocol

import numpy as np
import torch

from daceml_train.frontends.torch.recursion.lazy import Lazy, Meta


class Source(Protocol):
    """What computes lazy values."""

    height: int
    stage: int

    def demanded(self, value: Lazy) -> torch.Tensor:
        """A value that is asked for."""
        ...


class Reference:
    """An operand in the key of an operator: the k-th input of a run, or the k-th value that it has computed."""

    __slots__ = ("local", "number")

    def __init__(self, local: bool, number: int) -> None:
        self.local, self.number = local, number


def _slots(local: bool) -> list[Reference]:
    return [Reference(local, k) for k in range(64)]


_LOCK = threading.Lock()
LOCALS, INPUTS = _slots(True), _slots(False)


def slot(table: list[Reference], number: int) -> Reference:
    """The one object that stands for a slot."""
    while number >= len(table):
        with _LOCK:
            table.append(Reference(table[0].local, len(table)))
    return table[number]


class Given:
    """A new input of a run, in the key of the operator that reads it first."""

    __slots__ = ("meta",)

    def __init__(self, meta: Meta) -> None:
        self.meta = meta


class Sequence:
    """What kind of sequence the following entries of a key are in."""

    __slots__ = ("build",)

    def __init__(self, build: Callable[[list[Any]], Any]) -> None:
        self.build = build


LIST, TUPLE, SLICE = Sequence(list), Sequence(tuple), Sequence(lambda found: slice(*found))
MAPPING = Sequence(lambda found: dict(zip(found[::2], found[1::2], strict=True)))


class Constant:
    """A constant in a key, where `1`, `1.0`, and `True` differ."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_CONSTANTS: dict[Any, Constant] = {}


def constant(value: Any) -> Constant:
    """The one object that stands for a constant."""
    key = (type(value), str(value))  # 0.0 and -0.0 differ, and NaN is NaN
    found = _CONSTANTS.get(key)
    if found is None:
        found = _CONSTANTS.setdefault(key, Constant(value))
    return found


def keyed(value: Any) -> Any:
    """What stands for an argument in a key; numbers of other types than Python's may be equal to those.

    Raises `TypeError` for one without a hash.
    """
    hash(value)
    return constant(value) if isinstance(value, Number | np.generic) else value


def decoded(entry: Any, of: Callable[[Any], Any]) -> Any:
    """An argument from a key; `of` has the values of slots, new inputs, and shared tensors."""
    kind = type(entry)
    if kind is tuple:
        return entry[0].build([decoded(e, of) for e in entry[1:]])
    if kind is Constant:
        return entry.value
    if kind in (Reference, Given, Shared):
        return of(entry)
    return entry


class Shared:
    """A tensor that all cells share, such as a parameter."""

    __slots__ = ("fake", "tensor")

    def __init__(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        self.tensor, self.fake = tensor, fake


@dataclass(eq=False, slots=True)
class Step:
    """A point on the path of a run: the operators up to here, the last one of which is `operator`.

    `made` has a type per tensor that the operator returns; `result` puts lazy values into what the user gets.
    """

    before: Step | None = None
    operator: tuple[Any, ...] | None = None
    made: tuple[Meta, ...] = ()
    examples: tuple[Any, ...] = ()
    kind: Any = None
    """`None` for one tensor, a type for a sequence of tensors."""
    inputs: tuple[Meta, ...] = ()
    count: int = 0
    """How many values the operators up to here compute."""
    following: dict[Any, Step] = field(default_factory=dict)
    refused: str = ""
    """Why this operator runs in PyTorch at once; empty if it is recorded."""
    constant: Any = None
    """The result of an operator that returns no tensor."""
    numbers: dict[Any, set[Any]] = field(default_factory=dict)
    """Python's numbers that the next operator was ever given; see `scalars`."""
    cell: Any = None
    alias: bool = False
    """Whether a result has the memory of an operand."""
    aliased: bool = False
    """Whether one of an operator up to here has."""
    keywords: bool = False
    """Whether the last entry of the key has keyword arguments."""

    def operators(self) -> list[Step]:
        """The operators in order."""
        found: list[Step] = []
        at: Step | None = self
        while at is not None and at.operator is not None:
            found.append(at)
            at = at.before
        return found[::-1]


class Run:
    """Operators of one call between two values of the recursion: an instance of a cell, once it is sealed."""

    __slots__ = (
        "at",
        "forest",
        "group",
        "height",
        "inputs",
        "outer",
        "position",
        "recorder",
        "sealed",
        "slots",
        "stage",
        "used",
        "values",
    )

    recorder: Any
    at: Step
    outer: bool
    inputs: Any
    slots: Any
    values: Any
    used: Any
    """The values that others read: a set, or all that a block returns."""
    height: int
    stage: int
    sealed: bool
    group: Any
    position: int
    forest: Any

    def use(self, index: int) -> None:
        """Note that a value is read."""
        if index not in self.used:
            self.sealed = True
            self.used.add(index)

    def demanded(self, value: Lazy) -> torch.Tensor:
        """The value, for which all that is known so far is computed."""
        found: torch.Tensor = self.recorder.demanded(self, value)
        return found


def run_of(recorder: Any, start: Step, outer: bool) -> Run:
    """A run without operators. The class has no `__init__`: blocks create as many runs as trees have nodes."""
    run = Run()
    run.recorder, run.at, run.outer = recorder, start, outer
    run.inputs, run.slots, run.values, run.used = [], {}, [], set()
    run.height = run.stage = run.position = 0
    run.sealed = False
    run.group = run.forest = None
    return run


class _All:
    """Contains everything."""

    def __contains__(self, item: Any) -> bool:
        return True


ALL: Any = _All()


class Pick:
    """Slice `start` (or `length` slices from there) of a tensor that has a gradient: an input of a run."""

    __slots__ = ("length", "sealed", "start", "tensor")
    height = stage = 0
    used = forest = ALL

    def __init__(self, tensor: torch.Tensor, start: int, length: int | None) -> None:
        self.tensor, self.start, self.length = tensor, start, length

    def demanded(self, value: Lazy) -> torch.Tensor:
        """The slices."""
        with torch._C.DisableTorchFunction():
            if self.length is None:
                return self.tensor[self.start]
            return self.tensor[self.start : self.start + self.length]


class Solo:
    """One operator outside of the recursion whose operands have other sizes in each batch; PyTorch runs it."""

    __slots__ = ("args", "function", "kwargs", "recorder", "sealed", "stage", "values")
    height = 0
    used = forest = ALL

    def __init__(self, recorder: Any, function: Callable[..., Any], args: Any, kwargs: Any, stage: int) -> None:
        self.recorder, self.function, self.args, self.kwargs, self.stage = recorder, function, args, kwargs, stage
        self.values: list[Lazy] = []

    def done(self) -> None:
        """Release what refers to this object, and what it was computed from."""
        self.args, self.kwargs, self.values = (), {}, []

    def demanded(self, value: Lazy) -> torch.Tensor:
        """The value, for which all that is known so far is computed."""
        self.recorder.flush()
        assert value.value is not None
        return value.value
