"""Complex numbers among the arguments of operators that PyTorch computes within a compiled graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.conformity import assert_compiled
from tests.driver.holding import Function


class Polar(nn.Module):
    def forward(self, length: Tensor, angle: Tensor) -> Tensor:
        return torch.view_as_real(torch.polar(length, angle) * 2)


@pytest.mark.compiled
def test_an_imaginary_factor_in_a_gradient(tmp_path: Path) -> None:
    """The derivative of `polar` multiplies by the imaginary unit; the second module runs the stored program."""
    expected = None
    for model in (Polar(), dt.optimize(Polar(), cache=tmp_path), dt.optimize(Polar(), cache=tmp_path)):
        torch._dynamo.reset()
        leaves = [torch.linspace(0.5, 2, 6, requires_grad=True), torch.linspace(-3, 3, 6, requires_grad=True)]
        result = model(*leaves)
        found = [result, *torch.autograd.grad((result * torch.arange(12.0).view(6, 2)).sum(), leaves)]
        expected = expected or found
        torch.testing.assert_close(found, expected)
        state = state_of(model)
        assert state is None or not state.backend.breaks


def two_uses(w: Tensor, x: Tensor) -> Any:
    z = torch.complex(x * w, x)
    return torch.view_as_real(z * z + z)


def broadcast(w: Tensor, x: Tensor) -> Any:
    z, u = torch.complex(w, w.flip(0)), torch.complex(x, x * w)
    return torch.view_as_real(z * u + z), torch.view_as_real(u.sum(0) + z)


def views(w: Tensor, x: Tensor) -> Any:
    z = torch.complex(x * w, x)
    joined = torch.cat([z, z.conj()]).contiguous()
    return [
        torch.view_as_real(r) for r in (z.t() * 2j, z[:, 1:].reshape(-1) * 1j, joined, z[None].expand(2, 3, 4) * 1j)
    ]


def one_part(w: Tensor, x: Tensor) -> Any:
    z = torch.fft.fft(x * w)
    return torch.view_as_real(z.split(2, 1)[0]), z.unbind(0)[1].abs()


def detached(w: Tensor, x: Tensor) -> Any:
    z = torch.complex(x * w, x)
    return z.detach().abs() * w, torch.view_as_real(torch.where(x > 0, z, z * 0))


def overwritten(w: Tensor, x: Tensor) -> Any:
    z = torch.complex(x * w, x) * 1
    z[0] = z[1] * 1j
    z[:, 0] = 0
    z[1] += z[2]
    return torch.view_as_real(z + z.sum())


def written_views(w: Tensor, x: Tensor) -> Any:
    """Slices, rows and diagonals, of numbers with a gradient and of constants; PyTorch has no derivative by its scatters."""
    z = torch.complex(x * w, x)
    modes = torch.zeros_like(z)
    modes[..., :2] = z[..., 1:3] * 2
    modes[:, ::2] += z[..., 2:].conj()
    modes[2] = z[0] * 1j
    modes.diagonal()[:] = z.diagonal() ** 2
    real = torch.zeros_like(z)
    real[1:] = z.real[:2]
    return torch.view_as_real(modes * z), torch.view_as_real(real * 1j)


def changed_without_gradients(w: Tensor, x: Tensor) -> Any:
    z = torch.complex(x * w, x).clone()
    with torch.no_grad():
        z.mul_(2j)
    return torch.view_as_real(z * z)


def replaced(w: Tensor, x: Tensor) -> Any:
    z = torch.complex(x * w, x) * 1
    z.copy_(torch.complex(x, x))
    return torch.view_as_real(z) * w[0], torch.view_as_real(z)


@pytest.mark.compiled
@pytest.mark.parametrize(
    "program",
    [two_uses, broadcast, views, one_part, detached, overwritten, written_views, changed_without_gradients, replaced],
    ids=lambda p: p.__name__,
)
def test_gradients_of_complex_values_in_one_graph(program: Any) -> None:
    """Cotangents of a value with several uses are added by PyTorch's operators, since kernels compute no complex ones."""
    torch.manual_seed(0)
    weight, x = torch.randn(4), torch.randn(3, 4)
    found = []
    for compiled in (False, True):
        model = Function(program, 4)
        model.weight.data.copy_(weight)
        called = dt.optimize(model) if compiled else model
        results = pytree.tree_leaves(called(x))
        total = sum((r * torch.linspace(-1, 2, r.numel()).view(r.shape)).sum() for r in results)
        total.backward()
        found.append([*results, model.weight.grad])
        if compiled:
            assert_compiled(called, graphs=1)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.compiled
@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conjugated", "negated"])
def test_an_argument_that_is_computed_when_it_is_read(lazy: Any) -> None:
    """What is conjugated or negated is a flag of the tensor: its memory has the other numbers."""
    torch.manual_seed(0)
    x = lazy(torch.complex(torch.randn(3, 4), torch.randn(3, 4)))

    def program(w: Tensor, x: Tensor) -> Any:
        return x.real * w if x.is_complex() else x * w, x * 2

    found = []
    for compiled in (False, True):
        model = Function(program, 4)
        called = dt.optimize(model) if compiled else model
        results = called(x)
        results[0].square().sum().backward()
        found.append([*results, model.weight.grad])
    torch.testing.assert_close(found[1], found[0])


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.fft.fft(x) * self.filter + self.filter)


@pytest.mark.compiled
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_complex_parameters_are_updated_by_pytorch(kind: Any) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, x = Spectrum(), torch.randn(3, 4)
        optimizer = kind(model.parameters(), lr=0.1)
        loss = lambda y: y.square().mean()  # noqa: E731
        step = dt.training_step(model, loss, optimizer)
        for _ in range(3):
            if compiled:
                step(x)
                continue
            optimizer.zero_grad()
            loss(model(x)).backward()
            optimizer.step()
        found.append(model.filter.detach())
        assert not compiled or step.breaks == ["the update of a complex parameter; PyTorch's own update runs"]
    torch.testing.assert_close(found[1], found[0])


class Conjugated(nn.Module):
    def forward(self, x: Tensor) -> Any:
        y = x * 2
        return x.conj(), y, y.conj(), x.conj().imag, torch._neg_view(y.real)


@pytest.mark.compiled
@pytest.mark.parametrize("given", [lambda z: z, torch.conj])
def test_results_that_are_conjugated_or_negated_lazily(given: Any) -> None:
    x = given(torch.tensor([1 + 2j, 3 - 1j]))
    expected, found = Conjugated()(x), dt.optimize(Conjugated())(x)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)
        assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
    assert found[2].untyped_storage()._cdata == found[1].untyped_storage()._cdata
