"""Kernels of our own compute with vectors that the processor has: gcc emulates wider ones, at a tenth of the speed."""

import platform
import subprocess

import pytest

from daceml_train.codegen.compiler import compiler_command
from daceml_train.codegen.cpu.compile import FLAGS, HEADERS
from daceml_train.codegen.cpu.launch import KernelCode, Layout
from daceml_train.codegen.library import depthwise, tiles
from daceml_train.codegen.library.depthwise import depthwise_weight_gradient
from daceml_train.codegen.library.matmul_epilogue import matmul_kernel
from daceml_train.codegen.library.templates import written_kernel
from daceml_train.ops.convolution import ConvolutionWeightGrad
from daceml_train.ops.fused_attention import FusedAttention, FusedAttentionGrad
from daceml_train.ops.packed import PackedConvolution
from daceml_train.ops.winograd import WinogradFilter, WinogradWeightGrad
from daceml_train.tensor import DType
from tests.codegen.library.test_matmul_epilogue import body
from tests.codegen.library.test_tiles import layouts, sums

LEVELS = {"x86-64-v2": (16, 16), "x86-64-v3": (32, 16), "x86-64-v4": (64, 32)}
"""gcc's name of an instruction set -> bytes of its vectors, and how many there are."""
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")


def dense(*shape: int, last: bool = False, dtype: DType = DType.float32) -> Layout:
    """Row-major, or with channels last."""
    order = (0, 2, 3, 1) if last else range(len(shape))
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return Layout(shape, tuple(strides), dtype)


def attention(dtype: DType) -> list[KernelCode | None]:
    q, level = dense(2, 3, 64, 32, dtype=dtype), dense(2, 3, 64, dtype=dtype)
    forward, backward = FusedAttention(scale=0.3), FusedAttentionGrad(scale=0.3)
    return [
        written_kernel(forward, [q] * 3, [q, level]),
        written_kernel(backward, [q] * 5 + [level], [q] * 3),
    ]


def convolution(tiled: bool) -> KernelCode | None:
    window = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    op = PackedConvolution(columns=32, kernel=(3, 3), tiled=tiled, **window)
    y = dense(2, 32, 8, 8, last=True)
    matrix = dense(1, (16 if tiled else 9) * 32, 32)
    return matmul_kernel(body(op, (1, 32, 1, 1)), [y, matrix, dense(32), y], [y])


def channelwise(size: int, dtype: DType) -> KernelCode | None:
    window = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "output_padding": (0, 0)}
    op = ConvolutionWeightGrad(weight_shape=(32, 1, size, size), groups=32, **window)
    x = dense(8, 32, 30, 30, last=True, dtype=dtype)
    return depthwise_weight_gradient(op, [dense(8, 32, 31 - size, 31 - size, last=True, dtype=dtype), x])


def codes() -> list[KernelCode | None]:
    kernel, operands = sums(67, 3)
    x, g, w = dense(8, 64, 26, 26, last=True), dense(8, 64, 26, 26, last=True), dense(64, 64, 3, 3)
    return [
        *attention(DType.float32),
        *attention(DType.float64),
        convolution(False),
        convolution(True),
        channelwise(3, DType.float32),
        channelwise(5, DType.float64),
        written_kernel(WinogradFilter(), [w], [dense(16, 2, 64, 32)]),
        written_kernel(WinogradWeightGrad(padding=(1, 1)), [g, x], [w]),
        tiles.tiled(kernel, layouts(operands), layouts(kernel.infer(*operands))),
    ]


@pytest.mark.compiled
@pytest.mark.parametrize("level", LEVELS)
def test_no_vector_is_emulated(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width, registers = LEVELS[level]
    monkeypatch.setattr(tiles, "LANES", width // 4)
    monkeypatch.setattr(tiles, "REGISTERS", registers - 4)
    monkeypatch.setattr(depthwise, "FAST", 0)
    found = codes()
    texts = [code.source for code in found if code is not None]
    assert len(texts) == len(found)
    flags = [flag for flag in FLAGS if flag not in ("-O3", "-march=native", "-w", "-shared")]
    command = [*compiler_command(), *flags, "-O1", f"-march={level}", "-Wvector-operation-performance", "-Wno-psabi"]
    command += [f"-I{HEADERS}", "-S", "-x", "c++", "-", "-o", "/dev/null"]
    for text in texts:
        run = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (0, ""), text
