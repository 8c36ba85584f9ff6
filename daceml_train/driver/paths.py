"""Training steps along paths: Python runs the model, and programs compute what its calls of PyTorch mean.

A step whose model is not one graph for TorchDynamo (branches on values, coins, other libraries, exceptions) still does
the same as before in most calls. Its calls of PyTorch are recorded, with gradients and update by PyTorch, and form a
trie of paths. Later calls follow the trie while Python runs the user's code as always. What user code looks at is
computed by programs; all else, with the backward pass and the update, is one program that runs when the loss is known.
Nothing is updated before. A call that leaves all known paths is completed in PyTorch, and is a path from then on.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from daceml_train import logs
from daceml_train.driver.binding import raise_versions
from daceml_train.driver.bound_optimizer import changed_step, in_strides
from daceml_train.driver.bound_step import BoundStep, has_gradient_hooks
from daceml_train.driver.compile import compile_graph
from daceml_train.driver.faster import COSTLY, ENDLESS, PathCosts
from daceml_train.driver.goals import WholeStep
from daceml_train.driver.path_programs import (
    CallValues,
    Look,
    LookProgram,
    PathGoal,
    Values,
    divided,
    nearly_computed,
    without_graph,
)
from daceml_train.driver.records import Record
from daceml_train.driver.settings import Settings
from daceml_train.errors import Unsupported
from daceml_train.frontends.torch.capture.capture import InputSource
from daceml_train.frontends.torch.dynamo.tracing import reason
from daceml_train.frontends.torch.paths import user_functions
from daceml_train.frontends.torch.paths.recorder import Recorder
from daceml_train.frontends.torch.paths.sharing import Place, kept_of, places_of, same_elements, shared
from daceml_train.frontends.torch.paths.sites import Sites
from daceml_train.frontends.torch.paths.stitch import PathGraph, captured_path
from daceml_train.frontends.torch.paths.threads import watched
from daceml_train.frontends.torch.paths.trie import Call, Number, Result, Step, note_writes, numbers_of
from daceml_train.frontends.torch.paths.values import memory
from daceml_train.lowering.device import CPU
from daceml_train.runtime.arenas import AnyArena, new_arena
from daceml_train.training.gradients import GradientOptions

EARLY_PATHS = 12
"""So many paths are compiled when they were taken once, and later ones where most calls take known paths."""
PATHS = 64
"""Paths of a step that are compiled."""
RECENT, NEW = 16, 14
"""Where `NEW` of the last `RECENT` calls took paths that were never taken before, the search ends."""
MANY = 4
"""Where paths part into so many that differ in sizes or integers alone, there may be any number of them: a path is
compiled when it was taken twice, and half as many calls end the search."""


class Owner(Protocol):
    """What a path needs of its training step."""

    optimizer: torch.optim.Optimizer
    options: Settings
    keep_gradients: bool
    arenas: dict[Any, AnyArena]
    records: list[Record]
    gradient_norm: Tensor | None

    def _objective(self, inputs: Any, *targets: Any) -> Tensor: ...
    def _drop_gradients(self) -> None: ...
    def _train_in_pieces(self, loss: Tensor, inputs: Any, targets: Sequence[Any]) -> Tensor: ...
    def _modules(self) -> list[torch.nn.Module]: ...
    def _parameters(self) -> list[Tensor]: ...
    def _gradients(self) -> GradientOptions: ...
    def _wanted(self, by_name: Any, given: set[int]) -> Any: ...
    def _bound_to(
        self, captured: Any, step: WholeStep, by_name: Any, flat: Any, *, assigned: Collection[int]
    ) -> BoundStep: ...
    def _names(self) -> dict[int, str]: ...


@dataclass(eq=False)
class Leaf:
    """The end of a path."""

    loss: Result
    seen: int = 0
    """How often it was recorded."""
    followed: int = 0
    """How often its program ran."""
    looked: dict[tuple[Step, Result], None] = field(default_factory=dict)
    kept: dict[Result, None] = field(default_factory=dict)
    """Results that user code keeps after the call."""
    same: dict[Result, Result] = field(default_factory=dict)
    """By such a result the first one with the same memory."""
    places: dict[Result, Place] = field(default_factory=dict)
    """Where results were, when the path was recorded last."""
    versions: dict[Result, int] = field(default_factory=dict)
    """How often each was changed in place."""
    outside: set[int] = field(default_factory=set)
    """The memory of its operands then."""
    program: PathProgram | None = None


@dataclass
class PathProgram:
    """The program at the end of a path."""

    bound: BoundStep
    sources: list[Any]
    """Where the tensors of a call come from, that are passed to the program."""
    needs: list[LookProgram]
    kept: list[Result]
    same: dict[Result, Result]
    versions: dict[Result, int]
    generation: int


class Paths:
    """The paths of a step."""

    def __init__(self, owner: Owner) -> None:
        self.owner, self.root = owner, Step()
        self.compiled, self.calls, self.misses, self.generation = 0, 0, 0, 0
        self.leaves: list[Leaf] = []
        self.costs = PathCosts()
        self.widest = 0
        """Into how many paths that differ in sizes or integers alone some path parts."""
        self.sites = Sites()
        self.values = Values()
        self.buffers: dict[tuple[int, str], Tensor | None] = {}
        """By module and name the buffers of the first call; None for one that was assigned since."""
        self.recent: deque[bool] = deque(maxlen=RECENT)
        """Whether each of the last calls took a path that was not known."""
        self.numbers: set[Number] = set()
        """Numbers that are inputs of programs."""
        self.refused = ""
        """Why there are no paths any more."""
        self.failed = False
        """Whether that is an error of ours."""

    # ---- a call -------------------------------------------------------------------------------------------------
    def step(self, flat: Sequence[Any], inputs: Any, targets: tuple[Any, ...]) -> Tensor:
        """One training step, along a path if it is known; `flat` are the leaves of the arguments."""
        call = Call(arguments={id(leaf) for leaf in flat if isinstance(leaf, Tensor)})
        values = CallValues(call)
        recorder = Recorder(self.root, call, self._held, self.sites, self._look(values) if self.compiled else None)
        self.calls += 1
        recorder.before_backward = self.owner._drop_gradients

        def in_other_threads() -> None:
            recorder.refuse("a thread that the model starts")
            self._keep_real(recorder)

        try:
            with watched(in_other_threads), user_functions.watched(recorder.applied), recorder:
                loss: Any = self.owner._objective(inputs, *targets)
        except BaseException:
            self._keep_real(recorder)
            raise
        result = recorder.stands_for(loss)  # also where the call has left its path since the loss was computed
        if result is not None:
            loss = None  # nothing but the result itself refers to what stands for it
        if recorder.following:
            found = None if result is None else self._finished(recorder, values, recorder.at.leaves.get(result))
            if found is not None:
                self.recent.append(False)
                return found
            recorder.leave()
        loss = loss if result is None else recorder.values[result]
        self.misses += 1
        return self._recorded(recorder, values, loss, inputs, targets)

    def _held(self) -> set[int]:
        """The identities of what the model holds, but for buffers that it assigns: these are data."""
        found = {id(t) for t in self.owner._parameters()}
        for module in self.owner._modules():
            for name, buffer in module._buffers.items():
                key = id(module), name
                if self.buffers.setdefault(key, buffer) is not buffer:
                    self.buffers[key] = None
                if buffer is not None and self.buffers[key] is buffer:
                    found.add(id(buffer))
        return found

    def _look(self, values: CallValues) -> Callable[[Recorder, Result], Tensor | None]:
        def look(recorder: Recorder, result: Result) -> Tensor | None:
            found: Look | None = recorder.at.fetches.get(result)
            if found is None or found.generation != self.generation:
                return None
            return in_strides(found.value(values), result.tensor.stride())

        return look

    def _finished(self, recorder: Recorder, values: CallValues, found: Leaf | None) -> Tensor | None:
        """The loss of a call whose path has a program, which then runs; else None."""
        if found is None or found.program is None or not self._fresh(found.program):
            return None
        program = found.program
        held = [r for step in recorder.call.path for r in step.results if sys.getrefcount(r.tensor) > 2]
        if not set(program.kept).issuperset(held):
            found.kept.update(dict.fromkeys(held))
            return None
        if why := shared(found.places, found.outside, found.loss, held):
            self.refused = why
            return None
        leaves = (t for t in recorder.call.operands if t.requires_grad and not isinstance(t, torch.nn.Parameter))
        if any(sys.getrefcount(t) > 4 for t in leaves):
            recorder.refuse("a leaf of the model's own that user code keeps")  # its gradient can be read
            return None
        for look in program.needs:
            if id(look) not in values.ran:
                look.run(values)
        flat = [values.saved[s[0]] if isinstance(s, tuple) else values.tensor(s) for s in program.sources]
        result = program.bound.run(flat, self.owner.keep_gradients)
        if result is None:
            return None
        found.followed += 1
        self.owner.gradient_norm = program.bound.norm
        values_of = dict(zip(program.kept, program.bound.further, strict=True))
        for kept in program.kept:
            first = program.same[kept]
            values_of[first] = in_strides(values_of[first], first.tensor.stride())
            if kept is first:
                raise_versions([(values_of[first], program.versions.get(first, 0))])
            if kept in held:
                value = values_of[first].detach()
                value = without_graph(value) if kept.requires_grad else value
                torch.utils.swap_tensors(kept.renew(), value)
        return result if program.bound.mean is None else program.bound.mean

    def _fresh(self, program: PathProgram) -> bool:
        return program.generation == self.generation and program.bound.valid({})

    def lines(self) -> list[str]:
        """How calls have run: the paths over the user's lines, how often each was taken, and by what."""
        followed = sum(leaf.followed for leaf in self.leaves)
        end = f"; no longer, since {self.refused}" if self.refused else ""
        head = f"{self.calls} calls along paths: {followed} by programs, {self.misses} recorded in PyTorch{end}"
        return [head, *_lines(self.root, "  ")]

    # ---- recording ----------------------------------------------------------------------------------------------
    def _recorded(
        self, recorder: Recorder, values: CallValues, loss: Tensor, inputs: Any, targets: tuple[Any, ...]
    ) -> Tensor:
        """Gradients and update of a call that ran in PyTorch, whose path is then known."""
        recorder.check_arrays()
        self._held()
        result = recorder.known.get(id(loss))
        places, versions = places_of(recorder.values), {r: t._version for r, t in recorder.values.items()}
        recorder.begin_backward()
        try:
            trained = self.owner._train_in_pieces(loss, inputs, targets)
        except BaseException:
            self._keep_real(recorder)
            raise
        del loss
        alive = {r: weakref.ref(t) for r, t in recorder.values.items() if r is not result}
        self._keep_real(recorder)
        recorder.values.clear()
        if recorder.again:
            return trained
        call, at = recorder.call, recorder.at
        if recorder.refused or result is None:
            self.refused = recorder.refused or "the loss depends on no parameter that a path knows"
            return trained
        if self.generation >= 2:  # numbers change one after the other: from now on all of them are inputs
            for number in (n for step in call.path for n in step.numbers if isinstance(n.value, float)):
                number.varies = True
        numbers = set(numbers_of(call.path))
        if not numbers <= self.numbers:
            self.numbers |= numbers
            self.generation += 1
        self.recent.append(result not in at.leaves)
        leaf = at.leaves.setdefault(result, Leaf(result))
        if not leaf.seen:
            self.leaves.append(leaf)
        leaf.seen += 1
        leaf.looked.update(dict.fromkeys(recorder.looked))
        leaf.kept.update(dict.fromkeys(kept_of(alive)))
        leaf.same = same_elements(places, leaf.kept)
        leaf.places, leaf.versions, leaf.outside = places, versions, {memory(t) for t in call.operands}
        self.refused = self.refused or shared(places, leaf.outside, result, ())
        early = 2 * self.misses <= self.calls or len(self.leaves) <= EARLY_PATHS
        self.widest = max(self.widest, recorder.ways)
        if not self.refused and self.calls > 1 and (leaf.seen > 1 or (early and self.widest < MANY)):
            if self.compiled < EARLY_PATHS or self.costs.allow():
                self._compile(leaf, recorder, values)
            elif self.costs.leave():
                self.refused = COSTLY
        share = 1 if self.widest < MANY else 2
        if sum(list(self.recent)[-RECENT // share :]) >= NEW // share:
            self.refused = ENDLESS
        if self.refused:
            self.end(self.refused)
        return trained

    def end(self, why: str) -> None:
        """Follow no path any more."""
        self.refused, self.root, self.leaves = why, Step(), []

    def _keep_real(self, recorder: Recorder) -> None:
        """Give tensors that stand for results, and that user code keeps, the values that it expects."""
        if recorder.following and recorder.call.path:
            with torch.enable_grad():
                recorder.leave()
        if not recorder.left:
            return
        for step in recorder.call.path:
            for result in step.results:
                value = recorder.values.get(result)
                if value is not None and sys.getrefcount(result.tensor) > 2 and value.device.type != "meta":
                    torch.utils.swap_tensors(result.renew(), value.view_as(value))

    # ---- compiling ----------------------------------------------------------------------------------------------
    def _compile(self, leaf: Leaf, recorder: Recorder, values: CallValues) -> None:
        try:
            if why := unsuited(self.owner):
                raise Unsupported(why)
            if self.compiled >= PATHS:
                raise Unsupported("too many paths")
            start = time.perf_counter()
            leaf.program = self._program(leaf, recorder.call, values)
            self.costs.paid(time.perf_counter() - start, self.compiled < EARLY_PATHS)
            self.compiled += 1
        except Exception as error:
            self.refused = reason(error, ours=True)
            logs.event(logs.BREAKS, self.refused)
            self.failed = not isinstance(error, Unsupported)

    def _looks(
        self, found: PathGraph, path: Sequence[Step], looked: Sequence[tuple[Step, Result]], numbers: dict[str, int]
    ) -> list[LookProgram]:
        """The programs of a path's looks, in order; those of another path are shared."""
        graph, programs = found.captured.graph, list[LookProgram]()
        position = {id(step): number for number, step in enumerate(path)}
        used: dict[Any, int] = {o.index: position[id(step)] for step in path for o in step.operands}
        used |= {number: position[id(step)] for step in path for number in step.numbers}
        for place, ((step, result), name) in enumerate(zip(looked, found.looked, strict=True)):
            look: Look | None = step.fetches.get(result)
            if look is None or look.generation != self.generation:
                program = next((p for p in programs if numbers[name] in p.saved), None)
                if program is None:
                    now = position[id(step)]
                    also = nearly_computed(
                        graph,
                        name,
                        found.looked[place + 1 :],
                        lambda n, now=now: used.get(found.sources.get(n), -1) <= now,  # type: ignore[misc]
                    )
                    arguments = (graph, name, numbers, found.sources, programs, self.owner.options, also)
                    program = LookProgram(*arguments)
                    self.owner.records += program.records
                look = step.fetches[result] = Look(program, numbers[name], self.generation)
            if look.program not in programs:
                programs.append(look.program)
        return programs

    def _program(self, leaf: Leaf, call: Call, values: CallValues) -> PathProgram:
        owner, path = self.owner, call.path
        for step in path:  # looks of a call that left known paths later are those of the known ones
            leaf.looked.update(dict.fromkeys((step, result) for result in step.fetches))
        position = {id(step): number for number, step in enumerate(path)}
        looked, kept = sorted(leaf.looked, key=lambda look: position[id(look[0])]), list(leaf.kept)
        found = divided(captured_path(path, call, leaf.loss, kept, looked, owner._names()), owner.options)
        graph = found.captured.graph
        note_writes(path, call, [s for name, s in found.sources.items() if name in graph.writes])
        numbers = self.values.of(graph, found.sources)
        looks = self._looks(found, path, looked, numbers)
        available = {number: program for program in looks for number in program.saved}
        inside = {name for node in graph.nodes for name in node.outputs} - set(graph.outputs)
        saved = [name for name in inside if numbers[name] in available]
        for program in looks:  # examples of what the last program takes from them
            if id(program) not in values.ran:
                program.run(values)
        by_name = {name: values.tensor(source) for name, source in found.sources.items()}
        given = {id(values.tensor(s)) for s in found.sources.values() if not isinstance(s, Tensor)}
        trained, gradients = owner._wanted(by_name, given)
        if any(entry.first for entry in trained):
            raise Unsupported("the optimizer's state does not exist after a step")
        goal = PathGoal(trained, gradients, owner._gradients(), len(kept), tuple(sorted(saved)))
        if CPU not in owner.arenas:
            owner.arenas[CPU] = new_arena(CPU)
        compiled = compile_graph(graph, goal, owner.options, CPU, owner.arenas[CPU])
        step_program = WholeStep(
            executable=compiled.executables[0], records=compiled.records, **vars(compiled.interface)
        )
        owner.records += compiled.records
        taken = [e.name for e in step_program.executable.program.inputs if e.name in set(saved)]
        by_name |= {name: values.saved[numbers[name]] for name in taken}
        sources = [s for s in found.sources.values() if not isinstance(s, Tensor)]
        flat = [values.tensor(s) for s in sources] + [by_name[name] for name in taken]
        further = tuple(InputSource("tensor", None, name) for name in taken)
        captured = replace(found.captured, inputs=(*found.captured.inputs, *further))
        assigned = {module for (module, _), buffer in self.buffers.items() if buffer is None}
        bound = owner._bound_to(captured, step_program, by_name, flat, assigned=assigned)
        needs = list({id(p): p for name in taken for p in [available[numbers[name]]]}.values())
        all_sources: list[Any] = [*sources, *((numbers[name],) for name in taken)]
        return PathProgram(bound, all_sources, needs, kept, leaf.same, leaf.versions, self.generation)


def _lines(step: Step, indent: str) -> list[str]:
    """The paths from a step on: the line before which they part, and how often each was taken."""
    found = []
    while True:
        found += [f"{indent}a look at a value{step.where}" for _ in step.fetches]
        for leaf in step.leaves.values():
            how = "compiled" if leaf.program is not None else "recorded"
            found.append(f"{indent}a loss{step.where}: {how}, taken {leaf.seen + leaf.followed} times")
        if len(step.following) != 1:
            break
        (step,) = step.following
    for number, following in enumerate(step.following, 1):
        found.append(f"{indent}way {number} after{step.where or ' the start'}, to{following.where}")
        found += _lines(following, indent + "  ")
    return found


def unsuited(owner: Owner) -> str:
    """Why a step's calls are not followed along paths; nothing if they are."""
    parameters = owner._parameters()
    if any(m._backward_hooks or m._backward_pre_hooks for m in owner._modules()):
        return "a module has a backward hook"
    if any(map(has_gradient_hooks, parameters)):
        return "a parameter has a gradient hook"
    if why := changed_step(owner.optimizer):
        return why
    if any(type(p) is not torch.nn.Parameter or p.device.type != "cpu" for p in parameters):
        return "parameters that are not plain tensors on the CPU"
    return ""
