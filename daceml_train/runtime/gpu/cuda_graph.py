"""CUDA graphs: a plan's launches captured once on a GPU, over memory with fixed addresses, and replayed as one launch.

Inputs whose address changes from call to call are copied into buffers of the graph. All graphs of one `CudaGraphs`
share one memory pool: none of them leaves anything there that a later run needs.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch

from daceml_train.errors import OutOfMemory
from daceml_train.lowering.device import GPU
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.gpu.arena import DeviceArena
from daceml_train.runtime.gpu.binding import placed, schedule_of
from daceml_train.runtime.gpu.plan import DevicePlan

KEPT_GRAPHS = 4
"""Graphs of different sizes that are kept; each owns buffers for its inputs."""
PLAIN_RUNS = 1
"""Runs before a capture: libraries then choose algorithms and load code, which a graph cannot contain."""


class HostScalars:
    """0-d CPU tensors with copies on a GPU, which one transfer updates if any of them has changed."""

    def __init__(self, arena: DeviceArena, sources: Sequence[torch.Tensor]) -> None:
        self._arena = arena
        self._order = sorted(range(len(sources)), key=lambda i: -sources[i].element_size())  # aligned without gaps
        self._parts = [sources[i].view(1).view(torch.uint8) for i in self._order]
        self._last = torch.cat(self._parts) if sources else torch.empty(0, dtype=torch.uint8)
        self._buffer = self._last.to(arena.device.torch, copy=True)
        copies, start = {}, 0
        for i in self._order:
            size = sources[i].element_size()
            copies[i] = self._buffer[start : start + size].view(sources[i].dtype)[0]
            start += size
        self.copies = [copies[i] for i in range(len(sources))]

    def refresh(self, others: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """Update the copies, then copy each second tensor of `others` to the first."""
        current = torch.cat(self._parts) if self._parts else self._last
        changed = not torch.equal(current, self._last)
        if not changed and not others:
            return
        with self._arena.turn:
            self._arena.enter()  # the last run, perhaps on another stream, still reads what is overwritten here
            if changed:
                self._buffer.copy_(current, non_blocking=True)  # from pageable memory: it is read before this returns
                self._last = current
            for copy, tensor in others:
                copy.copy_(tensor)


class Patience:
    """When a plan is captured: after its first runs; at once when its graph was dropped, but later each time.

    Otherwise more kinds of arguments than graphs are kept, or alternating settings, mean a capture at each call.
    """

    def __init__(self) -> None:
        self._runs, self._plain_runs, self._drops = 0, PLAIN_RUNS, 0

    def count(self) -> None:
        """Count a run."""
        self._runs += 1

    @property
    def over(self) -> bool:
        """Whether the run that was counted last may be captured."""
        return self._runs > self._plain_runs

    def dropped(self) -> None:
        """A graph was dropped: 0, 1, 2, 4, ... runs follow without one."""
        self._runs, self._plain_runs = 1, (1 << self._drops) >> 1
        self._drops += 1


class CudaGraph:
    """A captured plan. `moving` are the inputs whose address changes from call to call."""

    def __init__(
        self, plan: BoundPlan, device: GPU, inputs: Sequence[torch.Tensor], moving: Sequence[int], pool: object
    ):
        assert isinstance(plan.plan, DevicePlan)
        self.bound, self.plan, self.device, self.moving = plan, plan.plan, device, moving
        self.inputs = list(inputs)
        for i in moving:
            self.inputs[i] = torch.empty_like(inputs[i], memory_format=torch.preserve_format)
        self.schedule = schedule_of(plan, device.model)
        with self.plan.arena.turn, device.quiet():
            self.plan.check(self.inputs)
            self.plan.grow()
            self._run = device.record(self._issue, pool)
        self._buffers, self._settings = self.plan.buffers, device.settings()
        self._fixed = [i for i in range(len(inputs)) if i not in set(moving)]
        self._addresses = [inputs[i].data_ptr() for i in self._fixed]

    def _issue(self) -> None:
        self._outputs = self.plan.issue(self.inputs, self.schedule)

    def valid(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether memory and settings are those of the capture: a parameter may have moved to other memory."""
        same = all(a is b for a, b in zip(self._buffers, self.plan.buffers, strict=True))
        if not same or self._settings != self.device.settings():
            return False
        return [inputs[i].data_ptr() for i in self._fixed] == self._addresses

    def replay(self, inputs: Sequence[torch.Tensor], own: int | None = None) -> list[torch.Tensor]:
        """Run. The first `own` outputs (all, if None) are new tensors; the others are valid until the next run."""
        copied = self.bound.owners_of(own)

        def run() -> list[torch.Tensor]:
            arena = self.plan.arena
            with arena.turn, self.device.quiet():
                arena.enter()
                for i in self.moving:
                    self.inputs[i].copy_(inputs[i])
                self._run()
                outputs = [
                    t.clone(memory_format=torch.preserve_format) if i in copied else t
                    for i, t in enumerate(self._outputs)
                ]
                arena.leave()
                self.plan.touch(self.inputs)
            return outputs

        outputs = self.bound.collect(run)
        if own is None:
            return outputs
        return [*outputs[:own], *self.bound.collect(lambda: list(self._outputs))[own:]]

    def summary(self) -> str:
        """The numbers of launches and streams, as a sentence."""
        schedule = self.schedule
        streams = f"one stream: {schedule.reason}"
        if schedule.streams > 1:
            streams = f"{schedule.streams} streams with {sum(map(len, schedule.waits))} events"
        return f"{len(schedule.stream)} launches in one CUDA graph, on {streams}"


class CudaGraphs:
    """Captures a training step's plans after their first run and replays them; `reasons` say why one is not."""

    def __init__(self, device: GPU) -> None:
        self.device = device
        self.reasons: list[str] = []
        self.graphs: OrderedDict[int, CudaGraph] = OrderedDict()
        self.captured = self.replayed = 0
        """The numbers of captures and of replays."""
        self._pool: object = None
        self._patience: dict[int, Patience] = {}
        self._refused: set[int] = set()

    def run(
        self, owner: object, plan: BoundPlan, inputs: Sequence[torch.Tensor], moving: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run the plan for `owner`, whose inputs have the same addresses at each call except those in `moving`."""
        key = id(owner)
        if key not in self._patience:
            self._patience[key] = Patience()
            weakref.finalize(owner, self.forget, key)
        if plan.timing is not None or key in self._refused or self.device.capturing():
            return plan.run(inputs)
        inputs = placed(plan.program, self.device, inputs)
        self._patience[key].count()
        graph = self.graphs.get(key)
        if graph is not None and not graph.valid(inputs):
            self._drop(key)
            graph = None
        if graph is None:
            if not self._patience[key].over:
                return plan.run(inputs)
            graph = self._capture(key, plan, inputs, moving)
            if graph is None:
                return plan.run(inputs)
        self.graphs.move_to_end(key)
        self.replayed += 1
        return graph.replay(inputs)

    def _capture(
        self, key: int, plan: BoundPlan, inputs: Sequence[torch.Tensor], moving: Sequence[int]
    ) -> CudaGraph | None:
        while len(self.graphs) >= KEPT_GRAPHS:
            self._drop(next(iter(self.graphs)))
        if isinstance(plan.plan, DevicePlan) and plan.plan.decides:
            self._refuse(key, "a branch or loop in it depends on data, which the CPU waits for")
            return None
        try:
            self._pool = self._pool or self.device.new_pool()
            graph = CudaGraph(plan, self.device, inputs, moving, self._pool)
        except OutOfMemory:
            raise
        except Exception as error:
            self._refuse(key, str(error))
            return None
        self.captured += 1
        self.graphs[key] = graph
        return graph

    def _drop(self, key: int) -> None:
        self.graphs.pop(key)
        self._patience[key].dropped()

    def messages(self) -> list[str]:
        """What is captured, on how many streams, and what is not, in sentences."""
        return [*(graph.summary() for graph in self.graphs.values()), *self.reasons]

    def _refuse(self, key: int, reason: str) -> None:
        self._refused.add(key)
        self.reasons.append(f"a step runs launch by launch, since it cannot be captured: {reason}")

    def forget(self, key: int) -> None:
        """Drop the state kept for an owner."""
        self.graphs.pop(key, None)
        self._patience.pop(key, None)
        self._refused.discard(key)
