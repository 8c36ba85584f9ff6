"""Windows as rows and their sums back: code of our own against PyTorch's unfold and fold."""

import ctypes
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from daceml_train.codegen.cpu.compile import compile_kernels, load
from daceml_train.codegen.cpu.launch import KernelCode
from daceml_train.codegen.kernel.loops import Layout
from daceml_train.codegen.library.im2col import sums_of, windows_of
from daceml_train.ops.resample import Col2Im, Im2Col
from daceml_train.tensor import DType, Tensor, symbol

CASES = [  # images, channels, height, width, kernel, stride, padding, dilation
    (2, 70, 6, 5, (3, 3), (1, 1), (1, 1), (1, 1)),
    (3, 5, 9, 7, (3, 2), (2, 1), (0, 1), (1, 2)),
    (1, 64, 7, 7, (7, 7), (1, 1), (3, 3), (1, 1)),
    (2, 130, 5, 6, (1, 1), (2, 2), (0, 0), (1, 1)),
    (2, 3, 4, 4, (4, 4), (4, 4), (0, 0), (1, 1)),
    (2, 4, 3, 3, (5, 5), (1, 1), (4, 4), (1, 1)),
]
NAMES = {torch.float32: DType.float32, torch.float64: DType.float64}


def layout(t: torch.Tensor) -> Layout:
    return Layout(tuple(t.shape), t.stride(), NAMES[t.dtype])


def run(code: KernelCode, path: Path, tensors: list[torch.Tensor], blocks: int) -> None:
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(load(path, code.key))
    pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
    integers = (ctypes.c_int64 * len(code.integers))(blocks, *code.integers[1:])
    function(ctypes.addressof(pointers), ctypes.addressof(integers))


@pytest.mark.compiled
def test_equals_pytorch(tmp_path: Path) -> None:
    """All strides, paddings, dilations; images in either layout and cut out of others; blocks; 32 and 64 bits."""
    torch.manual_seed(0)
    results = []
    for number, (n, c, h, w, kernel, stride, padding, dilation) in enumerate(CASES):
        dtype = torch.float64 if number % 3 == 2 else torch.float32
        x = torch.randn(n, c + 2, h, w, dtype=dtype)
        x = (x if number % 2 else x.contiguous(memory_format=torch.channels_last))[:, 1 : c + 1]
        geometry = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "last": True}
        columns = F.unfold(x, kernel, dilation, padding, stride)
        rows = torch.empty(n, columns.shape[2], columns.shape[1], dtype=dtype).transpose(1, 2)
        image = torch.empty(n, c, h, w, dtype=dtype, memory_format=torch.channels_last)
        back = Col2Im(size=(h, w), **geometry)
        gathered = windows_of(Im2Col(**geometry), [layout(x)], [layout(rows)])
        summed = sums_of(back, [layout(rows)], [layout(image)])
        assert gathered is not None
        assert summed is not None
        results.append((gathered, summed, x, rows, image, columns, CASES[number][4:]))
    paths = compile_kernels([code for m in results for code in m[:2]], tmp_path)
    for gathered, summed, x, rows, image, columns, (kernel, stride, padding, dilation) in results:
        want = F.fold(columns, x.shape[2:], kernel, dilation, padding, stride)
        for blocks in (1, 3):
            rows.fill_(float("nan"))
            image.fill_(float("nan"))
            run(gathered, paths[gathered.key], [x, rows], blocks)
            assert torch.equal(rows, columns)
            run(summed, paths[summed.key], [rows, image], blocks)
            torch.testing.assert_close(image, want, rtol=1e-6, atol=1e-6)


def test_sizes_are_arguments() -> None:
    op = Im2Col(kernel=(3, 3), padding=(1, 1), last=True)
    sizes = [(2, 8, 9, 9), (symbol("s0"), 8, symbol("s1"), 7)]
    codes = []
    for shape in sizes:
        x = Tensor(shape, DType.float32, (0, 2, 3, 1))
        (y,) = op.infer(x)
        codes.append(windows_of(op, *([Layout(t.shape, t.strides, t.dtype)] for t in (x, y))))
    assert len({code.key for code in codes if code}) == 1


@pytest.mark.parametrize("change", [{"last": False}, {"kernel": (20, 20)}])
def test_all_else_is_the_librarys(change: dict) -> None:
    x = Tensor((1, 3, 30, 30))
    op = Im2Col(**({"kernel": (3, 3), "last": True} | change))
    (y,) = op.infer(x)
    assert windows_of(op, *([Layout(t.shape, t.strides, t.dtype)] for t in (x, y))) is None


def test_16_bit_types_have_no_code() -> None:
    op = Im2Col(kernel=(3, 3), last=True)
    x = Tensor((1, 3, 6, 6), DType.bfloat16)
    (y,) = op.infer(x)
    assert windows_of(op, *([Layout(t.shape, t.strides, t.dtype)] for t in (x, y))) is None


def test_sums_want_dense_windows() -> None:
    op = Col2Im(kernel=(3, 3), size=(6, 6), last=True)
    columns = Tensor((1, 27, 16))
    (y,) = op.infer(columns)
    assert sums_of(op, *([Layout(t.shape, t.strides, t.dtype)] for t in (columns, y))) is None


def test_one_image_may_have_any_stride() -> None:
    op = Col2Im(kernel=(3, 3), size=(6, 6), last=True)
    columns = Tensor((1, 27, 16), DType.float32, (0, 2, 1))
    (y,) = op.infer(columns)
    image = Layout(y.shape, y.strides, y.dtype)
    for stride in (27 * 16, 27, 1):
        assert sums_of(op, [Layout(columns.shape, (stride, *columns.strides[1:]), columns.dtype)], [image]) is not None
