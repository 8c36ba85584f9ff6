import pytest
import torch
import torch.nn.functional as F

from daceml_train.errors import Invalid, Unsupported
from daceml_train.ops.resample import Col2Im, Im2Col, Resample, ResampleGrad
from daceml_train.tensor import Tensor
from tests.ops.checking import check_op, numbers


@pytest.mark.parametrize(
    "options", [{}, {"stride": (2, 1), "padding": (1, 0)}, {"dilation": (2, 1), "padding": (1, 1)}]
)
@pytest.mark.parametrize("lead", [(2, 3), (3,)])
def test_windows(lead: tuple[int, ...], options: dict) -> None:
    def unfold(x: torch.Tensor) -> torch.Tensor:
        return F.unfold(x, (2, 3), **options)

    check_op(Im2Col(kernel=(2, 3), **options), numbers(*lead, 5, 4), reference=unfold, symbolic=False)
    columns = unfold(torch.zeros(*lead, 5, 4)).shape
    check_op(
        Col2Im(kernel=(2, 3), size=(5, 4), **options),
        numbers(*columns),
        symbolic=False,
        reference=lambda x: F.fold(x, (5, 4), (2, 3), **options),
    )


@pytest.mark.parametrize(
    ("mode", "theirs", "source", "target", "corners"),
    [
        ("nearest", "nearest", (4,), (7,), None),
        ("nearest", "nearest", (2, 3), (4, 2), None),
        ("nearest_exact", "nearest-exact", (2, 3, 2), (4, 3, 3), None),
        ("linear", "linear", (4,), (7,), True),
        ("linear", "bilinear", (3, 4), (5, 2), False),
        ("linear", "bilinear", (3, 4), (5, 2), True),
        ("linear", "trilinear", (2, 2, 3), (3, 3, 2), False),
        ("cubic", "bicubic", (3, 4), (5, 2), False),
        ("nearest", "nearest", (1, 1), (3, 1), None),
    ],
)
def test_resample(mode: str, theirs: str, source: tuple, target: tuple, corners: bool | None) -> None:
    def reference(x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(x, target, mode=theirs, align_corners=corners)

    scales = (None,) * len(source)
    check_op(
        Resample(mode, source, target, scales, bool(corners)),
        numbers(2, 1, *source),
        reference=reference,
        symbolic=False,
    )


def test_the_adjoint() -> None:
    x, y = torch.rand(1, 2, 3, 4, dtype=torch.float64, requires_grad=True), numbers(1, 2, 5, 2)

    def reference(g: torch.Tensor) -> torch.Tensor:
        result = F.interpolate(x, (5, 2), mode="bilinear")
        return torch.autograd.grad(result, x, g, create_graph=True)[0]

    check_op(ResampleGrad("linear", (3, 4), (5, 2), (None, None)), y, reference=reference, symbolic=False, second=False)


def test_errors() -> None:
    with pytest.raises(Invalid, match=r"expects \[N, C\] and \[3, 4\]"):
        Resample("linear", (3, 4), (5, 2), (None, None)).infer(Tensor((1, 1, 4, 3)))
    with pytest.raises(Unsupported, match="resampling of 3 dimensions by mode cubic"):
        _ = Resample("cubic", (3, 4, 2), (5, 2, 2), (None,) * 3).call
    with pytest.raises(Invalid, match="col2im to"):
        Col2Im(kernel=(2, 2), size=(4, 4)).infer(Tensor((1, 4, 8)))
    with pytest.raises(Invalid, match="im2col expects"):
        Im2Col(kernel=(2, 2)).infer(Tensor((4, 4)))
