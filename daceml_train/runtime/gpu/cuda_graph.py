"""Recordings: a plan's launches recorded once on a GPU, for memory that stays where it is, and run as one launch.

Inputs that come from elsewhere at each call are copied into buffers of the recording. All recordings of a recorder
share one pool of memory: none of them leaves anything there that a later run needs.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch

from daceml_train.errors import OutOfMemory
from daceml_train.lowering.device import GPU
from daceml_train.runtime.executable import BoundPlan
from daceml_train.runtime.gpu.binding import placed, schedule_of
from daceml_train.runtime.gpu.plan import DevicePlan

KEPT_RECORDINGS = 4
"""Recordings of different sizes that are kept; each holds the buffers of its inputs."""
PLAIN_RUNS = 1
"""Runs before a recording: libraries choose algorithms and load code then, which a recording cannot contain."""


class HostScalars:
    """0-d tensors of the CPU with a copy on a GPU, brought up to date by one transfer if one of them has changed."""

    def __init__(self, device: GPU, sources: Sequence[torch.Tensor]) -> None:
        self._order = sorted(range(len(sources)), key=lambda i: -sources[i].element_size())  # aligned without gaps
        self._parts = [sources[i].view(1).view(torch.uint8) for i in self._order]
        self._last = torch.cat(self._parts) if sources else torch.empty(0, dtype=torch.uint8)
        self._buffer = self._last.to(device.torch, copy=True)
        made, start = {}, 0
        for i in self._order:
            size = sources[i].element_size()
            made[i] = self._buffer[start : start + size].view(sources[i].dtype)[0]
            start += size
        self.copies = [made[i] for i in range(len(sources))]

    def refresh(self) -> None:
        """Bring the copies up to date."""
        if not self._parts:
            return
        now = torch.cat(self._parts)
        if not torch.equal(now, self._last):
            self._buffer.copy_(now, non_blocking=True)  # of memory that is not pinned: it has left when this returns
            self._last = now


class CudaGraph:
    """One recording of a plan. `moving` are the inputs that come from elsewhere at each call."""

    def __init__(
        self, plan: BoundPlan, device: GPU, inputs: Sequence[torch.Tensor], moving: Sequence[int], pool: object
    ):
        assert isinstance(plan.plan, DevicePlan)
        self.bound, self.plan, self.device, self.moving = plan, plan.plan, device, moving
        self.inputs = list(inputs)
        for i in moving:
            self.inputs[i] = torch.empty_like(inputs[i], memory_format=torch.preserve_format)
        self.schedule = schedule_of(plan, device.capability())
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
        """Whether memory and settings are those that were recorded: a parameter may have been given other memory."""
        same = all(a is b for a, b in zip(self._buffers, self.plan.buffers, strict=True))
        if not same or self._settings != self.device.settings():
            return False
        return [inputs[i].data_ptr() for i in self._fixed] == self._addresses

    def replay(self, inputs: Sequence[torch.Tensor], own: int | None = None) -> list[torch.Tensor]:
        """Run. The first `own` outputs (all, if None) are new tensors; later ones are good until the next run."""
        copied = self.bound.owners_of(own)

        def run() -> list[torch.Tensor]:
            arena = self.plan.arena
            with arena.turn, self.device.quiet():
                arena.enter()
                for i in self.moving:
                    self.inputs[i].copy_(inputs[i])
                self._run()
                made = [
                    t.clone(memory_format=torch.preserve_format) if i in copied else t
                    for i, t in enumerate(self._outputs)
                ]
                arena.leave()
                self.plan.touch(self.inputs)
            return made

        outputs = self.bound.collect(run)
        if own is None:
            return outputs
        return [*outputs[:own], *self.bound.collect(lambda: list(self._outputs))[own:]]

    def told(self) -> str:
        """How many launches it is, on how many streams."""
        made = self.schedule
        how = f"one stream: {made.reason}"
        if made.streams > 1:
            how = f"{made.streams} streams with {sum(map(len, made.waits))} events"
        return f"{len(made.stream)} launches recorded as one, on {how}"


class CudaGraphs:
    """Records a training step's plans once they have run, and replays them; `reasons` say why one is not recorded."""

    def __init__(self, device: GPU) -> None:
        self.device = device
        self.reasons: list[str] = []
        self.recordings: OrderedDict[int, CudaGraph] = OrderedDict()
        self.recorded = self.replayed = 0
        """How often something was recorded, and run from a recording."""
        self._pool: object = None
        self._runs: dict[int, int] = {}
        self._refused: set[int] = set()

    def run(
        self, owner: object, plan: BoundPlan, inputs: Sequence[torch.Tensor], moving: Sequence[int]
    ) -> list[torch.Tensor]:
        """Run the plan for `owner`, whose inputs lie at the same places at each call except those in `moving`."""
        key = id(owner)
        if key not in self._runs:
            self._runs[key] = 0
            weakref.finalize(owner, self.forget, key)
        if plan.timing is not None or key in self._refused or self.device.capturing():
            return plan.run(inputs)
        inputs = placed(plan.program, self.device, inputs)
        recording = self.recordings.get(key)
        if recording is not None and not recording.valid(inputs):
            self.recordings.pop(key)
            recording, self._runs[key] = None, 0
        if recording is None:
            self._runs[key] += 1
            if self._runs[key] <= PLAIN_RUNS:
                return plan.run(inputs)
            recording = self._record(key, plan, inputs, moving)
            if recording is None:
                return plan.run(inputs)
        self.recordings.move_to_end(key)
        self.replayed += 1
        return recording.replay(inputs)

    def _record(
        self, key: int, plan: BoundPlan, inputs: Sequence[torch.Tensor], moving: Sequence[int]
    ) -> CudaGraph | None:
        while len(self.recordings) >= KEPT_RECORDINGS:
            self.recordings.popitem(last=False)
        if isinstance(plan.plan, DevicePlan) and plan.plan.decides:
            self._refuse(key, "a branch or loop in it depends on data, which the CPU waits for")
            return None
        try:
            self._pool = self._pool or self.device.new_pool()
            made = CudaGraph(plan, self.device, inputs, moving, self._pool)
        except OutOfMemory:
            raise
        except Exception as error:
            self._refuse(key, str(error))
            return None
        self.recorded += 1
        self.recordings[key] = made
        return made

    def told(self) -> list[str]:
        """What is recorded, on how many streams, and what is not, in sentences."""
        return [*(recording.told() for recording in self.recordings.values()), *self.reasons]

    def _refuse(self, key: int, reason: str) -> None:
        self._refused.add(key)
        self.reasons.append(f"a step runs launch by launch, since it cannot be recorded: {reason}")

    def forget(self, key: int) -> None:
        """Drop what is kept of an owner."""
        self.recordings.pop(key, None)
        self._runs.pop(key, None)
        self._refused.discard(key)
