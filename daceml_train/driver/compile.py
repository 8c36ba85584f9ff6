"""The stages from a captured graph to a program that runs: `STAGES`, which prints itself.

Everything that is compiled passes through them. A `Goal` says what differs: what is appended to the captured graph
(derivatives, an update), the programs into which it is divided, and what a caller must know to run them. The stages up
to `lower` produce plain data, which is stored; `generate` and `link` load it into this process.

    captured graph -> forward -> adapt -> extend -> distribute -> intra_operator -> divide -> [transform -> lower]
    -> generate -> link
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from daceml_train import logs
from daceml_train.analysis.traffic import total, traffic
from daceml_train.driver.devices import for_device
from daceml_train.driver.events import log_kernels, watcher
from daceml_train.driver.records import Record
from daceml_train.driver.rematerialized import rematerialized_within
from daceml_train.driver.settings import Settings
from daceml_train.driver.store import cached
from daceml_train.graph.graph import Graph
from daceml_train.lowering.cost import costs
from daceml_train.lowering.device import CPU, Device
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import CallLaunch, KernelLaunch, Program
from daceml_train.ops.fallback import Aten
from daceml_train.passes.pipeline import Pipeline, Step, Watcher
from daceml_train.processor import instructions
from daceml_train.runtime.arenas import AnyArena, new_arena
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.gpu.autotune import Autotuner
from daceml_train.runtime.schedules import scheduled
from daceml_train.runtime.tune_matmul import MatmulTuner
from daceml_train.runtime.tune_threads import ThreadTuner
from daceml_train.storage.storable import storable
from daceml_train.tensor import Dim
from daceml_train.transformations.intra_operator.decompose import Decompose

LATE = ("fusion", "layout", "global_movement")
"""The levels that are applied to each program of a compilation by itself."""


@dataclass
class Part:
    """One program of a compilation: a graph, and once it is lowered a program.

    The first `results` outputs (None: all) go to the user; `levels` are those that are still to be applied.
    """

    graph: Graph
    record: Record
    results: int | None = None
    levels: tuple[str, ...] = LATE
    lowered: Program | None = None

    @property
    def program(self) -> Program:
        """What the graph was lowered to."""
        assert self.lowered is not None, f"{self.record.name} is not lowered yet"
        return self.lowered


class Goal(ABC):
    """What a captured graph is compiled for."""

    from_capture = True
    """Whether the graph is as captured, so that the passes of level `forward` are still to be applied."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What this goal adds to the key under which the programs are stored."""

    def extend(self, graph: Graph) -> Graph:
        """The captured graph with what the goal appends to it, after the level `forward`."""
        return graph

    @abstractmethod
    def divide(self, compilation: Compilation) -> Iterator[Part]:
        """The programs. A part that was yielded is lowered when the next one is requested."""

    @abstractmethod
    def interface(self) -> Any:
        """What a caller must know of the programs, as plain data; requested after the last part."""


@dataclass
class Compilation:
    """A captured graph on its way to its goal."""

    graph: Graph
    goal: Goal
    options: Settings
    device: Device = CPU
    record: Record = field(init=False)
    """The record of the stages before the graph is divided; also that of the first part."""
    watch: Watcher = field(init=False)
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = Record(self.graph.name)
        self.watch = watcher(self.record, self.options, self.graph)

    def passes(self, graph: Graph, levels: tuple[str, ...], watch: Watcher | None = None) -> Graph:
        """The graph after these levels of the pipeline."""
        return self.options.pipeline.run(graph, levels, watch or self.watch)

    def compiled(self) -> Compiled:
        """The graph through the stages up to lowering."""
        for stage in STAGES:
            if stage.scope == "graph":
                stage.run(self)
        interface = self.goal.interface()
        return Compiled(interface, [part.program for part in self.parts], [part.record for part in self.parts])


@storable
@dataclass
class Compiled:
    """The programs of a compilation in stored form."""

    interface: Any
    programs: list[Program]
    records: list[Record]


class Lowered(BaseException):
    """Ends a call whose programs are for a device that is not there, once they are lowered.

    It is not an `Exception`, which would make the call run in PyTorch.
    """

    def __init__(self, compiled: Compiled) -> None:
        super().__init__("lowered for a device that is not there")
        self.compiled = compiled


@dataclass
class Linked:
    """The programs of a compilation in this process."""

    interface: Any
    executables: list[Executable]
    records: list[Record]


# ---- stages ---
def forward(compilation: Compilation) -> None:
    """Apply the passes that see the forward graph alone."""
    if compilation.goal.from_capture:
        compilation.graph = compilation.passes(compilation.graph, ("forward",))


def adapt(compilation: Compilation) -> None:
    """Write out operators that the device has no kernel for."""
    compilation.graph = for_device(compilation.graph, compilation.device)


def extend(compilation: Compilation) -> None:
    """Append derivatives, clipping and the update, as the goal asks; count what that moves operator by operator."""
    compilation.graph = compilation.goal.extend(compilation.graph)
    compilation.record.bytes_captured = traffic(compilation.graph).bytes


def distribute(compilation: Compilation) -> None:
    """Say how sums over the processes that train together travel."""
    compilation.graph = compilation.passes(compilation.graph, ("distribution",))


def intra_operator(compilation: Compilation) -> None:
    """Apply the passes on single operators, on the whole graph."""
    compilation.graph = compilation.passes(compilation.graph, ("intra_operator",))


def divide(compilation: Compilation) -> None:
    """Divide the graph into programs, and take each through its stages before the next one."""
    for part in compilation.goal.divide(compilation):
        compilation.parts.append(part)
        for stage in STAGES:
            if stage.scope == "program":
                stage.run(compilation, part)


def transform(compilation: Compilation, part: Part) -> None:
    """Apply fusion, layout and global movement, to each program by itself."""
    own = part.record is compilation.record
    watch = compilation.watch if own else watcher(part.record, compilation.options, part.graph)
    graph = compilation.passes(part.graph, part.levels, watch)
    if any(node.op.is_composite for node in graph.nodes):  # which a pipeline of a user's may leave as they are
        graph = Decompose().run(graph)
    part.graph = graph


def lower_part(compilation: Compilation, part: Part) -> None:
    """Choose buffers and launches: the graph becomes a program."""
    part.lowered = lower(part.graph, part.results, compilation.device)
    note_program(part.record, part.graph, part.lowered)
    if compilation.options.dump:
        compilation.options.dump.program(part.record.name, part.graph, part.lowered, part.record.costs)


def generate(compiled: Compiled, options: Settings, device: Device) -> dict[str, int]:
    """Generate and compile the kernels that are not on disk; the entry point of each by its key."""
    start, began = time.perf_counter(), time.time()
    programs, records = compiled.programs, compiled.records
    codes = [code for program in programs for each in program.all for code in each.codes]
    distinct = list({code.key: code for code in codes}.values())
    addresses = device.toolchain.addresses(distinct, options.cache.kernels, options.jobs, options.progress)
    log_kernels(programs, records, {key: path for key, (_, path) in addresses.items()}, began)
    for _, path in addresses.values():
        with contextlib.suppress(OSError):  # so that eviction knows it is used; a cache may be read-only
            os.utime(path)
    records[0].seconds["kernels"] = time.perf_counter() - start
    return {key: address for key, (address, _) in addresses.items()}


def link(compiled: Compiled, options: Settings, device: Device = CPU, arena: AnyArena | None = None) -> Linked:
    """Bind the programs to kernels, memory and tuners: what runs them."""
    for program in compiled.programs if device is CPU else ():
        program.codes[:] = scheduled(program.codes, options.cache.schedules)
    addresses = generate(compiled, options, device)
    arena = arena or new_arena(device)
    shared = options.matmuls is not None
    products = MatmulTuner(options.matmuls or options.cache.products, shared=shared)
    search = None
    if options.autotune and device.target == "cuda":
        search = Autotuner(options.cache.shapes, options.cache.kernels, options.jobs)
    threads = ThreadTuner(options.cache.threads) if options.concurrency == "measured" else None
    for program, record in zip(compiled.programs, compiled.records, strict=True):
        record.executable = Executable(program, addresses, arena, products, device, _work(record), search, threads)
    executables = [record.executable for record in compiled.records if record.executable is not None]
    return Linked(compiled.interface, executables, compiled.records)


def _work(record: Record) -> Callable[[int, Callable[[Dim], int]], tuple[int, int]]:
    """Bytes and operations of a launch, for the choice of streams."""

    def work(index: int, value: Callable[[Dim], int]) -> tuple[int, int]:
        return value(record.costs[index].bytes), value(record.costs[index].flops)

    return work


@dataclass(frozen=True)
class Stage:
    """One stage: `scope` says what it sees: the whole graph, one program of it, or what is stored, in this process."""

    name: str
    run: Callable[..., Any]
    scope: str = "graph"

    def __str__(self) -> str:
        summary = (self.run.__doc__ or "").split("\n")[0]
        return f"{self.name:<15} {self.scope:<8} {summary}"


class Stages(tuple[Stage, ...]):
    """Stages in their order; as text, a line each."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


STAGES = Stages(
    (
        Stage("forward", forward),
        Stage("adapt", adapt),
        Stage("extend", extend),
        Stage("distribute", distribute),
        Stage("intra_operator", intra_operator),
        Stage("divide", divide),
        Stage("transform", transform, "program"),
        Stage("lower", lower_part, "program"),
        Stage("generate", generate, "process"),
        Stage("link", link, "process"),
    )
)
"""All stages; `daceml-train stages` prints them."""


# ---- all stages ---
def compile_graph(
    graph: Graph, goal: Goal, options: Settings, device: Device = CPU, arena: AnyArena | None = None
) -> Linked:
    """Take a captured graph to its goal, or load the result from the cache.

    Programs with the same `arena` must not run at the same time.
    """
    pipeline = options.pipeline.for_target(device.target)
    _warn_of_bfloat16(pipeline, device)
    if device.model is not None:
        pipeline = pipeline.on(device.model)
    left_out = [p.name for p in options.pipeline if device.target not in p.targets]
    options = replace(options, pipeline=pipeline)
    compilation = Compilation(graph, goal, options, device)
    compilation.record.left_out = list(dict.fromkeys(left_out))
    compiled = cached(graph, goal.description, options, device, compilation.compiled)
    if not device.present:
        raise Lowered(compiled)
    if not compilation.parts:
        for record in compiled.records:
            _replay(record, options)
    return link(compiled, options, device, arena)


def _warn_of_bfloat16(pipeline: Pipeline, device: Device) -> None:
    """Warn where mixed precision slows a program down: on processors of this kind without bfloat16 instructions."""
    features = instructions() if device is CPU and "mixed_precision" in {p.name for p in pipeline} else ()
    if "avx2" in features and not {"avx512_bf16", "amx_bf16"}.intersection(features):
        logs.warn("daceml_train runs matmuls in bfloat16, for which this processor has no instructions: this is slower")


# ---- notes ---
def note_program(record: Record, graph: Graph, program: Program) -> None:
    """Record what a program launches and moves."""
    record.recomputed += rematerialized_within(graph)
    record.costs = costs(graph, program)
    record.flops = record.flops + total(cost.flops for cost in record.costs)
    for launch in (launch for each in program.all for launch in each.launches):
        if isinstance(launch, KernelLaunch):
            record.kernels += 1
        elif isinstance(launch, CallLaunch):
            record.calls[launch.target] = record.calls.get(launch.target, 0) + 1
    record.distinct_kernels = len({code.key for each in program.all for code in each.codes})
    record.fallbacks += [(n.op.label, str(n.origin)) for n in graph.nodes if isinstance(n.op, Aten)]


def _replay(record: Record, options: Settings) -> None:
    """Call the pass callback with what the passes did when the program was compiled."""
    if options.pass_callback is not None:
        passes = list(options.pipeline)
        for entry in record.passes:
            options.pass_callback(Step.of(entry, passes))
