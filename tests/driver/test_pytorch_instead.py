"""What PyTorch runs in place of compiled code: results are eager's, and `breaks` says why."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import daceml_train as dt
from daceml_train.driver.module import state_of

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def batched(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    seeds = torch.eye(6).reshape(6, 2, 3)
    return torch.autograd.grad(model(x), (x, *model.parameters()), seeds, is_grads_batched=True)


def dual(model: nn.Module) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(X, torch.ones_like(X)))))


def functional(model: nn.Module) -> Any:
    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (X,)).sum()

    return tuple(torch.func.grad(loss)(dict(model.named_parameters())).values())


TRANSFORMS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "batched": (batched, "batch of cotangents"),
    "hessian": (
        lambda m: (torch.autograd.functional.hessian(lambda x: m(x).pow(2).sum(), X, vectorize=True),),
        "batch of cotangents",
    ),
    "dual": (dual, "forward-mode"),
    "jvp": (lambda m: torch.func.jvp(m, (X,), (torch.ones_like(X),)), "torch.func"),
    "vmap": (lambda m: (torch.func.vmap(m)(X),), "torch.func"),
    "grad": (lambda m: (torch.func.grad(lambda x: m(x).sum())(X),), "torch.func"),
    "functional": (functional, "torch.func"),
}


@pytest.mark.compiled
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_left_to_pytorch(name: str, warm: bool, tmp_path: Path) -> None:
    transform, why = TRANSFORMS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    compiled = dt.optimize(model, cache=str(tmp_path))
    if warm:
        compiled(X)
    with pytest.warns(UserWarning, match=why):
        results = transform(compiled)
    expected = tuple(transform(model))
    torch.testing.assert_close(tuple(results), expected)
    assert [r.requires_grad for r in results] == [e.requires_grad for e in expected]
    state = state_of(compiled)
    assert state is not None and len(state.backend.breaks) == 1


class TwoResults(torch.autograd.Function):
    """Notes which of its cotangents are None."""

    seen: list[tuple[bool, bool]]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor | None, b: torch.Tensor | None) -> Any:
        TwoResults.seen.append((a is None, b is None))
        return a * 20 if a is not None and b is None else a


class UsesOne(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = TwoResults.apply(x.sin())
        return y.cos()


@pytest.mark.compiled
def test_a_backward_is_given_none_where_it_asks_for_it(tmp_path: Path) -> None:
    compiled = dt.optimize(UsesOne(), cache=str(tmp_path))
    found = []
    for model in (UsesOne(), compiled):
        x, TwoResults.seen = torch.ones(3, requires_grad=True), []
        model(x).sum().backward()
        found.append((x.grad, TwoResults.seen))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert found[0][1] == found[1][1] == [(False, True)]
    state = state_of(compiled)
    assert state is not None and "set_materialize_grads" in state.backend.breaks[0]


@pytest.mark.compiled
def test_forward_mode_through_torch_compile() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    compiled = torch.compile(model, backend="daceml_train")
    torch.testing.assert_close(dual(compiled), dual(model))


class Enabling(nn.Module):
    """Computes with gradients whatever its caller wants."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.inner(x)
        with torch.enable_grad():
            return h, self.inner(x).tanh()


@pytest.mark.compiled
def test_a_result_with_a_gradient_in_a_call_without_gradients() -> None:
    torch.manual_seed(0)
    model, found = Enabling(), []
    compiled = dt.optimize(model)
    for called in (model, compiled):
        with torch.no_grad():
            h, enabled = called(X)
        assert not h.requires_grad and enabled.requires_grad
        found.append((h, enabled, *torch.autograd.grad(enabled.sum(), list(model.parameters()))))
    torch.testing.assert_close(found[1], found[0])
    state = state_of(compiled)
    assert state is not None and "enable_grad" in state.backend.breaks[0]


class Keeping(nn.Module):
    """Hooks a value that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(x).tanh()
        h.register_hook(lambda g: g * 2)
        return self.b(h), h


@pytest.mark.compiled
def test_the_gradient_of_a_hooked_result() -> None:
    """It is that after the hook."""
    torch.manual_seed(0)
    model, found = Keeping(), []
    compiled = dt.optimize(model)
    for called in (model, compiled):
        y, h = called(X)
        found.append(torch.autograd.grad(y.sum(), (h, model.a.weight)))
    torch.testing.assert_close(found[1], found[0])
    state = state_of(compiled)
    assert state is not None and "register_hook of a result" in state.backend.breaks[0]


@pytest.mark.compiled
def test_anomaly_detection_finds_the_first_nan_of_a_step(tmp_path: Path) -> None:
    def losses(step: Any) -> list[float | str]:
        found: list[float | str] = []
        for number in range(6):
            x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
            x[0] = float("nan") if number == 3 else 0.0
            with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(number in (2, 3)):
                warnings.simplefilter("ignore")
                try:
                    found.append(float(step(x, y)))
                except RuntimeError as error:
                    found.append(str(error))
        return found

    expected, got, step = _both(losses, _network, tmp_path)
    assert "LogSoftmaxBackward0" in expected[3]
    assert got == [pytest.approx(value, rel=1e-5) if isinstance(value, float) else value for value in expected]
    assert "anomaly detection" in step.breaks[0]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:daceml_train runs")
def test_hooks_of_saved_tensors_change_the_gradients_of_a_step(tmp_path: Path) -> None:
    def losses(step: Any) -> list[float]:
        found = []
        for number in range(6):
            hooks = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float)
            with hooks if number in (2, 3) else contextlib.nullcontext():
                found.append(float(step(torch.randn(6, 4), torch.rand(6, 3))))
        return found

    expected, got, step = _both(losses, _network, tmp_path)
    assert got == pytest.approx(expected, rel=1e-6)
    assert "saved_tensors_hooks" in step.breaks[0]


class Neighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, edges: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.sparse.mm(edges, x))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor", "ignore:daceml_train runs")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_a_step_with_a_sparse_argument_is_taken_in_pieces(layout: str, tmp_path: Path) -> None:
    def losses(step: Any) -> list[float]:
        edges = [getattr((torch.rand(6, 6) > 0.5).float(), layout)() for _ in range(3)]
        return [float(step((each, torch.randn(6, 4)), torch.rand(6, 3))) for each in edges]

    expected, got, step = _both(losses, Neighbours, tmp_path)
    assert got == pytest.approx(expected, rel=1e-5)
    assert step.breaks == [f"argument 0 has layout torch.{layout[3:] if 'csr' in layout else 'sparse_coo'}"]


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:daceml_train runs")
@pytest.mark.parametrize("kind", ["forward set on the object", "torch.jit", "step of one element"])
def test_steps_of_unusual_models_are_taken_in_pieces(kind: str, tmp_path: Path) -> None:
    def made() -> nn.Module:
        model = _network()
        if kind == "forward set on the object":
            model.forward = lambda x: nn.Sequential.forward(model, x) * 2  # type: ignore[method-assign]
            model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
        return torch.jit.trace(model, torch.rand(2, 4)) if kind == "torch.jit" else model

    def losses(step: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        found = [float(step(torch.randn(6, 4), torch.rand(6, 3))) for _ in range(2)]
        if kind == "step of one element":
            for state in optimizer.state.values():
                state["step"] = torch.tensor([7.0])
        return [*found, *(float(step(torch.randn(6, 4), torch.rand(6, 3))) for _ in range(2))]

    expected, got, step = _both(losses, made, tmp_path)
    assert got == pytest.approx(expected, rel=1e-5)
    assert len(step.breaks) == 1


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:daceml_train runs")
@torch._dynamo.config.patch("compiled_autograd", True)
def test_gradients_under_compiled_autograd() -> None:
    torch.manual_seed(0)
    model = _network()

    @torch.compile(backend="daceml_train")
    def gradients(x: torch.Tensor) -> None:
        model(x).square().sum().backward()

    gradients(X)
    got = [p.grad for p in model.parameters()]
    torch.testing.assert_close(got, [*torch.autograd.grad(model(X).square().sum(), [*model.parameters()])])


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def _both(losses: Callable[..., Any], made: Callable[[], nn.Module], cache: Path) -> tuple[Any, Any, Any]:
    """What a training gives by eager steps and by compiled ones, and the compiled step."""
    found: list[Any] = []
    step: Any = None
    for compiled in (False, True):
        torch.manual_seed(0)
        model = made()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if compiled:
            step = dt.training_step(model, nn.functional.cross_entropy, optimizer, cache=str(cache))
        given = {"optimizer": optimizer} if "optimizer" in inspect.signature(losses).parameters else {}
        found.append(losses(step or _eager_step(model, optimizer), **given))
    return *found, step


def _eager_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(inputs: Any, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        output = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        loss = nn.functional.cross_entropy(output, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
