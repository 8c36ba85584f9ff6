"""Training steps of models of all kinds: outputs, parameters, hooks, breaks, memory that is shared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver import TrainingStep
from tests.driver.conformity import distance
from tests.driver.networks import mlp
from tests.driver.pairs import Output, Pair, batch

pytestmark = pytest.mark.compiled


def test_dictionaries_tuples_and_losses_of_the_output() -> None:
    class Keyword(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor, labels: Tensor, scale: Tensor | None = None) -> Any:
            y = self.fc(x) if scale is None else self.fc(x) * scale
            return Output(F.mse_loss(y, labels), y)

    pair = Pair(Keyword(), loss=None)
    for _ in range(2):
        x, y = batch()
        pair.step({"x": x, "labels": y})
        pair.step((x, y))
        pair.step([x, y, torch.tensor(2.0)])
    pair.whole()


def test_losses_with_parameters_and_buffers() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, y: Tensor, t: Tensor) -> Tensor:
            self.seen.add_(1)
            return ((y - t).square() * self.weight).mean()

    pair = Pair(mlp(), loss=Weighted())
    for _ in range(3):
        pair.step(*batch())
    pair.whole()
    assert torch.equal(pair.own_loss.seen, torch.tensor(3.0))
    assert distance(pair.own_loss.weight, pair.loss.weight) < 1e-4


def test_tied_frozen_and_unused_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.frozen = nn.Linear(8, 4).requires_grad_(False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.b(self.a(x).relu()))

    pair = Pair(Tied(), torch.optim.AdamW, weight_decay=0.1)
    for _ in range(3):
        pair.step(*batch())
    pair.whole()
    assert pair.ours.b.weight is pair.ours.a.weight


def test_a_parameter_that_is_only_rounded_decays() -> None:
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-2, 2, 5))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.sign()

    theirs = Rounded()
    ours = copy.deepcopy(theirs)
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    optimizer = torch.optim.AdamW(theirs.parameters(), weight_decay=0.1)
    step = dt.training_step(ours, F.mse_loss, torch.optim.AdamW(ours.parameters(), weight_decay=0.1))
    for _ in range(2):
        F.mse_loss(theirs(x), y).backward()
        optimizer.step()
        step(x, y)
    torch.testing.assert_close(ours.weight, theirs.weight)
    assert not torch.equal(ours.weight, torch.linspace(-2, 2, 5)) and not step.breaks


def test_groups_with_options_of_their_own() -> None:
    def groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
        listed = list(parameters)
        return torch.optim.SGD([{"params": listed[:2], "lr": 0.2, "momentum": 0.9}, {"params": listed[2:]}], lr=lr)

    pair = Pair(mlp(), groups)
    for _ in range(3):
        pair.step(*batch())
    pair.whole()


@pytest.mark.parametrize("where", ["optimizer", "everywhere", "parameter", "accumulated", "module", "backward"])
def test_hooks_are_honored_whenever_they_are_added(where: str) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    pair, seen = Pair(mlp()), []

    def register() -> Any:
        model, optimizer = pair.ours, pair.our_optimizer
        match where:
            case "optimizer":
                return optimizer.register_step_post_hook(lambda *_: seen.append(1))
            case "everywhere":
                return register_optimizer_step_pre_hook(lambda o, *_: seen.append(1) if o is optimizer else None)
            case "parameter":
                return model[0].weight.register_hook(lambda g: seen.append(1))
            case "accumulated":
                return model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
            case "module":
                return model[1].register_forward_hook(lambda *_: seen.append(1))
        return model[0].register_full_backward_hook(lambda *_: seen.append(1))

    for _ in range(2):
        pair.step(*batch())
    handle = register()
    pair.step(*batch())
    pair.step(*batch())
    assert len(seen) == 2
    expected = {"module": [], "backward": ["backward"], "optimizer": ["around its step"]}
    expected |= {"everywhere": expected["optimizer"]}
    breaks = list(pair.call.breaks)
    pairs = zip(expected.get(where, ["hooks of gradients"]), breaks, strict=True)
    assert all(part in reason for part, reason in pairs), breaks
    handle.remove()
    pair.step(*batch())
    assert len(seen) == 2 and pair.call.breaks == breaks


def test_a_graph_break_runs_in_pieces_and_says_where() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.fc1(x)
            if float(h.detach().sum()) > 1e6:
                h = h * 0
            return self.fc2(h)

    pair = Pair(Broken(), torch.optim.Adam)
    for _ in range(3):
        pair.step(*batch())
    assert len(pair.call.breaks) == 1 and "test_step_models.py" in pair.call.breaks[0]


def test_other_optimizers_run_in_pieces() -> None:
    pair = Pair(mlp(), torch.optim.Adafactor)
    for _ in range(2):
        pair.step(*batch())
    assert "Adafactor" in pair.call.breaks[0]


def test_arguments_that_require_gradients() -> None:
    pair = Pair(mlp())
    x, y = batch()
    x.requires_grad_()
    pair.step(x, y)
    assert x.grad is not None


def test_layouts_and_aliases_of_arguments() -> None:
    pair = Pair(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    base = torch.randn(16, 16)
    for x in (base[:8, :8], base[:8, 8:], base[::2, ::2], base[:8, :8].t(), base[0, :8].expand(8, 8)):
        pair.step(x, x)
    with torch.no_grad():
        x = pair.theirs[0].weight.detach().clone()
    pair.their_optimizer.zero_grad()
    loss = F.mse_loss(pair.theirs(x), x)
    loss.backward()
    pair.their_optimizer.step()
    weight = pair.ours[0].weight.detach()
    assert distance(pair.call(weight, weight), loss) < 1e-4
    pair.compare()
    pair.whole()


def test_an_argument_that_shares_memory_with_a_buffer_that_is_updated() -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)
            self.register_buffer("last", torch.zeros(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.last.mul_(0.5)
            return self.fc(x) + self.last.sum()

    pair = Pair(Remembering())
    x, y = batch()
    pair.step(x, y)
    pair.whole()
    pair.their_optimizer.zero_grad()
    loss = F.mse_loss(pair.theirs(pair.theirs.last[:]), y)
    loss.backward()
    pair.their_optimizer.step()
    assert distance(pair.call(pair.ours.last[:], y), loss) < 1e-4
    pair.compare()
    assert pair.call.breaks == ["an argument shares memory with a buffer that the model updates"]
    pair.step(x, y)
    assert len(pair.call.breaks) == 1


def test_parameters_that_share_memory() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).tanh())

    pair = Pair(Shared())
    pair.both(lambda m, _: setattr(m.b.weight, "data", m.a.weight.data.t()))
    pair.step(torch.randn(6, 8), torch.randn(6, 8))
    assert "share memory" in pair.call.breaks[0]


def test_under_no_grad_and_inside_autocast() -> None:
    pair = Pair(mlp())
    x, y = batch()
    pair.step(x, y)
    before = {n: p.clone() for n, p in pair.ours.named_parameters()}
    with torch.no_grad():
        pair.call(x, y)
    assert not torch.equal(before["0.weight"], pair.ours[0].weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pair.ours(x).dtype is torch.bfloat16
        assert torch.isfinite(pair.call(x, y))


def test_an_optimized_model() -> None:
    model = mlp()
    reference = Pair(model)
    ours = dt.optimize(reference.ours)
    reference.call = dt.training_step(ours, F.mse_loss, reference.our_optimizer)
    for _ in range(2):
        reference.step(*batch())
    reference.whole()


def test_many_steps_in_a_process() -> None:
    for width in range(3, 15):
        pair = Pair(nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4)))
        pair.step(*batch())
        pair.whole()


def test_random_layers_do_not_grow_memory() -> None:
    from daceml_train.runtime.native_library import pool_statistics

    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), nn.Linear(256, 64))
    step: TrainingStep = dt.training_step(model, F.mse_loss, torch.optim.Adam(model.parameters()))
    x, sizes = torch.randn(512, 64), []
    for _ in range(100):
        step(x, x)
        sizes.append(pool_statistics().in_use)
    assert sizes[-1] <= sizes[5]


def test_a_parameter_that_is_not_dense() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))
            self.transposed = nn.Parameter(torch.randn(8, 4).t())

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()) @ self.transposed

    pair = Pair(Strided())
    wide = torch.randn(4, 16)

    def spread(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.weight.data = wide.clone()[:, ::2]

    pair.both(spread)
    with pytest.warns(UserWarning, match="weight is not dense in memory"):
        for _ in range(3):
            pair.step(torch.randn(5, 8), torch.randn(5, 8))
    assert len(pair.call.breaks) == 1


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_modules_are_part_of_the_step(kind: type[nn.Module]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = kind(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.cell(x)[0][:, -1])

    pair = Pair(Recurrent())
    for _ in range(3):
        pair.step(torch.randn(4, 5, 8), torch.randn(4, 3))
    pair.whole()


def test_lazily_negated_and_zero_tensors() -> None:
    pair = Pair(mlp())

    def negate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weight = next(model.parameters())
        weight.data = torch._neg_view(weight.data.neg())

    for change in (lambda t: t, torch._neg_view):
        for _ in range(3):
            x, y = batch()
            pair.step(change(x), change(y))
    pair.step(batch()[0], torch._efficientzerotensor(batch()[1].shape))
    pair.whole()
    pair.both(negate)
    with pytest.warns(UserWarning, match="not dense in memory .*, or negated"):
        pair.step(*batch())


def test_versions_of_running_statistics() -> None:
    """Eager execution changes those of a batch norm unseen: what keeps them for a backward pass is not disturbed."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    reference = copy.deepcopy(model)
    for _ in range(3):
        w, x = torch.ones(3, requires_grad=True), torch.randn(6, 4)
        other = (w * model[1].running_mean).sum()
        step(x, torch.randn(6, 3))
        reference(x)
        assert [b._version for b in model.buffers()] == [b._version for b in reference.buffers()]
        other.backward()
