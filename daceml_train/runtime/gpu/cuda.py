"""CUDA: the GPU interface of `lowering.device` by PyTorch's streams, events, allocator and graphs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from daceml_train.analysis.device_model import present
from daceml_train.lowering.device import GPU
from daceml_train.runtime.gpu.toolchain import CudaToolchain

_CAPTURE = threading.Lock()
"""CUDA allows one capture per process at a time."""
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


_MATMUL_SETTINGS = (
    "fp32_precision",
    "allow_fp16_accumulation",
    *(f"allow_{dtype}_reduced_precision_reduction{rest}" for dtype in ("fp16", "bf16") for rest in ("", "_split_k")),
)


class CUDA(GPU):
    """The CUDA device of this number."""

    def __init__(self, index: int) -> None:
        self.torch = torch.device("cuda", index)
        torch.cuda.init()
        self.model = present(torch.cuda.get_device_properties(index))
        self.name = torch.cuda.get_device_name(index)
        self.toolchain = CudaToolchain(torch.cuda.get_device_capability(index), self.model.processors)

    def kernel(self, address: int, pointers: ctypes.Array[Any], integers: ctypes.Array[Any]) -> None:
        """See `GPU`."""
        stream = torch.cuda.current_stream(self.torch).cuda_stream
        status = _entry(address)(ctypes.addressof(pointers), ctypes.addressof(integers), stream)
        if status:
            raise RuntimeError(f"a kernel was not launched: {_error(status)}")

    def call(self, function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """See `GPU`."""
        return function(*arguments, **keywords)

    def stream(self) -> Hashable:
        """See `GPU`."""
        return torch.cuda.current_stream(self.torch)

    def new_stream(self) -> Hashable:
        """See `GPU`."""
        return torch.cuda.Stream(self.torch)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """See `GPU`."""
        return torch.cuda.stream(stream)

    def event(self, timed: bool = False) -> Any:
        """See `GPU`."""
        event = torch.cuda.Event(enable_timing=timed)
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def wait(self, event: Any) -> None:
        """See `GPU`."""
        torch.cuda.current_stream(self.torch).wait_event(event)

    def seconds(self, start: Any, end: Any) -> float:
        """See `GPU`."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def keeps(self, tensor: torch.Tensor, stream: Any) -> None:
        """See `GPU`."""
        tensor.record_stream(stream)

    def decide(self, tensor: torch.Tensor) -> bool:
        """See `GPU`."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a branch on data cannot be captured")
        return bool(tensor.item())

    def new_pool(self) -> Any:
        """See `GPU`."""
        return torch.cuda.graph_pool_handle()

    def record(self, issue: Callable[[], None], pool: Any) -> Callable[[], None]:
        """See `GPU`. Other threads may do what a capture forbids.

        The graph gets cuBLAS workspaces of its own, since it may run at the same time as other work.
        """
        graph = torch.cuda.CUDAGraph()
        failures: list[BaseException] = []

        def issued() -> None:
            try:
                issue()
            except BaseException as failure:  # leaving the context raises another error, which hides this one
                failures.append(failure)
                raise

        with _CAPTURE, torch.cuda.device(self.torch), _workspaces():
            before = torch.cuda.current_stream(self.torch)
            options: dict[str, Any] = {"stream": self._capture_stream, "capture_error_mode": "thread_local"}
            try:
                with torch.cuda.graph(graph, pool=pool, **options):
                    issued()
            except BaseException as error:
                self._abandon(graph, pool)
                raise (failures[0] if failures else error) from None
            finally:  # `torch.cuda.graph` does not restore the stream if the capture was invalid
                torch.cuda.set_stream(before)
        replay: Callable[[], None] = graph.replay
        return replay

    @functools.cached_property
    def _capture_stream(self) -> torch.cuda.Stream:
        """That of `torch.cuda.graph` belongs to whichever device captured first."""
        return torch.cuda.Stream(self.torch)

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture in the allocator, which would otherwise defer what is freed until the capture ends."""
        with contextlib.suppress(RuntimeError):  # it has ended there
            torch._C._cuda_endAllocateToPool(self.torch.index, pool)
            torch._C._cuda_releasePool(self.torch.index, pool)
        graph.reset()

    def capturing(self) -> bool:
        """See `GPU`."""
        return torch.cuda.is_current_stream_capturing()

    def holds(self, tensor: torch.Tensor) -> bool:
        """See `GPU`."""
        return tensor.device == self.torch

    def settings(self) -> Hashable:
        """See `GPU`."""
        backends, matmul, cudnn = torch.backends.cuda, torch.backends.cuda.matmul, torch.backends.cudnn
        owners: tuple[Any, ...] = (torch.backends, cudnn.conv, cudnn.rnn)  # type: ignore[attr-defined]
        return (
            *(owner.fp32_precision for owner in owners),  # `allow_tf32` raises where these were set one by one
            *(getattr(matmul, name, None) for name in _MATMUL_SETTINGS),
            torch._C._get_blas_preferred_backend(),
            torch._C._get_linalg_preferred_backend(),
            cudnn.enabled,
            cudnn.benchmark,
            cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
            backends.flash_sdp_enabled(),
            backends.mem_efficient_sdp_enabled(),
            backends.cudnn_sdp_enabled(),
            backends.math_sdp_enabled(),
        )

    def quiet(self) -> contextlib.AbstractContextManager[Any]:
        """See `GPU`; also sets the current device."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.cuda.device(self.torch))
        stack.enter_context(super().quiet())
        return stack


@contextlib.contextmanager
def _workspaces() -> Iterator[None]:
    """Within it, cuBLAS allocates new workspaces; it keeps those of each stream otherwise."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@functools.cache
def _entry(address: int) -> Any:
    return _LAUNCH(address)


def _error(status: int) -> str:
    runtime = torch.cuda.cudart()
    try:
        text: str = runtime.cudaGetErrorString(runtime.cudaError(status))
    except Exception:
        text = "unknown"
    return f"CUDA error {status} ({text})"
