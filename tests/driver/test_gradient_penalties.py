"""`torch.autograd.grad` of a tensor that the model makes a leaf, through dropout, noise, normalizations and in-place
changes, with a derivative: values, gradients, running statistics and random streams as in eager execution."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled


class Critic(nn.Module):
    def __init__(self, body: Callable[[Critic, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(8, 1), nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.register_buffer("average", torch.zeros(8))
        self.body, self.kept = body, torch.zeros(1)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def penalized(z: Tensor, y: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(y, z, torch.ones_like(y), create_graph=True)
    return y.mean() + (slope.norm(dim=1) - 1).square().mean()


def plain(c: Critic, x: Tensor) -> Tensor:
    z = (0.3 * x + 0.7 * x.flip(0)).detach().requires_grad_(True)
    return penalized(z, c.b(c.a(z).sin()))


def legacy(c: Critic, x: Tensor) -> Tensor:
    z = Variable(x, requires_grad=True)
    return penalized(z, c.b(c.a(z).sin())) + (Variable(c.a(x)) * c.a(x)).mean()


def dropouts(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    h = F.dropout(c.a(z).sin(), 0.3)
    planes = F.dropout2d(h.tanh()[:, :, None, None], 0.5)[:, :, 0, 0]
    return penalized(z, c.b(F.dropout(h, 0.5) * h + planes + F.dropout(h, training=False)))


def twice(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    y = c.b(F.dropout(c.a(z).sin(), 0.3))
    slope, weight = torch.autograd.grad(y.sum(), [z, c.a.weight], create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), z, create_graph=True)
    return y.mean() + curve.square().mean() + weight.square().mean()


def noise(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    h = c.a(z)
    return penalized(z, c.b((h + torch.randn_like(h) * torch.rand(h.shape, dtype=h.dtype)).sin()))


def statistics(c: Critic, x: Tensor) -> Tensor:
    z, w = leaf(x), leaf(2 * x)
    h = F.batch_norm(c.a(z), c.mean, c.var, training=True)  # type: ignore[arg-type]
    h = F.instance_norm(h[:, None], c.average[:1], torch.ones(1, dtype=x.dtype))[:, 0]  # type: ignore[index]
    return penalized(z, c.b(c.norm(h.sin()))) + penalized(w, c.b(c.a(w).cos()))


def activation_in_place(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    return penalized(z, c.b(F.leaky_relu(c.a(z), 0.2, inplace=True)))


def written_before(c: Critic, x: Tensor) -> Tensor:
    scale = torch.ones(8, dtype=x.dtype)
    scale.mul_(3.0)
    z = leaf(x)
    h = c.a(z)
    with torch.no_grad():
        c.average.mul_(0.9).add_(h.mean(0), alpha=0.1)  # type: ignore[union-attr,operator]
    return penalized(z, c.b((h * scale).sin() - c.average))


def unused(c: Critic, x: Tensor) -> Tensor:
    z = c.a(x).detach().requires_grad_()
    w = c.a(x).detach()
    w.requires_grad = True
    return c.b(z.sin() + w).mean()


def without_gradients(c: Critic, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = c.a(x)[:, :4].clone().requires_grad_()
    return penalized(z, c.b(c.a(z).sin()))


def kept(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    c.kept = z.view(-1)
    return penalized(z, c.b(c.a(z).sin()))


def element_in_place(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    h = torch.zeros(len(x), 8, dtype=x.dtype)
    h[:, 1:] = c.a(z)[:, 1:]
    return penalized(z, c.b(h.sin()))


def data_in_place(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    h = c.a(z) * 1
    h.data.mul_(2.0)
    return penalized(z, c.b(h + h.sin()))


def off_in_place(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    h = c.a(z) * 1
    with torch.no_grad():
        h.mul_(0.5)
    return penalized(z, c.b(h.cos() * c.a(z)))


def statistics_read(c: Critic, x: Tensor) -> Tensor:
    z = leaf(x)
    h = c.a(z)
    fixed = F.batch_norm(h, c.mean, c.var, training=False)  # type: ignore[arg-type]
    own = F.batch_norm(h, c.mean, c.var, training=True)  # type: ignore[arg-type]
    return penalized(z, c.b((fixed * own).sin()))


def outside(layers: Callable[[], list[nn.Module]], way: str) -> dict[str, Tensor]:
    """Steps with a penalty outside of the model; in some, other gradients are differentiated again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *layers(), nn.Linear(8, 1)).double()
    module = dt.optimize(model, random="eager") if way == "optimize" else model
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    torch.manual_seed(1)
    losses = []
    for number in range(1, 7):
        z = leaf(torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number)))
        seed = torch.ones(5, 1, dtype=torch.float64, requires_grad=number == 3)
        y = module(z)
        inputs = [z, model[0].weight] if number == 2 else [z]
        slope, *others = torch.autograd.grad(y, inputs, seed, create_graph=True)
        loss = y.mean() + (slope.norm(dim=1) - 1).square().mean() + sum(g.square().mean() for g in others)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(
            torch.stack([loss.detach(), z.grad.norm(), torch.zeros(()) if seed.grad is None else seed.grad.sum()])
        )
    return {"losses": torch.stack(losses), **model.state_dict(), "random": torch.rand(1)}


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [nn.Tanh()],
    "dropout": lambda: [nn.Tanh(), nn.Dropout(0.4)],
    "batch norm": lambda: [nn.BatchNorm1d(8), nn.SiLU()],
    "both": lambda: [nn.BatchNorm1d(8), nn.LeakyReLU(0.2, inplace=True), nn.Dropout(0.4)],
    "layer norm": lambda: [nn.LayerNorm(8), nn.Softplus()],
}


PIECEWISE: dict[str, Callable[[], list[nn.Module]]] = {
    "relu": lambda: [nn.ReLU(), nn.Linear(8, 8), nn.Hardtanh(), nn.PReLU()],
    "pooling": lambda: [nn.MaxPool1d(3, 1, 1)],
}


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.filterwarnings("error:daceml_train")
def test_outside_of_the_model(layers: str) -> None:
    expected, got = (outside(LAYERS[layers], way) for way in ("eager", "optimize"))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layers", ["dropout", "both", "layer norm", "relu", "pooling"])
def test_zeros_or_no_gradient(layers: str) -> None:
    """A parameter on which the slope does not depend has no gradient of it, or zeros, as in PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *(LAYERS | PIECEWISE)[layers](), nn.Linear(8, 1)).double()
    module, z = dt.optimize(copy.deepcopy(model), random="eager"), leaf(torch.randn(3, 4, dtype=torch.float64))
    for _ in range(5):
        found = []
        for each in (model, module):
            torch.manual_seed(1)
            z.grad = None
            each.zero_grad()
            (slope,) = torch.autograd.grad(each(z).sum(), z, create_graph=True)
            slope.square().sum().backward()
            found.append([z.grad, *(p.grad for p in each.parameters())])
        assert [g is None for g in found[1]] == [g is None for g in found[0]]
        torch.testing.assert_close(*([g for g in each if g is not None] for each in found), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layers", ["dropout", "batch norm", "layer norm", "both", "relu", "pooling"])
def test_zeros_or_no_gradient_within_the_model(layers: str) -> None:
    """By momentum and decay, parameters with a gradient of zeros change, and those without one do not."""

    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(4, 8), *(LAYERS | PIECEWISE)[layers](), nn.Linear(8, 1)).double()

        def forward(self, x: Tensor) -> Tensor:
            z = leaf(x)
            (slope,) = torch.autograd.grad(self.layers(z).sum(), z, create_graph=True)
            return slope.square().sum()

    eager, optimized, stepped = Slopes(), Slopes(), Slopes()
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in (eager, optimized, stepped)]
    module = dt.optimize(optimized, random="eager")
    step = dt.training_step(stepped, lambda loss: loss, optimizers[2], random="eager")
    for number in range(3):
        x = torch.randn(3, 4, dtype=torch.float64)
        for each, optimizer in zip((eager, module), optimizers[:2], strict=True):
            torch.manual_seed(number)
            optimizer.zero_grad()
            each(x).backward()
            optimizer.step()
        torch.manual_seed(number)
        step(x)
        for p, q in zip(eager.parameters(), optimized.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
    for other, optimizer in zip((optimized, stepped), optimizers[1:], strict=True):
        assert [len(optimizer.state[p]) for p in other.parameters()] == [
            len(optimizers[0].state[p]) for p in eager.parameters()
        ]
        if "batch" not in layers and layers != "both":  # rounding decides the sign of a gradient before such a norm
            torch.testing.assert_close([*other.parameters()], [*eager.parameters()], rtol=1e-8, atol=1e-10)


def test_results_whose_gradients_are_differentiated_again_by_turns() -> None:
    """Parameters of the head that is not used have no gradient."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.left, self.right = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)
            self.double()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = F.dropout(F.relu(self.a(x)), 0.2)
            return self.left(h), self.right(h.sin())

    eager, ours = Heads(), Heads()
    module = dt.optimize(ours, random="eager")
    for number in range(8):
        for each in (eager, module):
            torch.manual_seed(number)
            z = leaf(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).cos())
            each.zero_grad()
            (slope,) = torch.autograd.grad(each(z)[number % 2].sum(), z, create_graph=True)
            slope.square().sum().backward()
        for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-12)


def test_sparse_gradients_beside_slopes_that_are_differentiated_again() -> None:
    class Conditional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.labels, self.a, self.b = nn.Embedding(5, 4, sparse=True), nn.Linear(8, 8), nn.Linear(8, 1)
            self.double()

        def forward(self, x: Tensor, label: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(torch.cat([x, self.labels(label)], 1))))

    eager, ours = Conditional(), Conditional()
    module = dt.optimize(ours)
    for number in range(5):
        z, label = leaf(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4).cos()), torch.tensor([0, 2, number])
        for each in (eager, module):
            each.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch runs the graph from the third call on
                penalized(z, each(z, label)).backward()
        for p, q in zip(eager.parameters(), ours.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None and p.grad.layout == q.grad.layout
            torch.testing.assert_close(q.grad.to_dense(), p.grad.to_dense(), rtol=1e-10, atol=1e-12)


def various(module: nn.Module) -> list[Tensor]:
    """Derivatives of many kinds, after some that are differentiated again."""
    x = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4).sin().requires_grad_()
    found: list[Tensor] = []
    for _ in range(5):
        y = module(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sin().sum(), x)
        found += [first.detach(), second.detach(), third]
    found += torch.autograd.functional.hessian(lambda z: module(z).square().sum(), x, vectorize=True)
    found += torch.autograd.grad(module(x).sum(), x)
    y = module(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    y.mul_(2)
    found += torch.autograd.grad(y.sum() + first.square().sum(), [x, *module.parameters()], allow_unused=True)[:4]
    with torch.no_grad():
        found += [module(x), module(x)]
    return [*found, *torch.autograd.grad(module(x).sum(), x)]


@pytest.mark.filterwarnings("ignore:daceml_train")
def test_derivatives_of_a_graph_whose_gradients_are_differentiated_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    expected, got = various(model), various(module := dt.optimize(model))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert any(graph._connected for programs in state_of(module).backend.programs.values() for graph in programs)


def test_the_second_derivative_has_the_mask_of_the_first() -> None:
    """Numbers from a seed: by `y = sum(mask * w * x)`, the slope tells the mask, and the penalty's gradient follows."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.linspace(1, 2, 64))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.w, 0.5)

    model = Scaled()
    module = dt.optimize(model)
    for _ in range(8):  # native calls from the third on
        model.zero_grad()
        x = torch.ones(64, requires_grad=True)
        y = module(x)
        (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        slope.square().sum().backward()
        torch.testing.assert_close(slope, y.detach() / x)
        torch.testing.assert_close(model.w.grad, 2 * slope.detach() ** 2 / model.w.detach())
        assert 0 < (slope == 0).sum() < 64


def test_what_has_no_second_derivative_says_so() -> None:
    """A third derivative through random numbers, a buffer on which the gradient depends, and a changed input."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).sin() * self.mean
            self.mean.mul_(0.5).add_(0.5)
            return y

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="updates buffers"):
        torch.autograd.grad(dt.optimize(Averaged())(x * 1).sum(), x, create_graph=True)
    module = dt.optimize(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)))
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="random operators"):
        torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    z = x * 1
    y = module(z)
    with torch.no_grad():
        z.add_(1)
    with pytest.raises(RuntimeError, match="modified in"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:daceml_train")
def test_what_no_program_can_repeat_runs_in_pytorch_where_the_argument_is_a_leaf() -> None:
    """The power iteration of a spectral norm, on whose result gradients depend."""
    runs = []
    for way in ("eager", "optimize"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 1)
        ).double()
        module = dt.optimize(model) if way == "optimize" else model
        losses = []
        for number in range(3):
            z = leaf(torch.linspace(-1, 1 + number, 12, dtype=torch.float64).view(3, 4).cos())
            loss = penalized(z, module(z))
            model.zero_grad()
            loss.backward()
            losses += [loss.detach(), *(p.grad for p in model.parameters())]
        runs.append([*losses, *model.buffers()])
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-10, atol=1e-12)


WHOLE = [plain, legacy, dropouts, twice, noise, statistics, activation_in_place, written_before, unused]
WHOLE += [without_gradients]
OTHERS = [kept, element_in_place, data_in_place, off_in_place, statistics_read]
"""A leaf that others can read, and changes in place that a second run of operators would repeat or miss."""


@pytest.mark.parametrize("body", WHOLE + OTHERS)
@pytest.mark.parametrize("way", ["optimize", "training_step"])
def test_as_eager(body: Callable[[Critic, Tensor], Tensor], way: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if body in WHOLE else "ignore", "daceml_train")
        expected, got = trained(body, "eager"), trained(body, way)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def trained(body: Callable[[Critic, Tensor], Tensor], way: str) -> dict[str, Tensor]:
    """Losses and state after three steps, and a number from the random stream."""
    model = Critic(body)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    module = dt.optimize(model, random="eager") if way == "optimize" else model

    def stepped(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(x)
        loss.backward()
        optimizer.step()
        return loss

    step = dt.training_step(model, lambda y: y, optimizer, random="eager") if way == "training_step" else stepped
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)
    losses = [step(x * number).detach() for number in (1, 2, 3)]
    return {"losses": torch.stack(losses), **model.state_dict(), "random": torch.rand(1), "kept": model.kept.detach()}
