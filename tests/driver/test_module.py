"""An optimized module behaves as the module it was made from, whatever a training loop does with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.module import state_of
from tests.driver.conformity import assert_compiled, assert_tensors_conform, gradients
from tests.driver.networks import mlp

pytestmark = pytest.mark.compiled


class Net(nn.Module):
    """A module of the tests' own, at module level so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.norm(self.fc1(x))))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_same_behavior(module: nn.Module, *arguments: Any, compiled: bool = True, **keywords: Any) -> None:
    """Results and gradients of a compiled copy equal those of the module itself, leaf by leaf."""
    own, other = copy.deepcopy(module), copy.deepcopy(module)
    optimized = dt.optimize(other)
    results = []
    for called, owner in ((own, own), (optimized, other)):
        result = called(*arguments, **keywords)
        leaves = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, Tensor)]
        differentiable = [r for r in leaves if r.requires_grad]
        if differentiable:
            sum((r * torch.arange(1, r.numel() + 1).view(r.shape)).sum() for r in differentiable).backward()
        results.append((result, leaves, gradients(owner)))
    (a, a_leaves, a_grads), (b, b_leaves, b_grads) = results
    assert torch.utils._pytree.tree_structure(a) == torch.utils._pytree.tree_structure(b)
    for x, y in zip(a_leaves, b_leaves, strict=True):
        assert x.requires_grad == y.requires_grad
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert_tensors_conform(b_grads, a_grads, a_grads)
    if compiled:
        assert_compiled(optimized)


def test_class_names_and_parameters_are_the_originals() -> None:
    model = Net()
    optimized = dt.optimize(model)
    assert isinstance(optimized, Net) and type(optimized).__name__ == "Net"
    assert list(optimized.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(optimized.parameters(), model.parameters(), strict=True))
    assert [n for n, _ in optimized.named_modules()] == [n for n, _ in model.named_modules()]


def test_train_and_eval() -> None:
    model, x = Net(), torch.randn(6, 8)
    reference = copy.deepcopy(model)
    optimized = dt.optimize(model)
    for mode in (True, False, True, False):
        optimized.train(mode)
        reference.train(mode)
        assert model.training is mode
        close(optimized(x), reference(x))
        close(model.norm.running_mean, reference.norm.running_mean)
        assert model.norm.num_batches_tracked == reference.norm.num_batches_tracked
    assert_compiled(optimized, graphs=2)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable[[], Any]) -> None:
    model, x = mlp(), torch.randn(6, 8)
    optimized = dt.optimize(model)
    with context():
        result = optimized(x)
        assert not result.requires_grad
        close(result, model(x))
    assert optimized(x).requires_grad
    assert_compiled(optimized)


def test_batch_norm_in_inference_mode_updates_its_buffers() -> None:
    model, x = Net(), torch.randn(6, 8)
    reference = copy.deepcopy(model)
    with torch.inference_mode():
        close(dt.optimize(model)(x), reference(x))
    close(model.norm.running_var, reference.norm.running_var)


def test_freezing_and_unfreezing() -> None:
    model, x = mlp(), torch.randn(6, 8)
    optimized = dt.optimize(model)
    for frozen in ((), (0,), (0, 2), (), (4,)):
        for number in (0, 2, 4):
            model[number].requires_grad_(number not in frozen)
        model.zero_grad()
        optimized(x).square().sum().backward()
        found = gradients(model)
        model.zero_grad()
        model(x).square().sum().backward()
        assert_tensors_conform(found, gradients(model), gradients(model))
    assert_compiled(optimized)


def test_two_forwards_before_one_backward() -> None:
    model = Net().eval()
    optimized = dt.optimize(model)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    a, b = optimized(x), optimized(y)
    (a * b).sum().backward()
    found = gradients(model)
    model.zero_grad()
    (model(x) * model(y)).sum().backward()
    assert_tensors_conform(found, gradients(model), gradients(model))


def test_backward_twice() -> None:
    model, x = mlp(), torch.randn(6, 8)
    loss = dt.optimize(model)(x).square().sum()
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(g, first[n]) for n, g in gradients(model).items())
    with pytest.raises(RuntimeError, match=r"second|retain_graph"):
        loss.backward()


def test_gradient_of_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimized = dt.optimize(model)
    penalties = []
    for called in (model, optimized):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(called(x).sum(), x, create_graph=True)
        model.zero_grad()
        gradient.square().sum().backward()
        penalties.append((gradient.detach(), x.grad, gradients(model)))
    close(penalties[1][0], penalties[0][0])
    close(penalties[1][1], penalties[0][1])
    assert_tensors_conform(penalties[1][2], penalties[0][2], penalties[0][2])


def test_gradient_of_a_gradient_through_dropout_is_an_error() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    optimized = dt.optimize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        torch.autograd.grad(optimized(x).sum(), x, create_graph=True)


def test_deepcopy_is_independent() -> None:
    model, x = Net(), torch.randn(6, 8)
    optimized = dt.optimize(model)
    optimized(x)
    other = copy.deepcopy(optimized)
    assert isinstance(other, Net) and not set(map(id, other.parameters())) & set(map(id, model.parameters()))
    other.eval()
    optimized.eval()
    before = optimized(x)
    with torch.no_grad():
        other.fc1.weight.zero_()
    assert not torch.allclose(other(x), before)
    close(optimized(x), before)


@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_saving_an_optimized_module(way: str) -> None:
    optimized, x = dt.optimize(Net().eval()), torch.randn(6, 8)
    expected = optimized(x)
    if way == "pickle":
        loaded = pickle.loads(pickle.dumps(optimized))
    else:
        file = io.BytesIO()
        torch.save(optimized, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
    assert state_of(loaded) is not None
    close(loaded(x), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign: bool) -> None:
    model, x = Net().eval(), torch.randn(6, 8)
    optimized = dt.optimize(model)
    optimized(x)
    other = Net().eval()
    optimized.load_state_dict(other.state_dict(), assign=assign)
    close(optimized(x), other(x))
    optimized(x).sum().backward()
    other(x).sum().backward()
    assert_tensors_conform(gradients(model), gradients(other), gradients(other))
    assert_compiled(optimized, graphs=1)


def test_rebound_data_and_replaced_parameters() -> None:
    model, x = mlp(), torch.randn(6, 8)
    optimized = dt.optimize(model)
    optimized(x)
    model[0].weight.data = torch.randn(16, 8)
    close(optimized(x), model(x))
    model[2].weight = nn.Parameter(torch.randn(16, 16))
    close(optimized(x), model(x))
    model[2] = nn.Linear(16, 16)
    close(optimized(x), model(x))
    optimized(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_batch_sizes_share_a_program() -> None:
    """In float64: gradients of five batches add up, and in float32 eager execution itself is 2e-6 off."""
    model = Net().double()
    reference = copy.deepcopy(model)
    optimized = dt.optimize(model)
    for batch in (6, 3, 9, 4, 17):
        x = torch.randn(batch, 8, dtype=torch.float64)
        torch.testing.assert_close(optimized(x), reference(x), rtol=1e-10, atol=1e-12)
        optimized(x).sum().backward()
        reference(x).sum().backward()
        torch.testing.assert_close(model.fc1.weight.grad, reference.fc1.weight.grad, rtol=1e-10, atol=1e-12)
    assert_compiled(optimized)
    assert state_of(optimized).backend.graphs <= 2  # type: ignore[union-attr]


def test_many_modules_of_one_class() -> None:
    x = torch.randn(6, 8)
    for width in range(3, 15):
        model = nn.Sequential(nn.Linear(8, width), nn.ReLU())
        optimized = dt.optimize(model)
        close(optimized(x), model(x))
        assert_compiled(optimized, graphs=1)


def test_layouts_of_inputs() -> None:
    model = mlp()
    optimized = dt.optimize(model)
    base = torch.randn(12, 16)
    for x in (base[:6, :8], base[::2, ::2], base[:8, :6].t(), base[1, :8].expand(6, 8), base[6:, 8:]):
        close(optimized(x), model(x))
    assert_compiled(optimized)


def test_an_input_passed_twice() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(a) * b

    x = torch.randn(4, 4)
    assert_same_behavior(Two(), x, x)
    assert_same_behavior(Two(), x, x[:])
    model = Two()
    optimized = dt.optimize(model)
    weight = model.fc.weight
    for other in (weight, weight.t(), weight.detach()):
        found, expected = (torch.autograd.grad(m(x, other).sum(), [weight, model.fc.bias]) for m in (optimized, model))
        for a, b in zip(found, expected, strict=True):
            close(a, b)


def test_an_input_that_shares_memory_with_a_buffer() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(1)
            return x * 2

    model = Counting()
    optimized = dt.optimize(model)
    close(optimized(torch.ones(4)), torch.full((4,), 2.0))
    close(model.total, torch.ones(4))
    close(optimized(model.total[:]), torch.full((4,), 4.0))
    close(model.total, torch.full((4,), 2.0))


def test_gradients_see_a_buffer_as_it_was_in_the_forward_pass() -> None:
    class Fading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x) * self.scale.clone()
            z = y * torch.tanh(self.scale.clone())
            self.scale.mul_(0.5)
            return z * self.scale

    assert_same_behavior(Fading(), torch.randn(3, 4))


def test_in_place_operations() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            h = self.fc(x)
            h.mul_(y).relu_()
            h[:, 0] = y[:, 0]
            return h

    model = InPlace()
    optimized = dt.optimize(model)
    x = [torch.ones(3, 4), torch.ones(3, 4)]
    version = x[1]._version
    y = torch.randn(3, 4)
    close(optimized(x[1], y), model(x[0], y))
    close(x[1], x[0])
    assert x[1]._version > version


def test_results_that_are_views_or_inputs() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x, x.t(), x[1:], x.view(-1), x * 2

    base = torch.randn(6, 4)
    optimized = dt.optimize(Views())
    for x in (base[:3], base[2:5]):
        results, expected = optimized(x), Views()(x)
        for a, b in zip(results, expected, strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride()
        assert results[0] is x
        results[1][0, 0] = 7.0
        assert x[0, 0] == 7.0


def test_unusual_numbers() -> None:
    class Numbers(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            gelu = F.gelu(x[:2])  # for inf PyTorch's own result depends on the build
            return x.softmax(-1), x.exp(), x.amax(-1), F.relu(x), x.clamp(-1, 1), x.tanh(), x.sum(-1), gelu

    x = torch.tensor([[float("nan"), 1.0, 2.0], [float("-inf"), 0.0, 1.0], [float("inf"), 1.0, -1.0]])
    assert_same_behavior(Numbers(), x)


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


def test_saved_tensors_are_freed() -> None:
    from daceml_train.runtime.executor import pool_statistics

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
