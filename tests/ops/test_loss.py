import numpy as np
import pytest
import torch
import torch.nn.functional as F

from daceml_train.errors import Invalid
from daceml_train.ops.loss import CrossEntropy, MSELoss, NLLLoss
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import check_differences, check_op, numbers

SHAPES = [(6, 4), (4,), (2, 3, 5), (2, 3, 2, 2), (3, 1)]


def targets(shape: tuple[int, ...], ignored: bool) -> np.ndarray:
    places = (*shape[: len(shape) > 1], *shape[2:])
    classes = shape[min(1, len(shape) - 1)]
    target = np.random.default_rng(0).integers(0, classes, places)
    if ignored and target.ndim:
        target.ravel()[::2] = -100
    return target


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_nll_loss(shape: tuple[int, ...], reduction: str, ignored: bool, weighted: bool) -> None:
    weight = [numbers(shape[min(1, len(shape) - 1)], low=0.1)] * weighted

    def reference(logp: torch.Tensor, t: torch.Tensor, *w: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.nll_loss(logp, t, *w, reduction=reduction), None

    check_op(NLLLoss(reduction), numbers(*shape), targets(shape, ignored), *weight, reference=reference, wrt=[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy(shape: tuple[int, ...], reduction: str, ignored: bool, smoothing: float) -> None:
    dim = min(1, len(shape) - 1)
    t = targets(shape, ignored)

    def reference(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        loss = F.cross_entropy(x, t, reduction=reduction, label_smoothing=smoothing)
        maximum = x.amax(dim, keepdim=True).detach()
        normalizer = (x - maximum).exp().sum(dim)
        return loss, maximum.squeeze(dim), normalizer, torch.tensor(float((t != -100).sum()))

    op, x = CrossEntropy(reduction, label_smoothing=smoothing), numbers(*shape)
    check_op(op, x, t, reference=reference, smooth=False)  # the maximum counts as a constant
    check_differences(op, [x, t], [0], [0])


@pytest.mark.parametrize("ignored", [9, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nothing_counts(reduction: str, ignored: int) -> None:
    """A mean over no target is NaN, a sum is zero; gradients are zero, also of the class that is ignored."""
    x, t = numbers(3, 4), np.full(3, ignored)
    options = {"smooth": False, "second": False}
    torch_options = {"reduction": reduction, "ignore_index": ignored}
    entropy = lambda x, t: (F.cross_entropy(x, t, **torch_options), None, None, None)  # noqa: E731
    likelihood = lambda x, t: (F.nll_loss(x, t, **torch_options), None)  # noqa: E731
    check_op(CrossEntropy(reduction, ignored), x, t, reference=entropy, **options)
    check_op(NLLLoss(reduction, ignored), x, t, reference=likelihood, **options)


def test_masked_logits() -> None:
    """-inf at a class that is not the target costs nothing and gives a zero gradient, not NaN."""
    x = numbers(3, 4)
    x[:, 1] = -np.inf
    t = np.array([0, 2, 3])
    options = {"smooth": False, "second": False}
    check_op(CrossEntropy(), x, t, reference=lambda x, t: (F.cross_entropy(x, t), None, None, None), **options)
    check_op(NLLLoss(), x, t, reference=lambda x, t: (F.nll_loss(x, t), None), **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shapes", [((3, 4), (3, 4)), ((3, 1), (4,)), ((), ()), ((0, 3), (0, 3))])
def test_mse_loss(shapes: tuple[tuple[int, ...], ...], reduction: str) -> None:
    a, b = numbers(*shapes[0]), numbers(*shapes[1], seed=1)

    def reference(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        losses = (x - t) ** 2
        return {"none": losses, "sum": losses.sum(), "mean": losses.mean()}[reduction]

    check_op(MSELoss(reduction), a, b, reference=reference, smooth=a.size > 0, second=a.size > 0)


def test_errors() -> None:
    x, t = Tensor((3, 4)), Tensor((3,), DType.int64)
    with pytest.raises(Invalid, match="expects a reduction among mean, sum, none, given 'max'"):
        CrossEntropy("max").infer(x, t)
    with pytest.raises(Invalid, match=r"nll_loss of f32\[3, 4\] expects an i64 target \[3\], given i64\[4\]"):
        NLLLoss().infer(x, Tensor((4,), DType.int64))
    with pytest.raises(Invalid, match=r"an i64 target \[3\], given f32\[3, 4\]"):
        CrossEntropy().infer(x, x)
    with pytest.raises(Invalid, match=r"at most one class weight \[4\], given f32\[3\]"):
        NLLLoss().infer(x, t, Tensor((3,)))
    with pytest.raises(Invalid, match="one element type"):
        MSELoss().infer(x, Tensor((3, 4), DType.float64))
