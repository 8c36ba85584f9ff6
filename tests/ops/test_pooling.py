import pytest
import torch
import torch.nn.functional as F

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.pooling import AvgPool2d, MaxPool2d
from daceml_train.tensor import Tensor, symbol
from tests.ops.checking import check_op, numbers

GEOMETRY = [
    {"kernel": (2, 2), "stride": (2, 2)},
    {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 1)},
    {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": True},
    {"kernel": (2, 2), "stride": (3, 3), "padding": (1, 1), "ceil_mode": True},
]


@pytest.mark.parametrize("shape", [(2, 3, 7, 8), (3, 6, 5), (1, 1, 4, 4)])
@pytest.mark.parametrize("geometry", GEOMETRY)
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_max_pool2d(shape: tuple[int, ...], geometry: dict, dilation: tuple[int, int]) -> None:  # type: ignore[type-arg]
    g = {"padding": (0, 0), "ceil_mode": False} | geometry

    def reference(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.max_pool2d(x, g["kernel"], g["stride"], g["padding"], dilation, g["ceil_mode"], return_indices=True)

    check_op(MaxPool2d(dilation=dilation, **g), numbers(*shape), reference=reference, symbolic=False)


@pytest.mark.parametrize("shape", [(2, 3, 7, 8), (3, 6, 5)])
@pytest.mark.parametrize("geometry", GEOMETRY)
@pytest.mark.parametrize(("include", "divisor"), [(True, None), (False, None), (True, 3)])
def test_avg_pool2d(shape: tuple[int, ...], geometry: dict, include: bool, divisor: int | None) -> None:  # type: ignore[type-arg]
    g = {"padding": (0, 0), "ceil_mode": False} | geometry
    reference = lambda x: F.avg_pool2d(x, g["kernel"], g["stride"], g["padding"], g["ceil_mode"], include, divisor)  # noqa: E731
    check_op(
        AvgPool2d(count_include_pad=include, divisor=divisor, **g), numbers(*shape), reference=reference, symbolic=False
    )


def test_empty_batch() -> None:
    check_op(AvgPool2d(kernel=(2, 2), stride=(2, 2)), numbers(0, 3, 4, 4), reference=lambda x: F.avg_pool2d(x, 2))


def test_symbolic_sizes() -> None:
    n, s = symbol("n"), symbol("s")
    (y, indices) = MaxPool2d(kernel=(2, 2), stride=(2, 2)).infer(Tensor((n, 3, s, 2 * s), order=(0, 2, 3, 1)))
    assert y.shape[1:] == (3, y.shape[2], s) and y.order == indices.order == (0, 2, 3, 1)
    with pytest.raises(Unsupported, match="ceil_mode on the symbolic size s"):
        MaxPool2d(kernel=(2, 2), stride=(2, 2), ceil_mode=True).infer(Tensor((n, 3, s, s)))


def test_errors() -> None:
    with pytest.raises(Invalid, match="at most half the kernel"):
        AvgPool2d(kernel=(2, 2), stride=(1, 1), padding=(2, 0)).infer(Tensor((1, 1, 4, 4)))
    with pytest.raises(Invalid, match=r"expects \[N, C, H, W\] or \[C, H, W\], given f32\[4, 4\]"):
        AvgPool2d(kernel=(2, 2), stride=(1, 1)).infer(Tensor((4, 4)))
    with pytest.raises(Invalid, match="at least one window"):
        AvgPool2d(kernel=(5, 5), stride=(1, 1)).infer(Tensor((1, 1, 4, 4)))
