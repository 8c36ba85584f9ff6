"""Compilation: from a captured graph to executables, through differentiation, passes, lowering and the cache."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import daceml_train.frontends
import daceml_train.transformations
from daceml_train.analysis.traffic import total, traffic
from daceml_train.autodiff.partition import partition
from daceml_train.autodiff.reverse import differentiate, reached_arrays, reaching
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.driver.devices import for_device, pipeline_for
from daceml_train.driver.dump import Dump
from daceml_train.driver.prepacked import PrepackedWeights
from daceml_train.driver.records import PassRecord, Record
from daceml_train.driver.rematerialized import across, within
from daceml_train.frontends.torch.capture.rng_draws import Randomness
from daceml_train.graph.graph import Graph, Input, Role
from daceml_train.graph.text import canonical_text
from daceml_train.lowering.cost import costs
from daceml_train.lowering.device import CPU, Device
from daceml_train.lowering.lower import lower
from daceml_train.lowering.program import BufferView, CallLaunch, KernelLaunch, Program
from daceml_train.ops.fallback import Aten
from daceml_train.ops.operator import REGISTRY
from daceml_train.passes.base import without_dead_code
from daceml_train.passes.pipeline import Pipeline, Step, Watcher
from daceml_train.plugins import source_key
from daceml_train.runtime.cache import Cache
from daceml_train.runtime.encoding import storable
from daceml_train.runtime.executable import AnyArena, Executable, new_arena
from daceml_train.runtime.gpu.autotune import Autotuner
from daceml_train.runtime.tune_matmul import MatmulTuner
from daceml_train.storage.folders import cache_folder
from daceml_train.tensor import Dim, Tensor, channels_last, same_shape
from daceml_train.training.gradients import PLAIN, GradientOptions
from daceml_train.training.joint import Trained, joint_graph
from daceml_train.training.sparse_gradients import SparseGradients, as_rows, refuse_sparse
from daceml_train.transformations.intra_operator.decompose import Decompose
from daceml_train.transformations.pipelines import TRAINING


@dataclass(frozen=True)
class Options:
    """How graphs are compiled.

    `jobs` compiler processes run at once (None: one per core); `observe` receives the graph after each pass and what
    is generated, and keeps the cache out; `watch` hears of each pass, also of those whose result came from the cache;
    `progress` is told (kernels done, kernels in all) while kernels compile; `dynamic` is that of `torch.compile`.
    """

    pipeline: Pipeline = TRAINING
    cache: Cache = field(default_factory=lambda: Cache(cache_folder()))
    jobs: int | None = None
    observe: Dump | None = None
    progress: Callable[[int, int], None] | None = None
    watch: Watcher | None = None
    dynamic: bool | None = None
    randomness: Randomness = "seeded"
    search: bool = True
    recorded: bool = False
    inference: Pipeline | None = None
    """For calls without gradients; None: `pipeline` for them, too."""

    def __getstate__(self) -> dict[str, Any]:
        """Without `watch` and `progress`, which belong to this process."""
        return {**self.__dict__, "watch": None, "progress": None}


@dataclass
class Differentiable:
    """A forward program and, if gradients can be asked for, its backward program; see `autodiff.partition.Halves`.

    `gradients[i]` says to which captured input the backward program's i-th output belongs, and `sources[i]` on which
    cotangents it depends; `cotangents` lists the captured outputs whose cotangents it takes. Gradients that are
    `sparse` have further outputs behind those of all gradients.
    """

    forward: Executable
    backward: Executable | None
    results: int
    kept: tuple[str, ...]
    cotangents: tuple[int, ...]
    gradients: tuple[str, ...]
    sources: tuple[frozenset[int], ...]
    sparse: SparseGradients
    records: list[Record]
    preparation: PrepackedWeights | None = None
    """What makes further inputs of the forward program from parameters; see `driver.inference`."""


def compile_differentiable(
    graph: Graph, wrt: Sequence[str], outputs: Sequence[int], options: Options, device: Device = CPU
) -> Differentiable:
    """Compile a captured graph for forward calls and for gradients by the inputs `wrt` of the outputs `outputs`."""
    options = replace(options, pipeline=pipeline_for(options.pipeline, device))
    description = f"differentiable wrt={tuple(wrt)} outputs={tuple(outputs)}"
    pair = cached(graph, description, options, device, lambda: _differentiable(graph, wrt, outputs, options, device))
    return _link_pair(pair, options, device)


@storable
@dataclass
class _Pair:
    forward: Program
    backward: Program | None
    results: int
    kept: tuple[str, ...]
    cotangents: tuple[int, ...]
    gradients: tuple[str, ...]
    sources: tuple[frozenset[int], ...]
    sparse: SparseGradients
    records: list[Record]


@dataclass(frozen=True)
class WithGradients:
    """A captured graph with gradients behind its outputs; see `Differentiable` for the other fields."""

    graph: Graph
    cotangents: tuple[int, ...]
    gradients: tuple[str, ...]


def with_gradients(graph: Graph, wrt: Sequence[str], outputs: Sequence[int]) -> WithGradients:
    """The graph with gradients by the inputs `wrt` of its outputs `outputs`, whose cotangents are further inputs.

    Sparse gradients are there as dense arrays.
    """
    felt = reached_arrays(graph, wrt)
    cotangents = tuple(i for i in outputs if graph.outputs[i] in felt)
    joint = graph.copy()
    given: dict[str, Any] = {}
    for i in cotangents:
        name = graph.outputs[i]
        seed = joint.input(joint.fresh(f"grad_{name}"), graph.tensors[name], Role.cotangent)
        given[name] = given[name] + seed if name in given else seed
    found = differentiate(joint, given, wrt) if given else {}
    gradients = {name: value for name, value in found.items() if value is not None}
    joint = joint if gradients else graph  # which has no cotangents
    refuse_sparse(joint)
    if gradients:
        joint.outputs += [value.name for value in gradients.values()]
    return WithGradients(joint, cotangents, tuple(gradients))


def _differentiable(
    graph: Graph, wrt: Sequence[str], outputs: Sequence[int], options: Options, device: Device
) -> _Pair:
    record = Record(graph.name)
    watch = watcher(record, options)
    graph = for_device(options.pipeline.run(graph, ("forward",), watch), device)
    results = len(graph.outputs)
    found = with_gradients(graph, wrt, outputs)
    cotangents, gradients = found.cotangents, found.gradients
    joint, sparse = as_rows(found.graph, results)
    measure_captured(joint, record)
    joint = options.pipeline.run(joint, ("intra_operator",), watch)
    if not gradients:
        forward = lowered(without_dead_code(joint), options, record, watch, device)
        return _Pair(forward, None, results, (), (), (), (), {}, [record])
    reached = [reaching(graph, (graph.outputs[i],)) for i in cotangents]
    sources = tuple(frozenset(k for k, names in enumerate(reached) if name in names) for name in gradients)
    halves = partition(joint, results)
    record.recomputed = across(halves.forward, halves.backward)
    forward = lowered(halves.forward, options, record, watch, device, results)
    reverse = Record(f"{graph.name} backward")
    taken = laid_out(halves.backward, dict(zip(halves.saved, forward.outputs[results:], strict=True)))
    backward = lowered(taken, options, reverse, watcher(reverse, options), device)
    records = [record, reverse]
    return _Pair(forward, backward, results, halves.kept, cotangents, gradients, sources, sparse, records)


def laid_out(backward: Graph, places: Mapping[str, BufferView]) -> Graph:
    """The backward graph, which takes saved arrays in the memory order in which the forward program leaves them."""
    changed: dict[str, Input] = {}
    for name, place in places.items():
        entry, last = backward.inputs[name], channels_last(len(place.shape))
        for order in (None, last) if len(place.shape) > 2 else ():
            tensor = Tensor(entry.tensor.shape, entry.tensor.dtype, order)
            if tensor != entry.tensor and same_shape(tensor.strides, place.strides):
                changed[name] = replace(entry, tensor=tensor)
    return backward.with_inputs(changed) if changed else backward


def _link_pair(pair: _Pair, options: Options, device: Device) -> Differentiable:
    arena = new_arena(device)
    programs = [pair.forward] + ([pair.backward] if pair.backward else [])
    addresses = addresses_of([c for p in programs for q in p.all for c in q.codes], options, pair.records[0], device)
    products, search = MatmulTuner(options.cache.products), _search(options, device)
    forward = Executable(pair.forward, addresses, arena, products, device, None, search)
    backward = None
    if pair.backward:
        backward = Executable(pair.backward, addresses, arena, products, device, None, search)
    for record, executable in zip(pair.records, (forward, backward), strict=False):
        record.executable = executable
    return Differentiable(
        forward,
        backward,
        pair.results,
        pair.kept,
        pair.cotangents,
        pair.gradients,
        pair.sources,
        pair.sparse,
        pair.records,
    )


@dataclass
class WholeStep:
    """A training step as one program.

    Its inputs are the captured ones, then one float64 learning rate per group (`rates`), then the state of each
    trained parameter (`state` names them as (parameter, state name); those of no parameter are the loss scaler's).
    Outputs: the loss, then gradients of `gradients`, then for first steps the state they make, in the order of `made`,
    then, if gradients are clipped by their norm, that norm.
    """

    executable: Executable
    rates: int
    state: tuple[tuple[str, str], ...]
    trained: tuple[str, ...]
    gradients: tuple[str, ...]
    made: tuple[tuple[str, str], ...]
    norm: bool
    records: list[Record]


@storable
@dataclass
class _Step:
    program: Program
    rates: int
    state: tuple[tuple[str, str], ...]
    trained: tuple[str, ...]
    gradients: tuple[str, ...]
    made: tuple[tuple[str, str], ...]
    norm: bool
    records: list[Record]


def compile_step(
    graph: Graph,
    trained: Sequence[Trained],
    keep_gradients: Sequence[str],
    options: Options,
    arena: AnyArena | None = None,
    gradients: GradientOptions = PLAIN,
    device: Device = CPU,
) -> WholeStep:
    """Compile a captured graph whose first output is the loss into a step with gradients and update.

    Steps with the same `arena` must not run at the same time.
    """
    options = replace(options, pipeline=pipeline_for(options.pipeline, device))
    updates = "; ".join(
        f"{t.parameter} {t.rate} {t.first} {t.update} {t.accumulates} {t.accumulated} {t.share!r}" for t in trained
    )
    description = f"step keep={tuple(keep_gradients)} updates={updates} {gradients}"
    step = cached(
        graph, description, options, device, lambda: _step(graph, trained, keep_gradients, options, gradients, device)
    )
    return _link_step(step, options, arena, device)


def _step(
    graph: Graph,
    trained: Sequence[Trained],
    keep: Sequence[str],
    options: Options,
    gradients: GradientOptions,
    device: Device,
) -> _Step:
    record = Record(graph.name)
    watch = watcher(record, options)
    captured = for_device(options.pipeline.run(graph, ("forward",), watch), device)
    joint = joint_graph(captured, trained, keep, gradients)
    measure_captured(joint.graph, record)
    whole = options.pipeline.run(joint.graph, ("intra_operator",), watch)
    program = lowered(whole, options, record, watch, device)
    state, made, updated = tuple(joint.state), tuple(joint.made), tuple(joint.trained)
    return _Step(program, joint.rates, state, updated, joint.gradients, made, joint.norm, [record])


def _link_step(step: _Step, options: Options, arena: AnyArena | None, device: Device) -> WholeStep:
    record = step.records[0]
    addresses = addresses_of([c for p in step.program.all for c in p.codes], options, record, device)

    def work(index: int, value: Callable[[Dim], int]) -> tuple[int, int]:
        return value(record.costs[index].bytes), value(record.costs[index].flops)

    products = MatmulTuner(options.cache.products)
    search = _search(options, device)
    record.executable = executable = Executable(step.program, addresses, arena, products, device, work, search)
    made, norm = step.made, step.norm
    return WholeStep(executable, step.rates, step.state, step.trained, step.gradients, made, norm, step.records)


def _search(options: Options, device: Device) -> Autotuner | None:
    """What compares shapes of kernels, where that is wanted and there is a GPU."""
    if not options.search or device.target != "cuda":
        return None
    return Autotuner(options.cache.shapes, options.cache.kernels, options.jobs)


class _Recorded(Protocol):
    records: list[Record]


Entry = TypeVar("Entry", bound=_Recorded)


# ---- shared stages --------------------------------------------------------------------------------------------------
def cached(graph: Graph, description: str, options: Options, device: Device, build: Callable[[], Entry]) -> Entry:
    """The result of `build`, or from the cache where it is there."""
    start = time.perf_counter()
    foreign = source_key([*map(type, options.pipeline), *REGISTRY.values()])
    text = "\n".join([canonical_text(graph), description, str(options.pipeline), environment(), device.key, foreign])
    key = hashlib.sha256(text.encode()).hexdigest()
    entry = None if options.observe else options.cache.load(key)
    if entry is None:
        with _without_collection():
            entry = build()
        entry.records[0].seconds["passes and lowering"] = time.perf_counter() - start
        options.cache.store(key, entry)
    else:
        for record in entry.records:
            record.warm, record.seconds = True, {"load": time.perf_counter() - start}
            _replay(record, options)
    return cast(Entry, entry)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Passes make millions of small objects that live until the end; looking through them for cycles takes a third of
    their time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@functools.cache
def environment() -> str:
    """What a program depends on besides its graph: our own source, versions, processor."""
    own = hashlib.sha256()
    for package in (daceml_train, daceml_train.transformations, daceml_train.frontends):
        for path in sorted(Path(package.__path__[0]).resolve().rglob("*")):
            if path.suffix in (".py", ".h", ".cpp"):
                own.update(path.read_bytes())
    flags = ""
    if (info := Path("/proc/cpuinfo")).exists():
        flags = next((line for line in info.read_text().splitlines() if line.startswith("flags")), "")
    versions = [f"{name} {version(name)}" for name in ("torch", "dace", "sympy")]
    return "\n".join([own.hexdigest(), *versions, platform.machine(), flags])


def lowered(
    graph: Graph,
    options: Options,
    record: Record,
    watch: Watcher,
    device: Device,
    results: int | None = None,
    levels: tuple[str, ...] = ("fusion", "layout", "global_movement"),
) -> Program:
    """The program of a graph behind its last passes, noted in `record`; for `results` see `lowering.lower.lower`."""
    graph = options.pipeline.run(graph, levels, watch)
    if any(node.op.is_composite for node in graph.nodes):  # which a pipeline of a user's may leave as they are
        graph = Decompose().run(graph)
    program = lower(graph, results, device)
    if options.observe:
        options.observe.program(record.name, graph, program)
    record.recomputed += within(graph)
    record.costs = costs(graph, program.launches, program.nodes)
    record.flops = record.flops + total(cost.flops for cost in record.costs)
    for launch in (launch for each in program.all for launch in each.launches):
        if isinstance(launch, KernelLaunch):
            record.kernels += 1
        elif isinstance(launch, CallLaunch):
            record.calls[launch.target] = record.calls.get(launch.target, 0) + 1
    record.distinct_kernels = len({code.key for each in program.all for code in each.codes})
    record.fallbacks += [(n.op.label, str(n.origin)) for n in graph.nodes if isinstance(n.op, Aten)]
    return program


def measure_captured(graph: Graph, record: Record) -> None:
    """Note what a graph moves with one kernel or call per operator."""
    record.bytes_captured = traffic(graph).bytes


def watcher(record: Record, options: Options) -> Watcher:
    """Notes passes in `record` and tells who else listens."""

    def watch(step: Step) -> None:
        record.passes.append(
            PassRecord(
                step.level,
                step.transformation.name,
                step.bytes_before,
                step.bytes_after,
                step.operators_before,
                step.operators_after,
                step.seconds,
                step.matches,
                step.position,
                step.flops,
            )
        )
        if options.observe and step.graph is not None:
            options.observe.graph(record.name, step.level, step.transformation.name, step.graph)
        if options.watch is not None:
            options.watch(step)

    return watch


def _replay(record: Record, options: Options) -> None:
    """Tell who watches what the passes did when the program was made."""
    if options.watch is None:
        return
    passes = list(options.pipeline)
    for entry in record.passes:
        options.watch(
            Step(
                entry.level,
                passes[entry.position],
                entry.bytes_before,
                entry.bytes_after,
                entry.operators_before,
                entry.operators_after,
                entry.seconds,
                entry.matches,
                entry.position,
                len(passes),
                flops=entry.flops,
            )
        )


def addresses_of(codes: Sequence[KernelCode], options: Options, record: Record, device: Device) -> dict[str, int]:
    """Entry points of kernels, compiled where they are not on disk."""
    start = time.perf_counter()
    distinct = list({code.key: code for code in codes}.values())
    made = device.toolchain.addresses(distinct, options.cache.kernels, options.jobs, options.progress)
    addresses = {key: address for key, (address, _) in made.items()}
    for _, path in made.values():
        with contextlib.suppress(OSError):  # so that eviction knows it is used; a cache may be read-only
            os.utime(path)
    record.seconds["kernels"] = time.perf_counter() - start
    return addresses
