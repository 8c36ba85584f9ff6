"""A compiled step bound to particular tensors: what a call compares before it runs, and the run itself.

Dynamo's guards say whether the captured code is still right. What they leave to the code that Dynamo generates, which
does not run here, is compared here: the tensor objects of the modules and of the optimizer, and hooks.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from daceml_train.driver.binding import changed_often, check_apart, drawn_with, raise_versions
from daceml_train.driver.bound_optimizer import (
    OptimizerGuard,
    UserOptimizerGuard,
    check_state,
    global_hooks,
    in_strides,
    is_unresolved,
    own_step_hooks,
    same_strides,
)
from daceml_train.driver.checking import forwards_of, same_forwards
from daceml_train.driver.commit import note_what_changed
from daceml_train.driver.denominators import Denominators
from daceml_train.driver.distribution import described, rows_of
from daceml_train.driver.fully_sharded import memory_of
from daceml_train.driver.goals import WholeStep
from daceml_train.driver.selected import SelectedInputs
from daceml_train.driver.source_guard import ARRAY, SourceGuard, follow, tensor_of
from daceml_train.errors import DeviceMismatch, Unsupported
from daceml_train.frontends.torch.capture.capture import Captured
from daceml_train.frontends.torch.capture.rng_draws import Draw
from daceml_train.frontends.torch.dynamo import data_sizes
from daceml_train.frontends.torch.dynamo.tracing import failing_guard
from daceml_train.graph.node import SEED
from daceml_train.lowering.device import GPU
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.collectives import communicating
from daceml_train.runtime.gpu.cuda_graph import CudaGraphs, HostScalars
from daceml_train.runtime.gpu.plan import DevicePlan
from daceml_train.runtime.native_guards import GRADIENT, HOOK, IdentityGuard, Leaves, SharedStorage
from daceml_train.runtime.ranks import RankError, Ranks
from daceml_train.training.distribution import WEIGHT
from daceml_train.training.gradients import SCALER, scaler_state, scaling_of
from daceml_train.training.joint import ACCUMULATED, OF_STEP

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hook_tables(modules: Iterable[torch.nn.Module]) -> list[dict[int, Any]]:
    """The dictionaries of the hooks of these modules, and of global module hooks."""
    everywhere = [getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS]
    return [*everywhere, *(getattr(module, name) for module in modules for name in _HOOKS)]


SHARED = "an argument shares memory with a buffer that the model updates"
"""Why a call of a bound step runs in pieces."""


class Argument(NamedTuple):
    """An input of the program that is part of a call's arguments, and the strides to which it is copied if need be."""

    position: int
    number: int
    strides: tuple[int, ...] | None


class BoundStep:
    """See the module. `valid` and `run` are what every call costs."""

    share = 1.0
    """The weight of the loss, for a part of a batch."""
    new_sizes = False  # whether what the last call selected was the first of its sizes
    denominators: Denominators | None = None
    """Computed on the whole batch before its parts run."""
    why = ""
    """Why the last call could not run."""
    used = False
    """Whether a step that was compiled in the background has been compared with PyTorch's."""

    def __init__(
        self,
        captured: Captured,
        step: WholeStep,
        manager: Any,
        modules: Sequence[torch.nn.Module],
        optimizer: torch.optim.Optimizer,
        by_name: Mapping[str, torch.Tensor],
        flat: Sequence[Any],
        scope: dict[str, Any],
        code_globals: dict[str, Any],
        effects: types.FunctionType | None,
        accumulated: Mapping[int, torch.Tensor],
        bounds: Mapping[str, float],
        scaler: torch.amp.GradScaler | None = None,
        cuda_graphs: CudaGraphs | None = None,
        ranks: Ranks | None = None,
        idle: bool = False,
        assigned: Collection[int] = (),
        unstable: Collection[str] = (),
    ) -> None:
        self.cuda_graphs, self.device = cuda_graphs, step.executable.device
        self.accumulated, self.scaler, self.scaling = accumulated, scaler, scaling_of(scaler)
        self.further: list[torch.Tensor] = []
        """What the user's code keeps of the last call."""
        self.norm: torch.Tensor | None = None
        """The norm of the last call's gradients before clipping."""
        self.step, self.optimizer = step, optimizer
        self.manager = manager
        """TorchDynamo's guards of the captured code."""
        self.guard: Callable[[dict[str, Any]], bool] = manager.check
        self.effects = effects
        """The code that Dynamo generated, if it does more than compute the loss."""
        program = step.executable.program
        tensors = list(by_name.values())
        sizes = [tensors[i].shape[d] for i, d in program.symbols.values()]
        if captured.selection is not None:
            step.executable.changing = True
            sizes = [max(data_sizes.LEAST, size) for size in sizes]  # each call takes the plan of its own sizes
        self.plan: BoundPlan = step.executable.plan(sizes)
        self._observe(modules, bounds, assigned, unstable)
        self._bind_inputs(captured, by_name, flat, scope, code_globals)
        leaves = [t for name, t in by_name.items() if t.requires_grad and t.is_leaf]
        self.leaves = list({id(t): t for t in (*leaves, *_all_parameters(optimizer))}.values())
        self.attached, self.gradient_hooks = Leaves(self.leaves).attached, gradient_hooks(self.leaves)
        self.trained = [by_name[name] for name in step.trained]
        self.kept = [by_name[name] for name in step.gradients]
        self.first = bool(step.made)
        self.mean: torch.Tensor | None = None
        """The mean of the last call's losses over all ranks."""
        self.ranks, self.described, self.idle = ranks, self._described() if ranks else "", idle
        known = {entry: index for index, entry in enumerate(step.hyperparameters)}
        self.weight = known.get((OF_STEP, WEIGHT))
        """The position of the rank's weight among the hyper-parameters, if the program exchanges gradients."""

    # ---- binding ------------------------------------------------------------------------------------------------
    def _described(self) -> str:
        options = [*self.step.hyperparameters, *(repr(o) for group in self.bound_optimizer.groups for o in group[2])]
        lines = [f"{type(self.optimizer).__name__}: {sorted(map(str, options))}", f"scaler: {self.scaling}"]
        return described(self.step.executable.program, self.step.trained, lines)

    def _observe(
        self,
        modules: Sequence[torch.nn.Module],
        bounds: Mapping[str, float],
        assigned: Collection[int],
        unstable: Collection[str],
    ) -> None:
        """Note what has to stay as it is; the modules `assigned` assign their buffers themselves."""
        optimizer = self.optimizer
        self.bound_optimizer = (
            UserOptimizerGuard(optimizer, self.step.hyperparameters, bounds, unstable)
            if self.step.by_user
            else OptimizerGuard(optimizer, self.step.hyperparameters, bounds)
        )
        tables = [table for m in modules for table in (m._modules, m._parameters)]
        self.empty_hooks = [table for table in (*hook_tables(modules), *own_step_hooks(optimizer)) if not table]
        buffers = (m._buffers for m in modules if id(m) not in assigned)
        self.same = IdentityGuard([*tables, *buffers], self.empty_hooks)
        """Modules, parameters, buffers, and hooks, of which there are none."""
        self.steps = optimizer.__dict__.get("step"), type(optimizer).step
        self.forwards = forwards_of(modules)

    def _bind_inputs(
        self,
        captured: Captured,
        by_name: Mapping[str, torch.Tensor],
        flat: Sequence[Any],
        scope: dict[str, Any],
        code_globals: dict[str, Any],
    ) -> None:
        step, program = self.step, self.step.executable.program
        given = {id(t): i for i, t in enumerate(flat) if isinstance(t, torch.Tensor)}
        changed = next((n for n in captured.changes if n in by_name and id(by_name[n]) in given), None)
        if changed is not None:
            raise Unsupported(f"the model changes its argument {captured.graph.inputs[changed].path} in place")
        known = {id(t) for t in (*self.same.values, *self.bound_optimizer.kept)}
        sources = {source.name: source for source in captured.inputs}
        scaling = self._scaler_state(next(iter(by_name.values())).device)
        entries = (scaling[name] if name in SCALER else self._state(by_name[p], name) for p, name in step.state)
        state = [memory_of(entry) for entry in entries]
        numbers = self.bound_optimizer.tensors
        number_of = {id(tensor): i for i, tensor in enumerate(numbers)}
        further = iter([*numbers, *state])
        self.addresses = (ctypes.c_void_p * len(program.inputs))()
        self.inputs: list[torch.Tensor] = [_NOTHING] * len(program.inputs)
        self.host_positions: list[int] = []
        self.number_positions: dict[int, int] = {}
        """Position of a program's input -> that of a hyper-parameter."""
        self.arguments: list[Argument] = []
        self.followed: list[SourceGuard] = []
        self.alive: list[torch.Tensor] = []
        self.seed: torch.Tensor | None = None
        self.draws: dict[str, tuple[int, Draw, tuple[int, ...]]] = {}
        self.selected = SelectedInputs.of(captured, by_name, given, known, [entry.name for entry in program.inputs])
        selected = () if self.selected is None else {place for place, _ in self.selected.places}
        self.mutable, fixed = list[torch.Tensor](), list[torch.Tensor]()
        for position, entry in enumerate(program.inputs):
            if position in selected:
                continue
            strides = tuple(self.plan.value(s) for s in entry.strides)
            if entry.name in by_name:
                tensor, source = memory_of(by_name[entry.name]), sources[entry.name]
                fits = same_strides(tensor, strides)
                if id(tensor) in given:
                    self.arguments.append(Argument(position, given[id(tensor)], None if fits else strides))
                    continue
                fits = fits and not is_unresolved(tensor)
                bound = id(tensor) in known or tensor is not by_name[entry.name]
                if not fits and (bound or entry.mutable or source.kind != "tensor"):  # what a step reads is copied
                    raise Unsupported(f"{entry.path} is not dense in memory (strides {tensor.stride()}), or negated")
                if not bound and source.kind in ("tensor", "number"):
                    text, states = self.bound_optimizer.in_state(source.source)
                    known_as = {"G": code_globals, "S": states, ARRAY: tensor_of}
                    moving = self.effects is not None or text.startswith(ARRAY)
                    moving = moving and not entry.mutable and entry.name not in captured.changes
                    self.followed.append(follow(text, scope, known_as, tensor, position, strides, moving))
                    self.host_positions += [position] if self.followed[-1].number else []
            elif entry.name == SEED:
                tensor = self.seed = torch.zeros((), dtype=torch.int64, device="cpu")
                self.host_positions.append(position)
            elif entry.name in captured.draws:
                self.draws[entry.name] = position, captured.draws[entry.name], strides
                continue
            else:
                tensor = next(further)
                check_state(entry, tensor, strides)
                if (number := number_of.get(id(tensor))) is not None:
                    self.host_positions.append(position)
                    self.number_positions[position] = number
            (self.mutable if entry.mutable else fixed).append(tensor)
            self.alive.append(tensor)
            self._put(position, in_strides(tensor, strides))
        self._mirror_host_scalars()
        self.draws = {name: self.draws[name] for name in captured.draws if name in self.draws}  # in eager's order
        self.sizes = drawn_with(captured, by_name)
        check_apart(self.mutable, fixed)
        self.shared = SharedStorage(self.addresses, [a.position for a in self.arguments], self.mutable)
        self.updated = frozenset(t.untyped_storage()._cdata for t in self.mutable)
        self.buffers = frozenset(by_name[n].untyped_storage()._cdata for n in captured.graph.writes if n in by_name)
        self.changed_often = changed_often(captured, by_name, {i.name for i in program.inputs if i.mutable})

    def _put(self, position: int, tensor: torch.Tensor) -> None:
        self.addresses[position] = tensor._cdata
        self.inputs[position] = tensor

    def _mirror_host_scalars(self) -> None:
        """On a GPU, copy numbers that are on the CPU (rates, seed) to the device; each call updates the copies."""
        self.host: HostScalars | None = None
        if not isinstance(self.device, GPU):
            return
        host = [i for i, t in enumerate(self.inputs) if t is not _NOTHING and not self.device.holds(t)]
        positions = sorted({*self.host_positions, *host})
        for position in positions:
            entry = self.step.executable.program.inputs[position]
            if self.inputs[position].ndim or entry.mutable:
                where = f"{self.inputs[position].device}, the program runs on {self.device.torch}"
                raise DeviceMismatch(f"{entry.path or entry.name} is on {where}")
        assert isinstance(self.plan.plan, DevicePlan)
        self.host = HostScalars(self.plan.plan.arena, [self.inputs[i] for i in positions])
        for position, copy in zip(positions, self.host.copies, strict=True):
            self.inputs[position] = copy

    def _scaler_state(self, device: torch.device) -> dict[str, torch.Tensor]:
        self.scale = {} if self.scaler is None or self.scaling is None else scaler_state(self.scaler, device)
        return self.scale

    def _state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        tensor = self.accumulated[id(parameter)] if name == ACCUMULATED else self.optimizer.state[parameter][name]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    # ---- every call ---------------------------------------------------------------------------------------------
    def valid(self, scope: dict[str, Any]) -> bool:
        """Whether the model, the loss and the optimizer still contain all that was bound."""
        optimizer = self.optimizer
        if not self.same.holds() or global_hooks() or not self.bound_optimizer.holds(optimizer):
            return False
        if optimizer.__dict__.get("step") is not self.steps[0] or type(optimizer).step is not self.steps[1]:
            return False
        if not same_forwards(self.forwards):
            return False
        if self.scaler is not None and not self._same_scaling():
            return False
        if self.attached() & HOOK and gradient_hooks(self.leaves) != self.gradient_hooks:
            return False
        return self.guard(scope) and (not self.followed or all(followed.holds(scope) for followed in self.followed))

    def _same_scaling(self) -> bool:
        same = all(getattr(self.scaler, name) is tensor for name, tensor in self.scale.items())
        return same and scaling_of(self.scaler) == self.scaling

    def changed(self, scope: dict[str, Any]) -> str:
        """What is not as it was bound, for messages; the first call of a new kind of state is not asked about."""
        if not self.guard(scope):
            return failing_guard(self.guard, scope) or "a guard of the captured code does not hold"
        if any(self.empty_hooks) or global_hooks():
            return "a hook was added"
        if not self.same.holds() or not self.bound_optimizer.same.holds():
            return "a parameter, a buffer, a submodule or the optimizer's state is another object"
        if scaling_of(self.scaler) != self.scaling:
            return "the scaler has other settings"
        if not self.bound_optimizer.same_options():
            return "the optimizer has other options"
        return "the optimizer has other parameters, or a tensor that the step follows was replaced"

    def run(self, flat: Sequence[Any], keep_gradients: bool) -> torch.Tensor | None:
        """Run on the call's arguments; return None without running if `why` says that the program may not."""
        alive = []
        for position, number, strides in self.arguments:
            tensor = flat[number]
            if strides is not None or is_unresolved(tensor):
                alive.append(tensor := in_strides(tensor, strides or tensor.stride()))
            self.addresses[position] = tensor._cdata
            self.inputs[position] = tensor
        if self.selected is not None and (misfit := self._select(self.selected, flat)):
            self.why = misfit
            return None
        if self.shared.found():
            copies = self._unshared()
            if copies is None:
                self.why = SHARED
                return None
            alive += copies
        for followed in self.followed:
            if followed.copied or (followed.moving and followed.tensor is not self.inputs[followed.position]):
                tensor = in_strides(followed.tensor, followed.strides)
                if tensor.untyped_storage()._cdata in self.updated:
                    alive.append(tensor := tensor.clone(memory_format=torch.preserve_format))
                self._put(followed.position, tensor)
        on_device = self.bound_optimizer.refresh()
        if self.seed is not None:
            self.seed.random_()
            if self.ranks is not None:
                self.seed.bitwise_xor_(self.ranks.rank * _ODD)  # other numbers on each rank
        for place, draw, strides in self.draws.values():
            alive.append(tensor := in_strides(draw(self.sizes), strides))
            self._put(place, tensor)
        try:
            outputs = self._run(on_device, flat)
        except Exception as error:
            if not isinstance(error, RankError) or self.ranks is None or self.ranks.met:
                note_what_changed(error, self.step.executable.program)
            raise
        raise_versions(self.changed_often)
        if self.step.further:
            self.further = outputs[1 : 1 + self.step.further]
            del outputs[1 : 1 + self.step.further]
        if self.attached() & GRADIENT:
            for leaf in self.leaves:
                leaf.grad = None
        if keep_gradients:
            for parameter, gradient in zip(self.kept, outputs[1:], strict=False):
                parameter.grad = _laid_out_like(parameter, gradient)
        self.norm = outputs.pop() if self.step.norm else None
        self.mean = outputs.pop() if self.step.mean else None
        if self.first:
            states = outputs[1 + len(self.kept) :]
            owners = dict(zip(self.step.trained, self.trained, strict=True))
            for (owner, name), tensor in zip(self.step.made, states, strict=True):
                self.optimizer.state[owners[owner]][name] = _laid_out_like(owners[owner], tensor)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look at
        return outputs[0]

    def _select(self, selected: SelectedInputs, flat: Sequence[Any]) -> str:
        """Put what arguments' values select, and take the plan for its sizes; why the program may not run, if so."""
        found, misfit = selected(flat)
        if misfit or not found:
            return misfit
        for position, tensor in found:
            self._put(position, tensor)
        self.plan = self.step.executable.plan(self.step.executable.sizes_of(self.inputs))
        self.new_sizes, self.plan.ran = not self.plan.ran, True
        return ""

    def _unshared(self) -> list[torch.Tensor] | None:
        """Copies, as inputs, of the arguments that share memory with what is updated; None if that is a buffer."""
        copies = []
        for position, _, strides in self.arguments:
            tensor = self.inputs[position]
            storage = tensor.untyped_storage()._cdata
            if strides is None and storage in self.updated:
                if storage in self.buffers:
                    return None
                copies.append(tensor.clone(memory_format=torch.preserve_format))
                self._put(position, copies[-1])
        return copies

    def _run(self, on_device: Sequence[tuple[int, torch.Tensor]], flat: Sequence[Any]) -> list[torch.Tensor]:
        if self.ranks is None or self.weight is None:
            return self._launch(on_device)
        rows, values = 0 if self.idle else rows_of(flat), self.bound_optimizer.values
        self.ranks.begin(self.described, rows, bytes(values))
        values[self.weight] = self.ranks.weight(rows)
        with communicating(self.ranks):
            return self._launch(on_device)

    def _launch(self, on_device: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        if self.host is None:
            return self.plan.run_addresses(self.addresses)
        inputs = {number: self.inputs[position] for position, number in self.number_positions.items()}
        self.host.refresh([(inputs[number], tensor) for number, tensor in on_device if number in inputs])
        if self.cuda_graphs is None or self.first:
            return self.plan.run(self.inputs)
        moving = [*(a.position for a in self.arguments), *(place for place, _, _ in self.draws.values())]
        moving += [f.position for f in self.followed if f.moving]  # another tensor at each call
        return self.cuda_graphs.run(self, self.plan, self.inputs, moving)


UNGUARDED = types.SimpleNamespace(check=lambda scope: True)
"""In place of TorchDynamo's guards, for code that is not Dynamo's."""

_ODD = 0x1E3779B97F4A7C15
"""What distinguishes the random numbers of ranks."""

_NOTHING = torch.empty(0)
"""Where a call puts its own tensor."""


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether a hook reads or changes this parameter's gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


Hooks = tuple[tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]


def gradient_hooks(parameters: Iterable[torch.Tensor], every: bool = False) -> dict[int, Hooks]:
    """The hooks before and after the accumulation of gradients, by the identity of parameters that have any.

    `every`: of parameters without hooks, too.
    """
    tables = ((p, p._backward_hooks or {}, p._post_accumulate_grad_hooks or {}) for p in parameters)
    return {id(p): (tuple(b.values()), tuple(a.values())) for p, b, a in tables if b or a or every}


def _all_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _laid_out_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A gradient or a state in its parameter's memory layout, as PyTorch has it."""
    if same_strides(tensor, parameter.stride()):
        return tensor
    return torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(tensor)
