"""A launch list on a GPU: the list that `runtime.executor` runs on the CPU, over PyTorch's allocator and streams.

Kernels are launched by address; everything else is called as operators of PyTorch, on views of one arena. A CUDA graph
runs all of it as one launch, so the cost of issuing is paid once.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from daceml_train.errors import ExecutionError, Invalid
from daceml_train.lowering.device import GPU
from daceml_train.lowering.program import Allocation
from daceml_train.lowering.streams import Schedule
from daceml_train.runtime.executor import Argument, InputMismatch, PlanView
from daceml_train.runtime.gpu.arena import DeviceArena
from daceml_train.runtime.gpu.control import Control
from daceml_train.runtime.gpu.functions import FUNCTIONS

Layout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]


@dataclass
class _Slot:
    home: Allocation
    offset: int = 0
    index: int = -1
    mutable: bool = False
    layout: Layout = (torch.uint8, (), ())


@dataclass
class _Run:
    """One issue of the list: the memory of each slot."""

    plan: DevicePlan
    inputs: Sequence[torch.Tensor]
    owned: dict[int, torch.Tensor] = field(default_factory=dict)
    views: dict[int, torch.Tensor] = field(default_factory=dict)
    deferred: frozenset[int] = frozenset()
    """Owned slots whose memory stays until the end, since several streams use it."""

    def base(self, slot: int) -> tuple[torch.Tensor, int]:
        """The tensor that contains a slot, and where in its storage the slot begins, in bytes."""
        entry = self.plan.slots[slot]
        if entry is None:
            raise Invalid(f"slot {slot} has no memory")
        if entry.home is Allocation.arena:
            return self.plan.arena.buffer, entry.offset
        if entry.home is Allocation.input:
            tensor = self.inputs[entry.index]
        else:
            if entry.home is Allocation.fresh and slot not in self.owned:
                self.owned[slot] = self.empty(slot)
            tensor = self.owned[slot]
        return tensor, int(tensor.storage_offset()) * tensor.element_size()

    def empty(self, slot: int) -> torch.Tensor:
        """Allocate memory in the layout of a slot."""
        entry = self.plan.slots[slot]
        assert entry is not None
        return self.plan.device.empty(*entry.layout)

    def pointer(self, slot: int, offset: int) -> int:
        """The address of a byte of a slot."""
        tensor, start = self.base(slot)
        if tensor.numel() == 0:
            return 0
        return int(tensor.untyped_storage().data_ptr()) + start + offset

    def view(self, number: int) -> torch.Tensor:
        """The tensor of a view."""
        if number not in self.views:
            slot, offset, layout = self.plan.views[number]
            self.views[number] = self._over(slot, offset, layout)
        return self.views[number]

    def bytes_of(self, slot: int, offset: int, count: int) -> torch.Tensor:
        """Some bytes of a slot."""
        return self._over(slot, offset, (torch.uint8, (count,), (1,)))

    def _over(self, slot: int, offset: int, layout: Layout) -> torch.Tensor:
        tensor, start = self.base(slot)
        dtype, sizes, strides = layout
        view = torch.empty(0, dtype=dtype, device=tensor.device)
        if 0 in sizes:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=tensor.device)
        return view.set_(tensor.untyped_storage(), (start + offset) // dtype.itemsize, sizes, strides)

    def own(self, slot: int, result: torch.Tensor, arguments: Sequence[Any]) -> None:
        """Store what a call returned, in the layout of its slot."""
        entry = self.plan.slots[slot]
        assert entry is not None
        dtype, sizes, strides = entry.layout
        if tuple(result.shape) != sizes or result.dtype is not dtype:
            raise Invalid(f"a call returned {result.dtype} of sizes {tuple(result.shape)}, expected {dtype} of {sizes}")
        storages = {a.untyped_storage()._cdata for a in arguments if isinstance(a, torch.Tensor)}
        if not same_strides(result, strides) or result.untyped_storage()._cdata in storages:
            dense = self.empty(slot)
            self.plan.device.call(torch.ops.aten.copy_.default, (dense, result), {})
            result = dense
        self.owned[slot] = result

    def release(self, slot: int) -> None:
        """Release an owned slot's memory."""
        if slot not in self.deferred:
            self.owned.pop(slot, None)
            for number in self.plan.views_of.get(slot, ()):
                self.views.pop(number, None)


Step = Callable[[_Run], None]


class DevicePlan:
    """The interface of `executor.Plan` on a GPU."""

    def __init__(self, n_slots: int, arena: DeviceArena) -> None:
        self.arena, self.device = arena, arena.device
        self.slots: list[_Slot | None] = [None] * n_slots
        self.views: list[tuple[int, int, Layout]] = []
        self.views_of: dict[int, list[int]] = {}
        self.arena_bytes = 0
        self.bodies: list[DevicePlan] = []
        self.decides = False
        """Whether the CPU must read results before it can launch more: such a plan cannot be captured."""
        self._steps: list[tuple[Step, int]] = []
        self._uses: set[tuple[int, int]] = set()
        """(slot, tag of a launch that uses it)."""
        self._inputs: dict[int, _Slot] = {}
        self._outputs: list[int] = []
        self._seconds: list[float] = []
        self._lock = threading.Lock()

    # ---- slots --------------------------------------------------------------------------------------------------
    def arena_slot(self, slot: int, offset: int) -> None:
        """See `Plan.arena_slot`."""
        self.slots[slot] = _Slot(Allocation.arena, offset)

    def input_slot(
        self, slot: int, index: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], mutable: bool
    ) -> None:
        """See `Plan.input_slot`."""
        result = _Slot(Allocation.input, 0, index, mutable, (dtype, tuple(sizes), tuple(strides)))
        self.slots[slot] = self._inputs[index] = result

    def fresh_slot(self, slot: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> None:
        """See `Plan.fresh_slot`."""
        self.slots[slot] = _Slot(Allocation.fresh, layout=(dtype, tuple(sizes), tuple(strides)))

    def result_slot(self, slot: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]) -> None:
        """See `Plan.result_slot`."""
        self.slots[slot] = _Slot(Allocation.result, layout=(dtype, tuple(sizes), tuple(strides)))

    def view(
        self, slot: int, offset: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int]
    ) -> PlanView:
        """See `Plan.view`."""
        self.views_of.setdefault(slot, []).append(len(self.views))
        self.views.append((slot, offset, (dtype, tuple(sizes), tuple(strides))))
        return PlanView(len(self.views) - 1)

    # ---- launches -----------------------------------------------------------------------------------------------
    def kernel(
        self, address: int, pointers: Sequence[tuple[int, int]], integers: Sequence[int] = (), *, tag: int = -1
    ) -> int:
        """Launches `int f(void** pointers, const int64_t* integers, void* stream)`."""
        self._uses |= {(slot, tag) for slot, _ in pointers}
        numbers = (ctypes.c_int64 * len(integers))(*integers)
        kind, device = ctypes.c_void_p * len(pointers), self.device

        def step(run: _Run) -> None:
            device.kernel(address, kind(*[run.pointer(slot, offset) for slot, offset in pointers]), numbers)

        return self._add(step, tag)

    def mm(self, out: PlanView, a: PlanView, b: PlanView, *, tag: int = -1) -> int:
        """Writes a @ b to `out`."""
        return self._written(torch.ops.aten.mm.out, out, (a, b), tag)

    def bmm(self, out: PlanView, a: PlanView, b: PlanView, *, tag: int = -1) -> int:
        """Writes a[i] @ b[i] to `out[i]`."""
        return self._written(torch.ops.aten.bmm.out, out, (a, b), tag)

    def addmm(self, out: PlanView, bias: PlanView, a: PlanView, b: PlanView, *, tag: int = -1) -> int:
        """Writes bias + a @ b to `out`; the bias broadcasts."""
        return self._written(torch.ops.aten.addmm.out, out, (bias, a, b), tag)

    def baddbmm(self, out: PlanView, bias: PlanView, a: PlanView, b: PlanView, *, tag: int = -1) -> int:
        """Writes bias[i] + a[i] @ b[i] to `out[i]`."""
        return self._written(torch.ops.aten.baddbmm.out, out, (bias, a, b), tag)

    def _written(self, operator: Any, out: PlanView, views: Sequence[PlanView], tag: int) -> int:
        self._uses |= {(self.views[v.number][0], tag) for v in (out, *views)}

        def step(run: _Run) -> None:
            self.device.call(operator, [run.view(v.number) for v in views], {"out": run.view(out.number)})

        return self._add(step, tag)

    def call(
        self,
        name: str,
        overload: str,
        arguments: Sequence[Argument],
        results: Sequence[int | PlanView | None],
        *,
        tag: int = -1,
    ) -> int:
        """Calls an operator of PyTorch, or a function of `runtime.gpu.functions`; see `Plan.call`."""
        touched = [x for x in (*_flat(arguments), *results) if isinstance(x, PlanView)]
        self._uses |= {(self.views[v.number][0], tag) for v in touched}
        self._uses |= {(slot, tag) for slot in results if isinstance(slot, int)}
        function, names = _function(name, overload)
        positional = len(arguments) if names is None else sum(n is None for n in names)

        def step(run: _Run) -> None:
            values = [_value(run, a) for a in arguments]
            named = [n for n in names or () if n is not None]
            keywords = dict(zip(named, values[positional:], strict=False))
            returned = self.device.call(function, values[:positional], keywords)
            flat = _flat(returned)
            for result, tensor in zip(results, flat, strict=False):
                if isinstance(result, PlanView):
                    self.device.call(torch.ops.aten.copy_.default, (run.view(result.number), tensor), {})
                elif result is not None:
                    run.own(result, tensor, _flat(values))

        return self._add(step, tag)

    def control(
        self,
        kind: str,
        bodies: Sequence[DevicePlan],
        condition: PlanView | None,
        states: Sequence[PlanView],
        slices: Sequence[tuple[PlanView, int]],
        shared: Sequence[PlanView],
        results: Sequence[int],
        trips: int,
        reverse: bool,
        *,
        tag: int = -1,
    ) -> int:
        """Runs plans as the bodies of control flow; see `Plan.control`."""
        first = [view for view, _ in slices]
        read = [*([] if condition is None else [condition]), *states, *first, *shared]
        self._uses |= {(self.views[v.number][0], tag) for v in read} | {(slot, tag) for slot in results}
        self.bodies += bodies
        self.decides |= kind != "scan" or any(body.decides for body in bodies)
        strides = tuple(stride for _, stride in slices)
        control = Control(kind, tuple(body.issue for body in bodies), tuple(results), trips, reverse, strides)

        def step(run: _Run) -> None:
            def shown(views: Sequence[PlanView]) -> list[torch.Tensor]:
                return [run.view(v.number) for v in views]

            asked = None if condition is None else run.view(condition.number)
            arguments = (asked, shown(states), shown(first), shown(shared))
            for slot, tensor in zip(results, control.run(self.device, run, *arguments), strict=True):
                run.own(slot, tensor, ())

        return self._add(step, tag)

    def release(self, slot: int, *, tag: int = -1) -> int:
        """See `Plan.release`."""
        return self._add(lambda run: run.release(slot), tag)

    def copies(self, places: Sequence[tuple[tuple[int, int], tuple[int, int], int]], *, tag: int = -1) -> None:
        """See `Plan.copies`; one launch for all of them."""
        self._uses |= {(place[0], tag) for to, source, _ in places for place in (to, source)}

        def step(run: _Run) -> None:
            targets = [run.bytes_of(*to, nbytes) for to, _, nbytes in places]
            sources = [run.bytes_of(*source, nbytes) for _, source, nbytes in places]
            self.device.call(torch.ops.aten._foreach_copy_.default, (targets, sources), {})

        self._add(step, tag)

    def _add(self, step: Step, tag: int) -> int:
        self._steps.append((step, tag))
        return len(self._steps) - 1

    def finalize(self, arena_bytes: int, outputs: Sequence[int]) -> None:
        """See `Plan.finalize`."""
        self.arena_bytes, self._outputs = arena_bytes, list(outputs)

    # ---- running ------------------------------------------------------------------------------------------------
    def run(self, inputs: Sequence[torch.Tensor], profile: bool = False) -> list[torch.Tensor]:
        """Runs all launches on the current stream; the outputs belong to the caller."""
        with self.arena.turn, self.device.quiet():
            self.check(inputs)
            self.grow()
            self.arena.enter()
            try:
                outputs = self.issue(inputs, profile=profile)
            finally:
                self.arena.leave()
            self.touch(inputs)
        return outputs

    def grow(self) -> None:
        """Reserve memory for planned values, also for the bodies of control flow."""
        self.arena.grow(self.arena_bytes)
        for body in self.bodies:
            body.grow()

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The arenas' memory."""
        return [self.arena.buffer, *(buffer for body in self.bodies for buffer in body.buffers)]

    def check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise `InputMismatch` for an input whose layout is not the plan's."""
        if len(inputs) != max(self._inputs, default=-1) + 1:
            raise Invalid(f"the plan takes {max(self._inputs, default=-1) + 1} inputs, given {len(inputs)}")
        for index, slot in self._inputs.items():
            tensor, (dtype, sizes, strides) = inputs[index], slot.layout
            if tensor.dtype is not dtype or tuple(tensor.shape) != sizes or not same_strides(tensor, strides):
                given = f"{tensor.dtype} of sizes {tuple(tensor.shape)} and strides {tensor.stride()}"
                raise InputMismatch(
                    f"input {index} is {given}, expected {dtype} of sizes {sizes} and strides {strides}", index
                )

    def touch(self, inputs: Sequence[torch.Tensor]) -> None:
        """Increment the version counters of what a run has written."""
        for index, slot in self._inputs.items():
            if slot.mutable and not inputs[index].is_inference():
                torch.autograd.graph.increment_version(inputs[index])

    def issue(
        self, inputs: Sequence[torch.Tensor], schedule: Schedule | None = None, *, profile: bool = False
    ) -> list[torch.Tensor]:
        """Issue the launches, on the streams of a schedule over tags, if any, which join the current one."""
        several = schedule is not None and schedule.streams > 1
        run = _Run(self, inputs, deferred=self._shared(schedule) if several and schedule is not None else frozenset())
        streams = _Streams(self.device, schedule) if several and schedule is not None else None
        marks: list[Any] = []
        for position, (step, tag) in enumerate(self._steps):
            if profile:
                marks.append(self.device.event(timed=True))
            try:
                if streams is None:
                    step(run)
                else:
                    streams.run(step, run, tag, last=self._last_of(position))
            except (Invalid, torch.OutOfMemoryError):
                raise
            except ExecutionError as error:  # in a body, whose launches have numbers of their own
                raise ExecutionError(error.message, tag) from error
            except Exception as error:
                raise ExecutionError(f"{error}", tag) from error
        if streams is not None:
            streams.join()
        if profile:
            marks.append(self.device.event(timed=True))
            self._seconds = [self.device.seconds(a, b) for a, b in itertools.pairwise(marks)]
        return [self._output(run, slot) for slot in self._outputs]

    def _shared(self, schedule: Schedule) -> frozenset[int]:
        """Slots used by launches on different streams."""
        streams: dict[int, set[int]] = {}
        for slot, tag in self._uses:
            streams.setdefault(slot, set()).add(schedule.stream[tag])
        return frozenset(slot for slot, used in streams.items() if len(used) > 1)

    def _last_of(self, position: int) -> bool:
        return position + 1 == len(self._steps) or self._steps[position + 1][1] != self._steps[position][1]

    def _output(self, run: _Run, slot: int) -> torch.Tensor:
        if slot not in run.owned:
            run.base(slot)
        return run.owned[slot]

    def seconds(self) -> list[float]:
        """Seconds per launch in the last run with `profile=True`."""
        return self._seconds


class _Streams:
    """The streams of one issue: they start after the current stream's work, which resumes after theirs."""

    def __init__(self, device: GPU, schedule: Schedule) -> None:
        self.device, self.schedule = device, schedule
        self.main = device.stream()
        self.streams = [self.main, *device.side_streams(schedule.streams - 1)]
        start = device.event()
        for stream in self.streams[1:]:
            with device.on(stream):
                device.wait(start)
        self.events: dict[int, Any] = {}
        self.waited: set[int] = set()

    def run(self, step: Step, run: _Run, tag: int, last: bool) -> None:
        """Issue a part of launch `tag`; `last`: it is the last part."""
        with self.device.on(self.streams[self.schedule.stream[tag]]):
            if tag not in self.waited:
                self.waited.add(tag)
                for earlier in self.schedule.waits[tag]:
                    self.device.wait(self.events[earlier])
            step(run)
            if last and tag in self.schedule.recorded:
                self.events[tag] = self.device.event()

    def join(self) -> None:
        """The first stream waits for all others."""
        for stream in self.streams[1:]:
            with self.device.on(stream):
                end = self.device.event()
            self.device.wait(end)


def same_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides: dimensions of size 1 may have any."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return tensor.numel() < 2 or all(size == 1 or a == b for size, a, b in pairs)


@functools.cache
def _function(name: str, overload: str) -> tuple[Callable[..., Any], list[str | None] | None]:
    """The function to call, and per argument its name if it is passed by name."""
    if name in FUNCTIONS:
        return FUNCTIONS[name], None
    namespace, plain = name.split("::")
    operator = getattr(getattr(getattr(torch.ops, namespace), plain), overload or "default")
    return operator, [a.name if a.kwarg_only else None for a in operator._schema.arguments]


def _value(run: _Run, argument: Any) -> Any:
    if isinstance(argument, PlanView):
        return run.view(argument.number)
    if isinstance(argument, list | tuple):
        return [_value(run, a) for a in argument]
    return argument


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple) and not isinstance(value, PlanView):
        return [x for v in value for x in _flat(v)]
    return [value]
