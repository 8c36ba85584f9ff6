"""What models keep in Python from step to step: counters, schedules, states; each is as in eager execution, and programs
are compiled for structures, not for values.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import STORM, state_of
from daceml_train.driver.step import ALLOWED_CHANGES
from daceml_train.frontends.torch.dynamo import tracing

pytestmark = pytest.mark.compiled


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.r = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls, self.rate = 0, 1.0
        self.counts: dict[str, Any] = {"n": 0}
        self.state, self.mean = torch.zeros(4, 6), torch.zeros(6)
        self.seen: list[Any] = []


class Counter(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.l(x).tanh()


class Scaled(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.l(x).tanh() * self.calls + (2 * self.calls - 3)


class Divided(Model):
    """An integer that is divided, rounded down, and taken to a power."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 3
        return self.l(x).tanh() / self.calls + self.calls // 2 + self.calls**2 * 1e-3


class DictCounter(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.counts["n"] += x.shape[0]
        return self.l(x).tanh()


class Schedule(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.rate *= 0.9
        return self.l(x).tanh() * self.rate


class Branch(Model):
    """One way every third call, another one otherwise: two programs, not one for each call."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.l(x).tanh() if self.calls % 3 == 0 else self.l(x).relu()


class Recurrent(Model):
    """Truncated backpropagation through time."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.l(x) + self.r(self.state))
        self.state = h.detach()
        return h


class Average(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        return (h - self.mean).tanh()


class Views(Model):
    """What is kept shares memory with other values, and with a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        self.counts |= {"h": h.detach(), "t": h.detach().t(), "w": self.l.weight.detach()}
        return h.tanh()


MODELS = (Counter, Scaled, Divided, DictCounter, Schedule, Branch, Recurrent, Average, Views)


def kept(model: nn.Module) -> dict[str, Any]:
    return {name: getattr(model, name) for name in ("calls", "rate", "counts", "state", "mean", "seen")}


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    (one, form), (other, expected) = pytree.tree_flatten(kept(ours)), pytree.tree_flatten(kept(theirs))
    assert form == expected
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert a.stride() == b.stride() and a.requires_grad == b.requires_grad
        else:
            assert a == b


def train(model: nn.Module, way: str, cache: Path, steps: int) -> tuple[int, list[str]]:
    """Train a model and its copy in eager execution; programs compiled, and what breaks the step or the module."""
    torch._dynamo.reset()
    eager = copy.deepcopy(model)
    # With a rate of 0.1, tanh saturates, and eager execution itself is 5e-6 from float64 after 12 steps; with 0.01, 5e-8.
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, eager))
    step: Any = (
        dt.training_step(model, torch.sum, ours, cache=cache) if way == "step" else dt.optimize(model, cache=cache)
    )
    for number in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        if way == "step":
            loss = step(x)
        else:
            loss = step(x).sum()
            ours.zero_grad()
            loss.backward()
            ours.step()
        expected = eager(x).sum()
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=1e-5)
        assert_same_state(step if way == "optimize" else model, eager)
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    state = state_of(step if way == "optimize" else step.pieces)
    graphs = 0 if state is None else state.backend.graphs
    breaks = step.breaks if way == "step" else state.backend.breaks  # type: ignore[union-attr]
    return graphs + (step._captures if way == "step" else 0), list(breaks)


@pytest.mark.parametrize("way", ["step", "optimize"])
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_programs_are_for_structures(kind: type[Model], way: str, tmp_path: Path) -> None:
    programs, breaks = train(kind(), way, tmp_path, 12)
    assert not breaks and programs <= 4, (programs, breaks)


@pytest.mark.parametrize("way", ["step", "optimize"])
def test_a_storm_of_recompilations_ends_and_is_named(way: str, tmp_path: Path) -> None:
    """TorchDynamo compiles once for each length of a tuple."""

    class Listing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.seen: tuple[Tensor, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            h = self.l(x)
            self.seen = (*self.seen, h.detach().mean())
            return h.tanh() + torch.stack(self.seen).mean()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        programs, breaks = train(Listing(), way, tmp_path, 2 * STORM + 4)
    most = STORM + 1 + (ALLOWED_CHANGES + 1 if way == "step" else 0)  # the last ones are refused
    assert programs <= most and any("len(" in text and "seen" in text for text in breaks), breaks
    assert any("seen" in str(w.message) for w in caught)


class Rounding(torch.autograd.Function):
    """Takes a number, and so is no part of a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: int) -> Tensor:
        return (x * levels).round() / levels

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Quantized(Model):
    """A counter in a model that PyTorch runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Rounding.apply(self.l(x).tanh(), 2 ** (8 - self.calls % 4))


def test_a_storm_of_graphs_that_pytorch_runs_ends_as_well(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        programs, breaks = train(Quantized(), "optimize", tmp_path, 2 * STORM + 4)
    assert programs <= STORM + 4 and any("calls" in text for text in breaks), (programs, breaks)


class Padded(nn.Module):
    """Sequences of lengths that differ in each call; which of them are longer differs as well."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.l = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return self.l(self.words(nn.utils.rnn.pad_sequence(parts, batch_first=True))).mean(1)


def test_a_storm_of_sizes_in_a_list_ends() -> None:
    torch.manual_seed(0)
    theirs = Padded()
    ours = copy.deepcopy(theirs)
    module = dt.optimize(ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(STORM + 4):
            parts = [torch.zeros(int(size), dtype=torch.long) for size in torch.randint(1, 40, (8,))]
            module(parts).sum().backward()
            theirs(parts).sum().backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    state = state_of(module)
    assert state is not None
    assert state.backend.graphs <= STORM + 2, state.backend.graphs  # what follows `pad_sequence` has two of its own
    assert any("recompiled at nearly every call" in reason for reason in state.backend.breaks)


class ListOfSix(Model):
    """A list that grows in the first six calls."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        self.seen.append(h.detach().mean())
        if len(self.seen) > 6:
            self.seen.pop(0)
        return h.tanh() * torch.stack(self.seen).mean()


def test_a_list_that_stops_growing_compiles_nothing_from_then_on(tmp_path: Path) -> None:
    programs, breaks = train(ListOfSix(), "step", tmp_path, 12)
    assert programs <= 8 and len(breaks) == 1 and "len(" in breaks[0], (programs, breaks)
    assert train(ListOfSix(), "step", tmp_path, 24)[0] == programs


def test_effects_are_those_of_the_code_that_was_bound(tmp_path: Path) -> None:
    """Code for any batch and rate, which has one output more, is found before the code for the first rate."""
    model = Schedule()
    eager = copy.deepcopy(model)
    step = dt.training_step(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), cache=tmp_path)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for batch, rate in ((4, 1.0), (6, None), (4, 1.0), (6, None), (4, None)):
        x = torch.randn(batch, 6)
        for each in (model, eager):
            each.rate = each.rate if rate is None else rate
        loss, expected = step(x), eager(x).sum()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.l.weight, eager.l.weight)
        assert_same_state(model, eager)
    assert not step.breaks


def test_a_state_that_carries_a_gradient_runs_in_pieces(tmp_path: Path) -> None:
    class Carrying(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.l(x) + self.r(x))
            self.counts["h"] = h
            return h

    _, breaks = train_without_state(Carrying(), tmp_path)
    assert any("carry a gradient" in text for text in breaks)


def train_without_state(model: nn.Module, cache: Path) -> tuple[Tensor, list[str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = dt.training_step(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), cache=cache)
        loss = step(torch.ones(4, 6))
    assert model.counts["h"].requires_grad
    return loss, step.breaks


class PartOfWhatIsKept(Model):
    """The loss is one element of a tensor that is kept: its gradient is not that of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x).sum(1)
        self.state = h.detach()
        return h[0]


def test_a_loss_that_is_a_part_of_what_is_kept(tmp_path: Path) -> None:
    model = PartOfWhatIsKept()
    eager, x = copy.deepcopy(model), torch.randn(4, 6)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager))
    step = dt.training_step(model, lambda y: y, ours, cache=tmp_path)
    for _ in range(2):
        loss = step(x)
        expected = eager(x)
        theirs.zero_grad()
        expected.backward()
        theirs.step()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(model.l.weight, eager.l.weight)
        assert_same_state(model, eager)
    assert any("shares memory" in text for text in step.breaks)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_loss_that_is_a_part_of_a_parameter(keeps: bool, tmp_path: Path) -> None:
    class Part(Model):
        def forward(self, x: Tensor) -> Tensor:
            if keeps:
                self.seen = [self.l.weight]
            return self.l.weight.flatten()[-1]

    model = Part()
    wanted = model.l.weight.detach().clone()
    wanted[-1, -1] -= 0.1
    step = dt.training_step(model, lambda y: y, torch.optim.SGD(model.parameters(), lr=0.1), cache=tmp_path)
    step(torch.ones(4, 6))
    torch.testing.assert_close(model.l.weight.detach(), wanted)
    assert any("view of a parameter" in text for text in step.breaks)


def test_a_view_of_a_parameter_beside_a_detached_view(tmp_path: Path) -> None:
    """The result is a view of the parameter, not of what is kept, which carries no gradient."""

    class Beside(Model):
        def __init__(self) -> None:
            super().__init__()
            self.state = self.l.weight.detach()

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.state.sum(0)
            self.state = self.l.weight.T.detach()
            return self.l.weight.flatten()[-1]

    model = dt.optimize(Beside(), cache=tmp_path)
    for _ in range(3):
        loss = model(torch.ones(4, 6))
        (gradient,) = torch.autograd.grad(loss, model.l.weight)
        assert gradient[-1, -1] == 1 and gradient.sum() == 1


def test_versions_count_changes_in_place(tmp_path: Path) -> None:
    """Eager execution counts each change of a buffer and of what is kept; a program writes each once."""

    class Changing(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.b.add_(1.0)
            self.b[1:].mul_(2.0)
            self.mean.neg_().add_(1.0).mul_(3.0)
            self.state.neg_().neg_()  # which is what it was: the program writes nothing
            return self.l(x) + self.b + self.mean

    model, eager = Changing(), Changing()
    step = dt.training_step(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), cache=tmp_path)
    for _ in range(3):
        step(torch.ones(4, 6))
        eager(torch.ones(4, 6))
    assert not step.breaks
    for ours, theirs in ((model.b, eager.b), (model.mean, eager.mean), (model.state, eager.state)):
        torch.testing.assert_close(ours, theirs)
        assert ours._version == theirs._version


def test_versions_of_what_is_kept_follow_it(tmp_path: Path) -> None:
    """What is changed to what it was is another tensor in each step, and from the second one on a buffer's memory."""

    class Following(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.neg_().neg_()
            self.mean = self.b.detach()
            return self.l(x)

    model, eager = Following(), Following()
    step = dt.training_step(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), cache=tmp_path)
    for _ in range(3):
        step(torch.ones(4, 6))
        eager(torch.ones(4, 6))
        assert model.b._version == eager.b._version
        assert model.mean._version == eager.mean._version
    assert not step.breaks


def test_a_step_that_raises_keeps_nothing(tmp_path: Path) -> None:
    class Checked(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.l(x) + self.r(self.state))
            torch._assert_async((x < 100).all(), "large")
            self.state = h.detach()
            return h

    model = Checked()
    step = dt.training_step(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), cache=tmp_path)
    step(torch.ones(4, 6))
    before = model.state, [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="large"):
        step(torch.full((4, 6), 200.0))
    assert model.state is before[0]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before[1], strict=True))


@pytest.mark.parametrize("way", ["step", "optimize"])
def test_compiled_code_runs_without_the_settings_of_traces(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take as long as the small programs between which Python runs."""
    model, entered, settings = Counter(), [], tracing.tracing

    def counted() -> Any:
        entered.append(torch._dynamo.config.allow_rnn)
        return settings()

    monkeypatch.setattr(tracing, "tracing", counted)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = dt.optimize(model, cache=tmp_path) if way == "optimize" else dt.training_step(model, torch.sum, sgd)
    for _ in range(4):
        step(torch.ones(4, 6))
    assert entered and not torch._dynamo.config.allow_rnn
    entered.clear()
    step(torch.ones(4, 6))
    assert not entered and model.calls == 5
