"""Training steps as PyTorch takes them: gradients, learning rates, changes between steps, Python around them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.driver.conformity import assert_tensors_conform
from tests.driver.networks import mlp
from tests.driver.pairs import Change, Pair, batch

pytestmark = pytest.mark.compiled


def test_gradients_are_dropped_or_kept() -> None:
    for keep in (False, True):
        pair = Pair(mlp(), keep_gradients=keep)
        for p in pair.ours.parameters():
            p.grad = torch.ones_like(p)
        for _ in range(2):
            pair.step(*batch())
            theirs = {n: p.grad for n, p in pair.theirs.named_parameters() if p.grad is not None}
            found = {n: p.grad for n, p in pair.ours.named_parameters() if p.grad is not None}
            if keep:
                assert_tensors_conform(found, theirs, theirs, 1e-4)
                assert all(g.stride() == theirs[n].stride() for n, g in found.items())
            else:
                assert found == {}
        pair.whole()


@pytest.mark.parametrize("scheduler", ["StepLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_learning_rate_schedulers(scheduler: str, recwarn: pytest.WarningsRecorder) -> None:
    options: dict[str, Any] = {
        "StepLR": {"step_size": 2, "gamma": 0.5},
        "CosineAnnealingLR": {"T_max": 4},
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 8},
        "ReduceLROnPlateau": {"patience": 0},
    }[scheduler]
    pair = Pair(mlp())
    kind = getattr(torch.optim.lr_scheduler, scheduler)
    results = [kind(optimizer, **options) for optimizer in (pair.their_optimizer, pair.our_optimizer)]
    for _ in range(5):
        pair.step(*batch())
        for schedule in results:
            schedule.step(1.0) if scheduler == "ReduceLROnPlateau" else schedule.step()
    pair.whole()
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_learning_rate_as_tensor() -> None:
    pair = Pair(mlp(), torch.optim.Adam, lr=torch.tensor(0.01))
    pair.step(*batch())
    pair.both(lambda _, o: o.param_groups[0]["lr"].fill_(0.1))
    pair.step(*batch())
    pair.whole()


def _momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.5


def _freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(not model[0].weight.requires_grad)  # type: ignore[index,union-attr,operator]


def _rebind(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def _reload(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({n: t * 0.9 for n, t in model.state_dict().items()})


def _reload_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _state_entry(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for entry in optimizer.state.values():
        for name in entry:
            entry[name] = entry[name] * 0.5


def _replace_layer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(11)
    model[2] = nn.Linear(16, 16)  # type: ignore[operator]
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})  # type: ignore[index,union-attr]


def _assign(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(12)
    model.load_state_dict(mlp().state_dict(), assign=True)


def _weight_decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.1


@pytest.mark.parametrize(
    "change",
    [_momentum, _freeze, _rebind, _reload, _reload_optimizer, _state_entry, _replace_layer, _assign, _weight_decay],
    ids=lambda change: change.__name__.strip("_"),
)
def test_changes_between_steps(change: Change) -> None:
    pair = Pair(mlp(), momentum=0.9)
    for _ in range(2):
        pair.step(*batch())
        pair.step(*batch())
        pair.both(change)
    pair.step(*batch())
    pair.whole()


def test_continuing_in_pytorch_and_back() -> None:
    pair = Pair(mlp(), torch.optim.AdamW)
    for _ in range(2):
        pair.step(*batch())
    other = copy.deepcopy(pair.theirs)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.05)
    other.load_state_dict(pair.ours.state_dict())
    optimizer.load_state_dict(copy.deepcopy(pair.our_optimizer.state_dict()))  # it would share the tensors
    x, y = batch()
    F.mse_loss(other(x), y).backward()
    optimizer.step()
    pair.step(x, y)
    expected = other.state_dict()
    assert_tensors_conform(pair.ours.state_dict(), expected, expected, 1e-4)


def test_batch_sizes_share_a_program() -> None:
    pair = Pair(mlp(), momentum=0.9)
    for size in (6, 3, 9, 4, 17, 6):
        pair.step(*batch(size))
    pair.whole()
    assert len(pair.call.records) <= 2


def test_train_and_eval() -> None:
    pair = Pair(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    for mode in (True, False, True):
        pair.both(lambda m, _, mode=mode: m.train(mode))  # type: ignore[misc]
        pair.step(*batch())
    pair.whole()


def test_python_attributes_are_seen() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.scale, self.mask = nn.Linear(8, 4), 1.0, torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * self.scale * self.mask

    pair = Pair(Scaled())
    pair.step(*batch())
    for scale in (2.0, 0.5, 0.25):
        pair.both(lambda m, _, scale=scale: setattr(m, "scale", scale))  # type: ignore[misc]
        pair.step(*batch())
    pair.both(lambda m, _: setattr(m, "mask", torch.tensor([0.0, 1, 1, 0])))
    pair.step(*batch())
    pair.both(lambda m, _: m.mask.fill_(2.0))
    pair.step(*batch())


def test_numbers_among_the_targets() -> None:
    pair = Pair(mlp(), loss=lambda y, t, weight: F.mse_loss(y, t) * weight)
    for weight in (1.0, 2.0, 3.0, 0.5):
        pair.step(*batch(), weight)


def test_side_effects_happen_at_every_step() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.calls = nn.Linear(8, 4), 0
            self.register_buffer("average", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.fc(x)
            self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
            return y

    pair = Pair(Counting())
    for calls in (1, 2, 3):
        pair.step(*batch())
        assert pair.ours.calls == calls
    assert not pair.call.breaks and pair.call._captures <= 3


def test_side_effects_of_a_step_that_is_one_program() -> None:
    """What was assigned stands there after each step, whatever others assigned in between."""

    class Marking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.state, self.seen = nn.Linear(8, 4), "new", []

        def forward(self, x: Tensor) -> Tensor:
            self.state = "running"
            y = self.fc(x)
            self.state = "done"
            return y

    pair = Pair(Marking())
    for state in ("new", "other", "done"):
        pair.ours.state = pair.theirs.state = state
        pair.step(*batch())
        assert pair.ours.state == "done"
    assert pair.call.breaks == []


def test_a_step_that_assigns_once_what_it_depends_on() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.kind = nn.Linear(8, 4), None

        def forward(self, x: Tensor) -> Tensor:
            if self.kind is None:
                self.kind = "matrix" if x.dim() == 2 else "other"
            return self.fc(x) if self.kind == "matrix" else x

    pair = Pair(Deciding())
    for _ in range(4):
        pair.step(*batch())
    assert pair.ours.kind == "matrix"
    pair.whole()


def test_a_step_that_depends_on_what_it_assigns() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.calls = nn.Linear(8, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(x) * self.calls

    pair = Pair(Counting())
    for calls in (1, 2, 3, 4):
        pair.step(*batch())
        assert pair.ours.calls == calls
    assert not pair.call.breaks and pair.call._captures <= 3
