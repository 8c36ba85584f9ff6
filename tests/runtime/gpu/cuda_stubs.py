"""PyTorch's CUDA functions without CUDA: streams, devices and captures that only record what was asked of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from daceml_train.runtime.gpu.cuda import CUDA


@dataclass(frozen=True)
class Stream:
    device: torch.device
    number: int


@dataclass
class Driver:
    """The state of the driver, of PyTorch's allocator, and what happened."""

    current: int = 0
    streams: dict[int, Stream] = field(default_factory=dict)
    made: int = 0
    pools: dict[int, Any] = field(default_factory=dict)
    """Device -> pool that its allocator directs a capture's memory to."""
    released: list[tuple[int, Any]] = field(default_factory=list)
    captured: list[tuple[int, Stream]] = field(default_factory=list)
    cleared: int = 0
    invalid: bool = False
    """Whether the capture in progress was invalidated, so that ending it fails."""
    begin_fails: bool = False

    def stream_of(self, device: Any = None) -> Stream:
        index = self.current if device is None or device.index is None else device.index
        return self.streams.setdefault(index, Stream(torch.device("cuda", index), 0))

    def new_stream(self, device: Any = None) -> Stream:
        self.made += 1
        index = self.current if device is None else device.index
        return Stream(torch.device("cuda", index), self.made)

    def set_stream(self, stream: Stream) -> None:
        self.current = stream.device.index
        self.streams[stream.device.index] = stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.stream_of()
        self.set_stream(stream)
        yield  # left only where the context's end is reached, as PyTorch's is
        self.set_stream(before)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before

    def end(self, index: int, pool: Any) -> None:
        if index not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        del self.pools[index]

    def clear(self) -> None:
        self.cleared += 1


class Graph:
    """`torch.cuda.CUDAGraph`, in the order in which PyTorch's C++ does its work and fails."""

    driver: Driver

    def capture_begin(self, pool: Any = None, **options: Any) -> None:
        assert options["capture_error_mode"] == "thread_local"
        driver = self.driver
        self.index = driver.current
        driver.pools[self.index] = pool
        if driver.begin_fails:
            raise RuntimeError("CUDA error: operation not permitted")
        driver.captured.append((self.index, driver.stream_of()))

    def capture_end(self) -> None:
        if self.driver.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.driver.end(self.index, None)

    def replay(self) -> None:
        pass

    def reset(self) -> None:
        pass


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Two devices."""
    result = Driver()
    cuda = torch.cuda
    properties = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132)
    for name, value in {
        "init": lambda: None,
        "get_device_properties": lambda index: properties,
        "get_device_name": lambda index: f"stub {index}",
        "get_device_capability": lambda index: (9, 0),
        "current_stream": result.stream_of,
        "Stream": result.new_stream,
        "set_stream": result.set_stream,
        "stream": result.on,
        "device": result.device,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "CUDAGraph": type("CUDAGraph", (Graph,), {"driver": result}),
    }.items():
        monkeypatch.setattr(cuda, name, value)
    monkeypatch.setattr(cuda.graph, "default_capture_stream", None)
    for name, function in {
        "_host_emptyCache": lambda: None,
        "_cuda_endAllocateToPool": result.end,
        "_cuda_releasePool": lambda index, pool: result.released.append((index, pool)),
        "_cuda_clearCublasWorkspaces": result.clear,
    }.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    return result


@pytest.fixture
def devices(driver: Driver) -> list[CUDA]:
    return [CUDA(0), CUDA(1)]
