"""Control flow on a GPU: the bodies are plans whose launches follow one another, as in `native/control.h` on the CPU.

A loop over slices is issued step by step and can be captured in a CUDA graph. A branch or a loop on a condition makes
the CPU wait for the value, so such a plan runs launch by launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from daceml_train.errors import Invalid
from daceml_train.lowering.device import GPU

Issue = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Issues a body's launches on its inputs; its outputs are dense and share memory with nothing."""


class Layouts(Protocol):
    """What this module requires of a run: memory for the results."""

    def empty(self, slot: int) -> torch.Tensor:
        """Allocate memory in the layout of a slot."""
        ...


@dataclass(frozen=True)
class Control:
    """Bodies take the states, a slice of each array, and what is shared, in this order; see `ControlLaunch`."""

    kind: str
    bodies: tuple[Issue, ...]
    results: tuple[int, ...]
    trips: int
    reverse: bool
    strides: tuple[int, ...]
    """Bytes from slice to slice."""

    def run(
        self,
        device: GPU,
        memory: Layouts,
        condition: torch.Tensor | None,
        states: Sequence[torch.Tensor],
        slices: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The last states, then stacks; of a branch, the results of its body. `slices` are the first of each."""
        if self.kind == "cond":
            assert condition is not None
            produced = self.bodies[0 if device.decide(condition) else 1](shared)
        elif self.kind == "scan":
            produced = self._scan(device, memory, states, slices, shared)
        else:
            produced = self._first(device, memory, states)
            while device.decide(self.bodies[0]([*produced, *shared])[0]):
                produced = self.bodies[1]([*produced, *shared])
        if len(produced) != len(self.results):
            raise Invalid(f"control flow produces {len(produced)} results, {len(self.results)} were expected")
        return produced

    def _first(self, device: GPU, memory: Layouts, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies: a loop of no steps returns them, and what it returns must share memory with nothing."""
        results = [memory.empty(slot) for slot, _ in zip(self.results, states, strict=False)]
        for copy, state in zip(results, states, strict=True):
            device.call(torch.ops.aten.copy_.default, (copy, state), {})
        return results

    def _scan(
        self,
        device: GPU,
        memory: Layouts,
        states: Sequence[torch.Tensor],
        slices: Sequence[torch.Tensor],
        shared: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        current = self._first(device, memory, states)
        stacks = [memory.empty(slot) for slot in self.results[len(states) :]]
        for step in reversed(range(self.trips)) if self.reverse else range(self.trips):
            cut = [_moved(first, step * stride) for first, stride in zip(slices, self.strides, strict=True)]
            produced = self.bodies[0]([*current, *cut, *shared])
            for stack, value in zip(stacks, produced[len(current) :], strict=True):
                device.call(torch.ops.aten.copy_.default, (stack[step], value), {})
            current = produced[: len(current)]
        return [*current, *stacks]


def _moved(first: torch.Tensor, offset: int) -> torch.Tensor:
    """The tensor that begins so many bytes further on."""
    return first.as_strided(first.shape, first.stride(), first.storage_offset() + offset // first.element_size())
