"""What graphs are compiled for: forward calls and gradients, or a whole training step. For inference see there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from daceml_train.autodiff.partition import partition
from daceml_train.autodiff.reverse import differentiate, reached_arrays, reaching
from daceml_train.driver.compile import Compilation, Goal, Part, compile_graph
from daceml_train.driver.prepacked import PrepackedWeights
from daceml_train.driver.records import Record
from daceml_train.driver.rematerialized import rematerialized_across
from daceml_train.driver.settings import Settings
from daceml_train.graph.graph import Graph, Input, Role
from daceml_train.lowering.device import CPU, Device
from daceml_train.lowering.program import BufferView
from daceml_train.passes.base import without_dead_code
from daceml_train.runtime.arenas import AnyArena
from daceml_train.runtime.executable import Executable
from daceml_train.storage.storable import storable
from daceml_train.tensor import Tensor, channels_last, same_shape
from daceml_train.training.distribution import lookups
from daceml_train.training.gradients import PLAIN, GradientOptions
from daceml_train.training.joint import Joint, StepInterface, Trained, joint_graph
from daceml_train.training.sparse_gradients import SparseGradients, as_rows, refuse_sparse


# ---- forward calls and gradients ---
@storable
@dataclass(kw_only=True)
class GradientInterface:
    """How a forward and a backward program are called; see `autodiff.partition.Halves`.

    `gradients[i]` is the captured input to which the backward program's i-th output belongs, and `sources[i]` the
    cotangents on which it depends; `cotangents` lists the captured outputs whose cotangents it takes. Gradients that
    are `sparse` have further outputs after those of all gradients.
    """

    results: int
    kept: tuple[str, ...] = ()
    cotangents: tuple[int, ...] = ()
    gradients: tuple[str, ...] = ()
    sources: tuple[frozenset[int], ...] = ()
    sparse: SparseGradients = field(default_factory=dict)


@dataclass(kw_only=True)
class Differentiable(GradientInterface):
    """A forward program and, if gradients can be requested, its backward program."""

    forward: Executable
    backward: Executable | None = None
    records: list[Record]
    prepacked: PrepackedWeights | None = None
    """Computes further inputs of the forward program from parameters; see `driver.inference`."""


@dataclass(frozen=True)
class WithGradients:
    """A captured graph with gradients as further outputs; see `GradientInterface` for the other fields."""

    graph: Graph
    cotangents: tuple[int, ...]
    gradients: tuple[str, ...]


def with_gradients(graph: Graph, wrt: Sequence[str], outputs: Sequence[int]) -> WithGradients:
    """The graph with gradients of its outputs `outputs` by the inputs `wrt`; cotangents are further inputs.

    Sparse gradients appear as dense arrays.
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


@dataclass
class Gradients(Goal):
    """Forward calls, and gradients of the outputs `outputs` by the inputs `wrt`."""

    wrt: Sequence[str]
    outputs: Sequence[int]

    @property
    def description(self) -> str:
        return f"differentiable wrt={tuple(self.wrt)} outputs={tuple(self.outputs)}"

    def extend(self, graph: Graph) -> Graph:
        self.captured = graph
        self.found = with_gradients(graph, self.wrt, self.outputs)
        joint, self.sparse = as_rows(self.found.graph, len(graph.outputs))
        return joint

    def divide(self, compilation: Compilation) -> Iterator[Part]:
        results, record = len(self.captured.outputs), compilation.record
        self.made = GradientInterface(results=results)
        if not self.found.gradients:
            yield Part(without_dead_code(compilation.graph), record)
            return
        halves = partition(compilation.graph, results)
        record.recomputed = rematerialized_across(halves.forward, halves.backward)
        forward = Part(halves.forward, record, results)
        yield forward
        saved = dict(zip(halves.saved, forward.program.outputs[results:], strict=True))
        yield Part(laid_out(halves.backward, saved), Record(f"{self.captured.name} backward"))
        reached = [reaching(self.captured, (self.captured.outputs[i],)) for i in self.found.cotangents]
        self.made = GradientInterface(
            results=results,
            kept=halves.kept,
            cotangents=self.found.cotangents,
            gradients=self.found.gradients,
            sources=tuple(frozenset(k for k, names in enumerate(reached) if n in names) for n in self.found.gradients),
            sparse=self.sparse,
        )

    def interface(self) -> GradientInterface:
        return self.made


def compile_differentiable(
    graph: Graph, wrt: Sequence[str], outputs: Sequence[int], options: Settings, device: Device = CPU
) -> Differentiable:
    """Compile a captured graph for forward calls and for gradients of the outputs `outputs` by the inputs `wrt`."""
    lookups(graph, 1)  # raises for tables whose rows other ranks read: each rank would compile at its own time
    compiled = compile_graph(graph, Gradients(wrt, outputs), options, device)
    forward, *backward = compiled.executables
    return Differentiable(
        forward=forward,
        backward=backward[0] if backward else None,
        records=compiled.records,
        **vars(compiled.interface),
    )


def laid_out(backward: Graph, places: Mapping[str, BufferView]) -> Graph:
    """The backward graph, which takes saved arrays in the memory order in which the forward program saves them."""
    changed: dict[str, Input] = {}
    for name, place in places.items():
        entry, last = backward.inputs[name], channels_last(len(place.shape))
        for order in (None, last) if len(place.shape) > 2 else ():
            tensor = Tensor(entry.tensor.shape, entry.tensor.dtype, order)
            if tensor != entry.tensor and same_shape(tensor.strides, place.strides):
                changed[name] = replace(entry, tensor=tensor)
    return backward.with_inputs(changed) if changed else backward


# ---- a whole training step ---
@dataclass(kw_only=True)
class WholeStep(StepInterface):
    """A training step as one program.

    Its inputs are the captured ones, then the float64 `hyperparameters`, then the state of each trained parameter.
    Outputs: the loss, then gradients of `gradients`, then for first steps the state that they create, in the order of
    `made`, then, if gradients are clipped by their norm, that norm.
    """

    executable: Executable
    records: list[Record]


@dataclass
class StepGoal(Goal):
    """The loss, which is the first output, its gradients, and the update of parameters."""

    trained: Sequence[Trained]
    keep: Sequence[str]
    gradients: GradientOptions
    further: int = 0
    """How many outputs after the loss the user's code keeps."""

    @property
    def description(self) -> str:
        updates = "; ".join(map(repr, self.trained))
        return f"step keep={tuple(self.keep)} further={self.further} updates={updates} {self.gradients}"

    def extend(self, graph: Graph) -> Graph:
        self.joint: Joint = joint_graph(graph, self.trained, self.keep, self.gradients, self.further)
        return self.joint.graph

    def divide(self, compilation: Compilation) -> Iterator[Part]:
        yield Part(compilation.graph, compilation.record)

    def interface(self) -> StepInterface:
        return self.joint.interface


def compile_step(
    graph: Graph,
    trained: Sequence[Trained],
    keep_gradients: Sequence[str],
    options: Settings,
    arena: AnyArena | None = None,
    gradients: GradientOptions = PLAIN,
    device: Device = CPU,
    further: int = 0,
) -> WholeStep:
    """Compile a captured graph whose first output is the loss into a step with gradients and update.

    The `further` outputs after the loss are outputs of the program, after the loss.

    Steps with the same `arena` must not run at the same time.
    """
    goal = StepGoal(trained, keep_gradients, gradients, further)
    compiled = compile_graph(graph, goal, options, device, arena)
    return WholeStep(executable=compiled.executables[0], records=compiled.records, **vars(compiled.interface))
