"""Kernels around matmuls with packed weights: all windows, tails of rows and columns, threads, what follows."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from daceml_train.codegen.cpu.compile import compile_kernels
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.matmul_epilogue import matmul_kernel
from daceml_train.errors import Refused
from daceml_train.ops.elementwise import Elementwise, Full
from daceml_train.ops.kernel import Kernel, Statement
from daceml_train.ops.movement import Slice, View
from daceml_train.ops.packed import PANEL, Packed, PackedConvolution, PackedDepthwise, PackedMatmul
from daceml_train.ops.reduction import Reduce
from daceml_train.tensor import DType
from tests.codegen.running import launch

CASES = [  # images, channels, height, width, columns, kernel, stride, padding, dilation
    (2, 16, 6, 5, 32, (3, 3), (1, 1), (1, 1), (1, 1)),
    (1, 20, 9, 7, 40, (3, 2), (2, 1), (0, 1), (1, 2)),
    (3, 3, 11, 9, 16, (7, 7), (2, 2), (3, 3), (1, 1)),
    (1, 64, 5, 5, 70, (1, 1), (1, 1), (0, 0), (1, 1)),
    (2, 33, 6, 7, 100, (1, 1), (2, 2), (0, 0), (1, 1)),
    (1, 1024, 3, 4, 33, (1, 1), (1, 1), (0, 0), (1, 1)),
    (1, 17, 1, 1, 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 16, 4, 4, 1, (5, 5), (1, 1), (4, 4), (1, 1)),
    (0, 16, 4, 4, 8, (3, 3), (1, 1), (1, 1), (1, 1)),
    (30, 32, 8, 8, 64, (3, 3), (1, 1), (1, 1), (1, 1)),
]


def layout(t: torch.Tensor) -> Layout:
    return Layout(tuple(t.shape), t.stride(), DType.float32)


def panels(matrix: torch.Tensor) -> torch.Tensor:
    """As `ops.packed.packed` lays a matrix out, with numbers that must not be seen in place of zeros."""
    depth, columns = matrix.shape
    count = -(-columns // PANEL)
    wide = torch.full((depth, count * PANEL), 1e3)
    wide[:, :columns] = matrix
    return wide.view(depth, count, PANEL).permute(1, 0, 2).contiguous()


def body(op: Packed, shape: tuple[int, ...]) -> Kernel:
    """`max(sum + bias, 0) * 0.3 + other`."""
    statements = [
        Statement(op, ("x", "w"), ("s",)),
        Statement(View(shape), ("b",), ("row",)),
        Statement(Elementwise("add"), ("s", "row"), ("t",)),
        Statement(Elementwise("relu"), ("t",), ("r",)),
        Statement(Full(value=0.3, shape=(), dtype=DType.float32), (), ("c",)),
        Statement(Elementwise("mul"), ("r", "c"), ("m",)),
        Statement(Elementwise("add"), ("other", "m"), ("y",)),
    ]
    return Kernel(("x", "w", "b", "other"), tuple(statements), ("y",))


@pytest.mark.compiled
@pytest.mark.parametrize("last", [True, False])
def test_convolutions_equal_pytorchs(last: bool, tmp_path: Path) -> None:
    """Images in both layouts and cut out of others; one to five threads; NaN goes through a ReLU."""
    torch.manual_seed(0)
    results = []
    for n, c, h, w, k, kernel, stride, padding, dilation in CASES:
        x = torch.randn(n, c + 2, h, w)
        x = (x.contiguous(memory_format=torch.channels_last) if last else x)[:, 1 : c + 1]
        weight, bias = torch.randn(k, c, *kernel), torch.randn(k)
        if n:
            x[0, 0, 0, 0] = math.nan
        want = F.conv2d(x, weight, bias, stride, padding, dilation).contiguous(memory_format=torch.channels_last)
        other = torch.randn_like(want)
        matrix = panels(weight.permute(2, 3, 1, 0).reshape(-1, k))
        op = PackedConvolution(columns=k, kernel=kernel, stride=stride, padding=padding, dilation=dilation)
        operands = [x, matrix, bias, other]
        code = matmul_kernel(body(op, (1, k, 1, 1)), [*map(layout, operands)], [layout(want)])
        assert code is not None
        results.append((code, operands, want.relu() * 0.3 + other, math.prod((c, *kernel))))
    paths = compile_kernels([m[0] for m in results], tmp_path)
    assert len(paths) == 2, "sizes are no part of the text, unless there is but one column"
    for code, operands, want, depth in results:
        for blocks in (1, 2, 3, 4, 5):
            result = torch.full_like(want, 7.0)
            launch(code, paths[code.key], [*operands, result], blocks)
            torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-6 * depth, equal_nan=True)


@pytest.mark.compiled
def test_convolutions_in_tiles_equal_pytorchs(compiler: str, tmp_path: Path) -> None:
    """Odd sizes, tails of columns, padding, images cut out of others; more tiles than fit at once; short vectors."""
    torch.manual_seed(0)
    results = []
    g = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    for n, c, h, w, k, padding in (
        (2, 16, 6, 5, 32, 1),
        (1, 32, 9, 7, 40, 0),
        (3, 48, 1, 1, 8, 2),
        (4, 256, 24, 9, 64, 1),
        (0, 16, 4, 4, 8, 1),
    ):
        x = torch.randn(n, c + 16, h, w).contiguous(memory_format=torch.channels_last)[:, 16:]
        weight, bias = torch.randn(k, c, 3, 3), torch.randn(k)
        want = F.conv2d(x, weight, bias, 1, padding).contiguous(memory_format=torch.channels_last)
        other = torch.randn_like(want)
        matrix = panels((g @ weight @ g.T).permute(2, 3, 1, 0).reshape(-1, k))
        pairs = {"stride": (1, 1), "padding": (padding, padding), "dilation": (1, 1)}
        op = PackedConvolution(columns=k, kernel=(3, 3), tiled=True, **pairs)
        operands = [x, matrix, bias, other]
        code = matmul_kernel(body(op, (1, k, 1, 1)), [*map(layout, operands)], [layout(want)])
        assert code is not None
        results.append((code, operands, want.relu() * 0.3 + other, 9 * c))
    paths = compile_kernels([m[0] for m in results], tmp_path, compiler=compiler)
    for code, operands, want, depth in results:
        for blocks in (1, 2, 3, 4):
            result = torch.full_like(want, 7.0)
            launch(code, paths[code.key], [*operands, result], blocks)
            torch.testing.assert_close(result, want, rtol=1e-5, atol=2e-6 * depth)


@pytest.mark.compiled
def test_depthwise_convolutions_equal_pytorchs(tmp_path: Path) -> None:
    """Channels that are no whole vectors, images cut out of others, narrow images, windows larger than the image."""
    torch.manual_seed(0)
    results = []
    cases = [  # images, channels, height, width, kernel, stride, padding
        (2, 24, 9, 16, (3, 3), 1, (1, 1)),
        (1, 150, 8, 11, (3, 3), 2, (1, 1)),
        (2, 32, 12, 12, (5, 5), 1, (2, 2)),
        (3, 17, 7, 30, (5, 5), 2, (2, 0)),
        (1, 5, 1, 2, (3, 7), 1, (1, 3)),
        (2, 33, 4, 4, (2, 1), 1, (0, 0)),
        (0, 16, 4, 4, (3, 3), 1, (1, 1)),
    ]
    for n, c, h, w, kernel, stride, padding in cases:
        x = torch.randn(n, c + 3, h, w).contiguous(memory_format=torch.channels_last)[:, 3:]
        weight, bias = torch.randn(c, 1, *kernel), torch.randn(c)
        want = F.conv2d(x, weight, bias, stride, padding, groups=c).contiguous(memory_format=torch.channels_last)
        other = torch.randn_like(want)
        op = PackedDepthwise(columns=c, kernel=kernel, stride=(stride, stride), padding=padding)
        operands = [x, weight.permute(2, 3, 1, 0).reshape(-1, c).contiguous(), bias, other]
        code = matmul_kernel(body(op, (1, c, 1, 1)), [*map(layout, operands)], [layout(want)])
        assert code is not None
        results.append((code, operands, want.relu() * 0.3 + other))
    paths = compile_kernels([m[0] for m in results], tmp_path)
    for code, operands, want in results:
        for blocks in (1, 2, 3):
            result = torch.full_like(want, 7.0)
            launch(code, paths[code.key], [*operands, result], blocks)
            torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
@pytest.mark.parametrize("transposed", [False, True])
def test_products_equal_pytorchs(transposed: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    results = []
    for rows, depth, columns in (
        (1, 40, 70),
        (2, 16, 32),
        (11, 7, 5),
        (12, 1024, 96),
        (29, 64, 31),
        (0, 8, 8),
        (300, 80, 48),
    ):
        a = torch.randn(depth, rows).T if transposed else torch.randn(rows, depth)
        b, bias, other = torch.randn(depth, columns), torch.randn(columns), torch.randn(rows, columns)
        operands = [a, panels(b), bias, other]
        code = matmul_kernel(
            body(PackedMatmul(columns=columns), (1, columns)), [*map(layout, operands)], [layout(other)]
        )
        assert code is not None
        results.append((code, operands, (a @ b + bias).relu() * 0.3 + other, depth))
    paths = compile_kernels([m[0] for m in results], tmp_path)
    for code, operands, want, depth in results:
        for blocks in (1, 2, 3, 4):
            result = torch.full_like(want, 7.0)
            launch(code, paths[code.key], [*operands, result], blocks)
            torch.testing.assert_close(result, want, rtol=1e-5, atol=1e-6 * depth)


def around(*following: Statement, y: str = "y") -> Kernel:
    first = Statement(PackedMatmul(columns=8), ("x", "w"), ("s",))
    return Kernel(("x", "w", "o"), (first, *following), (y,))


@pytest.mark.parametrize(
    ("kernel", "other", "sentence"),
    [
        (around(Statement(Reduce("sum", (1,)), ("s",), ("y",))), (4,), "elementwise"),
        (around(Statement(Elementwise("add"), ("s", "o"), ("y",))), (4, 1), "another order"),
        (around(Statement(Elementwise("exp"), ("x",), ("y",))), (4, 8), "operand of the matmul has a second use"),
        (
            around(Statement(Slice(1, 1, 9), ("o",), ("p",)), Statement(Elementwise("add"), ("s", "p"), ("y",))),
            (4, 9),
            "reads a slice",
        ),
    ],
)
def test_other_kernels_are_refused(kernel: Kernel, other: tuple[int, ...], sentence: str) -> None:
    operands = [torch.zeros(4, 8), torch.zeros(1, 8, 32), torch.zeros(other)]
    with pytest.raises(Refused, match=sentence):
        matmul_kernel(kernel, [*map(layout, operands)], [layout(torch.zeros(4, 8))])


def test_a_result_in_another_order_is_refused() -> None:
    kernel = around(Statement(Elementwise("add"), ("s", "o"), ("y",)))
    operands = [torch.zeros(4, 8), torch.zeros(1, 8, 32), torch.zeros(4, 8)]
    with pytest.raises(Refused, match="another order"):
        matmul_kernel(kernel, [*map(layout, operands)], [layout(torch.zeros(8, 4).T)])


def test_other_kernels_are_not_ours() -> None:
    kernel = Kernel(("x",), (Statement(Elementwise("exp"), ("x",), ("y",)),), ("y",))
    assert matmul_kernel(kernel, [layout(torch.zeros(4))], [layout(torch.zeros(4))]) is None
