"""Whole training steps through the GPU's launch path, on an emulated one: they equal PyTorch's loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver import TrainingStep
from tests.driver.conformity import assert_tensors_conform, distance
from tests.driver.networks import mlp
from tests.runtime.emulation import Emulated, EmulatedCuda, emulated

pytestmark = pytest.mark.compiled


class Branches(nn.Module):
    """Four small branches that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 4, k, padding=k // 2), nn.BatchNorm2d(4), nn.ReLU()) for k in (1, 3, 5)
        )
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.stem(x))
        joined = torch.cat([branch(h) for branch in self.branches], 1)
        return self.head(joined.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.block = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens))).flatten(0, 1)


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 11, (3, 6)), torch.randint(0, 11, (18,))


def numbers(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 4)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Any]] = {
    "mlp": (mlp, numbers, F.mse_loss),
    "branches": (Branches, images, F.cross_entropy),
    "attention": (Attention, tokens, F.cross_entropy),
}


class Both:
    """A step on an emulated GPU, and PyTorch's loop."""

    def __init__(self, model: nn.Module, loss: Any, optimizer: Callable[..., torch.optim.Optimizer], **options: Any):
        self.theirs, self.loss = model, loss
        self.ours = copy.deepcopy(model)
        self.their_optimizer = optimizer(self.theirs.parameters())
        self.our_optimizer = optimizer(self.ours.parameters())
        self.step: TrainingStep = dt.training_step(self.ours, loss, self.our_optimizer, **options)

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        self.their_optimizer.zero_grad()
        expected = self.loss(self.theirs(x), y)
        expected.backward()
        self.their_optimizer.step()
        found = self.step(x, y)
        assert distance(found, expected) < 1e-4
        state = dict(self.theirs.state_dict())
        assert_tensors_conform(self.ours.state_dict(), state, state, 2e-4)
        return found

    @property
    def graphs(self) -> Any:
        (graphs,) = self.step.cuda_graphs.values()
        return graphs


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Where some gradients are zero but for rounding, which Adam would make large."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize(
    ("network", "schedule"),
    [
        *((name, "ahead_of_time") for name in NETWORKS),
        ("mlp", "plain"),
        *(pytest.param(name, "plain", marks=pytest.mark.wide) for name in ("branches", "attention")),
    ],
)
def test_steps_equal_pytorch(network: str, schedule: str) -> None:
    model, batch, loss = NETWORKS[network]
    with emulated() as device:
        both = Both(model(), loss, adam if network == "mlp" else sgd, schedule=schedule)
        losses = [both.run(*batch()) for _ in range(4)]
    assert both.step.breaks == []
    assert len({t.data_ptr() for t in losses}) == 4  # a loss is a new tensor
    if schedule == "plain":
        assert device.replays == 0 and not both.step.cuda_graphs
    else:
        assert device.replays == 3 and both.graphs.captured == 1 and both.graphs.reasons == []


@pytest.mark.parametrize("network", ["mlp", "attention", pytest.param("branches", marks=pytest.mark.wide)])
def test_steps_in_cuda_kernels(network: str) -> None:
    """The kernels that a GPU would run, in the emulator."""
    model, batch, loss = NETWORKS[network]
    with emulated(Emulated(EmulatedCuda())) as device:
        both = Both(model(), loss, adam if network == "mlp" else sgd)
        for _ in range(3):
            both.run(*batch())
    assert both.step.breaks == [] and device.replays == 2


def test_several_streams() -> None:
    """Orders that only streams and events restrict give the same numbers."""
    with emulated() as device:
        both = Both(Branches(), F.cross_entropy, sgd)
        for _ in range(8):
            both.run(*images())
        (graph,) = both.graphs.graphs.values()
    assert graph.schedule.streams > 1 and device.replays == 7


def test_one_stream_where_nothing_is_gained() -> None:
    device = Emulated()
    device.model = dataclasses.replace(device.model, processors=1, threads=1)  # which any launch fills
    with emulated(device):
        both = Both(Branches(), F.cross_entropy, sgd)
        for _ in range(3):
            both.run(*images())
        (graph,) = both.graphs.graphs.values()
    assert graph.schedule.streams == 1 and "faster" in graph.schedule.reason


def test_new_sizes_are_captured_and_few_are_kept() -> None:
    with emulated():
        both = Both(mlp(), F.mse_loss, adam)
        for size in (6, 6, 6, 4, 4, 4, 6, 3, 3, 5, 5, 7, 7, 7, 6, 6):
            both.run(*numbers(size))
        assert both.step.breaks == []
        assert len(both.graphs.graphs) <= 4 and both.graphs.captured >= 5


def test_rates_reach_the_graph() -> None:
    with emulated():
        both = Both(mlp(), F.mse_loss, adam)
        schedulers = [
            torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (both.their_optimizer, both.our_optimizer)
        ]
        for _ in range(5):
            both.run(*numbers())
            for scheduler in schedulers:
                scheduler.step()
        assert both.graphs.captured == 1 and both.graphs.replayed == 4


def test_other_options_are_captured_anew() -> None:
    with emulated():
        both = Both(mlp(), F.mse_loss, adam)
        for decay in (0.0, 0.0, 0.0, 0.1, 0.1, 0.1):
            for optimizer in (both.their_optimizer, both.our_optimizer):
                optimizer.param_groups[0]["weight_decay"] = decay
            both.run(*numbers())
        assert both.graphs.captured == 2


def test_other_settings_of_libraries_are_captured_anew() -> None:
    with emulated() as device:
        both = Both(mlp(), F.mse_loss, adam)
        for flags in ("tf32", "tf32", "tf32", "ieee", "ieee", "ieee"):
            device.flags = flags
            both.run(*numbers())
        assert both.graphs.captured == 2


def test_parameters_that_moved() -> None:
    with emulated():
        both = Both(mlp(), F.mse_loss, adam)
        for turn in range(6):
            if turn == 3:
                for p in both.ours.parameters():
                    p.data = p.data.clone()
            both.run(*numbers())
        assert both.step.breaks == []


def test_a_capture_that_fails() -> None:
    device = Emulated()
    device.refuses = "operation not permitted when stream is capturing"
    with emulated(device):
        both = Both(mlp(), F.mse_loss, adam)
        for _ in range(4):
            both.run(*numbers())
        assert device.replays == 0 and both.step.breaks == []
        assert both.graphs.reasons == [f"a step runs launch by launch, since it cannot be captured: {device.refuses}"]


def test_random_numbers_advance() -> None:
    """Dropout draws new numbers in every replay of a graph, and the same after the same seed."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4))
    x, y = numbers()
    found = []
    with emulated():
        step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0))
        for _ in range(2):
            torch.manual_seed(3)
            found.append([float(step(x, y)) for _ in range(4)])
    assert len(set(found[0])) == 4 and found[0] == found[1]


def test_numbers_drawn_by_pytorch() -> None:
    with emulated():
        model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 4))
        both = Both(model, F.mse_loss, adam, random="eager")
        for _ in range(4):
            x, y = numbers()
            state = torch.get_rng_state()
            both.their_optimizer.zero_grad()
            expected = F.mse_loss(both.theirs(x), y)
            torch.set_rng_state(state)
            found = both.step(x, y)
            assert distance(found, expected) < 1e-4
            both.theirs.load_state_dict(both.ours.state_dict())


def test_clipping_and_loss_scaling() -> None:
    """An update that is skipped is skipped in a replay, too."""
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=0.01, growth_interval=2) for _ in range(2)]
    their, mine = adam(theirs.parameters()), adam(ours.parameters())
    with emulated() as device:
        step = dt.training_step(ours, F.mse_loss, mine, scaler=scalers[1], clip_norm=0.1)
        for _ in range(6):
            x, y = (100 * t for t in numbers())
            their.zero_grad()
            scalers[0].scale(F.mse_loss(theirs(x), y)).backward()
            scalers[0].unscale_(their)
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
            scalers[0].step(their)
            scalers[0].update()
            step(x, y)
            assert scalers[1].get_scale() == scalers[0].get_scale()
            state = dict(theirs.state_dict())
            assert_tensors_conform(ours.state_dict(), state, state, 2e-5)
    assert device.replays == 5


def test_micro_batches_and_kept_gradients() -> None:
    theirs = mlp()
    ours = copy.deepcopy(theirs)
    their, mine = adam(theirs.parameters()), adam(ours.parameters())
    with emulated() as device:
        step = dt.training_step(ours, F.mse_loss, mine, micro_batches=3)
        for _ in range(3):
            x, y = numbers()
            their.zero_grad()
            F.mse_loss(theirs(x), y).backward()
            their.step()
            step(x, y)
            state = dict(theirs.state_dict())
            assert_tensors_conform(ours.state_dict(), state, state, 2e-5)
        assert step.breaks == [] and device.replays > 4
        kept = dt.training_step(ours, F.mse_loss, mine, keep_gradients=True)
        held = []
        for _ in range(3):
            kept(*numbers())
            held.append([p.grad.clone() for p in ours.parameters() if p.grad is not None])
        assert all(len(g) == len(held[0]) > 0 for g in held) and not torch.equal(held[1][0], held[2][0])


def test_autocast() -> None:
    with emulated(), torch.autocast("cpu", dtype=torch.bfloat16):
        both = Both(mlp(), F.mse_loss, sgd)
        for _ in range(3):
            x, y = numbers()
            both.their_optimizer.zero_grad()
            expected = F.mse_loss(both.theirs(x), y)
            expected.backward()
            both.their_optimizer.step()
            assert distance(both.step(x, y), expected) < 2e-2
        assert both.step.breaks == []


def test_bytes_of_the_arena_are_those_planned() -> None:
    with emulated() as device:
        both = Both(Branches(), F.cross_entropy, sgd)
        for _ in range(2):
            both.run(*images())
        arena = both.step.arenas[device]
        executable = both.step.records[0].executable
        assert executable is not None
        assert arena.capacity == executable.plan(()).arena_bytes > 0


def test_more_kinds_than_graphs_are_kept_for() -> None:
    """Captures of kinds that take turns become rare, instead of one at each call."""
    with emulated():
        both = Both(mlp(), F.mse_loss, adam)
        for turn in range(120):
            both.step(*numbers(3 + turn % 6))
        assert len(both.graphs.graphs) == 4 and both.graphs.captured <= 36


def test_settings_that_alternate() -> None:
    with emulated() as device:
        both = Both(mlp(), F.mse_loss, adam)
        for turn in range(40):
            device.flags = turn % 2
            both.step(*numbers())
        assert both.graphs.captured <= 8


class Ordered(Emulated):
    """Logs which stream waits."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def wait(self, event: Any) -> None:
        self.log.append("wait")
        super().wait(event)


def test_numbers_of_the_host_are_updated_after_the_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on another stream overwrites the rate that the last step may still read."""
    device = Ordered()
    copied = Tensor.copy_

    def copy(self: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            device.log.append("rate")
        return copied(self, other)

    monkeypatch.setattr(Tensor, "copy_", copy)
    with emulated(device):
        both = Both(mlp(), F.mse_loss, adam)
        for turn in range(6):
            both.our_optimizer.param_groups[0]["lr"] = 0.1 / (1 + turn)
            device.log.clear()
            with device.on(1000 + turn % 2):
                both.step(*numbers())
            assert turn == 0 or device.log[:2] == ["wait", "rate"]


def test_statistics_in_one_pass_keep_their_digits() -> None:
    """A mean of 1000 deviations: sums of squares in float32 would have none left."""
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 36, 4))
    x, y = 1000 + torch.randn(8, 3, 6, 6), torch.randn(8, 4)
    with emulated():
        both = Both(model, F.mse_loss, sgd)
        both.run(x, y)
        assert both.step.breaks == []
        norm = both.ours[0]
        assert isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None
        exact = 0.9 + 0.1 * x.double().var((0, 2, 3))
        torch.testing.assert_close(norm.running_var.double(), exact, rtol=1e-6, atol=0)
