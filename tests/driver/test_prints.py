"""Lines that a model prints: those of eager execution, in its order, and those of numbers do not break a step."""

from __future__ import annotations

import copy
import functools
import logging
import logging.handlers
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.calls, self.rate, self.note = nn.Linear(4, 4), 0, 1.0, ""


def mean_of(x: Tensor, what: str) -> Tensor:
    print(what, f"{x.mean().item():+.2f}", 3)
    return x


class Lines(Model):
    """Lines of a function that is called twice, between assignments."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rate *= 0.5
        h = mean_of(self.l(x), "first")
        print("call", self.calls, self.rate, f"{self.rate:.1e}")
        print()
        return mean_of(h.tanh(), "second")


class Objects(Model):
    """A tensor that is changed later, a stream, and a text of the user's: each line breaks the graph."""

    def forward(self, x: Tensor) -> Tensor:
        self.note += "x"
        h = self.l(x)
        kept = h.detach().clone()
        print(kept.sum().item() > 1e9, end="!\n")
        print(kept)
        kept.add_(1)
        print("err", kept.shape, file=sys.stderr)
        print(self.note)
        return h.tanh() + kept


class Raising(Model):
    """Nothing is printed of a step that raises, as nothing is assigned."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        torch._assert_async((x < 100).all(), "large")
        print("mean", f"{h.mean().item():.2f}")
        return h


@pytest.mark.parametrize("way", ["step", "optimize"])
@pytest.mark.parametrize("kind", [Lines, Objects])
def test_lines(kind: type[Model], way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch._dynamo.reset()
    ours = kind()
    theirs = copy.deepcopy(ours)
    if way == "step":
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
        call: Any = dt.training_step(ours, lambda y: print("loss", 1) or y.sum(), optimizer, cache=tmp_path)
    else:
        call = dt.optimize(ours, cache=tmp_path)
    for number in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = call(x)
        printed = capsys.readouterr()
        expected = theirs(x)
        if way == "step":
            print("loss", 1)
            expected = expected.sum()
        assert printed == capsys.readouterr()
        torch.testing.assert_close(found, expected.detach() if way == "step" else expected)
        assert (ours.calls, ours.rate, ours.note) == (theirs.calls, theirs.rate, theirs.note)
    if kind is Lines and way == "step":
        assert not call.breaks and len(call.records) <= 3
    if kind is Lines and way == "optimize":
        assert state_of(call).backend.graphs <= 3  # type: ignore[union-attr]  # calls 0, 1, and any


def test_a_step_that_raises_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Raising()
    step = dt.training_step(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), cache=tmp_path)
    step(torch.ones(3, 4))
    assert capsys.readouterr().out.startswith("mean") and not step.breaks
    with pytest.raises(RuntimeError, match="large"):
        step(torch.full((3, 4), 200.0))
    assert not capsys.readouterr().out


class Announcing(Model):
    """A message that is given once, of texts or of what the model computes."""

    def forward(self, x: Tensor, reads: bool = False) -> Tensor:
        h = self.l(x)
        LOGGER.warning_once("deprecated: %s" % type(self).__name__)  # noqa: UP031
        if reads:
            LOGGER.warning_once(h)
        LOGGER.warning_once("deprecated: %s" % type(self).__name__)  # noqa: UP031
        return h.tanh()


class OnceLogger(logging.Logger):
    """As Hugging Face's loggers."""

    @functools.lru_cache(None)  # noqa: B019
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        self.warning(*args, **kwargs)


LOGGER = OnceLogger("announcing")
LOGGER.propagate = False


@pytest.mark.parametrize("way", ["step", "optimize"])
def test_messages_that_are_given_once_reach_the_user(way: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    OnceLogger.warning_once.cache_clear()
    said = logging.handlers.BufferingHandler(100)
    LOGGER.handlers = [said]
    model = Announcing()
    if way == "step":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step: Any = dt.training_step(model, torch.sum, optimizer, cache=tmp_path)
        breaks = step.breaks
    else:
        step = dt.optimize(model, cache=tmp_path)
        state = state_of(step)
        assert state is not None
        breaks = state.backend.breaks
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (2, 2, 3):
            step(torch.ones(size, 4))
    assert [record.getMessage() for record in said.buffer] == ["deprecated: Announcing"] and breaks == []


@functools.lru_cache
def available() -> bool:
    LOGGER.warning("looked for a package")
    return True


def test_a_cached_answer_has_had_its_effects(tmp_path: Path) -> None:
    """Libraries ask at import whether a package is there, and log it; a step that asks again is one program."""

    class Asking(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.l(x).tanh() if available() else self.l(x)

    available()
    said = logging.handlers.BufferingHandler(100)
    LOGGER.handlers = [said]
    model = Asking()
    step = dt.training_step(model, torch.sum, torch.optim.SGD(model.parameters(), lr=0.1), cache=tmp_path)
    for _ in range(3):
        step(torch.ones(2, 4))
    assert not step.breaks and not said.buffer


SCALES: list[int] = []


@functools.lru_cache
def scale(k: int) -> float:
    """Notes what it was asked, once."""
    parts = []
    parts.append(k)
    SCALES.append(sum(parts))
    return k + 1.0


@pytest.mark.filterwarnings("ignore:daceml_train runs a")
def test_a_cached_function_that_changes_an_object_is_called_as_often(tmp_path: Path) -> None:
    class Scaled(Model):
        k = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x).tanh() * scale(self.k)

    found = []
    for compiled in (False, True):
        scale.cache_clear()
        SCALES.clear()
        model: Any = Scaled()
        optimized = dt.optimize(model, cache=tmp_path) if compiled else model
        for call in range(6):
            model.k = call % 2
            optimized(torch.ones(2, 4))
        found.append(list(SCALES))
    assert found == [[0, 1], [0, 1]]


def test_a_message_that_reads_the_computation_is_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    OnceLogger.warning_once.cache_clear()
    LOGGER.handlers = [logging.NullHandler()]
    model = dt.optimize(Announcing(), cache=tmp_path)
    logging.getLogger("daceml_train.breaks").disabled = False  # whoever configures logging may have disabled it
    with caplog.at_level(logging.INFO, "daceml_train.breaks"):
        model(torch.ones(2, 4), True)
    assert "announcing.warning_once is left out" in caplog.text
