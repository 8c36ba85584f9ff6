"""Inference: the forward pass alone, with what depends on parameters alone made once and kept, packed for libraries."""

from __future__ import annotations

from dataclasses import dataclass, replace

from daceml_train.analysis.weights_only import HELD, again, split
from daceml_train.driver.compilation import (
    Differentiable,
    Options,
    addresses_of,
    cached,
    lowered,
    measure_captured,
    watcher,
)
from daceml_train.driver.devices import for_device
from daceml_train.driver.prepacked import PrepackedWeights
from daceml_train.driver.records import Record
from daceml_train.graph.graph import Graph
from daceml_train.lowering.device import CPU
from daceml_train.lowering.program import Program
from daceml_train.ops.gradient import Detach
from daceml_train.passes.base import without_dead_code
from daceml_train.runtime.encoding import storable
from daceml_train.runtime.executable import Executable, new_arena
from daceml_train.runtime.prepack import pack
from daceml_train.runtime.tune_matmul import MatmulTuner

LAST = ("global_movement",)
"""The levels that only a main part without its prologue sees."""


@storable
@dataclass
class _Prepared:
    """A forward program, and the program that makes from parameters what it takes behind its inputs."""

    main: Program
    prologue: Program | None
    results: int
    records: list[Record]


def compile_inference(graph: Graph, options: Options) -> Differentiable:
    """Compile a captured graph for calls without gradients, on the CPU, by the pipeline for inference."""
    options = replace(options, pipeline=options.inference or options.pipeline)
    made = cached(graph, "inference", options, CPU, lambda: _build(graph, options))
    arena, products = new_arena(CPU), MatmulTuner(options.cache.products)
    programs = [made.main] + ([made.prologue] if made.prologue else [])
    addresses = addresses_of([c for p in programs for q in p.all for c in q.codes], options, made.records[0], CPU)
    executables = [Executable(program, addresses, arena, products) for program in programs]
    for record, executable in zip(made.records, executables, strict=True):
        record.executable = executable
    preparation = None
    if made.prologue is not None or any(entry.packing is not None for entry in made.main.inputs):
        names = {name: position for position, name in enumerate(graph.inputs)}
        read = [names[entry.name] for entry in made.prologue.inputs] if made.prologue else []
        taken = [names[entry.name] for entry in made.main.inputs if entry.name in names]
        prologue = executables[1] if made.prologue else None
        preparation = PrepackedWeights(prologue, read, taken, made.main.inputs)
    return Differentiable(executables[0], None, made.results, (), (), (), (), {}, made.records, preparation)


def _build(graph: Graph, options: Options) -> _Prepared:
    record = Record(graph.name)
    watch = watcher(record, options)
    graph = for_device(options.pipeline.run(without_detach(graph), ("forward",), watch), CPU)
    measure_captured(graph, record)
    whole = without_dead_code(options.pipeline.run(graph, ("intra_operator",), watch))
    # Once before fusion, which would compute arithmetic of parameters within kernels, and once behind layouts, which
    # lay weights out anew.
    parts, results = split(whole), len(whole.outputs)
    laid_out = options.pipeline.run(whole if parts is None else parts.main, ("fusion", "layout"), watch)
    parts = again(parts, laid_out)
    held = {name for name, entry in (laid_out if parts is None else parts.main).inputs.items() if entry.role in HELD}
    if parts is None:
        main = pack(lowered(laid_out, options, record, watch, CPU, levels=LAST), held)
        return _Prepared(main, None, results, [record])
    own = Record(parts.prologue.name)
    prologue = lowered(without_dead_code(parts.prologue), options, own, watcher(own, options), CPU, results=0)
    main = pack(lowered(parts.main, options, record, watch, CPU, levels=LAST), held)
    return _Prepared(main, prologue, results, [record, own])


def without_detach(graph: Graph) -> Graph:
    """The graph without operators that only say where gradients end."""
    if not any(isinstance(node.op, Detach) for node in graph.nodes):
        return graph
    other = graph.empty()
    now: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple(now.get(name, name) for name in node.inputs)
        if isinstance(node.op, Detach):
            now[node.outputs[0]] = inputs[0]
        else:
            other.append(node.op, inputs, node.outputs, node.origin)
    return graph.finish(other, now)
