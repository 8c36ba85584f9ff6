"""The update of an optimizer as one program, where PyTorch's `optimizer.step()` follows a backward pass of ours.

PyTorch launches about ten operators per parameter. A hook that is called before every `step()` runs one program for all
parameters of an optimizer that trains a module from `optimize`, and lets PyTorch's own step find nothing to do. The
state remains in the optimizer, under PyTorch's names. What is not as usual is left to PyTorch: a closure, hooks around
the step, a sparse gradient, an optimizer without an update of ours, and the first step, which makes the state. Where a
loop makes a new optimizer for parameters that had one, the first steps are, too: it may make one for every task.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from daceml_train import logs
from daceml_train.driver.bound_optimizer import OptimizerGuard, check_state, step_hooks
from daceml_train.driver.compile import Compilation, Goal, Part, compile_graph
from daceml_train.driver.settings import Settings
from daceml_train.errors import DacemlError, Unsupported
from daceml_train.frontends.torch.types import tensor as type_of
from daceml_train.runtime.executable import Executable
from daceml_train.runtime.executor import InputMismatch
from daceml_train.training.joint import StepInterface, Trained, gradient_name, update_graph
from daceml_train.training.optimizers import number_types, ready, update_of

PROGRAMS = 8
"""How many programs an optimizer may have: for sets of parameters with gradients, and for options. Then PyTorch's own
step is used: options change from step to step."""

NEXT = 24
"""How many steps a further optimizer of the same parameters takes by itself: binding a program takes as long as some 10
to 30 steps of PyTorch's."""


@dataclass
class UpdateGoal(Goal):
    """The update of parameters, of which nothing is an output."""

    interface_: StepInterface
    updates: str
    from_capture = False

    @property
    def description(self) -> str:
        return f"update {self.updates}"

    def divide(self, compilation: Compilation) -> Iterator[Part]:
        yield Part(compilation.graph, compilation.record)

    def interface(self) -> StepInterface:
        return self.interface_


class NotYet(Unsupported):
    """PyTorch has to make the state of a parameter first."""


class BoundUpdate:
    """An update bound to the parameters and the state of an optimizer; gradients and hyper-parameters change."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: Settings, names: dict[int, str], graded: Sequence[int]
    ) -> None:
        self.parameters, trained = _trained(optimizer, graded)
        by_name = dict(zip((t.parameter for t in trained), self.parameters, strict=True))
        paths = [names.get(id(p), "") for p in self.parameters]
        joint = update_graph(trained, [type_of(p.detach(), laid_out=True) for p in self.parameters], paths)
        self.guard = OptimizerGuard(optimizer, joint.hyperparameters)
        goal = UpdateGoal(joint.interface, "; ".join(map(repr, trained)))
        self.executable: Executable = compile_graph(joint.graph, goal, settings).executables[0]
        program = self.executable.program
        self.plan = self.executable.plan([])
        held: dict[str, torch.Tensor] = dict(by_name)
        positions = {gradient_name(t.parameter): i for i, t in enumerate(trained)}
        added = [n for n in joint.graph.inputs if n not in held and n not in positions]
        held |= zip(added, self.guard.tensors, strict=False)
        del added[: len(self.guard.tensors)]
        held |= {n: optimizer.state[by_name[p]][s] for n, (p, s) in zip(added, joint.state, strict=True)}
        self.addresses = (ctypes.c_void_p * len(program.inputs))()
        self.gradients: list[tuple[int, int]] = []
        self.alive = []
        written = []
        for position, entry in enumerate(program.inputs):
            if entry.name in positions:
                self.gradients.append((position, positions[entry.name]))
                continue
            tensor = held[entry.name]
            check_state(entry, tensor, tuple(self.plan.value(s) for s in entry.strides))
            self.addresses[position] = tensor._cdata
            self.alive.append(tensor)
            written += [tensor] if entry.mutable else []
        self.written = written
        storages = [t.untyped_storage()._cdata for t in written]
        if len(set(storages)) != len(storages) or any(t.is_inference() for t in written):
            raise Unsupported("parameters or state that share memory, or were made in inference mode")
        self.storages = frozenset(storages)

    def run(self, optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> bool:
        """Update, unless something is not as it was bound."""
        if not self.guard.holds(optimizer) or self.guard.refresh():
            return False
        if any(type(g) is not torch.Tensor or g.layout is not torch.strided for g in gradients):
            return False
        if any(g.untyped_storage()._cdata in self.storages for g in gradients):
            return False
        for position, index in self.gradients:
            self.addresses[position] = gradients[index]._cdata
        try:
            self.plan.run_addresses(self.addresses)
        except InputMismatch:  # before anything is written
            return False
        torch.autograd.graph.increment_version(self.written)
        return True


def _trained(optimizer: torch.optim.Optimizer, graded: Sequence[int]) -> tuple[list[torch.Tensor], list[Trained]]:
    """The parameters with gradients, and their updates. Raises `Unsupported` where PyTorch has to do it."""
    parameters: list[torch.Tensor] = []
    trained: list[Trained] = []
    has_gradient = iter(graded)
    for rate, group in enumerate(optimizer.param_groups):
        update = update_of(optimizer, group)
        for parameter in group["params"]:
            if not next(has_gradient):
                continue
            state = optimizer.state.get(parameter, {})
            if type(parameter) is not torch.nn.Parameter or parameter.device.type != "cpu":
                raise Unsupported(f"a parameter that is {type(parameter).__name__} on {parameter.device}")
            if not ready(update, state):
                raise NotYet("the optimizer's state does not exist yet")
            numbers = number_types(update, state)
            trained.append(Trained(f"p{len(trained)}", update, rate, numbers=numbers))
            parameters.append(parameter)
    return parameters, trained


class OptimizerUpdates:
    """The updates of one optimizer."""

    def __init__(self, settings: Settings, names: dict[int, str], by_itself: int = 1) -> None:
        self.settings, self.names = settings, names
        self.bound: dict[tuple[int, ...], BoundUpdate] = {}
        self.by_itself = by_itself
        """How many more steps are left to PyTorch, of which the first makes the state."""
        self.compiled = 0
        self.why = ""
        """Why PyTorch takes all further steps."""
        self.lock = threading.Lock()

    def update(self, optimizer: torch.optim.Optimizer) -> bool:
        """Update all parameters that have gradients, if a program of ours can."""
        found = [p.grad for group in optimizer.param_groups for p in group["params"]]
        key = (*[g is not None for g in found], torch.get_num_threads())
        gradients = [g for g in found if g is not None]
        if self.why or not gradients:
            return False
        bound = self.bound.get(key)
        if bound is not None and bound.run(optimizer, gradients):
            return True
        if self.by_itself:
            self.by_itself -= 1
            return False
        if bound is not None and bound.guard.holds(optimizer):
            return False  # of this step alone: a gradient of another kind
        try:
            self.compiled += 1
            if self.compiled > PROGRAMS:
                raise Unsupported("the optimizer has other options or parameters at every step")
            self.bound[key] = BoundUpdate(optimizer, self.settings, self.names, key[:-1])
        except NotYet:  # a parameter that had no gradient before
            self.compiled -= 1
            return False
        except DacemlError as error:
            self.why = str(error)
            logs.event(logs.BREAKS, f"PyTorch's own {type(optimizer).__name__}.step: {error}")
            return False
        return self.bound[key].run(optimizer, gradients)


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, OptimizerUpdates | None]]
_known = weakref.WeakKeyDictionary()
_settings: weakref.WeakKeyDictionary[torch.nn.Module, Settings] = weakref.WeakKeyDictionary()
"""The modules from `optimize`."""
_trained_before: weakref.WeakKeyDictionary[torch.nn.Module, set[int]] = weakref.WeakKeyDictionary()
"""The parameters, by identity, of each of these modules that an optimizer has updated."""
_count = 0
"""How many there have been: an optimizer that trained none of them may train a later one."""


def update_for(module: torch.nn.Module, settings: Settings) -> None:
    """From now on, optimizers of this module's parameters update them by programs."""
    global _count
    if _settings.get(module) is settings:
        return
    if not _count:
        register_optimizer_step_pre_hook(_before_step)
    _count += 1
    _settings[module] = settings


def _before_step(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> Any:
    """Update; PyTorch's own step is then that of an optimizer of the same kind without parameters."""
    if torch.compiler.is_compiling() or len(arguments) != 1 or keywords or any(step_hooks(optimizer)):
        return None
    count, updates = _known.get(optimizer, (0, None))
    if count != _count and updates is None:
        updates = _updates_of(optimizer)
        _known[optimizer] = _count, updates
    if updates is None or hasattr(optimizer, "grad_scale"):
        return None
    with updates.lock, torch.no_grad():
        if not updates.update(optimizer):
            return None
    return (_without_parameters(optimizer),), keywords


_before_step.of_daceml_train = True  # type: ignore[attr-defined]


def _updates_of(optimizer: torch.optim.Optimizer) -> OptimizerUpdates | None:
    """The updates of an optimizer; None if it trains no module from `optimize`."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module, settings in _settings.items():
        names = {id(p): name for name, p in module.named_parameters()}
        if not own.isdisjoint(names):
            before = _trained_before.setdefault(module, set())
            by_itself = 1 if own.isdisjoint(before) else NEXT
            before |= own
            return OptimizerUpdates(settings, names, by_itself)
    return None


def reasons(module: torch.nn.Module) -> list[str]:
    """Why PyTorch updates parameters of a module from `optimize`, or of one that is trained in pieces."""
    own = {id(p) for p in module.parameters()}
    found = [(optimizer, updates) for optimizer, (_, updates) in _known.items() if updates is not None and updates.why]
    return [
        f"{type(optimizer).__name__}.step: {updates.why}"
        for optimizer, updates in found
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"])
    ]


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    empty: torch.optim.Optimizer = object.__new__(type(optimizer))
    empty.defaults, empty.param_groups, empty.state = optimizer.defaults, [], {}  # type: ignore[assignment]
    return empty


__all__ = ["BoundUpdate", "OptimizerUpdates", "reasons", "update_for"]
