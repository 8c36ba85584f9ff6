"""Steps that are compiled in the background: PyTorch's numbers before the swap, the compiled step's after, and no other."""

from __future__ import annotations

import copy
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.driver import background, optimizer_updates
from daceml_train.driver.background import BackgroundStep
from daceml_train.driver.bound_step import BoundStep
from daceml_train.runtime.forked import Forked, Tell

pytestmark = pytest.mark.compiled


@pytest.fixture(autouse=True)
def _at_full_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daceml_train.runtime.forked.NICE", 0)


Optimizer = Callable[[Any], torch.optim.Optimizer]


class Network(nn.Module):
    """A normalization with statistics, and dropout."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x)))
        return self.last(F.dropout(h, self.rate, self.training) if self.rate else h)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def batch(seed: int = 0, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


class Twins:
    """A network that trains in PyTorch, and its twin that is compiled in the background."""

    def __init__(self, optimizer: Optimizer = adam, rate: float = 0.0, **options: Any) -> None:
        torch.manual_seed(0)
        self.theirs = Network(rate)
        self.ours = copy.deepcopy(self.theirs)
        self.optimizer, self.other = optimizer(self.theirs.parameters()), optimizer(self.ours.parameters())
        step = dt.training_step(self.ours, F.cross_entropy, self.other, **{"compile": "background", **options})
        assert isinstance(step, BackgroundStep)
        self.step = step

    def train(self, *data: Tensor, after: Callable[[], None] = lambda: None) -> None:
        """One step of both, whose results are compared."""
        state = torch.get_rng_state()
        ours = self.step(*data)
        end = torch.get_rng_state()
        torch.set_rng_state(state)
        self.optimizer.zero_grad()
        theirs = F.cross_entropy(self.theirs(data[0]), data[1])
        theirs.backward()
        self.optimizer.step()
        after()
        assert torch.equal(torch.get_rng_state(), end)
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)
        for (name, value), (_, own) in zip(
            self.theirs.state_dict().items(), self.ours.state_dict().items(), strict=True
        ):
            torch.testing.assert_close(own, value, rtol=1e-4, atol=1e-5, msg=name)


def compiled(step: BackgroundStep) -> bool:
    """Whether the last call ran a compiled step."""
    return any(way.used for ways in step._bound.values() for way in ways)


@pytest.mark.parametrize("optimizer", [adam, momentum])
def test_the_swap_keeps_parameters_state_and_buffers(optimizer: Optimizer, tmp_path: Path) -> None:
    twins = Twins(optimizer, cache=tmp_path)
    for i in range(3):
        twins.train(*batch(i))
        assert not compiled(twins.step)
    assert twins.ours not in optimizer_updates._settings  # nothing is compiled for the update, which a call waits for
    assert "PyTorch trains while the step compiles" in repr(twins.step)
    assert "PyTorch trains while the step compiles" in str(dt.report(twins.step))
    assert twins.step.wait(300)
    for i in range(3, 8):
        twins.train(*batch(i))
        assert compiled(twins.step)
    assert not twins.step.breaks
    assert "step 4: the compiled step takes over (loss" in str(dt.report(twins.step))
    for one, other in zip(twins.theirs.parameters(), twins.ours.parameters(), strict=True):
        for name, value in twins.optimizer.state[one].items():
            torch.testing.assert_close(twins.other.state[other][name], value, rtol=1e-3, atol=1e-6)


def test_random_numbers_of_eager_across_the_swap() -> None:
    twins = Twins(momentum, rate=0.5, random="eager")
    for i in range(2):
        twins.train(*batch(i))
    assert twins.step.wait(300)
    for i in range(2, 6):
        twins.train(*batch(i))
    assert compiled(twins.step) and "loss" in twins.step.compilation[-1]


def test_seeded_random_numbers_repeat() -> None:
    found = []
    for _ in range(2):
        twins = Twins(momentum, rate=0.5)
        torch.manual_seed(3)
        losses = [twins.step(*batch(i)) for i in range(2)]
        assert twins.step.wait(300)
        found.append(torch.stack([*losses, *(twins.step(*batch(i)) for i in range(2, 6))]))
        assert compiled(twins.step) and "other random numbers" in twins.step.compilation[-1]
    assert torch.equal(*found)


def test_schedulers_of_the_learning_rate() -> None:
    twins = Twins(momentum)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (twins.optimizer, twins.other)]

    def after() -> None:
        for scheduler in schedulers:
            scheduler.step()

    for i in range(6):
        twins.train(*batch(i), after=after)
        assert i != 2 or twins.step.wait(300)
    assert compiled(twins.step)


def test_checkpoint_at_the_time_of_the_swap() -> None:
    twins = Twins(adam)
    for i in range(2):
        twins.train(*batch(i))
    assert twins.step.wait(300)
    model, optimizer = copy.deepcopy(twins.ours.state_dict()), copy.deepcopy(twins.other.state_dict())
    losses = [twins.step(*batch(i)) for i in range(2, 5)]
    assert compiled(twins.step)
    twins.ours.load_state_dict(model)
    twins.other.load_state_dict(optimizer)
    again = [twins.step(*batch(i)) for i in range(2, 5)]
    torch.testing.assert_close(again, losses)
    assert compiled(twins.step) and not twins.step.breaks


def test_found_in_the_cache_at_the_second_step() -> None:
    for _ in range(2):
        twins = Twins(adam)
        twins.train(*batch(0))
        twins.train(*batch(1))
        assert twins.step.wait(300)
        twins.train(*batch(2))
        assert compiled(twins.step)
    assert twins.step.compilation[0].startswith("step 3: the compiled step takes over")  # no process compiled


def test_what_an_earlier_run_noted_may_have_left_the_cache(tmp_path: Path) -> None:
    for _ in range(2):
        twins = Twins(adam, cache=tmp_path)
        for i in range(2):
            twins.train(*batch(i))
        twins.step.wait(300)
        twins.train(*batch(2))
        for program in (tmp_path / "programs").iterdir():
            program.unlink()
    twins.train(*batch(3))
    assert twins.step.wait(300)
    twins.train(*batch(4))
    assert compiled(twins.step) and not twins.step.breaks


def test_the_next_run_has_the_compiled_step_from_the_first_call(tmp_path: Path) -> None:
    first = Twins(adam, compile="next_run", cache=tmp_path)
    for i in range(4):
        first.train(*batch(i))
        assert first.step.wait(300)
        assert not compiled(first.step)  # the numbers of a run come from one program
    second = Twins(adam, compile="next_run", cache=tmp_path)
    for i in range(3):
        second.train(*batch(i))
        assert compiled(second.step)


def test_gradients_clipping_and_scaling() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    twins = Twins(momentum, keep_gradients=True, clip_norm=0.1)
    for i in range(4):
        loss = twins.step(*batch(i))
        assert twins.step.gradient_norm is not None and loss.requires_grad is False
        norm = torch.stack([p.grad.norm() for p in twins.ours.parameters() if p.grad is not None]).norm()
        assert norm <= 0.1001
        assert i != 1 or twins.step.wait(300)
    assert compiled(twins.step)
    scaled = Twins(momentum, scaler=scaler)
    for i in range(4):
        scaled.train(*batch(i))
        assert i != 1 or scaled.step.wait(300)
    assert compiled(scaled.step) and scaler.get_scale() == 8.0


def test_two_models_take_turns() -> None:
    one, other = Twins(adam), Twins(momentum)
    for i in range(2):
        one.train(*batch(i))
        other.train(*batch(i))
    assert sum(job.process is not None for t in (one, other) for job in t.step._compiling.values()) <= 1
    for twins in (one, other, one, other):
        twins.train(*batch(5))
        assert twins.step.wait(300)
    for twins in (one, other):
        twins.train(*batch(6))
        assert compiled(twins.step)


def test_another_size_of_batch_follows() -> None:
    twins = Twins(adam)
    for rows in (8, 8, 5, 5):
        twins.train(*batch(0, rows))
        assert twins.step.wait(300)
    for rows in (8, 5, 5, 8, 5, 5, 5):
        twins.train(*batch(1, rows))
        assert twins.step.wait(300)
    assert len([ways for ways in twins.step._bound.values() if ways and ways[0].used]) == 2
    assert not twins.step.breaks


def test_what_cannot_be_compiled_stays_in_pytorch_with_a_reason() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y if y.sum() > 0 else -y

    model = Branch()
    step = dt.training_step(model, F.cross_entropy, momentum(model.parameters()), compile="background")
    assert isinstance(step, BackgroundStep)
    for i in range(4):
        step(*batch(i))
        assert step.wait(300)
    assert len(step.breaks) == 1 and "test_background.py" in step.breaks[0]
    assert "test_background.py" in str(dt.report(step))


def _failing(how: str) -> Callable[..., Any]:
    def run(self: BackgroundStep, *arguments: Any) -> Any:
        if how == "error":
            raise RuntimeError("no room on the moon")
        os.kill(os.getpid(), signal.SIGSEGV)

    return run


@pytest.mark.parametrize(("how", "reason"), [("error", "no room on the moon"), ("crash", "SIGSEGV")])
def test_a_compilation_that_fails(how: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundStep, "_compile", _failing(how))
    twins = Twins(rate=0.0, optimizer=momentum, clip_value=77.0)  # of which no run has compiled one
    for i in range(4):
        twins.step(*batch(i))
        assert twins.step.wait(60)
    assert not compiled(twins.step) and len(twins.step.breaks) == 1 and reason in twins.step.breaks[0]


def test_a_compiled_step_with_wrong_numbers_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BoundStep.run

    def wrong(self: BoundStep, *arguments: Any) -> Any:
        loss = right(self, *arguments)
        with torch.no_grad():
            self.mutable[0].mul_(1.5)
        return loss

    twins = Twins(momentum)
    for i in range(2):
        twins.train(*batch(i))
    assert twins.step.wait(300)
    monkeypatch.setattr(BoundStep, "run", wrong)
    for i in range(2, 5):
        twins.train(*batch(i))  # PyTorch's numbers stay
    assert not compiled(twins.step) and "its update was" in twins.step.breaks[0]


def test_wrong_data_raises_in_the_step_that_compares() -> None:
    twins = Twins(momentum)
    for i in range(2):
        twins.train(*batch(i))
    assert twins.step.wait(300)
    x, y = batch(2)
    with pytest.raises(IndexError):
        twins.step(x, torch.full_like(y, 7))
    assert not twins.step.breaks
    twins.theirs.load_state_dict(twins.ours.state_dict())  # PyTorch's forward pass has updated its statistics
    for i in range(3, 6):
        twins.train(*batch(i))
    assert compiled(twins.step)


def test_a_step_that_is_dropped_ends_its_process() -> None:
    twins = Twins(momentum, clip_value=78.0)
    twins.step(*batch(0))
    twins.step(*batch(1))
    process = next(job.process for job in twins.step._compiling.values())
    assert process is not None
    pid = process.pid
    del twins, process
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


PROGRAM = """
import os, sys, time
import torch
from torch import nn
import daceml_train as dt
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
step = dt.training_step(model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1), compile="background")
for _ in range(3):
    step(torch.randn(4, 6), torch.zeros(4, dtype=torch.int64))
print(next(job.process.pid for job in step._compiling.values()), flush=True)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "",
        pytest.param("os._exit(3)", marks=pytest.mark.wide),
        "os.kill(os.getpid(), 9)",
        pytest.param("raise KeyboardInterrupt", marks=pytest.mark.wide),
    ],
)
def test_the_compiler_ends_with_the_process(end: str, tmp_path: Path) -> None:
    environment = {**os.environ, "DACEML_TRAIN_CACHE": str(tmp_path)}
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM.format(end=end))]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == {"": 0, "os._exit(3)": 3, "os.kill(os.getpid(), 9)": -9}.get(end, -2), done.stderr
    pid = int(done.stdout)
    for _ in range(100):
        if not _alive(pid):
            return
        time.sleep(0.1)
    raise AssertionError("the compiler lives on")


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_forked_sends_messages_and_sees_what_is_here() -> None:
    model = nn.Linear(2, 2)

    def work(tell: Tell) -> dict[str, Any]:
        with torch.no_grad():
            model.weight.zero_()
        for i in range(3):
            tell({"i": i})
        return {"sum": float(model.weight.sum())}

    before, forked, found = model.weight.clone(), Forked(work), []
    while forked.result is None:
        found += forked.poll()
        time.sleep(0.01)
    assert found == [{"i": 0}, {"i": 1}, {"i": 2}] and forked.result == {"sum": 0.0}
    assert torch.equal(model.weight, before) and not forked.running


def test_a_copy_that_waits_for_a_lock_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daceml_train.runtime.forked.STALLED", 0.3)
    monkeypatch.setattr("daceml_train.runtime.forked._LOOKED", 0.1)
    forked = Forked(lambda tell: time.sleep(60) or {})
    while forked.result is None:
        forked.poll()
        time.sleep(0.01)
    assert "no processor time" in forked.result["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": "later"}, "compile is one of"),
        ({"compile": "background", "micro_batches": 2}, "micro_batches exclude each other"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(dt.Invalid, match=message):
        dt.training_step(model, F.cross_entropy, momentum(model.parameters()), **options)


def test_attempts_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundStep, "_compile", lambda *_: {"warm": False})  # which fills no cache
    twins = Twins(momentum, clip_value=79.0)
    for i in range(2 * background.ATTEMPTS + 3):
        twins.step(*batch(i))
        assert twins.step.wait(60)
    assert not compiled(twins.step) and "does not have the program" in twins.step.breaks[0]
