import numpy as np
import pytest
import torch

from daceml_train.errors import Invalid
from daceml_train.ops.ordering import CumSum, Extremum, Sort, TopK
from daceml_train.tensor import Tensor
from tests.ops.checking import check_op, numbers


@pytest.mark.parametrize(("shape", "dim"), [((5,), 0), ((3, 4), 0), ((3, 4), 1), ((2, 1, 3), 1), ((0, 3), 0)])
def test_cumsum(shape: tuple[int, ...], dim: int) -> None:
    check_op(CumSum(dim), numbers(*shape), reference=lambda x: x.cumsum(dim), smooth=0 not in shape)


def test_cumsum_of_integers() -> None:
    check_op(CumSum(0), np.arange(5), reference=lambda x: x.cumsum(0))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_sort(dim: int, descending: bool) -> None:
    def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(x.sort(dim=dim, descending=descending, stable=True))

    check_op(Sort(dim, descending), numbers(4, 3), reference=reference)
    check_op(Sort(dim, descending), numbers(1, 1), reference=reference)
    ties = np.array([[1.0, np.nan, 1.0], [0.0, 1.0, 1.0]])
    check_op(Sort(dim, descending), ties, reference=reference, smooth=False)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize(("dim", "count"), [(0, 2), (1, 3), (1, 0)])
def test_topk(dim: int, count: int, largest: bool) -> None:
    check_op(
        TopK(count, dim, largest),
        numbers(4, 3),
        reference=lambda x: tuple(x.topk(count, dim, largest)),
        symbolic=False,
        smooth=count > 0,
    )


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("shape", "dim"), [((4, 3), 0), ((4, 3), 1), ((5,), 0), ((2, 1, 3), 1)])
def test_extremum(kind: str, shape: tuple[int, ...], dim: int, keepdim: bool) -> None:
    def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(getattr(x, kind)(dim, keepdim))

    check_op(Extremum(kind, dim, keepdim), numbers(*shape), reference=reference)
    ties = np.round(numbers(*shape))
    check_op(Extremum(kind, dim, keepdim), ties, reference=reference, smooth=False)
    ties.flat[-1] = np.nan
    check_op(Extremum(kind, dim, keepdim), ties, reference=reference, smooth=False)
    check_op(Extremum(kind, dim, keepdim), np.round(numbers(*shape)).astype(np.int64), reference=reference)


def test_errors() -> None:
    with pytest.raises(Invalid, match="topk expects at most 3 elements"):
        TopK(4, 0).infer(Tensor((3,)))
    with pytest.raises(Invalid, match="cumsum expects a dimension in 0..0"):
        CumSum(1).infer(Tensor((3,)))
