"""Filters in tiles, and gradients for weights: kernels of our own against what the operators mean, in float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from daceml_train.codegen.cpu.compile import compile_kernels
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.winograd import split_count, tiles_of, transformed_filters, weight_gradient
from daceml_train.errors import Refused
from daceml_train.ops.operator import Operator
from daceml_train.ops.winograd import WinogradFilter, WinogradWeightGrad
from daceml_train.tensor import DType
from tests.codegen.running import launch

FILTERS = [(64, 32), (70, 33), (5, 3), (40, 24)]
GRADIENTS = [  # images, results' channels, channels, height, width, padding
    (2, 48, 80, 13, 17, (0, 0)),
    (3, 16, 32, 9, 7, (2, 1)),
    (8, 64, 64, 27, 26, (1, 1)),
    (1, 144, 16, 5, 4, (1, 1)),
]


def layout(t: torch.Tensor) -> Layout:
    return Layout(tuple(t.shape), t.stride(), DType.float32 if t.dtype is torch.float32 else DType.float64)


def last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last)


@pytest.mark.compiled
def test_filters(compiler: str, tmp_path: Path) -> None:
    """Row-major weights, with channels last, within others, and transposed; both directions."""
    torch.manual_seed(0)
    cases = []
    for k, c in FILTERS:
        whole = torch.randn(k, c + 2, 3, 3)
        for w in (torch.randn(k, c, 3, 3), last(torch.randn(k, c, 3, 3)), whole[:, 1:-1], torch.randn(k, c, 3, 3).mT):
            for back in (False, True):
                op = WinogradFilter(input_gradient=back)
                (want,) = op.evaluate(w.double().numpy())
                y = torch.full(want.shape, float("nan"))
                cases.append((transformed_filters(op, [layout(w)], [layout(y)]), w, y, want))
    paths = compile_kernels([code for code, *_ in cases], tmp_path, compiler=compiler)
    for code, w, y, want in cases:
        for blocks in (1, 3):
            launch(code, paths[code.key], [w, y.fill_(float("nan"))], blocks)
            np.testing.assert_allclose(y.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.compiled
def test_gradients_of_weights(compiler: str, tmp_path: Path) -> None:
    """Row-major results and others; sums in one part and in several: the bits do not depend on the number of blocks."""
    torch.manual_seed(0)
    cases = []
    for n, k, c, h, w, padding in GRADIENTS:
        x, g = last(torch.randn(n, c, h, w)), last(torch.randn(n, k, h + 2 * padding[0] - 2, w + 2 * padding[1] - 2))
        op = WinogradWeightGrad(padding=padding)
        (want,) = op.evaluate(g.double().numpy(), x.double().numpy())
        for y in (torch.empty(k, c, 3, 3), last(torch.empty(k, c, 3, 3))):
            cases.append((weight_gradient(op, [layout(g), layout(x)], [layout(y)]), g, x, y, want))
    assert {len(code.scratch) for code, *_ in cases} == {1, 2}
    paths = compile_kernels([code for code, *_ in cases], tmp_path, compiler=compiler)
    for code, g, x, y, want in cases:
        bits = []
        for blocks in (1, 2, 3):
            launch(code, paths[code.key], [g, x, y.fill_(float("nan"))], blocks)
            np.testing.assert_allclose(y.numpy(), want, rtol=1e-4, atol=3e-6 * np.abs(want).max())
            bits.append(y.clone())
        assert all(torch.equal(bits[0], other) for other in bits)


def test_parts_are_as_many_as_cores_have_use_for() -> None:
    assert [split_count(tiles, 1) for tiles in (100, 1100, 1_000_000)] == [1, 2, 64]
    assert [split_count(100_000, squares) for squares in (4, 64, 100)] == [16, 1, 1]
    assert tiles_of((3, 16, 9, 8)) == 3 * 5 * 4


@pytest.mark.parametrize("case", ["filter", "gradient", "channels"])
def test_what_there_is_no_kernel_for(case: str) -> None:
    double = torch.float64 if case != "channels" else torch.float32
    w, x = torch.randn(16, 16, 3, 3, dtype=double), torch.randn(2, 16, 8, 8, dtype=double)
    op: Operator = WinogradFilter() if case == "filter" else WinogradWeightGrad(padding=(1, 1))
    sentence = "do not fill vectors, or are not adjacent" if case == "channels" else "is of f32, not of f64"
    with pytest.raises(Refused, match=sentence):
        if case == "filter":
            transformed_filters(op, [layout(w)], [layout(w)])
        else:
            weight_gradient(op, [layout(x), layout(x)], [layout(w)])
