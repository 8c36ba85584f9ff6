"""Placement: the device of a program's tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

import torch

from daceml_train.errors import DeviceMismatch, Unsupported
from daceml_train.lowering.device import CPU, Device
from daceml_train.runtime.gpu.cuda import CUDA

_standing_in: ContextVar[Callable[[torch.device], Device | None] | None] = ContextVar("device_override", default=None)


@contextlib.contextmanager
def device_override(choose: Callable[[torch.device], Device | None]) -> Iterator[None]:
    """Within this context, `choose` returns the device of tensors, or None for the one that they report themselves."""
    token = _standing_in.set(choose)
    try:
        yield
    finally:
        _standing_in.reset(token)


def device_of(device: torch.device) -> Device:
    """The device for a `torch.device`. Raises `Unsupported` for a kind that programs do not run on."""
    choose = _standing_in.get()
    if choose is not None and (chosen := choose(device)) is not None:
        return chosen
    if device.type == "cpu":
        return CPU
    if device.type == "cuda":
        return _cuda(device.index if device.index is not None else torch.cuda.current_device())
    raise Unsupported(f"programs run on CPUs and CUDA devices, not on {device}")


@functools.cache
def _cuda(index: int) -> Device:
    return CUDA(index)


def common_device(tensors: Mapping[str, torch.Tensor]) -> Device:
    """The device of a program's inputs, by name. As in PyTorch, 0-d CPU tensors may accompany tensors on a GPU.

    Raises `Invalid`, which names two inputs on different devices.
    """
    first: tuple[str, torch.device] | None = None
    lone: torch.device | None = None
    for name, tensor in tensors.items():
        if tensor.ndim == 0 and tensor.device.type == "cpu":
            lone = tensor.device
        elif first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise DeviceMismatch(
                f"{first[0]} is on {first[1]} and {name} on {tensor.device}: a program runs on one device",
                advice="move model, inputs and targets to the same one",
            )
    found = first[1] if first is not None else lone or torch.device("cpu")
    return device_of(found)
