"""An optimized module behaves as the original: parameters, gradients, copies, layouts, memory that is shared."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.binding import _overlapping
from daceml_train.driver.module import state_of
from tests.driver.conformity import assert_compiled, assert_tensors_conform, gradients
from tests.driver.modules import Net, assert_same_behavior, close
from tests.driver.networks import mlp

pytestmark = pytest.mark.compiled


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


class Remembering(nn.Module):
    """Keeps its result, whose history has been freed when the next call reads it."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.w, self.kept, self.returned = nn.Parameter(torch.arange(1.0, 5.0)), torch.zeros(4), returned

    def forward(self, x: Tensor) -> Any:
        before, self.kept = self.kept, (self.w * x).sin()
        loss = self.kept.sum()
        before.relu()
        return (loss, self.kept * before) if self.returned else loss


@pytest.mark.parametrize("returned", [False, True])
def test_a_freed_history_that_the_loss_does_not_use(returned: bool) -> None:
    model, eager = Remembering(returned), Remembering(returned)
    optimized = dt.optimize(model)
    for number in range(4):
        for called in (optimized, eager):
            result = called(torch.full((4,), number / 3))
            (result[0] if returned else result).backward()
    assert state_of(optimized).backend.graphs  # type: ignore[union-attr]
    torch.testing.assert_close(model.w.grad, eager.w.grad)


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
    with pytest.warns(UserWarning, match="shares memory with one that the model writes"):
        close(optimized(model.total[:]), torch.full((4,), 4.0))
    close(model.total, torch.full((4,), 2.0))
    state = state_of(optimized)
    assert state is not None and len(state.backend.breaks) == 1


@pytest.mark.filterwarnings("ignore:.*shares memory with one that the model writes")
def test_two_storages_with_the_same_memory() -> None:
    """Arrays of NumPy that overlap, as two tensors; PyTorch knows of no alias then. Others stay compiled."""

    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.add_(1)
            return (x + y) * self.weight

    model, memory = Adding(), np.arange(10, dtype=np.float32)
    optimized = dt.optimize(model)
    pairs = [(slice(4), slice(4, 8)), (slice(4), slice(4)), (slice(4), slice(3, 7)), (slice(5, 9), slice(2, 6))]
    for own, other in [*pairs, *pairs]:
        found, expected = (
            (call(torch.from_numpy(array[own]), torch.from_numpy(array[other])), array)
            for call, array in ((optimized, memory.copy()), (model, memory.copy()))
        )
        close(found[0], expected[0])
        assert (found[1] == expected[1]).all()
    state = state_of(optimized)
    assert state is not None and len(state.backend.breaks) == 1


def test_spans_that_overlap() -> None:
    draw = random.Random(0)
    for _ in range(200):
        spans = [(start := draw.randrange(30), start + draw.randrange(6)) for _ in range(draw.randrange(8))]
        order = nx.Graph([(i, i) for i, (start, stop) in enumerate(spans) if start < stop])
        order.add_edges_from(
            (i, k) for i in order for k in order if max(spans[i][0], spans[k][0]) < min(spans[i][1], spans[k][1])
        )
        expected = {frozenset(c) for c in nx.connected_components(order) if len(c) > 1}
        assert {frozenset(c) for c in _overlapping(spans)} == expected


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
