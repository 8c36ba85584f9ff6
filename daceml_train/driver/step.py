"""A training step as one program: forward, loss, backward and update, on the user's own parameters and optimizer.

TorchDynamo captures the step and decides for which arguments a captured graph is right; from then on a call with
arguments of the same kind costs a few comparisons and one native call.
"""

from __future__ import annotations

import ctypes
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from daceml_train.driver.binding import SEED, input_tensors, with_own_code
from daceml_train.driver.compilation import Options, Record, Trained, WholeStep, compile_step
from daceml_train.driver.module import optimized, original
from daceml_train.errors import DacemlError, Invalid, Unsupported
from daceml_train.frontends.torch.capture import Captured, capture
from daceml_train.runtime.executable import BoundPlan
from daceml_train.runtime.executor import InputMismatch
from daceml_train.runtime.optimizers import Update, initial_state, ready, update_of

Loss = Callable[..., torch.Tensor]


class _Stop(Exception):
    """Carries what Dynamo would run out of its compiled code, so that nothing runs."""

    def __init__(self, captured: Captured, arguments: Sequence[Any]) -> None:
        self.captured, self.arguments = captured, arguments
        super().__init__("captured")


@dataclass
class _Held:
    """A tensor that the program reads besides the arguments, and where it must still be found at the next call."""

    owner: Mapping[str, Any]
    name: str
    tensor: torch.Tensor
    requires_grad: bool


@dataclass
class _Binding:
    """A compiled step bound to the parameters, buffers and optimizer state of one moment."""

    step: WholeStep
    addresses: ctypes.Array[ctypes.c_void_p]
    arguments: list[tuple[int, int]]
    """(position in `addresses`, position among the flattened arguments)."""
    held: list[_Held]
    constants: list[torch.Tensor]
    training: list[tuple[torch.nn.Module, bool]]
    trained: list[torch.Tensor]
    groups: list[tuple[dict[str, Any], tuple[Any, ...]]]
    rates: list[torch.Tensor]
    optimizer_state: Any
    state: list[tuple[dict[str, Any], str, torch.Tensor]]
    seed: torch.Tensor | None
    storages: frozenset[int]
    first: bool
    kept: list[torch.Tensor] = field(default_factory=list)


class TrainingStep:
    """`step(inputs, *targets)` trains `model` once and returns the loss as a detached 0-d tensor.

    It computes `loss(model(inputs), *targets)`; a tuple, list or dict of inputs is unpacked into `model`; `loss=None`
    uses the output's `loss`. Gradients are not accumulated: what `.grad` held is dropped, and after the step it is
    None unless `keep_gradients`. Where the step cannot be one program, `report` says why, and PyTorch's autograd and
    optimizer run around the compiled model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer,
        options: Options,
        keep_gradients: bool = False,
    ) -> None:
        _check(model, loss, optimizer)
        self.given, self.model, self.loss, self.optimizer = model, original(model), loss, optimizer
        self.options, self.keep_gradients = options, keep_gradients
        self.records: list[Record] = []
        self.breaks: list[str] = []
        """Why the step, or a kind of arguments, runs in pieces."""
        self._bound: dict[Any, tuple[_Binding, BoundPlan]] = {}
        self._steps: dict[Any, WholeStep] = {}
        self._pieces: torch.nn.Module | None = None
        self._in_pieces: set[Any] = set()
        self._lock = threading.Lock()
        objective = types.MethodType(with_own_code(TrainingStep._objective), self)
        self._traced = torch.compile(objective, backend=_collect, fullgraph=True)

    # ---- calling ------------------------------------------------------------------------------------------------
    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """One training step. Raises `Invalid` for arguments the model does not take, before anything is updated."""
        with self._lock:
            flat = [inputs, *targets]
            if not all(isinstance(a, torch.Tensor) for a in flat):
                flat = pytree.tree_leaves(flat)
            key = (torch.get_num_threads(), len(targets), *map(_kind, flat))
            bound = self._bound.get(key)
            if bound is None or not self._valid(bound[0]):
                if key in self._in_pieces or self._hooked():
                    return self._run_in_pieces(inputs, targets)
                made = self._bind(key, inputs, targets, flat)
                if made is None:
                    return self._run_in_pieces(inputs, targets)
                bound = made
            return self._run(key, *bound, flat)

    def _run(self, key: Any, binding: _Binding, plan: BoundPlan, flat: Sequence[Any]) -> torch.Tensor:
        addresses = binding.addresses
        alive = []
        for position, index in binding.arguments:
            tensor = flat[index]
            if not tensor.is_contiguous() or tensor.untyped_storage()._cdata in binding.storages:
                tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
                alive.append(tensor)
            addresses[position] = tensor._cdata
        for (group, _), rate in zip(binding.groups, binding.rates, strict=True):
            rate.fill_(group["lr"])
        if binding.seed is not None:
            binding.seed.random_()
        outputs = plan.run_addresses(addresses)
        if self.keep_gradients:
            for parameter, gradient in zip(binding.kept, outputs[1:], strict=False):
                parameter.grad = gradient
        else:
            for parameter in binding.trained:
                if parameter.grad is not None:
                    parameter.grad = None
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what learning-rate schedulers look at
        if binding.first:
            self._keep_first_state(binding, outputs[1 + len(binding.step.gradients) :])
            del self._bound[key]
        return outputs[0]

    def _valid(self, binding: _Binding) -> bool:
        """Whether parameters, buffers, modes, optimizer options and state are still the ones that were bound."""
        for held in binding.held:
            tensor = held.tensor
            if held.owner.get(held.name) is not tensor or tensor.requires_grad is not held.requires_grad:
                return False
            if tensor._backward_hooks:
                return False
        for module, mode in binding.training:
            if module.training is not mode:
                return False
        if self.optimizer.state is not binding.optimizer_state:
            return False
        if len(self.optimizer.param_groups) != len(binding.groups):
            return False
        for state, name, tensor in binding.state:
            if state.get(name) is not tensor:
                return False
        return all(_options(group) == options for group, options in binding.groups) and not self._hooked()

    def _hooked(self) -> bool:
        """Whether someone wants to be called around the optimizer's step or a parameter's gradient."""
        optimizer = self.optimizer
        return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)

    # ---- binding ------------------------------------------------------------------------------------------------
    def _objective(self, inputs: Any, *targets: Any) -> torch.Tensor:
        if isinstance(inputs, Mapping):
            output = self.model(**inputs)
        elif isinstance(inputs, tuple | list):
            output = self.model(*inputs)
        else:
            output = self.model(inputs)
        if self.loss is not None:
            return self.loss(output, *targets)
        found = output["loss"] if isinstance(output, Mapping) else output.loss
        assert isinstance(found, torch.Tensor)
        return found

    def _bind(self, key: Any, inputs: Any, targets: Sequence[Any], flat: Sequence[Any]) -> Any:
        """The step for these arguments, captured and compiled as far as that is new; None if it runs in pieces."""
        _check_devices(flat)
        self.model.training = self.given.training
        try:
            with torch.enable_grad():
                self._traced(inputs, *targets)
        except _Stop as stop:
            captured, arguments = stop.captured, stop.arguments
        except Exception as error:
            return self._break(key, error)
        else:
            return self._break(key, Unsupported("the step captured no tensor operation"))
        try:
            binding = self._bind_captured(captured, arguments, flat)
        except DacemlError as error:
            return self._break(key, error)
        sizes = self._sizes(binding, arguments, captured)
        bound = (binding, binding.step.executable.plan(sizes))
        self._bound[key] = bound
        return bound

    def _break(self, key: Any, error: BaseException) -> None:
        """Remember that arguments of this kind run in pieces, and why."""
        cause = error
        while not isinstance(cause, DacemlError):
            inner = getattr(cause, "inner_exception", None) or cause.__cause__  # Dynamo wraps what a backend raises
            if inner is None:
                break
            cause = inner
        self.breaks.append(str(cause).strip().split("\n\n")[0])
        self._in_pieces.add(key)

    def _sizes(self, binding: _Binding, arguments: Sequence[Any], captured: Captured) -> tuple[int, ...]:
        tensors = list(input_tensors(captured, arguments).values())
        return tuple(tensors[index].shape[dim] for index, dim in binding.step.executable.program.symbols.values())

    def _bind_captured(self, captured: Captured, arguments: Sequence[Any], flat: Sequence[Any]) -> _Binding:
        optimizer = self.optimizer
        by_name = input_tensors(captured, arguments)
        given = {id(t): i for i, t in enumerate(flat) if isinstance(t, torch.Tensor)}
        of_tensor = {id(t): name for name, t in by_name.items() if id(t) not in given}
        trained: list[Trained] = []
        parameters: list[tuple[torch.Tensor, Update, bool]] = []
        for rate, group in enumerate(optimizer.param_groups):
            update = update_of(optimizer, group)
            for parameter in group["params"]:
                if id(parameter) not in of_tensor or not parameter.requires_grad:
                    continue
                if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                    raise Unsupported("a parameter has a gradient hook")
                first = not self._make_state(update, parameter)
                trained.append(Trained(of_tensor[id(parameter)], update, rate, first))
                parameters.append((parameter, update, first))
        kept = []
        if self.keep_gradients:
            kept = [n for n, t in by_name.items() if t.requires_grad and t.is_leaf and id(t) not in given]
        step = self._compiled(captured, trained, kept)
        return self._addresses(step, by_name, given, parameters)

    def _make_state(self, update: Update, parameter: torch.Tensor) -> bool:
        """Make a parameter's optimizer state if it has none; False if its first step must make it."""
        state = self.optimizer.state[parameter]
        if ready(update, state):
            return True
        made = initial_state(update, parameter)
        if made is None:
            return False
        state.update({name: t for name, t in made.items() if not isinstance(state.get(name), torch.Tensor)})
        return True

    def _compiled(self, captured: Captured, trained: Sequence[Trained], kept: Sequence[str]) -> WholeStep:
        key = (id(captured), tuple(trained), tuple(kept))
        if key not in self._steps:
            step = compile_step(captured.graph, trained, kept, self.options)
            step.records[0].fallbacks = step.records[0].fallbacks or [(t, str(o)) for t, o in captured.fallbacks]
            self._steps[key] = step
            self._captured = captured  # keeps the id from being used again
            self.records += step.records
        return self._steps[key]

    def _addresses(
        self,
        step: WholeStep,
        by_name: dict[str, torch.Tensor],
        given: dict[int, int],
        parameters: Sequence[tuple[torch.Tensor, Update, bool]],
    ) -> _Binding:
        owners = _owners([self.model, *([self.loss] if isinstance(self.loss, torch.nn.Module) else [])])
        addresses = (ctypes.c_void_p * len(step.executable.program.inputs))()
        arguments: list[tuple[int, int]] = []
        held: list[_Held] = []
        constants: list[torch.Tensor] = []
        rates = [torch.zeros((), dtype=torch.float64) for _ in range(len(self.optimizer.param_groups))]
        seed: torch.Tensor | None = None
        state = [(self.optimizer.state[by_name[p]], name) for p, name in step.state]
        state_entries = [(entry, name, entry[name]) for entry, name in state]
        extra = iter([*rates[: step.rates], *(t for _, _, t in state_entries)])
        for position, entry in enumerate(step.executable.program.inputs):
            if entry.name in by_name:
                tensor = by_name[entry.name]
                if id(tensor) in given:
                    arguments.append((position, given[id(tensor)]))
                    continue
                if id(tensor) in owners:
                    owner, name = owners[id(tensor)]
                    held.append(_Held(owner, name, tensor, tensor.requires_grad))
                else:
                    constants.append(tensor)
            elif entry.name == SEED:
                tensor = seed = torch.zeros((), dtype=torch.int64)
            else:
                tensor = next(extra)
            addresses[position] = tensor._cdata
        modules = [m for root in (self.given, self.loss) if isinstance(root, torch.nn.Module) for m in root.modules()]
        groups = [(group, _options(group)) for group in self.optimizer.param_groups]
        mutable = [by_name[e.name] for e in step.executable.program.inputs if e.mutable and e.name in by_name]
        return _Binding(
            step=step,
            addresses=addresses,
            arguments=arguments,
            held=held,
            constants=constants,
            training=[(m, m.training) for m in modules],
            trained=[p for p, _, _ in parameters],
            groups=groups,
            rates=rates,
            optimizer_state=self.optimizer.state,
            state=state_entries,
            seed=seed,
            storages=frozenset(t.untyped_storage()._cdata for t in mutable),
            first=any(first for _, _, first in parameters),
            kept=[by_name[name] for name in step.gradients],
        )

    def _keep_first_state(self, binding: _Binding, made: Sequence[torch.Tensor]) -> None:
        names = dict(zip(binding.step.trained, binding.trained, strict=True))
        for (parameter, name), tensor in zip(binding.step.made, made, strict=True):
            self.optimizer.state[names[parameter]][name] = tensor

    # ---- in pieces ----------------------------------------------------------------------------------------------
    def _run_in_pieces(self, inputs: Any, targets: Sequence[Any]) -> torch.Tensor:
        """The same step with PyTorch's autograd and optimizer around the compiled model."""
        if self._pieces is None:
            self._pieces = optimized(self.model, self.options)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            model = self._pieces
            if isinstance(inputs, Mapping):
                output = model(**inputs)
            elif isinstance(inputs, tuple | list):
                output = model(*inputs)
            else:
                output = model(inputs)
            loss = self.loss(output, *targets) if self.loss is not None else output.loss
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        if not self.keep_gradients:
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _collect(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A Dynamo backend that captures, and stops instead of running."""
    captured = capture(module, examples)

    def stop(*arguments: Any) -> Any:
        raise _Stop(captured, arguments)

    return stop


def _kind(leaf: Any) -> Any:
    """What of an argument decides which program runs."""
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.dtype, leaf.requires_grad)
    return leaf


def _options(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """A parameter group's options except the learning rate, and its parameters' count."""
    return (*(v for k, v in group.items() if k not in ("params", "lr", "initial_lr")), len(group["params"]))


def _owners(roots: Sequence[torch.nn.Module]) -> dict[int, tuple[Mapping[str, Any], str]]:
    """Where each parameter and buffer is found: the dictionary that holds it, and its name there."""
    found: dict[int, tuple[Mapping[str, Any], str]] = {}
    for root in roots:
        for module in root.modules():
            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    if tensor is not None:
                        found.setdefault(id(tensor), (owner, name))
    return found


def _check_devices(flat: Sequence[Any]) -> None:
    for position, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
            raise Invalid(f"argument {position} is on device {leaf.device}, expected cpu")
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise Invalid(f"argument {position} has layout {leaf.layout}, expected torch.strided")


def _check(model: Any, loss: Any, optimizer: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise Invalid(f"model must be a torch.nn.Module, given {type(model).__name__}")
    if loss is not None and not callable(loss):
        raise Invalid(f"loss must be callable or None, given {type(loss).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Invalid(f"optimizer must be a torch.optim.Optimizer, given {type(optimizer).__name__}")


__all__ = ["TrainingStep"]
