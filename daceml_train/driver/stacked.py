"""A stacked step: K trials of one training step as one program, each with its own parameters, state and numbers.

The parameters, buffers and optimizer states of trials lie in arrays with a first dimension for the trial, as do
rates, options, the bound of clipping, and numbers of the model and of the loss. Arguments and random numbers are
shared.
A trial enters and leaves by way of the tensors that the step trains: `load` copies them into its row, `store` back.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from daceml_train.driver.bound_optimizer import in_strides
from daceml_train.driver.bound_step import BoundStep
from daceml_train.driver.checking import kind_of
from daceml_train.driver.compile import compile_graph
from daceml_train.driver.goals import StepGoal
from daceml_train.driver.step import TrainingStep
from daceml_train.errors import Invalid, Unsupported
from daceml_train.frontends.torch.capture.capture import Captured
from daceml_train.graph.graph import Graph
from daceml_train.graph.node import SEED
from daceml_train.lowering.device import CPU
from daceml_train.tensor import symbol
from daceml_train.training.joint import Joint, Trained, joint_graph
from daceml_train.training.stacked import stacked


@dataclass
class StackGoal(StepGoal):
    """The steps of `count` trials, each with `own` inputs for itself."""

    count: int = 1
    own: frozenset[str] = frozenset()

    @property
    def description(self) -> str:
        return f"{super().description} stacked={self.count} {' '.join(sorted(self.own))}"

    def extend(self, graph: Graph) -> Graph:
        self.joint: Joint = joint_graph(graph, self.trained, self.keep, self.gradients)
        return stacked(self.joint.graph, self.count, self.own & self.joint.graph.inputs.keys())


class StackedStep:
    """`step` for `count` trials at once, on arguments of one kind, of which `inputs` and `targets` are examples.

    Tensors have the shapes, dtypes, strides and devices of the examples, all else their values; other arguments raise
    `Invalid`. What the model and the loss are set to is looked at by `read`.
    Raises `Unsupported` where the step is not one program, or an operator has no rule for several trials.
    """

    def __init__(self, step: TrainingStep, count: int, inputs: Any, *targets: Any) -> None:
        if count < 1:
            raise Invalid(f"the number of trials is positive, given {count}")
        self.step, self.count = step, count
        with step._lock, torch.enable_grad():
            _, flat, bound = step._find(inputs, targets)
        self.kind = _kind(flat, len(targets))
        if bound is None:
            raise Unsupported(f"trials of a step that is not one program: {step.breaks[-1]}")
        _check(step, bound)
        self.bound: BoundStep = bound
        """The step of one trial, whose tensors trials enter and leave by."""
        captured, trained = _captured(step, bound)
        program, shared = bound.step.executable.program, self._shared()
        own = {p: entry.name for p, entry in enumerate(program.inputs) if p not in shared}
        goal = StackGoal(trained, (), step._gradients(), 0, count, frozenset(own.values()))
        arena = step.arenas[CPU]
        linked = compile_graph(captured.graph, goal, step.options, CPU, arena)
        self.records, executable = linked.records, linked.executables[0]
        self.plan = executable.plan([bound.plan.value(symbol(name)) for name in executable.program.symbols])
        self._bind(executable.program.inputs, {name: position for position, name in own.items()})
        self.norms: torch.Tensor | None = None
        """The norms of the last gradients before clipping, one per trial."""

    def _shared(self) -> set[int]:
        """The positions of inputs that the trials share."""
        bound = self.bound
        found = {argument.position for argument in bound.arguments}
        found |= {position for position, _, _ in bound.draws.values()}
        found |= {followed.position for followed in bound.followed if not followed.number}
        inputs = bound.step.executable.program.inputs
        return found | {position for position, entry in enumerate(inputs) if entry.name == SEED}

    def _bind(self, inputs: Sequence[Any], own: dict[str, int]) -> None:
        """Create the arrays of all trials; `own` names the inputs by their positions in the step of one trial."""
        bound = self.bound
        positions = {entry.name: p for p, entry in enumerate(bound.step.executable.program.inputs)}
        numbers = {*bound.number_positions, *(f.position for f in bound.followed if f.number)}
        self.addresses = (ctypes.c_void_p * len(inputs))()
        self.alive: list[torch.Tensor] = []
        self.moved: dict[int, int] = {}
        """Position of a shared input in the step of one trial -> its position here."""
        self.rows: list[tuple[torch.Tensor, Sequence[torch.Tensor], bool]] = []
        """A tensor of the step of one trial, those of all trials, and whether the step changes it."""
        self.numbers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """A number of the step of one trial, and those of all trials."""
        for position, entry in enumerate(inputs):
            before = positions[entry.name]
            if entry.name not in own:
                self.moved[before] = position
                self._put(position, bound.inputs[before])
                continue
            tensor = bound.inputs[before]
            shape, strides = ([self.plan.value(size) for size in sizes] for sizes in (entry.shape, entry.strides))
            everywhere = torch.empty_strided(shape, strides, dtype=tensor.dtype)
            everywhere.copy_(tensor.detach().expand(shape))
            self._put(position, everywhere)
            if before in numbers:
                self.numbers.append((tensor, everywhere))
            else:
                self.rows.append((tensor, everywhere.unbind(), entry.mutable))

    def _put(self, position: int, tensor: torch.Tensor) -> None:
        self.addresses[position] = tensor._cdata
        self.alive.append(tensor)

    # ---- trials -------------------------------------------------------------------------------------------------
    def load(self, trial: int) -> None:
        """Copy what the step of one trial trains into a row."""
        with torch.no_grad():
            for tensor, rows, _ in self.rows:
                rows[trial].copy_(tensor)

    def store(self, trial: int) -> None:
        """Copy a row into the tensors of the step of one trial."""
        with torch.no_grad():
            for tensor, rows, mutable in self.rows:
                if mutable:
                    tensor.copy_(rows[trial])

    def read(self, trial: int, inputs: Any, *targets: Any) -> bool:
        """Read the rates, options and numbers of a trial, which are set in the optimizer, the model, and the loss.

        Returns False where they ask for another program: an option is zero that was not.
        """
        bound = self.bound
        if not bound.valid({"self": self.step, "inputs": inputs, "targets": targets}):
            return False
        bound.bound_optimizer.refresh()
        for number, everywhere in self.numbers:
            everywhere[trial] = number
        return True

    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """One step of all trials; their losses. Raises `Invalid` for arguments of another kind than the examples."""
        flat = pytree.tree_leaves((inputs, *targets))
        if _kind(flat, len(targets)) != self.kind:
            raise Invalid(
                "arguments of another kind than those that the trials were stacked for", advice="stack them on these"
            )
        bound, alive = self.bound, []
        for argument in bound.arguments:
            tensor = flat[argument.number]
            if argument.strides is not None:
                tensor = in_strides(tensor, argument.strides)
            alive.append(tensor)
            if argument.position in self.moved:
                self.addresses[self.moved[argument.position]] = tensor._cdata
        if bound.seed is not None:
            bound.seed.random_()
        for position, draw, strides in bound.draws.values():
            alive.append(tensor := in_strides(draw(bound.sizes), strides))
            if position in self.moved:
                self.addresses[self.moved[position]] = tensor._cdata
        outputs = self.plan.run_addresses(self.addresses)
        self.norms = outputs.pop() if bound.step.norm else None
        return outputs[0]


def _check(step: TrainingStep, bound: BoundStep) -> None:
    """Raise `Unsupported` for what a stacked step leaves out."""
    left_out = {
        "micro-batches": type(step) is not TrainingStep,
        "a step on a GPU": bound.device is not CPU,
        "a loss scaler": step.scaler is not None,
        "several processes that train together": step.ranks is not None,
        "gradients that are kept": step.keep_gradients,
        "a model or a loss that changes Python objects": bound.effects is not None,
        "the first step of an optimizer, which creates its state": bound.first,
        'random="eager" with a probability that each trial may have of its own': any(
            draw.given for _, draw, _ in bound.draws.values()
        ),
    }
    for what, found in left_out.items():
        if found:
            raise Unsupported(f"several trials in one program: {what}")


def _kind(flat: Sequence[Any], targets: int) -> Any:
    """What arguments must have in common to be those of one program, without a look at guards."""
    first: dict[int, int] = {}
    same = [first.setdefault(id(leaf), index) for index, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
    values = [leaf for leaf in flat if not isinstance(leaf, torch.Tensor)]
    return torch.get_num_threads(), targets, [kind_of(leaf) for leaf in flat], same, values


def _captured(step: TrainingStep, bound: BoundStep) -> tuple[Captured, Sequence[Trained]]:
    for (_, trained, _, _), (captured, whole) in step._steps.items():
        if whole is bound.step:
            return captured, trained
    raise AssertionError("a bound step has a capture")
