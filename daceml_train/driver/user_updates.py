"""Steps in which code of the user's reads gradients: an optimizer that the user wrote, or hooks of parameters.

TorchDynamo traces that code together with model and loss, so that it is a part of the one program. PyTorch takes the
first steps, which make the optimizer's state and show which parameters get gradients. What the code assigns to Python
objects (`state["step"] += 1`) is repeated after each step, as that of a model is.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._dynamo
from torch.optim import Optimizer

from daceml_train import logs
from daceml_train.driver.along_paths import AlongPaths
from daceml_train.driver.bound_optimizer import step_hooks, unstable_state
from daceml_train.driver.bound_step import gradient_hooks, has_gradient_hooks, hook_tables
from daceml_train.driver.checking import forwards_of
from daceml_train.driver.stored_captures import Loaded
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.operators import NAMESPACE
from daceml_train.frontends.torch.dynamo.tracing import LIMITS, compiled, weakly, with_own_code
from daceml_train.graph.graph import Graph
from daceml_train.training.optimizers import has_update
from daceml_train.training.user_update import UserCode, reads_gradients

FIRST_STEPS = 2
"""The steps that PyTorch takes before an optimizer of the user's is traced: the second one shows what state moves."""

_OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep
_marks = getattr(torch.ops, NAMESPACE)


class UserUpdates(AlongPaths):
    """What a `TrainingStep` does where code of the user's reads gradients."""

    traces_user_code = True
    """Whether it may be a part of the program."""
    _traced: Any
    _hooks: list[int] | None
    _objective: Callable[..., torch.Tensor]
    _collect: Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
    _bound: dict[Any, Any]

    def _start_in_pieces(self) -> None:
        super()._start_in_pieces()
        self.user_step: Callable[[Optimizer], Any] | None = None
        """The `step` of an optimizer that the user wrote."""
        self._reading = False
        """Whether the trace contains code of the user's that reads gradients, as of the newest hooks."""
        self.read: list[torch.Tensor] = []
        """The parameters of the optimizer that get gradients, where code of the user's reads them."""
        self.hooks: list[tuple[tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]] = []
        """Their hooks, before and after a gradient is accumulated."""
        self.unstable: set[str] = set()
        """The names of the optimizer's state that steps replace by other objects."""
        self._begun: tuple[frozenset[int], int] = frozenset(), 0
        self.taken_by_pytorch = 0
        """The steps that PyTorch took before the user's code was traced, at the start and after changes."""

    # ---- what is traced -----------------------------------------------------------------------------------------
    def _watch_hooks(self) -> None:
        """Start over if hooks were added or removed: Dynamo does not guard against new hooks."""
        if (hooks := self._hooked()) == self._hooks:
            return
        self._hooks = hooks
        self.loaded: list[Loaded] = []
        self._bound.clear()
        self._in_pieces.clear()
        self._without_paths.clear()
        self.paths.clear()
        self._begun = frozenset(), 0
        self.user_step = self._step_of_user()
        self._reading = self._reads_gradients()
        self._code = with_own_code(_with_user_code if self._reading else type(self)._objective)
        dynamic = self.options.dynamic
        self._traced = compiled(self._code, weakly(self._collect_user_code), LIMITS, fullgraph=True, dynamic=dynamic)

    def _hooked(self) -> list[int]:
        """The identities of objects with hooks, of the hooks of gradients, and of what the classes of modules call."""
        tables = [*hook_tables(self._modules()), *step_hooks(self.optimizer)]
        hooks = gradient_hooks(self._parameters())
        every = (hook for before, after in hooks.values() for hook in (*before, *after))
        called = forwards_of(self._modules()).values()
        return [id(x) for x in tables if x] + [*hooks, *map(id, every), *map(id, called)]

    def _may_trace_user_code(self) -> bool:
        return self.traces_user_code and self.whole_batches and self.ranks is None

    def _step_of_user(self) -> Callable[[Optimizer], Any] | None:
        """The step of an optimizer that the user wrote; None for any other."""
        kind = type(self.optimizer)
        if has_update(kind) or not self._may_trace_user_code():
            return None
        bases = kind.__mro__[: kind.__mro__.index(Optimizer)]
        if any(base.__module__.partition(".")[0] == "torch" for base in bases):
            return None  # PyTorch's own, which computes otherwise where it is traced
        step: Any = kind.step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        return step if isinstance(step, types.FunctionType) else None

    def _reads_gradients(self) -> bool:
        """Whether the trace contains code of the user's that reads gradients."""
        if self.user_step is not None:
            return True
        return self._may_trace_user_code() and any(map(has_gradient_hooks, self._parameters()))

    def as_traced(self) -> bool:
        """Whether a trace is of the model and the loss alone, on one rank and without hooks."""
        if self._reading or self.ranks is not None:
            return False
        return not any(hook_tables(self._modules())) and not gradient_hooks(self._parameters())

    # ---- PyTorch's first steps ----------------------------------------------------------------------------------
    def _is_beginning(self) -> bool:
        """Whether PyTorch has to take a step before the user's code can be traced."""
        if not self._reading:
            return False
        known, steps = self._begun
        trained = self._trained_now()
        return not trained <= known or steps < (FIRST_STEPS if self.user_step is not None else 1)

    @property
    def beginning(self) -> list[str]:
        """What the user should know of the first steps."""
        what = "an optimizer that the user wrote" if self.user_step is not None else "hooks of parameters"
        steps = f"{self.taken_by_pytorch} step{'s' if self.taken_by_pytorch > 1 else ''}"
        return [f"PyTorch took {steps}, after which {what} can be traced"] if self.taken_by_pytorch else []

    def _trained_now(self) -> frozenset[int]:
        return frozenset(id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad)

    def _along_a_path(
        self, key: Any, flat: Sequence[Any], inputs: Any, targets: tuple[Any, ...]
    ) -> torch.Tensor | None:
        if key in self._in_pieces or not self._is_beginning():
            if self.user_step is not None:
                return None  # paths end with an update of ours
            return super()._along_a_path(key, flat, inputs, targets)
        self.taken_by_pytorch += 1
        logs.event(logs.RECOMPILES, self.beginning[0])
        return self._in_pytorch(key, inputs, targets)

    def _update_in_pieces(self, rows: int) -> None:
        if not self._reading:
            super()._update_in_pieces(rows)
            return
        parameters = {id(p): p for group in self.optimizer.param_groups for p in group["params"]}.values()
        self.read = [p for p in parameters if p.grad is not None]
        self.hooks = list(gradient_hooks(self.read, every=True).values())
        before = {id(state): dict(state) for state in self.optimizer.state.values() if isinstance(state, dict)}
        ran: list[bool] = []
        handle = self.optimizer.register_step_post_hook(lambda *arguments: ran.append(True))
        try:
            super()._update_in_pieces(rows)
        finally:
            handle.remove()
        self.unstable |= unstable_state(self.optimizer, before)
        if ran:  # and no loss scaler has skipped the step
            known, steps = self._begun
            trained = self._trained_now()
            self._begun = trained, steps + 1 if trained <= known else 1

    def _collect_user_code(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """The backend of TorchDynamo. Raises `Unsupported` for optimizers of PyTorch inside of a traced one."""
        if any(_OPTIMIZERS in (node.stack_trace or "") for node in module.graph.nodes):
            raise Unsupported("an optimizer that calls one of PyTorch's, which computes otherwise where it is traced")
        return self._collect(module, examples)

    # ---- what is bound ------------------------------------------------------------------------------------------
    def _check_user_code(self, graph: Graph, by_name: Mapping[str, torch.Tensor], changes: bool) -> None:
        """Raise `Unsupported` where a program would do otherwise than the user's code.

        `changes`: whether model, loss or optimizer change Python objects.
        """
        if not reads_gradients(graph):
            return
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        code = UserCode.of(graph)
        code.expect([name for name, t in by_name.items() if t.requires_grad and id(t) in own])
        others = [t for t in self._parameters() if id(t) not in own]
        if any(map(has_gradient_hooks, others)):
            raise Unsupported("a hook of a parameter that the optimizer does not update")
        kept = [n for n, t in by_name.items() if t.requires_grad and id(t) not in own] if self.keep_gradients else ()
        if self.user_step is not None and code.connects(kept):
            raise Unsupported("gradients that are kept, of parameters that the optimizer does not update")
        if changes and any(before or after for before, after in self.hooks):
            raise Unsupported("hooks of gradients in a step that changes Python objects, in the backward pass's order")
        if changes and self.scaler is not None and self.scaler.is_enabled():
            raise Unsupported("an optimizer that changes Python objects in a step that a loss scaler may skip")


def _with_user_code(self: UserUpdates, inputs: Any, *targets: Any) -> Any:
    """The loss, and the user's code that reads its gradients; what TorchDynamo traces."""
    loss = self._objective(inputs, *targets)
    finals = []
    read = [parameter for parameter in self.read if parameter.requires_grad]
    hooks = [pair for parameter, pair in zip(self.read, self.hooks, strict=True) if parameter.requires_grad]
    with torch.no_grad():
        for parameter, gradient, (before, after) in zip(read, _marks.loss_gradients(loss, read), hooks, strict=True):
            for hook in before:
                result = hook(gradient)
                gradient = gradient if result is None else result
            if after:
                parameter.grad = gradient
                for hook in after:
                    if hook(parameter) is not None:
                        raise RuntimeError("Tensor post accumulate grad hooks should return None.")
                gradient = parameter.grad
                parameter.grad = None
            finals.append(gradient)
        finals = _marks.final_gradients(finals)
    if self.user_step is None:
        return loss, *finals
    for parameter, gradient in zip(read, finals, strict=True):
        parameter.grad = gradient
    self.user_step(self.optimizer)
    if not self.keep_gradients:
        for parameter in read:
            parameter.grad = None
    return loss
