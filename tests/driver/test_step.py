"""A training step means what PyTorch's loop means, whatever happens to model, loss and optimizer between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver import TrainingStep
from tests.driver.conformity import assert_tensors_conform, distance
from tests.driver.networks import mlp

pytestmark = pytest.mark.compiled

Change = Callable[[nn.Module, torch.optim.Optimizer], None]


class Pair:
    """A step on one copy of a model, and PyTorch's loop on another; `step` holds them to each other."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        loss: Any = F.mse_loss,
        keep_gradients: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("lr", 0.05)
        self.loss, self.own_loss = (loss, copy.deepcopy(loss)) if isinstance(loss, nn.Module) else (loss, loss)
        self.theirs, self.ours = model, copy.deepcopy(model)
        further = [list(x.parameters()) if isinstance(x, nn.Module) else [] for x in (self.loss, self.own_loss)]
        self.their_optimizer = optimizer([*self.theirs.parameters(), *further[0]], **options)
        self.our_optimizer = optimizer([*self.ours.parameters(), *further[1]], **options)
        self.call = dt.training_step(self.ours, self.own_loss, self.our_optimizer, keep_gradients=keep_gradients)

    def both(self, change: Change) -> None:
        change(self.theirs, self.their_optimizer)
        change(self.ours, self.our_optimizer)

    def step(self, inputs: Any, *targets: Any) -> Tensor:
        self.their_optimizer.zero_grad()
        if isinstance(inputs, dict):
            output = self.theirs(**inputs)
        else:
            output = self.theirs(*inputs) if isinstance(inputs, tuple | list) else self.theirs(inputs)
        loss = self.loss(output, *targets) if self.loss is not None else output.loss
        loss.backward()
        self.their_optimizer.step()
        found = self.call(inputs, *targets)
        assert found.shape == () and not found.requires_grad
        assert distance(found, loss) < 1e-4
        self.compare()
        return found

    def compare(self) -> None:
        theirs = dict(self.theirs.state_dict())
        assert_tensors_conform(self.ours.state_dict(), theirs, theirs, 2e-4)
        ours, expected = self.our_optimizer.state_dict(), self.their_optimizer.state_dict()
        assert ours["param_groups"] == expected["param_groups"]
        assert ours["state"].keys() == expected["state"].keys()
        for key, entry in expected["state"].items():
            tensors = {n: t for n, t in entry.items() if isinstance(t, Tensor)}
            assert_tensors_conform({n: ours["state"][key][n] for n in tensors}, tensors, tensors, 1e-3)

    def whole(self) -> None:
        """Everything ran as one program."""
        assert self.call.breaks == [] and self.call.pieces is None


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


def batch(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 4)


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
        "OneCycleLR": {"max_lr": 0.1, "total_steps": 8, "cycle_momentum": False},
        "ReduceLROnPlateau": {"patience": 0},
    }[scheduler]
    pair = Pair(mlp())
    kind = getattr(torch.optim.lr_scheduler, scheduler)
    made = [kind(optimizer, **options) for optimizer in (pair.their_optimizer, pair.our_optimizer)]
    for _ in range(5):
        pair.step(*batch())
        for schedule in made:
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
    assert "Python objects" in pair.call.breaks[0]


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
    assert "that it depends on" in pair.call.breaks[0]


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
    handle.remove()
    pair.step(*batch())
    assert len(seen) == 2


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
    assert len(pair.call.breaks) == 1 and "test_step.py" in pair.call.breaks[0]


def test_other_optimizers_run_in_pieces() -> None:
    pair = Pair(mlp(), torch.optim.NAdam)
    for _ in range(2):
        pair.step(*batch())
    assert "NAdam" in pair.call.breaks[0]


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
    from daceml_train.runtime.executor import pool_statistics

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
