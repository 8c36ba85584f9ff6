"""Arenas: the memory that the plans of a program share, on a CPU or on a GPU."""

from __future__ import annotations

from daceml_train.lowering.device import GPU, Device
from daceml_train.runtime.executor import Arena
from daceml_train.runtime.gpu.arena import DeviceArena

AnyArena = Arena | DeviceArena


def new_arena(device: Device) -> AnyArena:
    """An arena for programs on this device."""
    return DeviceArena(device) if isinstance(device, GPU) else Arena()
