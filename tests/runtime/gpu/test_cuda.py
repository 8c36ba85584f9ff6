"""Captures, streams and settings of CUDA devices, where PyTorch's CUDA functions are stubs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from daceml_train.runtime.gpu.cuda import CUDA
from daceml_train.runtime.gpu.functions import kernel_for
from tests.runtime.gpu.cuda_stubs import Driver, Stream, devices, driver

__all__ = ["devices", "driver"]


def test_a_capture_that_fails_leaves_everything_as_it_was(driver: Driver, devices: list[CUDA]) -> None:
    user = driver.new_stream()
    driver.set_stream(user)

    def issue() -> None:
        assert driver.stream_of() != user
        driver.invalid = True
        raise ValueError("operation not permitted when stream is capturing")

    with pytest.raises(ValueError, match="not permitted"):  # not the error of ending the capture
        devices[0].record(issue, "pool")
    assert driver.stream_of() == user and driver.current == 0
    assert not driver.pools and driver.released == [(0, "pool")]
    driver.invalid = False
    devices[0].record(lambda: None, "pool")()
    assert driver.stream_of() == user and not driver.pools


def test_a_capture_that_cannot_begin(driver: Driver, devices: list[CUDA]) -> None:
    user = driver.stream_of()
    driver.begin_fails = True
    with pytest.raises(RuntimeError, match="not permitted"):
        devices[0].record(lambda: None, "pool")
    assert driver.stream_of() == user and not driver.pools


def test_a_failure_that_the_capture_survives(driver: Driver, devices: list[CUDA]) -> None:
    user = driver.stream_of()

    def issue() -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        devices[0].record(issue, "pool")
    assert driver.stream_of() == user and not driver.pools and not driver.released


def test_each_device_captures_on_a_stream_of_its_own(driver: Driver, devices: list[CUDA]) -> None:
    for device in (*devices, devices[0]):
        device.record(lambda: None, "pool")
    assert [(index, stream.device.index) for index, stream in driver.captured] == [(0, 0), (1, 1), (0, 0)]
    assert driver.captured[0][1] == driver.captured[2][1]  # graphs that share a pool share the stream
    assert driver.current == 0
    assert driver.cleared == 6  # each graph has workspaces of its own


def test_side_streams_are_reused(driver: Driver, devices: list[CUDA]) -> None:
    first, second = devices[0].side_streams(3), devices[0].side_streams(2)
    assert second == first[:2] and len(set(first)) == 3 and driver.made == 3
    other = devices[1].side_streams(1)[0]
    assert isinstance(other, Stream) and other.device.index == 1


def _set(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


MATMUL: Any = torch.backends.cuda.matmul
CUDNN: Any = torch.backends.cudnn
CHANGES: dict[str, Callable[[], None]] = {
    "allow_tf32": lambda: setattr(MATMUL, "allow_tf32", not MATMUL.allow_tf32),
    "matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "fp32_precision": _set(MATMUL, "fp32_precision", "tf32"),
    "cudnn_tf32": _set(CUDNN, "allow_tf32", False),
    "conv_precision": _set(CUDNN.conv, "fp32_precision", "ieee"),
    "rnn_precision": _set(CUDNN.rnn, "fp32_precision", "ieee"),
    "bf16_reductions": _set(MATMUL, "allow_bf16_reduced_precision_reduction", False),
    "bf16_split_k": _set(MATMUL, "allow_bf16_reduced_precision_reduction", (False, False)),
    "benchmark": _set(CUDNN, "benchmark", True),
    "flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.fixture
def restored() -> Iterator[None]:
    conv, rnn = CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision
    reductions = MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_bf16_reduced_precision_reduction_split_k
    precision, benchmark = MATMUL.fp32_precision, CUDNN.benchmark
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():  # PyTorch's own tests, once imported, forbid it
        yield
        MATMUL.fp32_precision, CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision = precision, conv, rnn
        MATMUL.allow_bf16_reduced_precision_reduction = reductions
        CUDNN.benchmark = benchmark
    torch.backends.cuda.enable_flash_sdp(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("restored")
def test_settings_are_read_under_old_and_new_names(devices: list[CUDA], change: str) -> None:
    before = devices[0].settings()
    CHANGES[change]()
    after = devices[0].settings()
    assert after != before and hash(after) is not None


@pytest.mark.usefixtures("restored")
def test_settings_that_the_old_names_cannot_read(devices: list[CUDA]) -> None:
    CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision = "ieee", "tf32"
    MATMUL.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):
        _ = CUDNN.allow_tf32
    assert devices[0].settings() == devices[0].settings()


AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER, LATER = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0), (13, 0)


@pytest.mark.parametrize(
    ("capability", "flash"),
    [
        ((7, 5), []),
        (AMPERE, [64, 128, 192, 200, 224, 256]),
        ((8, 6), [64, 128, 192, 256]),
        (ADA, [64, 128, 192, 256]),
        (HOPPER, [64, 128, 192, 200, 224, 256]),
        (BLACKWELL, [64, 128, 192, 200, 224, 256]),
        (CONSUMER, [64, 128, 192, 256]),
        ((12, 1), [64, 128, 192, 256]),
        (LATER, []),
    ],
)
def test_attention_per_architecture(capability: tuple[int, int], flash: list[int]) -> None:
    """Head sizes of PyTorch's kernels in training; other sizes are written out."""
    for dtype in (torch.float16, torch.bfloat16):
        sizes = [64, 68, 128, 192, 200, 224, 256, 264]
        assert [s for s in sizes if kernel_for(capability, dtype, s) == "flash"] == flash
    efficient = [s for s in (4, 6, 64, 128, 132) if kernel_for(capability, torch.float32, s) == "efficient"]
    assert efficient == ([] if capability == LATER else [4, 64, 128])
    assert kernel_for(capability, torch.float64, 64) == "plain"
