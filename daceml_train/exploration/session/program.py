"""A session's graph as a compiled program, and tensors for its inputs; the user's own are copied."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from daceml_train.driver.binding import random_inputs
from daceml_train.driver.function import run_with_layout
from daceml_train.driver.goals import compile_differentiable
from daceml_train.driver.settings import Settings
from daceml_train.errors import Invalid
from daceml_train.exploration.session.subject import Subject
from daceml_train.graph.graph import Graph
from daceml_train.graph.node import SEED
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.torch_types import torch_dtype
from daceml_train.training.gradients import scaler_state
from daceml_train.training.joint import ACCUMULATED
from daceml_train.training.optimizers import initial_state, option_value

DRAWN = 7
"""The seed of cotangents and of random numbers."""
RATE = 1.0
"""The learning rate of verification: with a small one, rounding of parameters hides what a gradient did to them."""


@dataclass(frozen=True)
class Inputs:
    """Tensors for the inputs of a training graph, by name; `state` names those of the optimizer's state."""

    tensors: Mapping[str, torch.Tensor]
    state: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Input -> (the parameter's input, the state's name)."""

    @staticmethod
    def captured(subject: Subject) -> Inputs:
        """The present tensors of the forward pass, not copied, and the random numbers of a call."""
        captured = subject.seen.captured
        tensors = {name: tensor.detach() for name, tensor in subject.seen.tensors.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(DRAWN)
            tensors |= random_inputs(captured, tensors)
        if SEED in captured.graph.inputs:
            tensors[SEED] = torch.tensor(DRAWN, dtype=torch.int64)
        return Inputs(tensors)

    @staticmethod
    def of(subject: Subject, rate: float | None = None) -> Inputs:
        """Copies of the present tensors of model, optimizer and batch; `rate` replaces all learning rates."""
        captured = subject.seen.captured
        tensors = Inputs.captured(subject).fresh()
        graph = subject.training_graph(captured.graph)
        rest = [name for name in graph.inputs if name not in captured.graph.inputs]
        if subject.kind == "module":
            generator = torch.Generator().manual_seed(DRAWN)
            types = {name: graph.inputs[name].tensor for name in rest}
            sizes = {name: [int(size) for size in t.shape] for name, t in types.items()}
            drawn = {n: torch.randn(sizes[n], generator=generator).to(torch_dtype(t.dtype)) for n, t in types.items()}
            return Inputs(tensors | drawn)
        joint = subject.joint
        groups = subject.optimizer.param_groups if subject.optimizer is not None else []
        count = len(joint.hyperparameters)
        for name, (group, option) in zip(rest[:count], joint.hyperparameters, strict=True):
            value = option_value(groups[group], option) if option != "lr" or rate is None else rate
            tensors[name] = torch.tensor(value, dtype=torch.float64)
        state = dict(zip(rest[count:], joint.state, strict=True))
        tensors |= {name: _state(subject, *entry) for name, entry in state.items()}
        return Inputs(tensors, state)

    def fresh(self) -> dict[str, torch.Tensor]:
        """Copies, for a run that may write them."""
        return {name: _copy(tensor) for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class Program:
    """A compiled graph: `run` returns its outputs and writes into the tensors it is given."""

    graph: Graph
    executable: Executable
    kernels: int
    distinct_kernels: int
    calls: int

    @staticmethod
    def of(graph: Graph, options: Settings) -> Program:
        """Lower and compile a graph as it is, without any pass. Raises the errors of lowering and of the compiler."""
        compiled = compile_differentiable(graph, (), (), options)
        record = compiled.records[0]
        return Program(graph, compiled.forward, record.kernels, record.distinct_kernels, sum(record.calls.values()))

    def run(self, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The outputs in the order of the graph."""
        with torch.no_grad():
            return run_with_layout(self.executable, [tensors[name] for name in self.graph.inputs])


def cotangents(subject: Subject, graph: Graph, inputs: Inputs) -> dict[int, torch.Tensor]:
    """Captured output -> its cotangent among the inputs of a training graph without loss."""
    if subject.kind != "module":
        return {}
    names = [name for name in graph.inputs if name not in subject.captured.inputs]
    return {output: inputs.tensors[name] for output, name in zip(subject.cotangents, names, strict=True)}


def accumulated(path: str, parameter: torch.Tensor) -> torch.Tensor:
    """The assumed gradient of a parameter after all parts of a batch but the last."""
    generator = torch.Generator().manual_seed(DRAWN + zlib.crc32(path.encode()))
    drawn = 0.01 * torch.randn(parameter.shape, generator=generator)
    return drawn.to(parameter.dtype).contiguous(memory_format=torch.preserve_format)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.preserve_format)


def _state(subject: Subject, parameter: str, name: str) -> torch.Tensor:
    assert subject.optimizer is not None
    if not parameter:
        assert subject.treatment.scaler is not None
        return _copy(scaler_state(copy.deepcopy(subject.treatment.scaler), torch.device("cpu"))[name])
    owner = subject.seen.tensors[parameter]
    if name == ACCUMULATED:
        return accumulated(subject.path(parameter), owner)
    value = subject.optimizer.state.get(owner, {}).get(name)
    if value is not None and not isinstance(value, torch.Tensor):
        raise Invalid(f"the optimizer's {name} is not a tensor")
    return _copy(value) if value is not None else initial_state(name, owner, subject.optimizer)
