"""Executable: a program bound to kernels and memory, run on tensors.

Each set of sizes and thread count gets a plan of its own (offsets, integers, views); the last few are kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from daceml_train.errors import Invalid
from daceml_train.lowering.device import CPU, Device
from daceml_train.lowering.program import (
    Program,
)
from daceml_train.runtime import group_collectives
from daceml_train.runtime.arenas import AnyArena, new_arena
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.executor import Plan
from daceml_train.runtime.gpu.autotune import Autotuner
from daceml_train.runtime.lane_entries import edges_of
from daceml_train.runtime.launch_threads import Share, share
from daceml_train.runtime.native_library import library
from daceml_train.runtime.shared_facts import SharedFacts
from daceml_train.runtime.timing import Timing
from daceml_train.runtime.tune_matmul import MatmulTuner
from daceml_train.runtime.tune_threads import ThreadTuner
from daceml_train.tensor import Dim

assert group_collectives.LIBRARY  # its functions are defined by the import

KEPT_PLANS = 8
"""Plans that an executable keeps for sizes seen before."""

KEPT_CHANGING_PLANS = 64
"""The same where sizes change from call to call."""

MANY_SIZES = 4
"""After plans for so many sets of sizes, they are known to change from call to call."""


class Executable:
    """A compiled program.

    `addresses` maps each kernel's key to its entry point; `products` chooses the library for each matmul, `search` the
    launch configuration of each large kernel on a GPU, `threads` the threads of each launch on CPUs.
    """

    def __init__(
        self,
        program: Program,
        addresses: dict[str, int],
        arena: AnyArena | None = None,
        products: MatmulTuner | None = None,
        device: Device = CPU,
        work: Callable[[int, Callable[[Dim], int]], tuple[int, int]] | None = None,
        search: Autotuner | None = None,
        threads: ThreadTuner | None = None,
    ) -> None:
        self.program, self.addresses, self.device, self.work = program, addresses, device, work
        self.search, self.threads = search, threads
        self.arena, self.products = arena or new_arena(device), products or MatmulTuner()
        self._plans: OrderedDict[tuple[int, ...], BoundPlan] = OrderedDict()
        self._cells: dict[Any, Plan] = {}
        self._bodies: dict[Any, list[BoundPlan]] = {}
        self._facts = SharedFacts(program)
        self._lock = threading.Lock()
        self._symbols = list(program.symbols.items())
        self.changing = False
        """Whether sizes change from call to call: libraries are compared for sizes rounded up, threads not at all."""
        self._seen: set[tuple[int, ...]] = set()
        """The first sets of sizes."""
        self.timing: Timing | None = None
        """Receives the seconds of each launch during a measurement; see `runtime.timing`."""

    def plan(self, sizes: Sequence[int]) -> BoundPlan:
        """The plan for these values of the program's size symbols, in the order of `program.symbols`."""
        key = (torch.get_num_threads(), *sizes)
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
            if not self.changing:
                self._seen.add(tuple(sizes))
                self.changing = len(self._seen) > MANY_SIZES
            names = [name for name, _ in self._symbols]
            values = dict(zip(names, sizes, strict=True))
            plan = BoundPlan(
                self.program,
                self.addresses,
                values,
                key[0],
                self.arena,
                self.products,
                self.device,
                self.work,
                self.search,
                self._cells,
                tuner=None if self.changing else self.threads,
                changing=self.changing,
                bodies=self._bodies,
                facts=self._facts,
            )
            plan.timing = self.timing
            self._plans[key] = plan
            while len(self._plans) > (KEPT_CHANGING_PLANS if self.changing else KEPT_PLANS):
                self._plans.popitem(last=False)
            return plan

    def has_plan(self, sizes: Sequence[int]) -> bool:
        """Whether `plan` has one for these values that it has kept."""
        return (torch.get_num_threads(), *sizes) in self._plans

    def time(self, timing: Timing | None) -> None:
        """Measure each launch of each run from here on and add it to `timing`; None ends that."""
        library().compiled_calls_end()
        with self._lock:
            self.timing = timing
            for plan in self._plans.values():
                plan.timing = timing

    @property
    def sizes(self) -> dict[str, int]:
        """The most recent values of the size symbols; empty before the first run."""
        with self._lock:
            last = next(reversed(self._plans), ())
        return dict(zip((name for name, _ in self._symbols), last[1:], strict=False))

    def shapes(self) -> list[str]:
        """Per launch of the last plan, its kernel's launch configuration; empty for other launches, and on CPUs."""
        plan = self._last()
        return [] if plan is None else [plan.shape(launch) for launch in plan.program.launches]

    def shares(self) -> list[Share]:
        """Per launch of the last plan, its threads and its lane; nothing on a GPU."""
        plan = self._last()
        if plan is None or not isinstance(plan.plan, Plan):
            return []
        return [share(plan, index, before) for index, before in enumerate(edges_of(plan))]

    def autotuned(self) -> tuple[int, int]:
        """How many kernels of the last plan were autotuned, and how many of them changed."""
        plan = self._last()
        return (0, 0) if plan is None else plan.compared

    def _last(self) -> BoundPlan | None:
        with self._lock:
            return next(reversed(self._plans.values()), None)

    def sizes_of(self, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The values of the size symbols on these inputs."""
        return tuple(inputs[index].shape[dim] for _, (index, dim) in self._symbols)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run on `inputs`, in the program's order; the outputs are new tensors.

        Raises `Invalid` (before anything runs) for an input whose type or layout is not the program's, and
        `ExecutionError`, which names the user's line, where a launch fails.
        """
        if len(inputs) != len(self.program.inputs):
            raise Invalid(f"{self.program.name} takes {len(self.program.inputs)} tensors, given {len(inputs)}")
        return self.plan(self.sizes_of(inputs)).run(inputs)
