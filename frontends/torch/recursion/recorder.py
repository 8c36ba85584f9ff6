"""Recording: functions of PyTorch that user code calls become operators of runs; nothing is computed before a look."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.overrides import TorchFunctionMode

from daceml_train.frontends.torch.handlers import may_fail
from daceml_train.frontends.torch.recursion import cells, columns
from daceml_train.frontends.torch.recursion.aliases import aliases
from daceml_train.frontends.torch.recursion.arguments import joined_type, laziness, lazy_values, name_of, picked
from daceml_train.frontends.torch.recursion.decomposed import decomposed
from daceml_train.frontends.torch.recursion.effects import (
    Exposed,
    Held,
    all_settled,
    decides,
    exposes,
    in_range,
    initializes,
    may_change,
    needs_graph,
    settled,
)
from daceml_train.frontends.torch.recursion.forest import Forest, as_tensors, rows
from daceml_train.frontends.torch.recursion.lazy import (
    Lazy,
    Meta,
    known,
    lazy_of,
    meta_of,
    outside,
    set_value,
    take_added,
)
from daceml_train.frontends.torch.recursion.native_calls import APPLY
from daceml_train.frontends.torch.recursion.runs import (
    INPUTS,
    LIST,
    LOCALS,
    MAPPING,
    SLICE,
    TUPLE,
    Given,
    Run,
    Solo,
    constant,
    keyed,
    run_of,
    slot,
)
from daceml_train.frontends.torch.recursion.scalars import SCALED, with_data
from daceml_train.frontends.torch.recursion.state import State, state_of
from daceml_train.frontends.torch.recursion.structures import Structures
from daceml_train.frontends.torch.recursion.watches import Watch

_GETTER = type(vars(torch.Tensor.__mro__[1])["shape"].__get__)
_ITEM = torch.Tensor.__getitem__


class Recorder(TorchFunctionMode):
    """Records the calls of one forward pass. `note` is told why something runs in PyTorch at once."""

    def __init__(
        self,
        structures: Structures,
        tensors: Iterable[torch.Tensor],
        entry: types.CodeType,
        note: Callable[[str], None],
        root: torch.nn.Module,
    ) -> None:
        super().__init__()
        take_added()
        self.structures, self.note = structures, note
        tensors = list(tensors)
        self.shared = structures.shared_by(tensors)
        self.held, self.exposed = Held(tensors), Exposed(tensors)
        self.grad = torch.is_grad_enabled()
        """Whether values have gradients, unless what computes them was called where they have none."""
        self.entry = entry
        self.frames: dict[int, bool] = {}
        self.pending: list[Run] = []
        self.solos: list[Solo] = []
        self.traced: dict[types.FrameType, Run] = {}
        """The runs of calls, under a debugger."""
        self.failed: list[Any] = []
        """What the call was given whose levels have raised an error."""
        self.looks = 0
        self.events = 0
        """How often something happened that is not recorded."""
        self.root = root
        self.eager = ""
        self.lasting = True
        self.state: State | None = None
        self.last: dict[Any, Callable[..., Any]] = {}
        """Per block, what repeats the record that was repeated last."""

    def follow(self, codes: Mapping[types.CodeType, Iterable[types.CodeType]]) -> None:
        """Begin, while functions of the recursion have this code, and their blocks."""
        known = self.structures
        for code, blocks in codes.items():
            known.codes |= {id(each): each for each in (code, *blocks)}
            known.blocks.update(blocks)
        self.frames = dict.fromkeys(known.codes, True) | {id(self.entry): False, id(APPLY): False}
        self.settle()

    def settle(self, watches: Sequence[Watch] | None = None) -> bool:
        """Take the records that were made for the state in which modules are now; whether anything has changed.

        With watches, only if one of these has seen a change.
        """
        if watches is not None and all(watch.unchanged() for watch in watches):
            return False
        known = self.structures
        with torch._C.DisableTorchFunction():
            state = state_of(list(self.root.modules()), known.contents)
        if state != self.state:
            self.state, self.modules = state, state.modules
            self.memo, self.last, self.watches = known.of(state)
        elif watches is not None and (noise := set[int]().union(*(watch.noise() for watch in watches))):
            known.noisy |= noise
            for records in (self.memo, self.last, self.watches):
                records.clear()
        for watch in self.watches:
            watch.arm()
        return True

    # ---- calls --------------------------------------------------------------------------------------------------
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function: lazy if it depends on lazy values or, within the recursion, on a gradient."""
        state = laziness(args)
        if kwargs:
            state |= laziness(kwargs.values())
        if not state & 3 or self.eager or (state == 2 and initializes(function, args, kwargs)):
            return self._now(state, function, args, kwargs)
        if peek_interpreter_stack() is not None:  # within `torch.func`, whose values are not those of this level
            return function(*known(args), **known(kwargs))
        if needs_graph(function):
            if state & 1 or decides(function, args, self.shared):
                self.abandon(f"{name_of(function)} {cells.EFFECT}")
            return function(*known(args), **known(kwargs))
        if self.structures.caught and may_fail(name_of(function), args):
            self.events += 1  # or a block would repeat it
            if not in_range(function, args):
                return self._at_once(function, args, kwargs, "an error that user code may handle")
        frame = self._frame()
        if type(frame) is bool:
            return function(*known(args), **known(kwargs))
        if frame is not None and (parts := decomposed(function)) is not None:
            found = parts(lambda *each: self._record(self._run_of(frame), *each), *args, **kwargs)
            if found is not NotImplemented:
                return found
        if frame is None:
            if not state & 1:
                return self._now(state, function, args, kwargs)
            run = self._outer(function, args, kwargs)
            if run is None:
                return self._solo(function, args, kwargs)
        else:
            if not state & 1 and type(function) is _GETTER:
                return function(*args, **kwargs)
            if function is _ITEM and state == 2 and (slices := picked(*args)) is not None:
                return slices
            run = self._run_of(frame)
        return self._record(run, function, args, kwargs)

    def _now(self, state: int, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function of tensors that need not wait; operators that do are computed if it changes them."""
        changes = may_change(function, args, kwargs)
        if not self.eager and decides(function, args, self.shared):
            self.abandon(f"{name_of(function)} {cells.EFFECT}")
        if changes and exposes(function) and not self.eager and self.held.of_shared(args, kwargs):
            self.abandon(f"{name_of(function)} of a parameter or a buffer")
        if self.pending and changes and self.held.by(self.pending, self.solos, args, kwargs):
            self.flush()
        return function(*known(args), **known(kwargs)) if state & 4 or self.eager else function(*args, **kwargs)

    def _run_of(self, frame: types.FrameType) -> Run:
        """The run of a call. It is kept in the frame, or, under a debugger, which has its own there, in a dict."""
        traced = sys.gettrace() is not None
        held: Any = frame
        run = self.traced.get(frame) if traced else held.f_trace
        if type(run) is not Run or run.sealed or run.recorder is not self:
            run = self._new(outer=False)
            if traced:
                self.traced[frame] = run
            else:
                held.f_trace = run
            self.structures.nested = self.structures.nested or self._nested(frame)
        return run

    def _record(self, run: Run, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        at, inputs = run.at, len(run.inputs)
        before = run.height, run.stage
        try:
            if function in SCALED:
                args = with_data(at, function, args)
            key = (function, torch.is_grad_enabled(), *[self._encode(run, a) for a in args])
            if kwargs:
                key = (*key, self._encode(run, kwargs))
            step = at.following.get(key)
        except TypeError:  # an argument that is no part of a key
            return self._refuse(run, inputs, before, function, args, kwargs, "an argument of an unknown type")
        if step is None:
            step = at.following[key] = cells.step(self.structures, at, run, key, bool(kwargs))
        if step.refused:
            return self._refuse(run, inputs, before, function, args, kwargs, step.refused)
        if not step.made:
            del run.inputs[inputs:]
            run.slots = {name: s for name, s in run.slots.items() if s.number < inputs}
            run.height, run.stage = before
            # strides and the like are those of types only where the tensor is not there yet
            waiting = next(lazy_values((args, kwargs)), None)
            return step.constant if waiting is not None else function(*args, **kwargs)
        run.at = step
        values = run.values
        first = len(values)
        if step.kind is None:
            value = lazy_of(run, first, step.made[0])
            values.append(value)
            return value
        results = [lazy_of(run, first + k, kind) for k, kind in enumerate(step.made)]
        values += results
        return step.kind(results)

    def _encode(self, run: Run, a: Any) -> Any:
        kind = type(a)
        if kind is Lazy:
            if a.source is run:
                return slot(LOCALS, a.index)
            found = run.slots.get(id(a))
            if found is not None:
                return found
            source = a.source
            if type(source) is Run and source.forest is None:
                source.use(a.index)
                if run.height <= source.height:
                    run.height = source.height + 1
            if run.stage < source.stage:
                run.stage = source.stage
            return self._input(run, a, a.meta)
        if kind is int or a is None or kind is str:
            return a
        if kind is bool or kind is float or kind is complex:
            return constant(a)
        if kind is tuple or kind is list or kind is torch.Size:
            return (LIST if kind is list else TUPLE, *[self._encode(run, b) for b in a])
        if isinstance(a, torch.Tensor):
            shared = self.shared.get(id(a))
            if shared is not None:
                return shared
            found = run.slots.get(id(a))
            return found if found is not None else self._input(run, a := settled(a), meta_of(a))
        if kind is slice:
            return (SLICE, *[self._encode(run, b) for b in (a.start, a.stop, a.step)])
        if kind is dict:
            return (MAPPING, *[self._encode(run, b) for item in a.items() for b in item])
        return keyed(a)

    def _input(self, run: Run, a: Any, kind: Meta) -> Given:
        run.slots[id(a)] = slot(INPUTS, len(run.inputs))
        run.inputs.append(a)
        given = self.structures.given.get(kind)
        if given is None:
            given = self.structures.given[kind] = Given(kind)
        return given

    def _refuse(self, run: Run, inputs: int, before: Any, function: Any, args: Any, kwargs: Any, why: str) -> Any:
        del run.inputs[inputs:]
        run.slots = {name: s for name, s in run.slots.items() if s.number < inputs}
        run.height, run.stage = before
        return self._at_once(function, args, kwargs, why)

    def _at_once(self, function: Any, args: Any, kwargs: Any, why: str) -> Any:
        """The result of a function that PyTorch runs now, at its place in the user's program."""
        self.events += 1
        if why in (cells.IN_PLACE, cells.EFFECT):
            self.abandon(f"{name_of(function)} {why}")
        elif exposes(function) and any(type(a.source) is Run for a in lazy_values((args, kwargs))):
            self.abandon(f"{name_of(function)} of a value", lasting=False)  # the value may be a view of another one
        elif why not in ("", cells.LOOK):
            self.note(f"{name_of(function)} within a recursion: {why}; PyTorch runs it")
        return function(*known(args), **known(kwargs))

    # ---- where operators go -------------------------------------------------------------------------------------
    def _frame(self) -> types.FrameType | bool | None:
        """The call of the recursion that computes; None outside of it, `False` within a function for autograd."""
        frame: types.FrameType | None = sys._getframe(2)
        frames = self.frames
        while frame is not None:
            inside = frames.get(id(frame.f_code))
            if inside is not None:
                if frame.f_code is APPLY:
                    return False
                return frame if inside and not self.outermost(frame) else None
            frame = frame.f_back
        return None

    def _nested(self, frame: types.FrameType | None) -> bool:
        """Whether a function of the recursion has called itself."""
        seen: set[types.CodeType] = set()
        while frame is not None and frame.f_code is not self.entry:
            code = frame.f_code
            if self.frames.get(id(code)) and code not in self.structures.blocks:
                if code in seen:
                    return True
                seen.add(code)
            frame = frame.f_back
        return False

    def outermost(self, frame: types.FrameType) -> bool:
        """Whether this is the call of the method itself, or of a block in it: what it joins differs in each batch."""
        caller = frame.f_back
        if frame.f_code in self.structures.blocks:
            while caller is not None and id(caller.f_code) not in self.frames:
                caller = caller.f_back
            caller = None if caller is None else caller.f_back
        return caller is not None and caller.f_code is self.entry

    def _new(self, outer: bool) -> Run:
        self.structures.inner |= not outer
        run = run_of(self, self.structures.start, outer)
        self.pending.append(run)
        return run

    def _outer(self, function: Any, args: Any, kwargs: Any) -> Run | None:
        """The run for an operator outside of the recursion; None for one that PyTorch runs."""
        source: Any = None
        for a in (*args, *kwargs.values()):
            if type(a) is Lazy:
                if type(a.source) is Solo or (source is not None and source is not a.source):
                    source = self if type(a.source) is not Solo else None
                    if source is None:
                        return None
                else:
                    source = a.source
            elif type(a) in (list, tuple) and laziness((a,)) & 1:
                return None
        if type(source) is Run and source.outer and not source.sealed:
            return source
        return self._new(outer=True)

    def _solo(self, function: Any, args: Any, kwargs: Any) -> Any:
        joined = joined_type(function, args, kwargs)
        if joined is None:
            result, why = self.structures.outside.of(function, args, kwargs)
        else:
            result, why = joined, ""
        if why == cells.IN_PLACE and not any(type(value.source) is Run for value in lazy_values((args, kwargs))):
            why = cells.LOOK  # PyTorch has computed the operands, and their views, before it changes them
        if why or not isinstance(result, Meta):
            return self._at_once(function, args, kwargs, why)
        stage = columns.use(list(lazy_values((args, kwargs)) if joined is None else args[0]))
        self.events += 1
        solo = Solo(self, function, all_settled(args), all_settled(kwargs), stage)
        value = lazy_of(solo, 0, result)
        solo.values.append(value)
        self.solos.append(solo)
        return value

    # ---- looks --------------------------------------------------------------------------------------------------
    def demanded(self, run: Run, value: Lazy) -> torch.Tensor:
        """A value that is asked for: all that is known so far is computed."""
        if run.forest is None:
            self.looks += 1
            self.flush()
        if value.value is not None:
            return value.value
        with outside(self.grad or value.meta.requires_grad):  # or reading the row would be recorded
            found: torch.Tensor = run.forest.value(value)
        return found

    def flush(self, last: Collection[Run] | None = None) -> None:
        """Compute what is recorded; user code goes on afterwards, unless this is the `last` time, for these runs."""
        self.events += 1
        with outside(self._has_gradients()):
            pending: list[Any] = self.pending
            solos: list[Any] = self.solos
            self.pending, self.solos = [], []
            self.held.cleared()
            views = aliases(pending if last is None else [run for run in pending if run in last])
            by_stage: dict[int, list[Run]] = columns.seal(pending)
            for stage in sorted({*by_stage, *[solo.stage for solo in solos]}):
                for solo in solos:
                    if solo.stage == stage:
                        self._run_solo(solo)
                if runs := by_stage.get(stage):
                    try:
                        self._run(runs)
                    except Exception:  # PyTorch's, of values
                        self.failed = cells.failing(runs)
                        raise
            for view in views:
                view.restore()

    def _run(self, runs: list[Run]) -> None:
        compiled = self.structures.programs
        batch = None if compiled is None else compiled.run(self.structures, runs)
        if batch is None:
            cells.with_tensors(runs)
            for why in dict.fromkeys(g.cell.alone for g in Forest(self.structures, runs).groups):
                if why:
                    self.note(f"calls of a recursion that PyTorch runs one by one: {why}")

    def _has_gradients(self) -> bool:
        """Whether something that is recorded has: user code may call for gradients where the caller does not."""
        return self.grad or any(run.at.operator is not None and run.at.operator[1] for run in self.pending)

    def _run_solo(self, solo: Solo) -> None:
        function, args = solo.function, solo.args
        whole = joined_type(function, args, solo.kwargs) is not None and (len(args) == 1 or args[1] == 0)
        if whole and columns.unknown(args[0]):
            result, _ = rows(args[0])
            result = result.flatten(0, 1) if function is torch.cat else result
        else:
            result = function(*as_tensors(args), **known(solo.kwargs))
        for value in solo.values:
            set_value(value, result)
        solo.done()

    def abandon(self, why: str, lasting: bool = True) -> None:
        """Compute what is recorded call by call, as PyTorch does, and run the rest of this forward pass in PyTorch.

        `lasting`: further ones as well.
        """
        self.eager, self.lasting = why, lasting
        self.last = {}
        self.events += 1
        self.note(f"{why} within a recursion; PyTorch runs the forward pass")
        with outside(self._has_gradients()):
            pending: list[Any] = self.pending
            solos: list[Any] = self.solos
            self.pending, self.solos = [], []
            cells.with_tensors(pending)
            for each in sorted([*pending, *solos], key=lambda r: (r.stage, r.height)):
                if type(each) is Solo:
                    set_value(each.values[0], each.function(*known(each.args), **known(each.kwargs)))
                    each.done()
                elif type(each) is Run:
                    each.sealed = True
                    cells.replay(each)
