"""What eager execution checks in data raises in compiled programs, too, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.errors import ExecutionError, OutOfRange
from tests.driver.conformity import assert_compiled

pytestmark = pytest.mark.compiled


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embed(words))


@pytest.mark.parametrize(
    ("word", "target", "options"),
    [(7, 0, {}), (0, 3, {}), (0, -100, {"ignore_index": 1})],
)
def test_an_index_or_class_out_of_range_raises_in_a_step(word: int, target: int, options: dict[str, Any]) -> None:
    model = Classifier()
    loss = nn.CrossEntropyLoss(**options)
    step = dt.training_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    words, targets = torch.arange(4), torch.tensor([0, 1, 2, 1])
    step(words, targets)
    before = [p.detach().clone() for p in model.parameters()]
    words[1], targets[1] = word, target
    with pytest.raises(IndexError):
        loss(model(words), targets)
    with pytest.raises(OutOfRange, match="out of"):
        step(words, targets)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert step.breaks == []
    step(torch.arange(4), torch.tensor([0, 1, 2, 1]))


@pytest.mark.parametrize(
    ("shape", "options"),
    [((5, 3), {"weight": torch.rand(3)}), ((2, 3, 4), {"reduction": "none"}), ((3,), {"label_smoothing": 0.1})],
)
def test_classes_out_of_range_raise_in_a_module(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    class Loss(nn.Module):
        def forward(self, scores: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(scores, target, **options)

    compiled, scores = dt.optimize(Loss()), torch.randn(shape)
    target = torch.ones((*shape[: len(shape) > 1], *shape[2:]), dtype=torch.long)
    assert torch.allclose(compiled(scores, target), Loss()(scores, target), rtol=1e-5)
    with pytest.raises(IndexError):
        compiled(scores, target * 3)
    if not options.get("weight", torch.empty(0)).numel():
        ignored = torch.full_like(target, -100)
        assert torch.equal(compiled(scores, ignored).isnan(), Loss()(scores, ignored).isnan())
    assert_compiled(compiled)


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "x is not positive")
        return x.log()


def test_a_users_assertion_on_data_holds() -> None:
    compiled = dt.optimize(Asserts())
    assert torch.allclose(compiled(torch.ones(3)), torch.zeros(3))
    with pytest.raises(RuntimeError, match="x is not positive"):
        compiled(torch.zeros(3))
    assert_compiled(compiled)


class Gaussian(nn.Module):
    def forward(self, x: Tensor, y: Tensor, variance: Tensor) -> Tensor:
        return F.gaussian_nll_loss(x, y, variance, full=True)


def test_the_gaussian_loss_is_compiled_and_checks_its_variance() -> None:
    compiled = dt.optimize(Gaussian())
    x, y, variance = torch.randn(4, 3), torch.randn(4, 3), torch.rand(4, 1)
    assert torch.allclose(compiled(x, y, variance), Gaussian()(x, y, variance))
    with pytest.raises(ExecutionError, match="negative"):
        compiled(x, y, -variance)
    with pytest.raises(ValueError, match="incorrect size"):
        compiled(x, y, torch.rand(2, 1))
    assert_compiled(compiled)


class Covariance(nn.Module):
    def forward(self, x: Tensor, f: Tensor, a: Tensor) -> Any:
        return torch.cov(x), torch.cov(x, fweights=f, aweights=a, correction=0), torch.corrcoef(x)


def test_covariances_are_compiled_and_check_their_weights() -> None:
    compiled = dt.optimize(Covariance())
    x, f, a = torch.randn(3, 5), torch.tensor([1, 2, 0, 1, 3]), torch.rand(5)
    for ours, eager in zip(compiled(x, f, a), Covariance()(x, f, a), strict=True):
        assert torch.allclose(ours, eager, rtol=1e-4, atol=1e-6)
    with pytest.raises(ExecutionError, match="aweights cannot be negative"):
        compiled(x, f, -a)
    assert_compiled(compiled)


SINGULAR, INDEFINITE = torch.tensor([[1.0, 2.0], [2.0, 4.0]]), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
LINEAR_ALGEBRA = {
    "inv": (torch.linalg.inv, SINGULAR),
    "inverse": (lambda x: x.inverse(), SINGULAR),
    "power": (lambda x: torch.linalg.matrix_power(x, -2), SINGULAR),
    "tensorinv": (lambda x: torch.linalg.tensorinv(x.view(2, 2, 1), 1), SINGULAR),
    "solve": (lambda x: torch.linalg.solve(x, x[0] * 2), SINGULAR),
    "solve from the right": (lambda x: torch.linalg.solve(x, x + 1, left=False), SINGULAR),
    "lu_factor": (lambda x: torch.linalg.lu_factor(x)[0], SINGULAR),
    "cholesky": (lambda x: torch.linalg.cholesky(x + x.mT, upper=True), INDEFINITE),
    "cholesky as a method": (lambda x: (x + x.mT).cholesky(), INDEFINITE),
}


class Applies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * 2


@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_what_linear_algebra_cannot_compute_raises(name: str) -> None:
    function, bad = LINEAR_ALGEBRA[name]
    model, good = Applies(function), torch.tensor([[3.0, 1.0], [0.5, 2.0]])
    compiled = dt.optimize(model)
    ours, eager = good.clone().requires_grad_(), good.clone().requires_grad_()
    torch.testing.assert_close(compiled(ours), model(eager), rtol=1e-5, atol=1e-6)  # LAPACK's, in both
    compiled(ours).square().sum().backward()
    model(eager).square().sum().backward()
    torch.testing.assert_close(ours.grad, eager.grad, rtol=1e-4, atol=1e-5)  # products in another order
    with pytest.raises(RuntimeError):
        model(bad)
    with pytest.raises(ExecutionError, match=r"singular|zero|positive-definite"):
        compiled(bad)
    assert_compiled(compiled)


RAISING: dict[str, tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    "probabilities": (
        F.binary_cross_entropy,
        (torch.tensor([0.0, 1.0]),) * 2,
        (torch.tensor([0.5, 1.5]), torch.ones(2)),
    ),
    "labels": (F.binary_cross_entropy, (torch.tensor([0.0, 1.0]),) * 2, (torch.ones(2), torch.tensor([2.0, 1.0]))),
    **{
        name: (function, (torch.tensor([7, -7]), torch.tensor([2, -3])), (torch.tensor([7, -7]), torch.tensor([2, 0])))
        for name, function in {
            "floor": lambda a, b: a // b,
            "remainder": lambda a, b: a % b,
            "fmod": torch.fmod,
            "rounding mode": lambda a, b: torch.div(a, b, rounding_mode="floor"),
        }.items()
    },
}
"""Functions whose operands eager execution checks, operands that it takes, and some that it refuses."""


@pytest.mark.parametrize("name", RAISING)
def test_operands_that_eager_execution_refuses(name: str) -> None:
    function, taken, refused = RAISING[name]

    class Module(nn.Module):
        def forward(self, *operands: Tensor) -> Any:
            return function(*operands)

    compiled = dt.optimize(Module())
    torch.testing.assert_close(compiled(*taken), function(*taken))
    with pytest.raises(RuntimeError) as expected:
        function(*refused)
    with pytest.raises(ExecutionError, match=str(expected.value)):
        compiled(*refused)
    assert_compiled(compiled)
