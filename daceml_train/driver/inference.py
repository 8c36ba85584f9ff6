"""Inference: the forward pass alone; what depends on parameters only is computed once and packed for libraries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from daceml_train.analysis.weights_only import HELD, again, split
from daceml_train.driver.compile import Compilation, Goal, Part, compile_graph
from daceml_train.driver.goals import Differentiable, GradientInterface
from daceml_train.driver.prepacked import PrepackedWeights
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.graph.graph import Graph
from daceml_train.ops.gradient import Detach
from daceml_train.passes.base import without_dead_code
from daceml_train.runtime.prepack import pack
from daceml_train.training.distribution import lookups


@dataclass
class Inference(Goal):
    """Calls without gradients: a weights-only program, and a main program that takes its results as further inputs.

    The captured graph is divided twice: before fusion, which would compute parameter arithmetic within kernels, and
    after layouts, which change the layout of weights.
    """

    prepacks: bool = True
    """Whether that is worth it: not for weights that change from call to call."""

    @property
    def description(self) -> str:
        return "inference" if self.prepacks else "inference with weights that change"

    def divide(self, compilation: Compilation) -> Iterator[Part]:
        whole = without_dead_code(compilation.graph)
        self.made = GradientInterface(results=len(whole.outputs))
        parts = split(whole) if self.prepacks else None
        laid_out = compilation.passes(whole if parts is None else parts.main, ("fusion", "layout"))
        parts = again(parts, laid_out) if self.prepacks else None
        graph = laid_out if parts is None else parts.main
        main = Part(graph, compilation.record, levels=("global_movement",))
        yield main
        if not self.prepacks:
            return
        main.lowered = pack(main.program, {name for name, entry in graph.inputs.items() if entry.role in HELD})
        if parts is not None:
            yield Part(without_dead_code(parts.prologue), Record(parts.prologue.name), results=0)

    def interface(self) -> GradientInterface:
        return self.made


def compile_inference(graph: Graph, options: Settings, prepacks: bool = True) -> Differentiable:
    """Compile a captured graph for calls without gradients, on the CPU, by the pipeline for inference.

    Not `prepacks`: weights are read as they are, since they change from call to call.
    """
    lookups(graph, 1)  # raises for tables whose rows other ranks read
    options = replace(options, pipeline=options.inference or options.pipeline)
    compiled = compile_graph(without_detach(graph), Inference(prepacks), options)
    main, *rest = compiled.executables
    weights_only = rest[0] if rest else None
    prepacked = None
    if weights_only is not None or any(entry.packing is not None for entry in main.program.inputs):
        names = {name: position for position, name in enumerate(graph.inputs)}
        read = [names[entry.name] for entry in weights_only.program.inputs] if weights_only else []
        taken = [names[entry.name] for entry in main.program.inputs if entry.name in names]
        prepacked = PrepackedWeights(weights_only, read, taken, main.program.inputs)
    return Differentiable(forward=main, records=compiled.records, prepacked=prepacked, **vars(compiled.interface))


def without_detach(graph: Graph) -> Graph:
    """The graph without operators that only stop gradients."""
    if not any(isinstance(node.op, Detach) for node in graph.nodes):
        return graph
    other = graph.empty()
    values: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple(values.get(name, name) for name in node.inputs)
        if isinstance(node.op, Detach):
            values[node.outputs[0]] = inputs[0]
        else:
            other.append(node.op, inputs, node.outputs, node.origin)
    return graph.finish(other, values)
