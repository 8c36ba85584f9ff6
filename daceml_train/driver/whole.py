"""The whole batch of micro-batches: the weight of each part's loss, and the common divisors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from daceml_train.analysis.sizes import bind
from daceml_train.autodiff.whole_batch import ADVICE, Batch, Split, split_loss
from daceml_train.driver.binding import sizes_of
from daceml_train.driver.capture_only import CapturedCall
from daceml_train.driver.denominators import Denominators
from daceml_train.driver.goals import compile_differentiable
from daceml_train.driver.settings import Settings
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import BudgetInfeasible
from daceml_train.frontends.torch.capture.capture import Captured, InputSource
from daceml_train.frontends.torch.dynamo.tracing import reason
from daceml_train.graph.graph import Graph
from daceml_train.graph.leaves import leaves
from daceml_train.graph.node import SEED
from daceml_train.lowering.device import Device
from daceml_train.passes.base import without_dead_code
from daceml_train.runtime.torch_types import torch_dtype


@dataclass
class Wholes:
    """What is known of whole batches, per graph of a part."""

    looking: TrainingStep
    """Captures whole batches, and never runs."""
    options: Settings
    count: int
    known: dict[Any, tuple[Split, Captured, Any, Denominators | None]] = field(default_factory=dict)

    def split(
        self, part: CapturedCall, inputs: Any, targets: tuple[Any, ...], device: Device
    ) -> tuple[float, Captured, Denominators | None]:
        """The weight of each part's loss, the graph of a part, and what has to be computed for a batch first.

        Raises `BudgetInfeasible` where the loss of a batch cannot be derived from those of its parts.
        """
        whole, flat = self._seen(inputs, targets), pytree.tree_leaves((inputs, targets))
        own = [(name, id(tensor)) for name, tensor in whole.tensors.items() if not _cut(name, part, whole)]
        shapes = [tuple(tuple(t.shape) for t in seen.tensors.values()) for seen in (part, whole)]
        key = (id(part.captured), id(whole.captured), *shapes, *own)
        if key not in self.known:
            found = split_loss(batch_of(part, whole, self.count))
            captured, denominators = part.captured, None
            if found.graph is not None:
                denominators = self._denominators(found, whole, flat, device)
                further = zip(found.denominators, denominators.held, strict=True)
                sources = [InputSource("attribute", None, name, value=tensor) for name, tensor in further]
                captured = replace(captured, graph=found.graph, inputs=(*captured.inputs, *sources))
            self.known[key] = found, captured, (part.captured, whole.captured), denominators
        found, captured, _, denominators = self.known[key]
        return 1.0 if found.share is None else found.share, captured, denominators

    def share(self, part: tuple[Any, tuple[Any, ...]], batch: tuple[Any, tuple[Any, ...]]) -> float:
        """The weight of each part's loss where steps run in pieces. Raises `BudgetInfeasible` where it has none."""
        found = split_loss(batch_of(self._seen(*part), self._seen(*batch), self.count))
        if found.share is None:
            names = ", ".join(found.denominators.values())
            why = f"the loss divides by values of the whole batch ({names}), and this step runs in pieces"
            raise BudgetInfeasible(
                f"micro-batches cannot derive the loss of a whole batch from its parts: {why}", advice=ADVICE
            )
        return found.share

    def _seen(self, inputs: Any, targets: tuple[Any, ...]) -> CapturedCall:
        try:
            return self.looking.seen(inputs, *targets)
        except Exception as error:
            why = f"model and loss are not one graph: {reason(error)}"
            raise BudgetInfeasible(
                f"micro-batches cannot derive the loss of a whole batch from its parts: {why}", advice=ADVICE
            ) from error

    def _denominators(self, found: Split, whole: CapturedCall, flat: Sequence[Any], device: Device) -> Denominators:
        assert found.whole is not None
        graph = found.whole.copy()
        graph.outputs, graph.writes = list(found.denominators.values()), {}
        graph = leaves(without_dead_code(graph)).graph  # the count of a loss needs none of what its value needs
        graph = _needed(without_dead_code(graph), whole)
        compiled = compile_differentiable(graph, (), (), self.options, device)
        position = {id(leaf): i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)}
        tensors = [whole.tensors[name] for name in graph.inputs]
        inputs = [(position.get(id(tensor)), tensor.detach()) for tensor in tensors]
        types = [graph.tensors[name] for name in graph.outputs]
        sizes = sizes_of(whole.captured, whole.tensors)
        buffers = [torch.zeros(bind(t.shape, sizes), dtype=torch_dtype(t.dtype), device=device.torch) for t in types]
        return Denominators(compiled.forward, inputs, buffers)


def _cut(name: str, part: CapturedCall, whole: CapturedCall) -> bool:
    """Whether an input belongs to a batch."""
    return name not in part.tensors or part.tensors[name].shape != whole.tensors[name].shape


def batch_of(part: CapturedCall, whole: CapturedCall, count: int) -> Batch:
    """A captured part and a captured batch, for `autodiff.whole_batch`."""
    graph = part.captured.graph
    trained = [name for name, tensor in part.tensors.items() if tensor.requires_grad]
    varying = {*trained, *graph.writes, *part.captured.draws, SEED}
    sizes = [sizes_of(seen.captured, seen.tensors) for seen in (part, whole)]
    return Batch(graph, whole.captured.graph, sizes[0], sizes[1], count, varying)


def _needed(graph: Graph, whole: CapturedCall) -> Graph:
    """The graph without unused inputs."""
    read = {name for node in graph.nodes for name in node.inputs}
    inputs = {n: e for n, e in graph.inputs.items() if n in read or (e.tensor.symbols and n in whole.tensors)}
    other = graph.copy()
    for name in graph.inputs.keys() - inputs.keys():
        del other.inputs[name], other.tensors[name]
    return other
