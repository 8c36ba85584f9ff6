"""Arguments that do not fit: an error that names argument, expected and given, before anything has changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from tests.driver.conformity import assert_compiled

pytestmark = pytest.mark.compiled


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def assert_unchanged(before: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    after = (model.state_dict(), optimizer.state_dict())
    leaves = [torch.utils._pytree.tree_leaves(x) for x in (before, after)]
    for a, b in zip(*leaves, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shape": (lambda: torch.randn(6, 9), RuntimeError, r"9"),
    "dtype": (lambda: torch.randn(6, 8, dtype=torch.float64), RuntimeError, r"[dD]ouble|float64"),
    "device": (lambda: torch.randn(6, 8, device="meta"), (RuntimeError, ValueError), r"meta"),  # type: ignore[dict-item]
    "text": (lambda: "x", TypeError, r"str"),
    "none": (lambda: None, TypeError, r"None"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
@pytest.mark.filterwarnings("ignore:daceml_train runs")
def test_arguments_that_do_not_fit(kind: str, before: bool) -> None:
    make, error, text = WRONG[kind]
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    step, x, y = dt.training_step(model, F.mse_loss, optimizer), torch.randn(6, 8), torch.randn(6, 4)
    optimized = dt.optimize(model)
    if before:
        step(x, y)
        optimized(x)
    kept = state(model, optimizer)
    for call in (lambda: optimized(make()), lambda: step(make(), y)):
        with pytest.raises(error, match=text) as caught:
            call()
        notes = "".join(getattr(caught.value, "__notes__", ())) + str(caught.value)
        assert "argument 0" in notes
        assert not before or "meta" in notes or "took argument 0: float32[6, 8]" in notes
        assert_unchanged(kept, model, optimizer)
    assert torch.isfinite(step(x, y)) and optimized(x).shape == (6, 4)
    assert step.breaks == []


def test_missing_and_surplus_arguments() -> None:
    model = network()
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="input"):
        dt.optimize(model)()
    with pytest.raises(TypeError, match="positional"):
        dt.optimize(model)(torch.randn(6, 8), torch.randn(6, 8))
    with pytest.raises(TypeError, match="target"):
        step(torch.randn(6, 8))


def test_what_is_no_module_loss_or_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(dt.Invalid, match=r"takes a torch\.nn\.Module, given function"):
        dt.optimize(network)  # type: ignore[arg-type]
    with pytest.raises(dt.Invalid, match=r"model must be a torch\.nn\.Module, given list"):
        dt.training_step([model], F.mse_loss, optimizer)
    with pytest.raises(dt.Invalid, match="loss must be callable or None, given str"):
        dt.training_step(model, "mse", optimizer)
    with pytest.raises(dt.Invalid, match=r"optimizer must be a torch\.optim\.Optimizer, given float"):
        dt.training_step(model, F.mse_loss, 0.1)


def test_a_forward_that_raises() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise KeyError("three rows")
            return self.fc(x)

    model = Fails()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, optimized = dt.training_step(model, lambda y: y.square().mean(), optimizer), dt.optimize(model)
    for size in (6, 3, 6, 3, 5):
        kept = state(model, optimizer)
        x = torch.randn(size, 8)
        if size == 3:
            for call in (step, optimized):
                with pytest.raises(KeyError, match="three rows"):
                    call(x)
            assert_unchanged(kept, model, optimizer)
        else:
            step(x)
            optimized(x)
    assert step.breaks == []
    assert_compiled(optimized)


@pytest.mark.parametrize("way", ["optimize", "torch.compile"])
def test_an_argument_that_begins_inside_its_memory_is_not_changed(way: str) -> None:
    """Its version must not rise: what PyTorch keeps for the backward pass of another function would count as changed."""
    model = nn.Linear(4, 4)
    called = dt.optimize(model) if way == "optimize" else torch.compile(model, backend="daceml_train")
    for _ in range(3):
        x, w = torch.randn(5, 4)[2:].detach(), torch.randn(3, 4, requires_grad=True)
        other = (x * w).sum()
        called(x).sum().backward()
        assert x._version == 0
        other.backward()
