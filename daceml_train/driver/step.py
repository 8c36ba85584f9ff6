"""A training step as one program: forward, loss, backward and update, on the user's parameters and optimizer.

TorchDynamo captures the step; from then on a call costs its guards, a few comparisons and one native call. What
cannot be one program runs in pieces: PyTorch's autograd and optimizer around the compiled model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch._dynamo
import torch.utils._pytree as pytree

from daceml_train import collector, logs
from daceml_train.driver import stored_captures
from daceml_train.driver.binding import input_tensors, laid_out, numbers_of, results_of, sizes_of
from daceml_train.driver.bound_optimizer import changed_step
from daceml_train.driver.bound_step import BoundStep, has_gradient_hooks
from daceml_train.driver.capture_only import CapturedCall, CaptureDone, DependsOnPython, as_refusal, loss_graph
from daceml_train.driver.checking import check, check_tensors, device_of, loss_of, refuse_mixed_devices
from daceml_train.driver.events import first_line
from daceml_train.driver.goals import WholeStep, compile_step
from daceml_train.driver.interrupts import Turns, raise_from_handler
from daceml_train.driver.options import ScheduleKind
from daceml_train.driver.records import Record
from daceml_train.driver.recursion import recursion_of
from daceml_train.driver.sdfg_programs import sdfg_of
from daceml_train.driver.settings import Settings
from daceml_train.driver.user_updates import UserUpdates
from daceml_train.errors import BudgetInfeasible, DeviceMismatch, Invalid, NotCompiled, Unsupported
from daceml_train.frontends.torch.capture.capture import Captured, capture
from daceml_train.frontends.torch.dynamo import data_sizes, floats, packed
from daceml_train.frontends.torch.dynamo.stored_guards import sources_of
from daceml_train.frontends.torch.dynamo.tracing import (
    describe,
    failing_guard,
    guards,
    has_effects,
    reason,
    recompilation,
    with_code,
)
from daceml_train.graph.graph import Graph
from daceml_train.lowering.device import GPU, Device
from daceml_train.passes.pipeline import Pipeline
from daceml_train.runtime.arenas import AnyArena, new_arena
from daceml_train.runtime.gpu.cuda_graph import CudaGraphs
from daceml_train.runtime.ranks import RankError
from daceml_train.training.gradients import SCALER, Clipping
from daceml_train.training.joint import Trained, joint_graph
from daceml_train.training.optimizers import makes_its_state, number_types, ready, update_of, whole_or_none
from daceml_train.training.user_update import reads_gradients

Loss = Callable[..., torch.Tensor]

KEPT_BINDINGS = 64
"""The number of kinds of arguments whose bound steps are kept."""

WAYS = 8
"""Bound steps that are kept for a kind of arguments: ways through the user's code, such as two sides of a branch."""

ALLOWED_CHANGES = 8
"""How often a step is captured again because it assigned what its capture depends on, or compiled again for changed
options of the optimizer, before it runs in pieces."""


class TrainingStep(UserUpdates):
    """`step(inputs, *targets)` trains `model` once and returns the loss as a detached 0-d tensor.

    It computes `loss(model(inputs), *targets)`; a tuple, list or dict of inputs is unpacked into `model`; `loss=None`
    uses the output's `loss`. Gradients are not accumulated: the old `.grad` is dropped, and after the step it is
    None unless `keep_gradients`. Where the step cannot be one program, `breaks` says why; then Python runs the model
    while programs compute what its calls mean (`paths`), or PyTorch's autograd and optimizer run around the compiled
    model.
    """

    keeps_state = True
    """Whether a program may hand tensors to what the user's code keeps."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss: Loss | None,
        optimizer: torch.optim.Optimizer,
        options: Settings,
        keep_gradients: bool = False,
        clipping: Clipping | None = None,
        scaler: torch.amp.GradScaler | None = None,
        schedule: ScheduleKind = "ahead_of_time",
    ) -> None:
        self.schedule = schedule
        check(model, loss, optimizer)
        self.gradient_norm: torch.Tensor | None = None
        """The norm of the last step's gradients before clipping."""
        self.model, self.loss, self.optimizer, self.scaler = model, loss, optimizer, scaler
        self.bounds, self._clipping = (clipping or Clipping()).bounds, clipping or Clipping()
        self.options, self.keep_gradients = options, keep_gradients
        self.records: list[Record] = []
        self.breaks: list[str] = []
        """The reasons why kinds of arguments run in pieces."""
        self.pieces: torch.nn.Module | None = None
        """The compiled model of steps in pieces."""
        self._bound: dict[Any, list[BoundStep]] = {}
        """Per kind of arguments the bound steps, the last one first: one for each way through the user's code."""
        self._steps: dict[Any, tuple[Captured, WholeStep]] = {}
        self._in_pieces: dict[Any, str] = {}
        self._start_in_pieces()
        self._worked, self._captures = "", 0
        self._known: list[torch.Tensor] | None = None
        self._changes: dict[Any, int] = {}
        """Per kind of arguments how often the step was captured again because of what it assigned."""
        self._changed: dict[Any, str] = {}
        """Per kind of arguments what the last step assigned that its own capture depends on."""
        self._warned: set[str] = set()
        self._lock = Turns("a training step")
        self._hooks: list[int] | None = None
        self.arenas: dict[Device, AnyArena] = {}
        """The arena per device, shared by all programs of the step, which run one after the other."""
        self.cuda_graphs: dict[Device, CudaGraphs] = {}
        """The CUDA graphs per GPU, unless the schedule is plain."""
        self.accumulated: dict[int, torch.Tensor] = {}
        """Gradients of micro-batches by the parameter's identity; see `driver.micro_batches`."""

    def __repr__(self) -> str:
        name = type(self.model).__name__
        loss = "the model's own loss" if self.loss is None else getattr(self.loss, "__name__", type(self.loss).__name__)
        kinds = len(self._in_pieces)
        how = "in pieces" if all(paths.refused for paths in self.paths.values()) else "along paths"
        runs = f", {how} for {kinds} kind{'s' * (kinds != 1)} of arguments" if kinds else ""
        return f"<{type(self).__name__} of {name}, {loss}, {type(self.optimizer).__name__}{runs}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Invalid(
            f"{self!r} is neither copied nor pickled: it is bound to its model's and its optimizer's tensors",
            advice="save their state_dict(), or copy them, and make another step with training_step",
        )

    # ---- calling ------------------------------------------------------------------------------------------------
    def __call__(self, inputs: Any, *targets: Any) -> torch.Tensor:
        """One training step. An error for arguments that do not fit comes before anything is updated."""
        with self._lock:
            if torch.is_grad_enabled():
                return self._step(inputs, targets)
            with torch.enable_grad():
                return self._step(inputs, targets)

    def _local_step(self, inputs: Any, targets: tuple[Any, ...]) -> torch.Tensor:
        if self.fixed and self.in_python:
            return self._by_pytorch(inputs, targets)
        key, flat, bound = self._bound_for(inputs, targets)
        if key not in self._in_pieces if bound is None else bound.selected is not None:
            return self._of_some_kind(key, flat, bound, inputs, targets)
        self.kinds.recent.append(False)
        bound = self._bind(key, inputs, targets, flat) if bound is None else bound
        return self._run(key, flat, bound, inputs, targets)

    def _find(self, inputs: Any, targets: tuple[Any, ...]) -> tuple[Any, Sequence[Any], BoundStep | None]:
        """The kind of these arguments, their leaves, and the step bound for them, if it is one program."""
        key, flat, bound = self._bound_for(inputs, targets)
        return key, flat, self._bind(key, inputs, targets, flat) if bound is None else bound

    def _bound_for(self, inputs: Any, targets: tuple[Any, ...]) -> tuple[Any, Sequence[Any], BoundStep | None]:
        """The kind of these arguments, their leaves, and the step that is bound for them already."""
        flat: Sequence[Any] = (inputs, *targets)
        for argument in flat:
            if not isinstance(argument, torch.Tensor):
                flat = pytree.tree_leaves(flat)
                break
        key = self._kind(flat, len(targets))
        scope, ways = {"self": self, "inputs": inputs, "targets": targets}, self._bound.get(key, [])
        for bound in ways:
            if bound.valid(scope):
                self._unbound.pop(key, None)
                if bound is not ways[0]:
                    ways.remove(bound)
                    ways.insert(0, bound)
                return key, flat, bound
        self._outgrown(key)
        if ways and logs.speaks(logs.RECOMPILES):
            changed = ways[0].changed(scope)
            logs.event(logs.RECOMPILES, f"training step of {type(self.model).__name__} is rebound: {changed}")
        return key, flat, None

    def _run_bound(
        self, key: Any, flat: Sequence[Any], bound: BoundStep, inputs: Any, targets: tuple[Any, ...]
    ) -> torch.Tensor | None:
        loss = bound.run(flat, self.keep_gradients)
        if loss is None:
            if bound.why not in self.breaks:  # of this call alone: others of its kind may run as one program
                self.breaks.append(bound.why)
                logs.event(logs.BREAKS, bound.why)
            return None
        self.gradient_norm = bound.norm
        if bound.effects is not None:
            self._repeat_effects(bound, key, loss, inputs, targets)
        if bound.first:
            self._bound[key] = [way for way in self._bound.get(key, []) if way is not bound]
        return loss if bound.mean is None else bound.mean

    def graph(self, inputs: Any, *targets: Any, forward: Pipeline | None = None) -> Graph:
        """The step on these arguments as operators: forward pass, gradients and update, after only the passes of level
        `forward` of the given pipeline. Nothing is compiled, run or changed. Raises what keeps the step from being one
        program.
        """
        seen, trained, kept = self.look(inputs, *targets)
        graph = seen.captured.graph if forward is None else forward.run(seen.captured.graph, ("forward",))
        return joint_graph(graph, trained, kept, self._gradients()).graph

    def sdfg(self, inputs: Any, *targets: Any, extent: str = "step") -> Any:
        """The step on these arguments as an SDFG of library nodes, one per operator, for `daceml_train.from_sdfg`.

        `extent` is "step", with gradients and update, or "loss", the forward pass up to the loss, from which gradients
        and update follow. Sizes are those of the arguments, unless the step is `dynamic=True`. Nothing is compiled,
        run or changed. Raises what keeps the step from being one program.
        """
        if extent not in ("step", "loss") or not self.whole_batches:
            what = f"extent {extent!r}" if self.whole_batches else "micro-batches, which are several programs"
            raise Invalid(f"an SDFG of a training step: {what}", advice='extent is "step" or "loss"')
        options = replace(self.options, dynamic=self.options.dynamic is True)
        looking = TrainingStep(self.model, self.loss, self.optimizer, options, self.keep_gradients)
        looking.sharing = self.sharing
        seen, trained, kept = looking.look(inputs, *targets)
        self._divided_inputs = looking._divided_inputs
        graph = captured = seen.captured.graph
        if extent == "step":
            graph = self.options.pipeline.run(captured, ("forward",))
            later = [replace(entry, first=False) for entry in trained]
            graph = joint_graph(graph, later, kept, self._gradients(), len(captured.outputs) - 1).graph
        return sdfg_of(graph, "step" if extent == "step" else "loss", captured, self)

    def look(self, inputs: Any, *targets: Any) -> tuple[CapturedCall, list[Trained], list[str]]:
        """What is captured on these arguments, the parameters that are updated, and those whose gradients are kept.

        Nothing is compiled, run or changed. Raises what keeps the step from being one program.
        """
        seen = self.seen(inputs, *targets)
        flat = pytree.tree_leaves((inputs, *targets))
        return seen, *self._wanted(self._tensors_of(seen.tensors), {id(t) for t in flat})

    def seen(self, inputs: Any, *targets: Any) -> CapturedCall:
        """The loss on these arguments, captured. Nothing is compiled, run or changed."""
        if self._reads_gradients():
            looking = TrainingStep(self.model, self.loss, self.optimizer, self.options)
            looking.traces_user_code = False
            return looking.seen(inputs, *targets)
        with self._lock, torch.enable_grad(), as_refusal(self.model, (inputs, *targets)):
            self._watch_hooks()
            done = self._capture(inputs, targets)
        return CapturedCall.of(done.captured, done.arguments)

    # ---- binding ------------------------------------------------------------------------------------------------
    def _objective(self, inputs: Any, *targets: Any) -> torch.Tensor:
        if isinstance(inputs, Mapping):
            output = self.model(**inputs)
        elif isinstance(inputs, tuple | list):
            output = self.model(*inputs)
        else:
            output = self.model(inputs)
        return self.loss(output, *targets) if self.loss is not None else loss_of(output)

    def _bind(self, key: Any, inputs: Any, targets: tuple[Any, ...], flat: Sequence[Any]) -> BoundStep | None:
        """The step for these arguments, captured and compiled if it is new; None if it runs in pieces."""
        check_tensors(flat)
        if key in self._in_pieces and self._python_runs():
            return None  # hooks are called by the user's code, and seen by paths
        self._watch_hooks()
        if key in self._in_pieces or self._is_beginning():
            return None
        if self._knows_kinds():
            self._in_pieces[key] = self.breaks[-1]  # as all kinds of arguments before
            return None
        if (refused := self._refused(key, flat)) is not None:
            self._break(key, refused)
            return None
        if recursion_of(self.model, type(self.model).forward, arguments=(inputs, *targets)) is not None:
            self._calls_itself = True
            self._break(key, Unsupported("the model calls itself over data, which runs level by level"))
            return None
        scope = {"self": self, "inputs": inputs, "targets": targets}
        captures = self._captures
        try:
            done = self._capture(inputs, targets)
        except Exception as error:
            raise_from_handler(error)
            refuse_mixed_devices(self.model, flat)
            self._break(key, error)
            return None
        if self._captures > captures and (changed := self._changed.get(key)):
            self._changes[key] = self._changes.get(key, 0) + 1  # an attribute set once is not a counter
            if self._changes[key] >= self._allowed_changes(ALLOWED_CHANGES):
                self.in_python = True
                self._break(
                    key, Unsupported(f"the model or the loss changes Python objects that it depends on: {changed}")
                )
                return None
        try:
            with collector.paused():
                bound = self._bind_captured(done, flat, scope)
        except (BudgetInfeasible, DeviceMismatch, NotCompiled, RankError):
            raise
        except DependsOnPython as error:
            self._break(key, error)
            return None
        except Exception as error:  # of this graph, which a path would be as well
            raise_from_handler(error)
            self._without_paths.add(key)
            self._break(key, error, ours=True)
            return None
        if logs.speaks(logs.GUARDS):
            for condition in guards(self._code.__code__):
                logs.event(logs.GUARDS, f"training step of {type(self.model).__name__}: {condition}")
        if not bound.step.by_user:
            stored_captures.keep(self, done, bound.effects, scope)
        while len(self._bound) >= KEPT_BINDINGS:
            del self._bound[next(iter(self._bound))]
        self._bound[key] = [bound, *self._bound.get(key, [])[: WAYS - 1]]
        self._worked = self._worked or describe(flat)
        return bound

    @property
    def selects(self) -> bool:
        """Whether what the values of arguments select is computed before the program."""
        return self.whole_batches and self.ranks is None and self.options.dynamic is not True

    def _capture(self, inputs: Any, targets: tuple[Any, ...]) -> CaptureDone:
        """The call as a graph: traced, unless an earlier process has made the same trace."""
        randomness, scope = self.options.randomness, {"self": self, "inputs": inputs, "targets": targets}
        if (known := stored_captures.load(self, scope)) is not None:
            return known
        with self._capturing(), data_sizes.admitted(self.selects), packed.admitted(self.selects, randomness):
            try:
                floats.traced(lambda: self._traced(self, inputs, *targets))
            except CaptureDone as done:
                return done
        raise Unsupported("the step captured no tensor operation")

    def _collect(self, module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        """A Dynamo backend that captures, and stops instead of running, unless the loss is already known."""
        captured = loss_graph(capture(module, examples, self.options.randomness, select=self.selects))
        captured.graph.name, sources = "training_step", sources_of(module)
        self._captures += 1
        if self._known is None and logs.speaks(logs.RECOMPILES) and (changed := recompilation()):
            logs.event(logs.RECOMPILES, f"{first_line(captured.graph)}: {changed}")

        step = weakref.ref(self)  # what TorchDynamo keeps as long as the traced code lives, which the step holds
        return lambda *arguments: cast(TrainingStep, step()).answer(captured, arguments, sources)

    def answer(self, captured: Captured, arguments: Sequence[Any], sources: Sequence[Any] = ()) -> Any:
        """What code that TorchDynamo generated gets for its graph: an exception that carries it, or known results."""
        if self._known is None:
            raise CaptureDone(captured, arguments, sources)
        sizes = sizes_of(captured, input_tensors(captured, arguments)) | numbers_of(captured, arguments)
        return results_of(captured, laid_out(captured, self._known, sizes), arguments)

    def _repeat_effects(
        self, bound: BoundStep, key: Any, loss: torch.Tensor, inputs: Any, targets: tuple[Any, ...]
    ) -> None:
        """Execute what model and loss assign to Python objects, by the code that Dynamo generated for it."""
        self._known = [loss, *bound.further]
        try:
            assert bound.effects is not None
            bound.effects(self, inputs, *targets)
        finally:
            self._known = None
        scope = {"self": self, "inputs": inputs, "targets": targets}
        self._changed[key] = "" if bound.guard(scope) else failing_guard(bound.guard, scope) or "what it depends on"

    def _break(self, key: Any, error: BaseException, ours: bool = False) -> None:
        """Record that arguments of this kind run in pieces, and why."""
        self._in_pieces[key] = why = reason(error, ours)
        self.breaks[:] = [*(text for text in self.breaks if text != why), why]  # once for all sizes, the last one last
        logs.event(logs.BREAKS, why)

    def _bind_captured(self, done: CaptureDone, flat: Sequence[Any], scope: dict[str, Any]) -> BoundStep:
        captured, (guards, code) = done.captured, done.guarded(self._code, scope)
        by_user = reads_gradients(captured.graph)
        changes = code is not None and has_effects(code, {"grad"} if by_user else ())
        sets_gradients = by_user and self.user_step is not None and self.keep_gradients
        effects = with_code(self._code, code) if code is not None and (changes or sets_gradients) else None
        further = 0 if by_user and self.user_step is None else len(captured.graph.outputs) - 1
        if further and (effects is None or not self.keeps_state):
            raise DependsOnPython(
                "the model or the loss keeps tensors in Python objects (an attribute, a list, a global)"
            )
        modules = self._modules()
        if any(m._backward_hooks or m._backward_pre_hooks for m in modules):
            raise Unsupported("a module has a backward hook")
        if why := changed_step(self.optimizer):
            raise Unsupported(why)
        by_name = self._tensors_of(input_tensors(captured, done.arguments))
        self._check_user_code(captured.graph, by_name, changes)
        given = {id(t) for t in flat}
        if any(id(t) in given and t.requires_grad for t in by_name.values()):
            raise Unsupported("an argument requires a gradient")
        device = device_of(self.model, by_name, flat)
        if captured.selection is not None and isinstance(device, GPU):
            raise Unsupported("sizes that depend on the values of arguments, on a GPU")
        if self.ranks is not None and isinstance(device, GPU):
            raise Unsupported("collectives of a step on a GPU", advice="they run around the compiled model")
        self._choose_tables(captured.graph, by_name)
        wanted = ([], []) if by_user and self.user_step is not None else self._wanted(by_name, given, by_user)
        self._warn_of_nothing(bool(wanted[0]) or self.user_step is not None)
        step = self._compiled(captured, *wanted, device, further)
        with whole_or_none(self.optimizer.state):
            for name, entry in step.state:
                if entry not in SCALER:
                    self._make_state(by_name[name], entry)
        return self._bound_to(captured, step, by_name, flat, guards, scope, effects)

    def _wanted(
        self, by_name: Mapping[str, torch.Tensor], given: set[int], hooked: bool = False
    ) -> tuple[list[Trained], list[str]]:
        """The parameters to update, and the inputs whose gradients are kept; `hooked`: hooks are in the graph."""
        of_tensor = {id(t): name for name, t in by_name.items()}
        trained: list[Trained] = []
        for rate, group in enumerate(self.optimizer.param_groups):
            update = update_of(self.optimizer, group)
            for parameter in group["params"]:
                if id(parameter) not in of_tensor or not parameter.requires_grad:
                    continue
                state = self.optimizer.state.get(parameter, {})
                first, numbers = makes_its_state(update) and not ready(update, state), number_types(update, state)
                trained.append(Trained(of_tensor[id(parameter)], update, rate, first, numbers=numbers))
        leaves = {n: t for n, t in by_name.items() if t.requires_grad and t.is_leaf and id(t) not in given}
        if not hooked and any(map(has_gradient_hooks, leaves.values())):
            raise Unsupported("a parameter has a gradient hook")
        return trained, list(leaves) if self.keep_gradients else []

    def _compiled(
        self, captured: Captured, trained: Sequence[Trained], kept: Sequence[str], device: Device, further: int = 0
    ) -> WholeStep:
        gradients = self._gradients()
        key = (id(captured), tuple(trained), tuple(kept), gradients)
        if key not in self._steps:
            updates = {tuple(t.update for t in known[1]) for known in self._steps if known[0] == id(captured)}
            if len(updates - {tuple(t.update for t in trained)}) >= ALLOWED_CHANGES:
                raise Unsupported("options of the optimizer that are compiled into the step change at every step")
            if device not in self.arenas:
                self.arenas[device] = new_arena(device)
            arena = self.arenas[device]
            step = compile_step(captured.graph, trained, kept, self.options, arena, gradients, device, further)
            step.records[0].fallbacks = step.records[0].fallbacks or [(t, str(o)) for t, o in captured.fallbacks]
            step.records[0].constant_sizes = list(captured.constant_sizes)
            self._steps[key] = captured, step  # `captured` is held so that its id stays its own
            self.records += step.records
        return self._steps[key][1]
