"""The autotuner: it chooses what a clock says is fastest, stores the choice, and never changes numbers."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver import TrainingStep
from daceml_train.errors import CompilerError
from daceml_train.lowering.program import KernelLaunch
from daceml_train.runtime.bound_plan import BoundPlan
from daceml_train.runtime.gpu import autotune
from daceml_train.runtime.gpu.autotune import Autotuner, shape
from tests.runtime.emulation import Emulated, EmulatedCuda, emulated

pytestmark = pytest.mark.compiled


class Timed(Emulated):
    """Runs each candidate once, and says that this one of them is fastest."""

    def __init__(self, fastest: int = -1, margin: float = 0.5) -> None:
        super().__init__(EmulatedCuda())
        self.fastest, self.margin = fastest, margin
        self.measured: list[int] = []

    def times(self, runs: Sequence[Callable[[int], None]]) -> list[float]:
        for run, turn in itertools.product(runs, range(2)):
            run(turn)
        self.measured.append(len(runs))
        results = [1.0] * len(runs)
        results[self.fastest % len(runs)] = self.margin
        return results


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "LEAST_BYTES", 1)
    monkeypatch.setattr(autotune, "ROTATED", 1)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BoundPlan]]:
    """Every plan that is bound."""
    results: list[BoundPlan] = []
    bind = BoundPlan.__init__

    def noted(self: BoundPlan, *arguments: Any, **keywords: Any) -> None:
        bind(self, *arguments, **keywords)
        results.append(self)

    monkeypatch.setattr(BoundPlan, "__init__", noted)
    return results


class Normed(nn.Module):
    """Kernels of each kind: elementwise, over rows, sums over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.norm(x))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def train(device: Emulated, folder: Path, model: Callable[[], nn.Module] = Scaled, **options: object) -> TrainingStep:
    """Some steps of ours and of PyTorch's, from the same start on the same data."""
    torch.manual_seed(3)
    theirs = model()
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    with emulated(device):
        step = dt.training_step(ours, F.mse_loss, optimizers[0], cache=folder, **options)
        for _ in range(3):
            x, y = torch.randn(40, 64), torch.randn(40, 64)
            found = step(x, y)
            optimizers[1].zero_grad()
            expected = F.mse_loss(theirs(x), y)
            expected.backward()
            optimizers[1].step()
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    return step


def shapes(plan: BoundPlan) -> list[str]:
    return [shape(code) for code in plan.program.codes]


@pytest.mark.slow
@pytest.mark.usefixtures("all_are_large")
def test_whatever_is_fastest_is_taken_and_computes_the_same(tmp_path, plans) -> None:
    """Also with shapes that need more or less scratch memory than those that sizes suggest."""
    device = Timed()
    train(device, tmp_path, Normed)
    kernels = len(plans[0].program.codes)
    assert device.measured and all(count > 1 for count in device.measured)
    suggested, taken = [shape(c) for c in plans[0].base.codes], shapes(plans[0])
    assert len(taken) == kernels and sum(a != b for a, b in zip(suggested, taken, strict=True)) == len(device.measured)
    for index, launch in enumerate(plans[0].program.launches):
        if isinstance(launch, KernelLaunch):
            code = plans[0].program.codes[launch.code]
            scratch = launch.places[len(launch.places) - len(code.scratch) :]
            assert all(plans[0].program.slots[p.slot].first == index for p in scratch)
            assert set(range(len(launch.places) - len(scratch), len(launch.places))) <= set(launch.writes)


@pytest.mark.usefixtures("all_are_large")
def test_a_search_is_made_once_per_sizes(tmp_path, plans) -> None:
    first = Timed(1)
    train(first, tmp_path)
    again = Timed(0)  # would choose otherwise
    train(again, tmp_path)
    assert first.measured and not again.measured
    assert shapes(plans[-1]) == shapes(plans[0])
    (tmp_path / "shapes.json").write_text("{")
    train(again, tmp_path)
    assert again.measured == first.measured and shapes(plans[-1]) != shapes(plans[0])


@pytest.mark.usefixtures("all_are_large")
def test_sizes_that_vary_are_measured_once_for_similar_ones(tmp_path) -> None:
    device, counts = Timed(), []
    with emulated(device):
        model = Scaled()
        step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters()), cache=tmp_path, dynamic=True)
        for size in (40, 50, 60, 70):
            step(torch.randn(size, 64), torch.randn(size, 64))
            counts.append(len(device.measured))
    assert counts[0] == counts[1] == counts[2] < counts[3]


@pytest.mark.usefixtures("all_are_large")
def test_the_suggested_shape_stays_unless_another_one_gains(tmp_path, plans) -> None:
    train(Timed(1, margin=0.98), tmp_path)
    assert plans[0].program is plans[0].base


@pytest.mark.usefixtures("all_are_large")
def test_a_report_says_where_and_how_it_runs(tmp_path) -> None:
    device = Timed()
    text = str(dt.report(train(device, tmp_path)))
    found = re.search(r"on emulated, blocks of (.*) threads, (\d+) kernels? autotuned, (\d+) changed", text)
    assert found and int(found[2]) == int(found[3]) == len(device.measured)
    assert re.search(r"\d+ launches in one CUDA graph, on (one stream: |\d streams with \d+ events)", text)
    shapes = [launch.shape for launch in dt.report(train(Timed(0), tmp_path / "other")).functions[0].launches]
    assert any(re.fullmatch(r"\d+ threads, teams of \d+, \d+ x \d+ lanes each, \d+ blocks", s) for s in shapes)


def test_small_kernels_are_left_alone(tmp_path, plans) -> None:
    device = Timed()
    train(device, tmp_path)
    assert not device.measured and plans[0].program is plans[0].base


@pytest.mark.usefixtures("all_are_large")
def test_no_search_where_none_is_wanted(tmp_path, plans) -> None:
    device = Timed()
    train(device, tmp_path, autotune=False)
    assert not device.measured and plans[0].program is plans[0].base


@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("fault", ["memory", "compiler"])
def test_what_cannot_be_measured_keeps_its_shape(fault, tmp_path, plans, monkeypatch) -> None:
    noted: list[list[str]] = []
    tuned = Autotuner.tuned

    def watched(self, *arguments):
        noted.append(self.notes)
        return tuned(self, *arguments)

    monkeypatch.setattr(Autotuner, "tuned", watched)
    device = Timed()
    if fault == "memory":
        device.times = lambda runs: (_ for _ in ()).throw(torch.OutOfMemoryError("no room"))  # type: ignore[method-assign]
    else:
        addresses = device.toolchain.addresses

        def refuse(codes, folder, jobs, progress):
            if folder == tmp_path / "kernels" and noted:
                raise CompilerError("nvcc is gone")
            return addresses(codes, folder, jobs, progress)

        device.toolchain.addresses = refuse  # type: ignore[method-assign]
    train(device, tmp_path)
    assert plans[0].program is plans[0].base
    assert noted[0] and ("no room" in noted[0][0] or "nvcc is gone" in noted[0][0])


def test_times_are_the_shortest_of_batches_that_alternate() -> None:
    """The clock of a GPU, on a device whose events count what was called."""
    now, calls = [0.0], []

    class Ticking(Emulated):
        def event(self, timed: bool = False) -> float:
            return now[0]

        def seconds(self, start: float, end: float) -> float:
            return end - start

    def run(number: int, cost: float) -> Callable[[int], None]:
        def called(turn: int) -> None:
            calls.append(number)
            now[0] += cost * (3 if len(calls) % 7 == 0 else 1)  # noise only adds

        return called

    fast, slow = Ticking().times([run(0, 2e-4), run(1, 1e-4)])[::-1]
    assert 1e-4 <= fast < slow <= 3e-4
    switches = sum(a != b for a, b in itertools.pairwise(calls))
    assert switches >= 6 and set(calls) == {0, 1}
