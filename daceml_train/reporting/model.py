"""The contents of a report, as plain frozen data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from daceml_train.reporting.numbers import share
from daceml_train.runtime.roofline import Machine


@dataclass(frozen=True)
class Change:
    """Bytes and operators before and after a pass, a level, or the partition into forward and backward pass.

    Bytes are numbers, or texts of expressions where a size is not known yet.
    """

    name: str
    before: int | str
    after: int | str
    operators: tuple[int, int]
    seconds: float
    flops: int | str = 0
    """Operations after it."""
    network: tuple[int | str, int | str] = (0, 0)
    """Bytes that each of the processes that train together sends, before and after it."""
    messages: tuple[int, int] = (0, 0)
    """The collectives in which it sends them."""

    @property
    def saved(self) -> float | None:
        """The share of the bytes that was saved; None where it is not a number."""
        return share(self.before, self.after)


@dataclass(frozen=True)
class Launched:
    """One launch of a program: a kernel, a library call or a copy.

    `kernel` tells equal kernels apart from others, `phase` is forward, backward or update; `seconds` were measured.
    `shape` is the launch configuration of a kernel on a GPU.
    """

    program: int
    kind: str
    operators: str
    kernel: str
    module: str
    source: str
    phase: str
    bytes: int
    flops: int
    seconds: float | None = None
    shape: str = ""
    name: str = ""
    """What it computes, and where."""
    network: int = 0
    """Bytes that each of the processes that train together sends in it."""
    threads: int = 0
    """The threads that it has; 0 where that is not known, or on a GPU."""
    before: tuple[int, ...] = ()
    """Launches of its program that must have ended when it starts, whatever memory they share."""
    place: tuple[int, int, int] | None = None
    """Where launches run side by side, its segment, its lane, and its position in the order in which they start."""


@dataclass(frozen=True)
class Kept:
    """An array that the forward pass saves for the backward pass, and the operators that produced it."""

    array: str
    bytes: int
    operators: str
    module: str


@dataclass(frozen=True)
class Compiled:
    """One compiled function: the bytes it moves, level by level, and what it runs.

    `captured` are the bytes with one kernel or library call per operator, gradients and update included; `moved` those
    of what runs. `levels` begin there; `passes` has all passes, by level. `fallbacks` are operators that PyTorch runs
    for lack of a rule, with the user's line. `stages` are seconds of compilation.
    """

    name: str
    programs: int
    captured: int | str
    moved: int | str
    flops: int | str
    levels: tuple[Change, ...]
    passes: tuple[tuple[str, Change], ...]
    kernels: int
    distinct_kernels: int
    calls: Mapping[str, int]
    fallbacks: tuple[tuple[str, str], ...]
    stages: Mapping[str, float]
    warm: bool
    arena: int
    sizes: Mapping[str, int]
    launches: tuple[Launched, ...] = ()
    memory: tuple[int, ...] = ()
    """Bytes of arrays alive during each launch, forward pass first; the inputs' bytes come on top."""
    inputs: int = 0
    """Bytes of inputs: parameters, buffers, optimizer state, the batch."""
    kept: tuple[Kept, ...] = ()
    """Arrays that the forward pass saves for the backward pass."""
    recomputed: tuple[Kept, ...] = ()
    """Arrays that are rematerialized instead of being kept; their bytes are those that keeping would take."""
    device: str = "cpu"
    left_out: tuple[str, ...] = ()
    """The pipeline's passes that are not for the device."""
    constant_sizes: tuple[str, ...] = ()
    """Which sizes became constants of the program although others were asked for, and why."""
    notes: tuple[str, ...] = ()
    """What else changes how calls run, and why."""
    needs_python: str = ""
    """Why each call runs through Python."""
    autotuned: tuple[int, int] = (0, 0)
    """The number of autotuned kernels on a GPU, and how many of them do not have the default configuration."""

    network: tuple[int, int] = (0, 0)
    """The number of collectives, and the bytes that each of the processes that train together sends in them."""

    @property
    def saved(self) -> float | None:
        """The share of the captured bytes that is no longer moved."""
        return share(self.captured, self.moved)

    @property
    def peak(self) -> int:
        """The most bytes that are alive at once, inputs included."""
        return self.inputs + max(self.memory, default=0)

    @property
    def seconds(self) -> float | None:
        """Seconds of all launches; None where nothing was measured."""
        times = [launch.seconds for launch in self.launches if launch.seconds is not None]
        return sum(times) if times else None


@dataclass(frozen=True)
class Eager:
    """What PyTorch moves for the same in eager execution: bytes, operations, kernels, and bytes per operator."""

    bytes: int
    flops: int
    kernels: int
    by_operator: Mapping[str, int]


@dataclass(frozen=True)
class Contents:
    """Everything known of an optimized module or a training step; `breaks` are reasons why something runs in PyTorch.

    `eager` and `machine` are there if they were asked for.
    """

    kind: str
    name: str
    functions: tuple[Compiled, ...]
    breaks: tuple[str, ...]
    eager: Eager | None = None
    machine: Machine | None = None
    cuda_graphs: tuple[str, ...] = ()
    """The programs that run as one launch on a GPU, on how many streams, or why they do not."""
    paths: tuple[str, ...] = ()
    """The ways through a model that is not one graph, and how often each was taken."""
    background: tuple[str, ...] = ()
    """What has happened in the background, for a step that compiles there."""
    graph_breaks: tuple[str, ...] = ()
    """Why a module is several graphs, between which Python runs."""

    @property
    def empty(self) -> bool:
        """Whether nothing was called yet."""
        return not self.functions and not self.breaks


@dataclass(frozen=True)
class Group:
    """Launches that have something in common, added up."""

    name: str
    count: int
    bytes: int
    flops: int
    seconds: float | None

    def roofline(self, machine: Machine | None) -> float | None:
        """The machine's least time as a share of the measured time."""
        if machine is None or not self.seconds:
            return None
        return machine.seconds(self.bytes, self.flops) / self.seconds


def grouped(launches: Iterable[Launched], key: Callable[[Launched], str]) -> list[Group]:
    """Launches grouped by `key`; those that move the most bytes come first."""
    groups: dict[str, list[Launched]] = {}
    for launch in launches:
        groups.setdefault(key(launch), []).append(launch)
    results = [_group(name, of) for name, of in groups.items()]
    return sorted(results, key=lambda g: -g.bytes)


def _group(name: str, of: Sequence[Launched]) -> Group:
    times = [launch.seconds for launch in of if launch.seconds is not None]
    total = sum(times) if times else None
    return Group(name, len(of), sum(x.bytes for x in of), sum(x.flops for x in of), total)
