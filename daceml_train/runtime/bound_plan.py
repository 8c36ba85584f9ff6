"""A program bound to one set of sizes: the plan that the executor runs, on tensors or on addresses."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import sympy
import torch

from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.errors import ExecutionError, OutOfMemory
from daceml_train.lowering.arena import Lifetime, plan_arena
from daceml_train.lowering.aten import Placeholder
from daceml_train.lowering.device import CPU, GPU, Device
from daceml_train.lowering.lane_plan import LanePlan
from daceml_train.lowering.program import (
    Allocation,
    BufferView,
    CallLaunch,
    ControlLaunch,
    CopyLaunch,
    KernelLaunch,
    Launch,
    Program,
)
from daceml_train.ops.levels import ROWS
from daceml_train.runtime.arenas import AnyArena
from daceml_train.runtime.chosen_matmuls import in_onednn
from daceml_train.runtime.executor import Plan, PlanView
from daceml_train.runtime.failures import failure
from daceml_train.runtime.gpu.arena import DeviceArena
from daceml_train.runtime.gpu.autotune import Autotuner
from daceml_train.runtime.gpu.binding import biggest, placed
from daceml_train.runtime.gpu.plan import DevicePlan
from daceml_train.runtime.lane_entries import run_in_lanes
from daceml_train.runtime.launch_threads import LaunchThreads, contention_of
from daceml_train.runtime.levels import add_levels, capacity, varying
from daceml_train.runtime.shared_facts import SharedFacts
from daceml_train.runtime.size_values import bytes_of, evaluator, rounded, varies
from daceml_train.runtime.timing import Timing
from daceml_train.runtime.torch_types import torch_dtype
from daceml_train.runtime.tune_lanes import LaneTrial
from daceml_train.runtime.tune_matmul import MatmulTuner, onednn_call
from daceml_train.runtime.tune_threads import ThreadTuner
from daceml_train.tensor import Dim, DType

KEPT_BODIES = 16  # plans that are kept of a body of control flow
_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # without: an output is no view for autograd


class BoundPlan:
    """A program for one set of sizes and one thread count. `base` is the original program: `program` may have other
    launch configurations. With `lanes`, its launches run side by side, in memory that is planned for that.
    """

    ran = False  # for those who count the sizes of what they ran
    timing: Timing | None = None
    _placeholder_bytes = 0

    def __init__(
        self,
        program: Program,
        addresses: dict[str, int],
        sizes: dict[str, int],
        threads: int,
        arena: AnyArena,
        products: MatmulTuner,
        device: Device = CPU,
        work: Callable[[int, Callable[[Dim], int]], tuple[int, int]] | None = None,
        search: Autotuner | None = None,
        cells: dict[Any, Plan] | None = None,
        most: dict[str, int] | None = None,
        tuner: ThreadTuner | None = None,
        lanes: LanePlan | None = None,
        changing: bool = False,
        bodies: dict[Any, list[BoundPlan]] | None = None,
        facts: SharedFacts | None = None,
    ) -> None:
        self.facts = facts or SharedFacts(program)
        self.read = set[str]()  # the symbols on whose values the plan depends
        self.value, self.base = evaluator(sizes, self.facts.sizes), program
        self.bodies, self.cells = {} if bodies is None else bodies, {} if cells is None else cells
        """Plans of bodies, and of cells of levels, which take their number of rows at run time: sizes share them."""
        self.planned = self.value if most is None else evaluator({**sizes, **most}, self.facts.sizes)
        """Evaluates the sizes for which the arena is planned: a cell's for the most rows it may have."""
        self.compared = (0, 0)
        """How many kernels were autotuned, and how many of them changed."""
        if search is not None and isinstance(device, GPU):
            program, addresses = search.tuned(program, addresses, self.value, device)
            changed = sum(a is not b for a, b in zip(program.codes, self.base.codes, strict=True))
            self.compared = len(search.measured), changed
            self.facts = self.facts if program is self.base else SharedFacts(program)
        self.program, self.threads, self.sizes, self.products = program, threads, sizes, products
        self.device, self.work, self.lanes, self.arena = device, work, lanes, arena
        self.touching, self.used, self.owners = self.facts.touching, self.facts.used, self.facts.owners
        changing = changing or any(map(varies, program.launches))
        self.typical = evaluator(rounded(sizes), self.facts.sizes) if changing else self.value
        """Evaluates the sizes for which libraries of matmuls are chosen."""
        self.onednn = (
            in_onednn(self.facts.matmuls, products, self.typical, threads) if device is CPU and most is None else {}
        )
        """Matmul launches that run in oneDNN."""
        self.stand_in = len(program.slots)
        """An extra slot, at the arena's start, for arrays whose elements no call reads."""
        self.plan: Plan | DevicePlan = (
            DevicePlan(self.stand_in + 1, arena) if isinstance(arena, DeviceArena) else Plan(self.stand_in + 1, arena)
        )
        self.offsets: dict[int, int] = {}
        """The offsets of slots in the arena."""
        self.plan.arena_slot(self.stand_in, 0)
        self._views: dict[tuple[Any, ...], PlanView] = {}
        self._lane = 0
        """The lane of the launch that is being added: lanes share no views."""
        self.arena_bytes = self._slots()
        self.order: list[int] = []
        """Per entry of the plan, the launch of the program; releases count as the launch before them."""
        self.last_use: dict[int, list[int]] = {}
        """Launch -> slots that are released after it."""
        for slot in self.used:
            if self._home(slot) in (Allocation.fresh, Allocation.result) and slot not in self.facts.handed:
                self.last_use.setdefault(self._last_touching(slot), []).append(slot)
        for index in range(len(program.launches)) if lanes is None else lanes.order:
            self._lane = 0 if lanes is None else lanes.place[index][1]
            self._launch(index, program.launches[index], addresses)
            for slot in self.last_use.get(index, ()):
                self.plan.release(slot, tag=index)
            self.order += [index] * (1 + len(self.last_use.get(index, ())))
        self.plan.finalize(max(self.arena_bytes, self._placeholder_bytes), self.owners)
        self.outputs = [self._output(place) for place in program.outputs]
        """Per output of the program the position among the owners; sizes, strides and offset where it is a part."""
        self._whole = self.outputs == [(i,) for i in range(len(self.owners))]
        self.in_lanes = None if lanes is None else run_in_lanes(self, lanes)
        """Segments and waits, as the executor takes them."""
        self.launch_threads = None if tuner is None or device is not CPU else LaunchThreads(self, tuner)
        self.trial = None if tuner is None or lanes is not None else self._trial(tuner, addresses)
        """Finds whether launches run side by side; None where they never do."""
        self.contention = None if self.launch_threads is None or lanes is not None else contention_of(self)
        """Whether launches have their threads, and not one each because others have the cores; None: they have."""
        self.read |= self.facts.sizes.symbols & sizes.keys()

    # ---- slots --------------------------------------------------------------------------------------------------
    def _home(self, slot: int) -> Allocation:
        """Declare where a slot's memory comes from; oneDNN allocates what it computes."""
        return Allocation.result if slot in self._returned else self.program.slots[slot].home

    @functools.cached_property
    def _returned(self) -> frozenset[int]:
        return frozenset(chosen.slot for chosen in self.onednn.values() if chosen.slot is not None)

    def _last_touching(self, slot: int) -> int:
        """The launch after which a slot is released."""
        if self.lanes is None or not self.touching[slot]:
            return self.program.slots[slot].last
        return max(self.touching[slot], key=self.lanes.position.__getitem__)

    def arena_for(self, lanes: LanePlan | None) -> tuple[list[int], list[int], int]:
        """The slots in the arena, their offsets, and its size, for launches in this order."""
        offered = self._offered
        planned = [i for i in self.used if self._home(i) is Allocation.arena or i in offered]
        lifetimes = []
        for i in planned:
            entry = self.program.slots[i]
            life = (entry.first, entry.last) if lanes is None else lanes.life(self.touching[i])
            lifetimes.append(Lifetime(self.bytes_of(i, self.planned), *life))
        return planned, *plan_arena(lifetimes)

    def _slots(self) -> int:
        program = self.program
        offered = self._offered
        planned, offsets, size = self.arena_for(self.lanes)
        for slot, offset in zip(planned, offsets, strict=True):
            if slot not in offered:
                self.plan.arena_slot(slot, offset)
            self.offsets[slot] = offset
        for i in self.used:
            entry, home = program.slots[i], self._home(i)
            if home is Allocation.arena:
                continue
            layout = (torch_dtype(entry.dtype), self._ints(entry.shape), self._ints(entry.strides))
            if entry.opaque:
                assert isinstance(self.plan, Plan)
                self.plan.opaque_slot(i, entry.input, *layout)
            elif home is Allocation.input:
                self.plan.input_slot(i, entry.input, *layout, entry.mutable)
            elif home is Allocation.fresh:
                self.plan.fresh_slot(i, *layout)
            else:
                self.plan.result_slot(i, *layout)
                if i in offered:
                    assert isinstance(self.plan, Plan)
                    self.plan.offer(i, self.offsets[i])
        return size

    @functools.cached_property
    def _offered(self) -> frozenset[int]:
        """Results that library calls place in the arena: those of PyTorch's own operators, on CPUs.

        Others may keep what they allocate.
        """
        if not isinstance(self.plan, Plan):
            return frozenset()
        return (self._returned - self.facts.handed) | self.facts.library_results

    def _ints(self, dims: Sequence[Dim]) -> list[int]:
        value = self.value
        return [d if d.__class__ is int else value(d) for d in dims]

    # ---- launches -----------------------------------------------------------------------------------------------
    def _launch(self, index: int, launch: Launch, addresses: dict[str, int]) -> None:
        match launch:
            case KernelLaunch(code=number, places=places):
                code = self.program.codes[number]
                blocks = self.blocks(code)
                integers = [self.value(d, blocks) for d in code.integers]
                pointers = [(p.slot, self.value(p.offset) * p.dtype.bytes) for p in places]
                self.plan.kernel(addresses[code.key], pointers, integers, tag=index)
            case CopyLaunch(pairs=pairs):
                copied = []
                for target, source in pairs:
                    to, start = ((p.slot, self.value(p.offset) * p.dtype.bytes) for p in (target, source))
                    copied.append((to, start, bytes_of(source.dtype, source.shape, self.value)))
                self.plan.copies(copied, tag=index)
            case CallLaunch(target=name, overload=overload, arguments=arguments, returns=returns, direct=direct):
                if index in self.onednn:
                    self._onednn(index, arguments)
                    return
                values = [self._argument(a) for a in arguments]
                if direct:
                    getattr(self.plan, name)(*values, tag=index)
                else:
                    self.plan.call(name, overload, values, returns, tag=index)
            case ControlLaunch():
                self._control(index, launch, addresses)

    def _control(self, index: int, launch: ControlLaunch, addresses: dict[str, int]) -> None:
        """Launch control flow, whose bodies have plans and an arena of their own: one of them runs at a time."""
        plan: Any = self.plan
        arena = plan.arena.inner
        if launch.cells is not None:
            counts = [self.value(count) for count in launch.cells.counts]
            bodies = [self._cell(body, rows, addresses) for body, rows in zip(launch.bodies, counts, strict=True)]
            operands = [self._view(p) for p in launch.shared]
            add_levels(plan, bodies, operands, launch.returns, launch.cells, counts, launch.reverse, index)
            return
        inner = [self._body(body, addresses, arena) for body in launch.bodies]
        trips = self.value(launch.trips)
        strides = [self.value(p.strides[0]) * p.dtype.bytes for p in launch.slices]
        first = [replace(p, shape=p.shape[1:], strides=p.strides[1:]) for p in launch.slices] if trips else []
        plan.control(
            launch.kind,
            inner,
            None if launch.condition is None else self._view(launch.condition),
            [self._view(p) for p in launch.states],
            [(self._view(p), stride) for p, stride in zip(first, strides, strict=bool(first))],
            [self._view(p) for p in launch.shared],
            launch.returns,
            trips,
            launch.reverse,
            tag=index,
        )

    def _body(self, body: Program, addresses: dict[str, int], arena: Any) -> Any:
        """The plan of a body, which plans for other sizes share if it reads none of them, as other numbers of steps."""
        plans = self.bodies.setdefault((id(body), self.threads), [])
        found = next((b for b in plans if all(b.sizes[name] == self.sizes[name] for name in b.read)), None)
        if found is None:
            own = (self.sizes, self.threads, arena, self.products, self.device)
            facts = self.facts.of(body)
            plans.append(found := BoundPlan(body, addresses, *own, bodies=self.bodies, facts=facts))
            del plans[:-KEPT_BODIES]
        self.read |= found.read
        return found.plan

    def _cell(self, body: Program, count: int, addresses: dict[str, int]) -> Plan:
        """The plan of a cell for any number of rows up to at least `count`."""
        own = {
            str(s)
            for entry in body.inputs
            for size in entry.shape
            if not isinstance(size, int)
            for s in size.free_symbols
        }
        known = {name: size for name, size in self.sizes.items() if name in own and name != ROWS.name}
        self.read |= known.keys()
        most = {ROWS.name: capacity(count)}
        key = (id(body), self.threads, *most.values(), *known.items())
        if key not in self.cells:
            assert isinstance(self.plan, Plan)
            arena = self.plan.arena.inner

            def bind(rows: int) -> Plan:
                sizes = {**known, ROWS.name: rows}
                own = (sizes, self.threads, arena, self.products)
                result = BoundPlan(body, addresses, *own, most=most, facts=self.facts.of(body)).plan
                assert isinstance(result, Plan)
                return result

            self.cells[key] = varying(bind)
        return self.cells[key]

    def _onednn(self, index: int, arguments: tuple[BufferView, ...]) -> None:
        """Launch a matmul in oneDNN, which takes the second operand transposed."""
        chosen = self.onednn[index]
        out, *c, a, b = arguments
        transposed = replace(b, shape=b.shape[::-1], strides=b.strides[::-1])
        operands = self._view(a), self._view(transposed), self._view(c[0]) if c else None
        overload, values = onednn_call(*operands, chosen.added)
        returned = [self._view(out) if chosen.slot is None else chosen.slot]
        self.plan.call("mkldnn::_linear_pointwise", overload, values, returned, tag=index)

    def _argument(self, argument: Any) -> Any:
        match argument:
            case BufferView():
                return self._view(argument)
            case Placeholder(tensor=tensor):
                nbytes = bytes_of(tensor.dtype, tensor.shape, self.value)
                self._placeholder_bytes = max(self._placeholder_bytes, nbytes)
                return self._view(BufferView(self.stand_in, tensor.dtype, tensor.shape, tensor.strides))
            case DType():
                return torch_dtype(argument)
            case tuple() | list():
                return [self._argument(a) for a in argument]
            case sympy.Expr():
                return self.value(argument)
        return argument

    def _view(self, place: BufferView) -> PlanView:
        layout = (torch_dtype(place.dtype), tuple(self._ints(place.shape)), tuple(self._ints(place.strides)))
        offset = 0 if 0 in layout[1] else self.value(place.offset) * place.dtype.bytes  # empty: it may be past the end
        key = (self._lane, place.slot, offset, *layout)
        if key not in self._views:
            self._views[key] = self.plan.view(place.slot, offset, *layout)
        return self._views[key]

    def _output(self, place: BufferView) -> tuple[Any, ...]:
        slot, position = self.program.slots[place.slot], self.owners.index(place.slot)
        layout = (self._ints(place.shape), self._ints(place.strides), self.value(place.offset))
        if layout == (self._ints(slot.shape), self._ints(slot.strides), 0):
            return (position,)
        return position, tuple(layout[0]), tuple(layout[1]), layout[2]

    def bytes_of(self, slot: int, value: Callable[..., int] | None = None) -> int:
        """Bytes of a slot; the size of scratch memory depends on the blocks of its kernel."""
        entry = self.program.slots[slot]
        return bytes_of(entry.dtype, entry.shape, value or self.value, self._scratch_blocks.get(slot, self.threads))

    def shape(self, launch: Launch) -> str:
        """The launch configuration of a launch's kernel; empty for other launches, and on CPUs."""
        if not isinstance(launch, KernelLaunch) or not isinstance(self.device, GPU):
            return ""
        code = self.program.codes[launch.code]
        return f"{code.shape}, {self.blocks(code)} blocks" if code.shape else ""

    def blocks(self, code: KernelCode) -> int:
        if self.planned is not self.value:
            return 1  # a cell's for any number of rows
        return self.device.toolchain.blocks(code, self.value, self.threads)

    @functools.cached_property
    def _scratch_blocks(self) -> dict[int, int]:
        """Slot -> blocks, of scratch memory."""
        found: dict[int, int] = {}
        for code, slots in self.facts.scratch:
            found |= dict.fromkeys(slots, self.blocks(self.program.codes[code]))
        return found

    def _trial(self, tuner: ThreadTuner, addresses: dict[str, int]) -> LaneTrial | None:
        def bind(lanes: LanePlan) -> BoundPlan:
            given = self.program, addresses, self.sizes, self.threads, self.arena, self.products, self.device, self.work
            return BoundPlan(*given, cells=self.cells, lanes=lanes, facts=self.facts)

        return LaneTrial.of(self, tuner, bind)

    def owners_of(self, outputs: int | None) -> frozenset[int]:
        """The positions of the program's first `outputs` outputs among the plan's; all of them, if None."""
        return frozenset(position for position, *_ in self.outputs[:outputs])

    # ---- running ------------------------------------------------------------------------------------------------
    def run(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on `inputs`; see `Executable.__call__`."""
        if isinstance(self.device, GPU):
            inputs = placed(self.program, self.device, inputs)
        return self._run(self.plan.run, inputs)

    def run_addresses(self, inputs: ctypes.Array[ctypes.c_void_p]) -> list[torch.Tensor]:
        """Run on an array of `tensor._cdata`, on the CPU. Tensors that are written share memory with no other."""
        assert isinstance(self.plan, Plan)
        trial = self.trial
        if trial is not None and not trial.done and self._timing() is None and self._many:
            return trial.run(inputs)
        return self._run(self.plan.run_addresses, inputs)

    def _run(self, run: Callable[..., list[torch.Tensor]], inputs: Any) -> list[torch.Tensor]:
        timing = self._timing()
        begin = time.perf_counter()
        outputs = self.collect(run, inputs, timing is not None)
        if timing is not None:
            timing.add(self.order, self.plan.seconds())
        elif self.contention is not None:
            self.contention.add(time.perf_counter() - begin)
        return outputs

    def fail(self, status: int) -> NoReturn:
        """Raise the error of the last run in this thread, which was none of `run` and ended with this status."""
        assert isinstance(self.plan, Plan)
        self.collect(self.plan.fail, status)
        raise AssertionError(status)

    def adopt(self, other: BoundPlan) -> None:
        """Run as another plan of the same program and sizes from here on."""
        for name in ("plan", "order", "offsets", "arena_bytes", "lanes", "in_lanes", "last_use", "_views"):
            setattr(self, name, getattr(other, name))

    def _timing(self) -> Timing | LaunchThreads | None:
        """What is told the seconds of a run: the user's measurement, or the search as long as it needs them."""
        found = self.launch_threads
        if self.timing is not None or found is None or found.done or not self._many:
            return self.timing
        return found

    @property
    def _many(self) -> bool:
        """Whether launches have their threads, and not one each because others have the cores."""
        return self.contention is None or self.contention.many

    def collect(self, run: Callable[..., list[torch.Tensor]], *arguments: Any) -> list[torch.Tensor]:
        """Run, and view the results as the program's outputs."""
        try:
            owned = self._shown(run, arguments) if torch._C._autograd._profiler_enabled() else run(*arguments)
        except ExecutionError as error:
            failed = failure(error, self.program)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(biggest(self, str(error))) from error
        else:
            if self._whole:
                return owned
            with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
                return [owned[i].as_strided(*layout) if layout else owned[i] for i, *layout in self.outputs]
        raise failed  # not within `except`: it keeps its own context

    def _shown(self, run: Callable[..., list[torch.Tensor]], arguments: Any) -> list[torch.Tensor]:
        """Run as one span of the profile that PyTorch records: `training_step`, `forward` or `backward`."""
        name = self.program.name.removeprefix("forward_")
        with torch.autograd.profiler.record_function(f"daceml_train: {name}"):
            return run(*arguments)
