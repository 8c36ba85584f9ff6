"""The memory of planned values on a GPU, and who used it last."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from typing import Any

import torch

from daceml_train.lowering.device import GPU


class DeviceArena:
    """A buffer for planned values, shared by the plans that are given it; it grows and never shrinks."""

    def __init__(self, device: GPU) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device.torch)
        self.turn = threading.RLock()
        self._last: tuple[Hashable, Any] | None = None

    @functools.cached_property
    def inner(self) -> DeviceArena:
        """The arena for programs that run inside those of this one: bodies of control flow."""
        return DeviceArena(self.device)

    @property
    def capacity(self) -> int:
        """Bytes allocated: 0 until a plan runs or `grow` is called."""
        return self.buffer.numel()

    def grow(self, nbytes: int) -> None:
        """Makes room; recordings over the old buffer keep it, and are not used any more."""
        if nbytes > self.capacity:
            old, self.buffer = self.buffer, torch.empty(0, dtype=torch.uint8, device=self.device.torch)
            del old
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch)

    def enter(self) -> None:
        """Before a run: wait for the last one, if it was on another stream."""
        stream = self.device.stream()
        if self._last is not None and self._last[0] != stream:
            self.device.wait(self._last[1])
            self.device.keeps(self.buffer, stream)

    def leave(self) -> None:
        """After a run."""
        self._last = self.device.stream(), self.device.event()
