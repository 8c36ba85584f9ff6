"""Program: a lowered graph as plain data: buffers, views of them, and the launches in order.

Sizes are expressions over the size symbols of the inputs; `runtime.executable` evaluates them once per set of sizes.
A program contains no addresses and no kernels' code, so it can be stored and reloaded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.graph.graph import Role
from daceml_train.tensor import Dim, DType, Shape, Tensor


class Allocation(enum.Enum):
    """The kind of allocation of a buffer."""

    input = "input"
    arena = "arena"
    fresh = "fresh"
    """Allocated at each run and handed to the caller."""
    result = "result"
    """Allocated and returned by a library call."""


@dataclass
class Buffer:
    """A contiguous piece of memory for one array in one layout."""

    home: Allocation
    dtype: DType
    shape: Shape
    strides: tuple[Dim, ...]
    input: int = -1
    mutable: bool = False
    opaque: bool = False
    """Whether it is an input in a library's packed layout; see `Packing`."""
    first: int = -1
    """Index of the launch that writes it first."""
    last: int = -1
    """Index of the last launch that touches it."""

    @property
    def bytes(self) -> Dim:
        """Bytes of the dense array."""
        return Tensor(self.shape, self.dtype).bytes


@dataclass(frozen=True)
class BufferView:
    """An array as a strided view of a buffer (`slot`); the offset counts elements."""

    slot: int
    dtype: DType
    shape: Shape
    strides: tuple[Dim, ...]
    offset: Dim = 0


@dataclass(frozen=True)
class KernelLaunch:
    """Run kernel `code` on these buffer views (operands, then results, then scratch)."""

    code: int
    places: tuple[BufferView, ...]
    origin: str
    writes: tuple[int, ...] = ()
    """Positions of the views that it writes."""


@dataclass(frozen=True)
class CallLaunch:
    """Run a library call; `BufferView`s and `Placeholder`s occur among its arguments. `returns` are slots or None."""

    target: str
    overload: str
    arguments: tuple[Any, ...]
    returns: tuple[int | None, ...]
    direct: bool
    origin: str
    writes: tuple[int, ...] = ()
    """Slots that it writes in place."""


@dataclass(frozen=True)
class CopyLaunch:
    """Copy dense arrays onto others of the same layouts, none of which another copy of the launch reads."""

    pairs: tuple[tuple[BufferView, BufferView], ...]
    """Target and source of each copy."""
    origin: str


@dataclass(frozen=True)
class Gather:
    """An argument of a cell: in each of its rows, rows of these children (by position) one after the other.

    `result` is the own result whose rows these are, -1 if there is none.
    """

    children: tuple[int, ...]
    result: int = -1


@dataclass(frozen=True)
class Added:
    """What is added to a child: from element `start` on of each row of an output of the cell."""

    output: int
    start: int


@dataclass(frozen=True)
class Cells:
    """What the cells of `levels` read and write, by positions among its operands and states; see `ops.levels`."""

    count: int
    """The number of states."""
    counts: tuple[Dim, ...]
    rows: tuple[tuple[int, ...], ...]
    children: tuple[tuple[tuple[int, int], ...], ...]
    shared: tuple[tuple[int, ...], ...]
    states: tuple[tuple[int, ...], ...]
    own: tuple[int, ...]
    """Per kind, the number of its own results."""
    gathers: tuple[tuple[Gather, ...], ...]
    """Per kind, the arguments of its program that are gathered from states."""
    added: tuple[tuple[Added, ...], ...]
    """Per kind, in reverse, where the values that are added to children are."""
    written: tuple[tuple[int, ...], ...]
    """Per kind, the own results that its program returns."""


@dataclass(frozen=True)
class ControlLaunch:
    """Run the bodies of control flow, each a program of its own, with the sizes of the enclosing program.

    `kind` is `cond` (bodies: then, orelse), `scan` (body) or `while` (condition, body). Their inputs are the dense
    `states`, a slice of each of `slices` along its first dimension, and `shared`. The results go to `returns`: the last
    states, then stacks; of `cond`, the results of the chosen body. Those of `levels` have as many rows as a level, and
    `shared` are all operands.
    """

    kind: str
    bodies: tuple[Program, ...]
    condition: BufferView | None
    states: tuple[BufferView, ...]
    slices: tuple[BufferView, ...]
    shared: tuple[BufferView, ...]
    returns: tuple[int, ...]
    trips: Dim
    reverse: bool
    origin: str
    cells: Cells | None = None

    @property
    def places(self) -> tuple[BufferView, ...]:
        """All operands."""
        first = () if self.condition is None else (self.condition,)
        return (*first, *self.states, *self.slices, *self.shared)


Launch = KernelLaunch | CallLaunch | CopyLaunch | ControlLaunch


def touched(launch: Launch) -> list[int]:
    """Slots that a launch reads or writes."""
    match launch:
        case KernelLaunch(places=places):
            return [p.slot for p in places]
        case CopyLaunch(pairs=pairs):
            return [place.slot for pair in pairs for place in pair]
        case ControlLaunch(places=places, returns=returns):
            return [*(p.slot for p in places), *returns]
        case CallLaunch(arguments=arguments, returns=returns):
            return [p.slot for p in _places(arguments)] + [s for s in returns if s is not None]


def touching(program: Program) -> list[list[int]]:
    """Per slot the launches that read or write it."""
    found: list[list[int]] = [[] for _ in program.slots]
    for index, launch in enumerate(program.launches):
        for slot in dict.fromkeys(touched(launch)):
            found[slot].append(index)
    return found


def views(launch: Launch) -> list[BufferView]:
    """Buffer views among a launch's operands and results; a call returns further ones, in slots of their own."""
    match launch:
        case KernelLaunch(places=places) | ControlLaunch(places=places):
            return list(places)
        case CopyLaunch(pairs=pairs):
            return [view for pair in pairs for view in pair]
        case CallLaunch(arguments=arguments):
            return _places(arguments)


def _places(argument: Any) -> list[BufferView]:
    if isinstance(argument, BufferView):
        return [argument]
    if isinstance(argument, tuple):
        return [p for a in argument for p in _places(a)]
    return []


@dataclass(frozen=True)
class LaneRules:
    """How the launches of a program may share the cores of a CPU: what `Concurrency` wrote onto its graph."""

    lanes: int = 0
    """The most launches at once; 0 for as many as there are threads."""
    memory: float = 1.1
    """The most that the arena may grow for that, as a multiple of what it takes in order."""
    threads: tuple[tuple[int, int], ...] = ()
    """Launches and their numbers of threads, which are not measured."""
    alone: tuple[int, ...] = ()
    """Launches that run beside no other."""


@dataclass(frozen=True)
class Packing:
    """A library's packed layout of the weight of a call; see `runtime.prepack`.

    `shape`, `strides` and `offset` are the weight as the call reads it, within the input; `arguments` are those of
    PyTorch's operator `target` after the weight.
    """

    target: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class ProgramInput:
    """An argument of a program: name, role, the user's path, and the expected type and layout.

    With a `packing`, the argument is the packed form of an array of this type and layout.
    """

    name: str
    role: Role
    path: str
    dtype: DType
    shape: Shape
    strides: tuple[Dim, ...]
    mutable: bool
    packing: Packing | None = None


@dataclass
class Program:
    """The lowered graph. `outputs` are views of `fresh` or `result` slots; several may share one."""

    name: str
    inputs: list[ProgramInput] = field(default_factory=list)
    slots: list[Buffer] = field(default_factory=list)
    codes: list[KernelCode] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    outputs: list[BufferView] = field(default_factory=list)
    symbols: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Size symbol -> (input, dimension) that has exactly this size."""
    nodes: list[int] = field(default_factory=list)
    """Per launch, the position of its node in the lowered graph; -1 for copies at the end."""
    rules: LaneRules | None = None
    """How its launches may share the cores of a CPU; None: one after the other."""

    @property
    def all(self) -> Iterator[Program]:
        """This program and those of its bodies, at any depth."""
        yield self
        for launch in self.launches:
            for body in launch.bodies if isinstance(launch, ControlLaunch) else ():
                yield from body.all


def library_results(program: Program) -> frozenset[int]:
    """Slots that PyTorch's own operators allocate, except those returned to the user."""
    handed = {place.slot for place in program.outputs}
    results = {
        slot
        for launch in program.launches
        if isinstance(launch, CallLaunch) and launch.target.startswith("aten::")
        for slot in launch.returns
        if slot is not None and program.slots[slot].home is Allocation.result
    }
    return frozenset(results - handed)
