"""The memory of planned values on a GPU, and the stream that used it last."""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable
from typing import Any

import torch

from daceml_train.lowering.device import GPU


class DeviceArena:
    """A buffer for planned values, shared by the plans that use it; it grows and never shrinks."""

    def __init__(self, device: GPU) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device.torch)
        self.turn = threading.RLock()
        self._last: tuple[Hashable, Any] | None = None

    @functools.cached_property
    def inner(self) -> DeviceArena:
        """The arena for bodies of control flow, which run inside programs of this one."""
        return DeviceArena(self.device)

    @property
    def capacity(self) -> int:
        """Bytes allocated: 0 until a plan runs or `grow` is called."""
        return self.buffer.numel()

    def grow(self, nbytes: int) -> None:
        """Grows the buffer; CUDA graphs over the old buffer keep it and are no longer replayed."""
        if nbytes > self.capacity:
            old, self.buffer = self.buffer, torch.empty(0, dtype=torch.uint8, device=self.device.torch)
            del old
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch)

    def enter(self) -> None:
        """Call before a run: waits for the last run if it was on another stream."""
        stream = self.device.stream()
        if self._last is not None and self._last[0] != stream:
            self.device.wait(self._last[1])
            self.device.keeps(self.buffer, stream)

    def leave(self) -> None:
        """Call after a run."""
        self._last = self.device.stream(), self.device.event()
