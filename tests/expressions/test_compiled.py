"""Expressions in models: under torch.compile, in `optimize`, and in a training step."""

import copy

import pytest
import torch
from torch import nn

import daceml_train as dt
from benchmarks.novel import operators
from daceml_train.expressions import array, size, total


class Model(nn.Module):
    """An involution between convolutions, as one kernel per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.kernels = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 18, 1)
        self.head = nn.Linear(8 * 36, 10)

    def forward(self, x):
        h = self.stem(x).relu().view(-1, 2, 4, 6, 6)
        y = operators.involution(h, self.kernels(x).view(-1, 2, 3, 3, 6, 6))
        return self.head(y.flatten(1).tanh())


def problem():
    torch.manual_seed(0)
    return Model(), torch.randn(4, 3, 6, 6), torch.randint(0, 10, (4,))


def gradients(model, call, x, y):
    model.zero_grad()
    loss = nn.functional.cross_entropy(call(x), y)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def close(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_torch_compile() -> None:
    model, x, y = problem()
    close(
        gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True), x, y), gradients(model, model, x, y)
    )


@pytest.mark.compiled
@pytest.mark.slow
def test_optimize_and_training_step() -> None:
    model, x, y = problem()
    ours = copy.deepcopy(model)
    module = dt.optimize(copy.deepcopy(model))
    close(gradients(module, module, x, y), gradients(model, model, x, y))
    assert "expression" in str(dt.report(module))
    optimizer, mine = torch.optim.SGD(model.parameters(), 0.1), torch.optim.SGD(ours.parameters(), 0.1)
    step = dt.training_step(ours, nn.CrossEntropyLoss(), mine)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x, y).detach(), loss.detach(), rtol=1e-5, atol=1e-6)
    close(list(ours.parameters()), list(model.parameters()))


@pytest.mark.compiled
def test_a_gradient_that_is_read_backward() -> None:
    """A program's result has no negative strides, which PyTorch has not; the loop over one element reads nothing."""

    @dt.expression
    def reversed_(x):
        return array(x.outside(0)[5 - i] for i in size(5) for j in size(1))

    class Reversing(nn.Module):
        def forward(self, x):
            return reversed_(x * 1)

    theirs, ours = (torch.arange(1.0, 5).requires_grad_() for _ in range(2))
    reversed_(theirs).square().sum().backward()
    dt.optimize(Reversing())(ours).square().sum().backward()
    assert ours.grad is not None and ours.grad.tolist() == theirs.grad.tolist()


@pytest.mark.compiled
@pytest.mark.parametrize("compiler", ["compile", "optimize"])
def test_a_name_that_is_another_expression_now(compiler: str) -> None:
    """Expressions share the code of their wrapper, but a model is compiled for one of them."""
    module = Renamed()
    call = torch.compile(module, backend="aot_eager") if compiler == "compile" else dt.optimize(module)
    for factor in (2.0, 3.0, 2.0):
        RENAMED["scale"] = SCALES[factor]
        assert call(torch.ones(2)).tolist() == [factor, factor]


SCALES = {
    2.0: dt.expression(lambda x: array(x[i] * 2 for i in x.shape[0])),
    3.0: dt.expression(lambda x: array(x[i] * 3 for i in x.shape[0])),
}
RENAMED = dict.fromkeys(["scale"], SCALES[2.0])


class Renamed(nn.Module):
    """A module whose expression is looked up by name."""

    def forward(self, x):
        return RENAMED["scale"](x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: array(x[i] * 2 for i in x.shape[0]),
        lambda x: array(x[i] for i in x.shape[0]),
        lambda x: array(x[0] for i in x.shape[0]),
        lambda x: array(total(x[j] * x[j + 1] for j in size(2)) for i in x.shape[0]),
        lambda x: array(total(x[i + j] for j in size(1)) for i in x.shape[0]),
    ],
)
def test_results_may_be_changed_in_place(function) -> None:
    """A result is no view, and shares no memory with an operand."""
    x = torch.arange(3.0, requires_grad=True)
    expected = torch.autograd.grad(dt.expression(function)(x).sum(), x)
    result = dt.expression(function)(x)
    result.add_(1).sum().backward()
    torch.testing.assert_close(x.grad, expected[0])
    assert x.tolist() == [0, 1, 2]
