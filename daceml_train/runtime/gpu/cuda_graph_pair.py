"""CUDA graphs of a module's forward and backward program, each one launch, with autograd between them.

What the forward pass saves for the backward pass stays in the graph's memory and is not copied. It is valid until the
next replay of that graph, so the graph is not replayed while a backward pass is pending: a call in the meantime (two
forward passes before one backward pass, a result that is kept) runs launch by launch, into memory of its own. Results
and gradients are copied out, since their owner may keep them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from daceml_train.errors import OutOfMemory
from daceml_train.lowering.device import GPU
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.executor import InputMismatch
from daceml_train.runtime.gpu.binding import placed
from daceml_train.runtime.gpu.cuda_graph import PLAIN_RUNS, CudaGraph, Patience
from daceml_train.runtime.gpu.plan import DevicePlan

KEPT_PAIRS = 2
"""Pairs for different sizes that are kept: each owns what its forward pass saves for the backward pass."""


class Ticket:
    """Owned by whoever may still request the backward pass of a replayed forward pass."""

    def __init__(self, pair: CudaGraphPair) -> None:
        self.pair = pair


@dataclass
class CudaGraphPair:
    """The graphs for one set of sizes, in a memory pool that no other graph uses."""

    pool: object = None
    patience: Patience = field(default_factory=Patience)
    forward: CudaGraph | None = None
    backward: CudaGraph | None = None
    backward_runs: int = 0
    refused: bool = False
    open: weakref.ref[Ticket] | None = None

    def drop(self) -> None:
        """Drop the graphs."""
        self.forward = self.backward = None
        self.patience.dropped()

    @property
    def awaited(self) -> bool:
        """Whether the backward pass of the last replayed forward pass is pending."""
        return self.open is not None and self.open() is not None


@dataclass
class CudaGraphPairs:
    """Captures the programs of a compiled graph; `reasons` say why one is not captured."""

    device: GPU
    results: int
    """The number of outputs that go to the user; later ones are saved for the backward pass."""
    moving: Sequence[int]
    """Inputs of the forward program whose address changes from call to call."""
    moving_back: Sequence[int]
    """The same for the backward program."""
    reasons: list[str] = field(default_factory=list)
    pairs: OrderedDict[int, CudaGraphPair] = field(default_factory=OrderedDict)
    replayed: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def forward(
        self, plan: BoundPlan, inputs: Sequence[torch.Tensor], awaited: bool
    ) -> tuple[list[torch.Tensor], Ticket | None]:
        """Outputs of a forward pass. `awaited`: a backward pass may follow, which takes the ticket."""
        with self._lock:
            pair = self._pair(plan)
            pair.patience.count()
            if pair.refused or pair.awaited or self._observed(plan):
                return plan.run(inputs), None
            inputs = placed(plan.program, self.device, inputs)
            if pair.forward is not None and not pair.forward.valid(inputs):
                pair.drop()
            if pair.forward is None and pair.patience.over:
                pair.pool = self.device.new_pool()
                pair.forward = self._capture(pair, plan, inputs, self.moving)
            if pair.forward is None:
                return plan.run(inputs), None
            outputs = pair.forward.replay(inputs, self.results)
            self.replayed += 1
            if not awaited:
                return outputs, None
            ticket = Ticket(pair)
            pair.open = weakref.ref(ticket)
            return outputs, ticket

    def backward(self, plan: BoundPlan, inputs: Sequence[torch.Tensor], ticket: Ticket | None) -> list[torch.Tensor]:
        """Outputs of the backward pass of the forward pass that returned the ticket."""
        with self._lock:
            if ticket is None or ticket.pair.refused or self._observed(plan):
                return plan.run(inputs)
            pair, inputs = ticket.pair, placed(plan.program, self.device, inputs)
            if pair.backward is None or pair.backward.bound is not plan or not pair.backward.valid(inputs):
                pair.backward_runs += 1
                if pair.backward_runs <= PLAIN_RUNS:
                    return plan.run(inputs)
                pair.backward = self._capture(pair, plan, inputs, self.moving_back)
            if pair.backward is None:
                return plan.run(inputs)
            self.replayed += 1
            return pair.backward.replay(inputs)

    def messages(self) -> list[str]:
        """What is captured, and what is not, in sentences."""
        graphs = [half for pair in self.pairs.values() for half in (pair.forward, pair.backward) if half is not None]
        return [*(graph.summary() for graph in graphs), *self.reasons]

    def _pair(self, plan: BoundPlan) -> CudaGraphPair:
        key = id(plan)
        if key not in self.pairs:
            self.pairs[key] = CudaGraphPair()
            weakref.finalize(plan, self.pairs.pop, key, None)
            idle = [pair for pair in self.pairs.values() if pair.forward is not None and not pair.awaited]
            for pair in idle[: max(0, len(idle) - KEPT_PAIRS + 1)]:
                pair.drop()
        self.pairs.move_to_end(key)
        return self.pairs[key]

    def _observed(self, plan: BoundPlan) -> bool:
        """Whether a measurement or an outer capture is in progress."""
        return plan.timing is not None or self.device.capturing()

    def _capture(
        self, pair: CudaGraphPair, plan: BoundPlan, inputs: Sequence[torch.Tensor], moving: Sequence[int]
    ) -> CudaGraph | None:
        reason = ""
        if isinstance(plan.plan, DevicePlan) and plan.plan.decides:
            reason = "a branch or loop in it depends on data, which the CPU waits for"
        elif set(moving) & {i for i, entry in enumerate(plan.program.inputs) if entry.mutable}:
            reason = "it writes an argument"
        try:
            if not reason:
                return CudaGraph(plan, self.device, inputs, moving, pair.pool)
        except (OutOfMemory, InputMismatch):
            raise
        except Exception as error:
            reason = str(error)
        pair.refused = True
        self.reasons.append(f"a pass runs launch by launch, since it cannot be captured: {reason}")
        return None
