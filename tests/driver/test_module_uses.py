"""An optimized module in use: arguments of all kinds, hooks, attributes, breaks, as a backend, recurrent modules."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.conformity import assert_compiled, assert_tensors_conform, gradients
from tests.driver.modules import assert_same_behavior, close
from tests.driver.networks import mlp

pytestmark = pytest.mark.compiled


def test_structures_keywords_and_other_arguments() -> None:
    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, power: int = 1) -> Any:
            h = self.fc(x) * scale
            if mask is not None:
                h = h * mask
            return {"h": h**power, "parts": (h.detach(), [h.sum(), 3, "name"]), "index": h.argmax(-1)}

    x = torch.randn(3, 4)
    assert_same_behavior(Flexible(), x)
    assert_same_behavior(Flexible(), x, None, scale=2.0)
    assert_same_behavior(Flexible(), x, mask=torch.tensor([0, 1, 1, 0]), power=2)
    model = Flexible()
    optimized = dt.optimize(model)
    for scale in (1.0, 0.5, 0.25, -3.0):
        close(optimized(x, scale=scale)["h"], model(x, scale=scale)["h"])
    optimized(x)["h"].sum().backward()
    assert model.unused.weight.grad is None and model.fc.weight.grad is not None


def test_gradients_of_results_that_the_loss_ignores() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.trunk(x)
            return self.a(h), self.b(h)

    model, x = Heads(), torch.randn(5, 4)
    optimized = dt.optimize(model)
    for used, unused in ((0, model.b), (1, model.a)):
        model.zero_grad()
        optimized(x)[used].square().sum().backward()
        found = gradients(model)
        assert unused.weight.grad is None
        model.zero_grad()
        model(x)[used].square().sum().backward()
        assert_tensors_conform(found, gradients(model), gradients(model))


def test_module_hooks_are_called_whenever_they_are_added() -> None:
    model, x = mlp(), torch.randn(6, 8)
    optimized = dt.optimize(model)
    plain = optimized(x)
    handle = model[1].register_forward_hook(lambda module, given, result: result + 1)
    close(optimized(x), model(x))
    assert not torch.allclose(optimized(x), plain)
    handle.remove()
    close(optimized(x), plain)
    seen: list[int] = []
    model[2].register_forward_pre_hook(lambda module, given: seen.append(1))
    model[2].register_full_backward_hook(lambda module, grad, result: seen.append(2))
    optimized.register_forward_hook(lambda module, given, result: seen.append(3))
    optimized(x).sum().backward()
    assert sorted(seen) == [1, 2, 3]


def test_tensor_hooks() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc1(x)
            if h.requires_grad:
                h.register_hook(lambda g: g * 2)
            return self.fc2(h)

    model, x = Hooked(), torch.randn(3, 4)
    model.fc2.weight.register_hook(lambda g: g * 3)
    found = []
    for called in (model, dt.optimize(model)):
        model.zero_grad()
        called(x).sum().backward()
        found.append(gradients(model))
    assert_tensors_conform(found[1], found[0], found[0])


def test_attributes_are_shared_and_changes_are_seen() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.calls, self.mask = 1.0, 0, torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.scale * self.mask

    model, x = Scaled(), torch.ones(4)
    optimized = dt.optimize(model)
    close(optimized(x), x)
    optimized.scale = 2.0
    close(optimized(x), 2 * x)
    model.scale = 3.0
    close(optimized(x), 3 * x)
    model.mask = torch.zeros(4)
    close(optimized(x), 0 * x)
    assert model.calls == optimized.calls == 4


def test_nested_and_repeated_optimize() -> None:
    inner = mlp()
    outer = nn.Sequential(dt.optimize(inner), nn.Linear(4, 2))
    x = torch.randn(6, 8)
    optimized = dt.optimize(dt.optimize(outer))
    close(optimized(x), outer[1](inner(x)))
    assert_compiled(optimized, graphs=1)


def test_a_graph_break_keeps_its_meaning() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc1(x)
            if float(h.sum()) > 1e6:
                h = h * 0
            return self.fc2(h)

    assert_same_behavior(Broken(), torch.randn(3, 4))


def test_as_a_backend_of_torch_compile() -> None:
    model, x = mlp(), torch.randn(6, 8)
    compiled = torch.compile(model, backend="daceml_train")
    close(compiled(x), model(x))
    compiled(x).sum().backward()
    found = gradients(model)
    model.zero_grad()
    model(x).sum().backward()
    assert_tensors_conform(found, gradients(model), gradients(model))


def test_a_copy_of_what_torch_compile_returns() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = torch.compile(model, backend="daceml_train")
    x = torch.randn(3, 4)
    expected = compiled(x)
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        model[0].weight.zero_()
    torch.testing.assert_close(other(x), expected)
    torch.testing.assert_close(compiled(x), model(x))


def test_saved_tensors_are_freed() -> None:
    from daceml_train.runtime.native_library import pool_statistics

    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(512, 64)
    optimized = dt.optimize(model)
    losses, sizes = [], []
    for _ in range(100):
        loss = optimized(x).square().mean()
        loss.backward()
        model.zero_grad()
        losses.append(loss)  # as careless loops do: the graph lives on, what it saved must not
        sizes.append(pool_statistics().in_use)
    assert sizes[-1] <= sizes[5]


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


ODD = {
    "rounded": lambda x: x.round(),
    "sign_of_a_product": lambda x: (x * 3).sign() * 2,
    "divided_down": lambda x: torch.div(x, 3, rounding_mode="floor"),
    "replaced": lambda x: x.clone().zero_(),
    "no_copies": lambda x: x.repeat(0, 1),
    "counted": lambda x: torch.linalg.vector_norm(x, 0),
    "fourier": lambda x: torch.fft.rfft(x).abs(),
    "hermitian": lambda x: torch.fft.hfft(x, 4),
    "hyperbolic_sine": lambda x: torch.sinh(x - 9),
}


@pytest.mark.parametrize("name", ODD)
def test_gradients_exist_where_eagers_do(name: str) -> None:
    module = Function(ODD[name])
    compiled = dt.optimize(module)
    x = torch.randn(3, 4, requires_grad=True)
    ours, theirs = compiled(x), module(x)
    assert ours.requires_grad and theirs.requires_grad
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    cotangent = torch.randn_like(theirs)
    (a,), (b,) = (torch.autograd.grad(y, x, cotangent, allow_unused=True) for y in (ours, theirs))
    a, b = (torch.zeros_like(x) if g is None else g for g in (a, b))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert_compiled(compiled)


def test_slices_without_elements_of_empty_inputs() -> None:
    assert_same_behavior(Function(lambda x: F.pad(x, (1, 1), mode="circular")), torch.randn(0, 2, 4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules(kind: type[nn.Module]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0][:, -1]

    theirs = Recurrent()
    ours = dt.optimize(copy.deepcopy(theirs))
    x = torch.randn(4, 5, 8)
    for model in (theirs, ours):
        model(x).square().sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    assert not ours._daceml_train.backend.breaks
    assert ours._daceml_train.backend.graphs == 1


def test_cotangents_of_another_layout_at_varying_batch_sizes() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).tanh().transpose(0, 1)

    module = Turned()
    optimized = dt.optimize(copy.deepcopy(module))
    for batch in (5, 4, 3):
        x = torch.randn(batch, 6, 4)
        cotangent = torch.randn(6, batch, 4)
        for model in (module, optimized):
            model.zero_grad()
            model(x).backward(cotangent)
        close(optimized.fc.weight.grad, module.fc.weight.grad)
    assert_compiled(optimized)


def test_a_forward_of_which_nothing_is_compiled_says_so() -> None:
    class Unique(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.unique(x)

    ours = dt.optimize(Unique())
    x = torch.randn(3, 5)
    with pytest.warns(UserWarning, match=r"nothing that it can compile in Unique\.forward"):
        torch.testing.assert_close(ours(x), torch.unique(x))
    assert len(ours._daceml_train.backend.breaks) == 1


def test_a_derivative_of_one_operand_of_an_operator_that_has_two() -> None:
    """PyTorch's backward operator returns nothing for the image, before the gradient of the grid."""
    weight, image = torch.randn(2, 3, 3, 2), torch.randn(2, 3, 8, 8)

    class Sampled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Parameter(weight.clone())

        def forward(self, x: Tensor) -> Tensor:
            return F.grid_sample(x, self.grid.tanh(), align_corners=False)

    found = []
    for model in (Sampled(), dt.optimize(Sampled())):
        result = model(image)
        (result * torch.linspace(-1, 2, result.numel()).view(result.shape)).sum().backward()
        found.append((result.detach(), model.grid.grad))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", ["_batch_norm_with_update", "_batch_norm_no_update"])
@pytest.mark.parametrize("wanted", ["x", "w", "b", "xw", "wb"])
def test_gradients_of_some_operands_of_a_batch_norm(name: str, wanted: str) -> None:
    """PyTorch's backward operator leaves the others undefined."""

    class Normalized(nn.Module):
        def forward(self, *operands: Tensor) -> Tensor:
            result: Tensor = getattr(torch.ops.aten, name)(*operands, 0.1, 1e-5)[0]
            return result

    found = []
    for model in (Normalized(), dt.optimize(Normalized())):
        given = {
            "x": torch.linspace(-1, 3, 24).sin().view(2, 4, 3),
            "w": torch.linspace(-1, 2, 4),
            "b": torch.linspace(1, 2, 4),
        }
        for letter in wanted:
            given[letter].requires_grad_()
        statistics = [torch.linspace(0, 1, 4), torch.linspace(1, 2, 4)]
        result = model(*given.values(), *statistics)
        (result * torch.linspace(-1, 2, result.numel()).view(result.shape)).sum().backward()
        found.append((result.detach(), [given[letter].grad for letter in wanted], statistics))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("enabled", [False, True])
def test_gradients_that_a_forward_pass_leaves_disabled_or_enabled(enabled: bool) -> None:
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            torch.set_grad_enabled(enabled)
            return y

    module = dt.optimize(Switching())
    for _ in range(4):  # later ones run without Python
        with torch.set_grad_enabled(not enabled):
            assert module(torch.ones(1, 2)).requires_grad is not enabled
            assert torch.is_grad_enabled() is enabled


def test_the_module_that_runs_is_of_the_users_class() -> None:
    """Also where it asks for its class, counts on it, or compares itself with what it keeps."""
    registry: list[str] = []

    class Base(nn.Module):
        def __init_subclass__(cls, **keywords: Any) -> None:
            super().__init_subclass__(**keywords)
            registry.append(cls.__name__)

    class Square(Base):
        total = 0

        def __init__(self) -> None:
            super().__init__()
            self.last, self.me = nn.Linear(4, 4), [self]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).total += 1
            h = self.last(x)
            h = h if type(self) is Square else h * 2
            return h if self.me[0] is self else h * 3

    torch.manual_seed(0)
    theirs = Square()
    ours = dt.optimize(theirs)
    x = torch.randn(3, 4)
    for calls in range(1, 4):
        torch.testing.assert_close(ours(x), F.linear(x, theirs.last.weight, theirs.last.bias))
        assert Square.total == calls
    assert registry == ["Square"]
    assert isinstance(ours, Square)


@pytest.mark.parametrize("way", ["step", "optimize", "sequential"])
def test_what_is_dropped_is_freed(way: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    def one() -> list[Any]:
        model = Net() if way != "sequential" else Net().body
        x, y = torch.randn(4, 8), torch.randint(0, 2, (4,))
        if way == "step":
            step = dt.training_step(model, F.cross_entropy, torch.optim.AdamW(model.parameters()))
            for _ in range(2):
                step(x, y)
            return [weakref.ref(model), weakref.ref(step)]
        ours = dt.optimize(model)
        for _ in range(2):
            F.cross_entropy(ours(x), y).backward()
        state = state_of(ours)
        assert state is not None
        return [weakref.ref(model), weakref.ref(ours), weakref.ref(state.backend)]

    found = [reference for _ in range(3) for reference in one()]
    one()  # TorchDynamo remembers the last
    gc.collect()
    assert [reference() for reference in found] == [None] * len(found)
