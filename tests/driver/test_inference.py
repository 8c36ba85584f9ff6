"""Calls without gradients: what is prepared from parameters is never older than they are."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver.function import STILL_PACKED
from daceml_train.driver.module import WEIGHTS_CHANGE
from daceml_train.driver.prepacked import PrepackedWeights
from daceml_train.errors import Unsupported
from tests.driver.conformity import assert_compiled

pytestmark = pytest.mark.compiled


class Images(nn.Module):
    """Convolutions and normalizations in each form that is folded, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1, groups=24), nn.BatchNorm2d(24), nn.ReLU6())
        self.wide = nn.Conv2d(24, 24, 1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.head = nn.Sequential(nn.Linear(24, 10), nn.BatchNorm1d(10))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.first(x))
        y = F.silu(self.norm(self.wide(y)) + y)
        y = self.norm(self.wide(y))  # tied
        return self.head(y.mean((2, 3)))


def images(seed: int = 0) -> nn.Module:
    """A model whose statistics are not those of a new one."""
    torch.manual_seed(seed)
    model = Images()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.3, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model.eval()


def agree(module: nn.Module, optimized: nn.Module, *inputs: Tensor) -> None:
    """Both give the same, to rounding, without gradients."""
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            want, got = module(*inputs), optimized(*inputs)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert_compiled(optimized)


@pytest.fixture(scope="module")
def pair() -> tuple[nn.Module, nn.Module]:
    model = images()
    return model, dt.optimize(model)


def test_prepared_once(pair: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[PrepackedWeights] = []
    original = PrepackedWeights.__call__

    def noted(self: PrepackedWeights, inputs: Any, run: Any) -> list[Tensor]:
        seen.append(self)
        return original(self, inputs, run)

    monkeypatch.setattr(PrepackedWeights, "__call__", noted)
    model, optimized = pair
    agree(model, optimized, torch.randn(2, 3, 16, 16))
    before = [weights.computed for weights in seen]
    for _ in range(3):
        agree(model, optimized, torch.randn(2, 3, 16, 16))
    assert [weights.computed for weights in seen[:2]] == before[:2]
    assert len({id(weights) for weights in seen}) == 2


def test_against_float64(pair: tuple[nn.Module, nn.Module]) -> None:
    model, optimized = pair
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
        error = (optimized(x) - exact).abs().max()
        assert error < 4 * (model(x) - exact).abs().max() + 1e-6


def scale(p: Tensor) -> None:
    with torch.no_grad():
        p.mul_(1.5)


def scale_in_inference_mode(p: Tensor) -> None:
    with torch.inference_mode():
        p.mul_(1.5)


def scale_data(p: Tensor) -> None:
    p.data.mul_(1.5)


def replace_data(p: Tensor) -> None:
    p.data = p.data * 1.5


def scale_in_numpy(p: Tensor) -> None:
    p.detach().numpy()[...] *= 1.5


@pytest.mark.parametrize("change", [scale, scale_in_inference_mode, scale_data, replace_data, scale_in_numpy])
@pytest.mark.parametrize("name", ["wide.weight", "norm.running_var", "norm.bias", "head.0.weight"])
def test_changes_are_seen(pair: tuple[nn.Module, nn.Module], change: Callable[[Tensor], None], name: str) -> None:
    model, optimized = pair
    x = torch.randn(2, 3, 16, 16)
    agree(model, optimized, x)
    with torch.no_grad():
        before = model(x)
    change(model.get_parameter(name) if "running" not in name else model.get_buffer(name))
    agree(model, optimized, x)
    with torch.no_grad():
        assert not torch.allclose(model(x), before, rtol=1e-3)


def test_one_number_of_a_small_tensor_is_seen(pair: tuple[nn.Module, nn.Module]) -> None:
    model, optimized = pair
    x = torch.randn(2, 3, 16, 16)
    agree(model, optimized, x)
    for name in ("norm.bias", "norm.weight", "head.0.bias"):
        parameter = model.get_parameter(name)
        parameter.data.view(-1)[1] += 1.0
        agree(model, optimized, x)


@pytest.mark.parametrize("assign", [False, True])
def test_another_state_dict(pair: tuple[nn.Module, nn.Module], assign: bool) -> None:
    model, optimized = pair
    x = torch.randn(2, 3, 16, 16)
    agree(model, optimized, x)
    optimized.load_state_dict(images(seed=7 + assign).state_dict(), assign=assign)
    agree(model, optimized, x)


def test_training_in_between() -> None:
    model = images()
    optimized = dt.optimize(model)
    reference = copy.deepcopy(model)
    x = torch.randn(4, 3, 16, 16)
    for module, called in ((reference, reference), (model, optimized)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        with torch.no_grad():
            called(x)
        called.train()
        for _ in range(2):
            optimizer.zero_grad()
            called(x).square().mean().backward()
            optimizer.step()
        called.eval()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    agree(model, optimized, x)
    called = optimized(x)  # gradients in eval mode, after a call without
    called.sum().backward()


def test_weights_that_change_are_not_prepared_again() -> None:
    """A teacher whose weights are an average is not packed at each call; what holds still stays packed."""
    model, still = images(), images()
    optimized, fixed = dt.optimize(model), dt.optimize(still)
    x = torch.randn(4, 3, 16, 16)
    for _ in range(7):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9).add_(0.01)
        for module, called in ((model, optimized), (still, fixed)):
            with torch.no_grad():
                torch.testing.assert_close(called(x), module(x), rtol=1e-4, atol=1e-5)
    prepared = [
        p.compiled.prepacked
        for called in (optimized, fixed)
        for programs in called._daceml_train.backend.programs.values()  # type: ignore[union-attr]
        for p in programs
    ]
    assert prepared[0] is None and prepared[1] is not None and prepared[1].computed == 1
    assert_compiled(optimized)
    assert WEIGHTS_CHANGE in str(dt.report(optimized)) and WEIGHTS_CHANGE not in str(dt.report(fixed))


def test_weights_that_change_and_no_program_for_them() -> None:
    model = images()
    optimized = dt.optimize(model)

    def fail() -> Any:
        raise Unsupported("no second program")

    x = torch.randn(2, 3, 16, 16)
    for _ in range(6):
        agree(model, optimized, x)
        for programs in optimized._daceml_train.backend.programs.values():  # type: ignore[union-attr]
            for program in programs:
                program.again = program.again and fail
        scale(model.get_parameter("wide.weight"))
    assert f"{STILL_PACKED}: no second program" in dt.report(optimized).to_html()


def test_batch_sizes_and_layouts(pair: tuple[nn.Module, nn.Module]) -> None:
    model, optimized = pair
    for batch in (2, 5, 1, 5):
        agree(model, optimized, torch.randn(batch, 3, 16, 16))
    agree(model, optimized, torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last))
    agree(model, optimized, torch.randn(2, 3, 16, 32)[..., ::2])
    agree(model, optimized, torch.randn(2, 16, 16, 3).permute(0, 3, 1, 2))


def test_channels_last_model() -> None:
    model = images().to(memory_format=torch.channels_last)
    agree(model, dt.optimize(model), torch.randn(2, 3, 16, 16).contiguous(memory_format=torch.channels_last))


def test_autocast(pair: tuple[nn.Module, nn.Module]) -> None:
    model, optimized = pair
    x = torch.randn(2, 3, 16, 16)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        want, got = model(x), optimized(x)
    assert want.dtype is got.dtype
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)
    agree(model, optimized, x)


def test_parameters_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = images()
        optimized = dt.optimize(model)
        x = torch.randn(2, 3, 16, 16)
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)
        model.wide.weight.mul_(1.5)
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-4, atol=1e-5)


def test_threads(pair: tuple[nn.Module, nn.Module]) -> None:
    model, optimized = pair
    inputs = [torch.randn(2, 3, 16, 16) for _ in range(4)]
    with torch.inference_mode():
        wanted = [model(x) for x in inputs]
        optimized(inputs[0])
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.inference_mode():
            for _ in range(5):
                if not torch.allclose(optimized(inputs[number]), wanted[number], rtol=1e-4, atol=1e-5):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Layers(nn.Module):
    """Nothing to fold: weights that a library lays out for itself, as they are; one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 32, 3, padding=1), nn.ConvTranspose2d(32, 16, 2, 2)
        self.grouped, self.sequence = nn.Conv2d(16, 16, 3, groups=4), nn.Conv1d(16, 24, 5, padding=2)
        self.first, self.tied = nn.Linear(24, 256), nn.Linear(256, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.grouped(self.up(F.relu(self.conv(x))))
        y = self.first(self.sequence(y.flatten(2)).transpose(1, 2))
        return self.tied(F.gelu(self.tied(y)))


@pytest.mark.parametrize("change", [scale, scale_data, replace_data])
def test_packed_weights_follow(change: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    model = Layers().eval()
    optimized = dt.optimize(model)
    x = torch.randn(2, 3, 8, 8)
    agree(model, optimized, x)
    for name in ("conv.weight", "sequence.weight", "first.weight", "tied.weight", "conv.bias"):
        change(model.get_parameter(name))
        agree(model, optimized, x)
    model.to(memory_format=torch.channels_last)
    agree(model, optimized, x)
    optimized(x).sum().backward()


class Scaled(nn.Module):
    """No convolution; it returns something made of a parameter alone, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))
        self.register_buffer("calls", torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        return x * self.weight.exp().softmax(0) + self.calls, self.weight.exp()


def test_results_belong_to_the_user_and_buffers_are_written() -> None:
    model, other = Scaled(), Scaled()
    other.load_state_dict(model.state_dict())
    optimized, x = dt.optimize(other), torch.randn(3, 6)
    with torch.no_grad():
        for _ in range(3):
            want, got = model(x), optimized(x)
            for a, b in zip(want, got, strict=True):
                torch.testing.assert_close(a, b)
                b.zero_()
    torch.testing.assert_close(model.calls, other.calls)
