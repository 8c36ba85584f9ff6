"""Errors by data that a model catches, and random numbers of Python's that become tensors."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import daceml_train as dt
from daceml_train.frontends.torch.handlers import catches_at
from tests.driver.imperative import SIZE, Imperative, Pair, Streams, assert_alike, batches, kept, loss_of


class Asserting(Imperative):
    """Assertions within a `try`, in a function that is called there, and where an error is suppressed."""

    def positive(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            assert h.sum() > 0
        return h * 2

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        try:
            h = self.positive(h)
        except (KeyError, AssertionError):
            self.notes.append("negative")
        with contextlib.suppress(AssertionError):
            assert h[0].sum() > 0
            h = h + 1
        try:
            return self.r(h)
        finally:
            self.calls += 1


class Factorizing(Imperative):
    """A factorization that is tried, and again with a larger diagonal."""

    def forward(self, x: Tensor) -> Tensor:
        h, eye = self.l(x), torch.eye(SIZE, dtype=x.dtype)
        shift = 1.0 if x.detach().sum() > 0 else -1.0
        try:
            factor = torch.linalg.cholesky(h.T @ h * 0.01 + eye * shift)
        except torch.linalg.LinAlgError:
            self.notes.append("shifted")
            factor = torch.linalg.cholesky(h.T @ h + eye)
        return self.r(h @ factor)


class OutsideTheTable(Imperative):
    """Rows of a table, elements, and classes that may be out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        h, rows = self.l(x), (x[:, 0].abs() * 4).long()
        try:
            h = h + self.table(rows)
        except IndexError:
            self.notes.append("row")
        try:
            try:
                h = h + h[:, rows + 1].mean(1, keepdim=True)
            finally:
                self.calls += 1
        except LookupError:
            self.notes.append("element")
        try:
            h = h + F.cross_entropy(h, rows)
        except Exception:
            self.notes.append("class")
        return self.r(h)


class Drawing(Imperative):
    """Numbers that Python draws, as factors and as tensors of the default type."""

    def forward(self, x: Tensor) -> Tensor:
        scale = random.uniform(0.5, 1.5)
        alone, filled = torch.tensor(scale), torch.full((2,), scale)
        self.notes.append((scale, alone.dtype, filled.dtype))
        return self.r(self.l(x) * scale) + alone + filled.sum()


MODELS = (Asserting, Factorizing, OutsideTheTable, Drawing)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_as_in_eager_execution(model: Callable[[], Imperative]) -> None:
    Pair(model()).train(batches(4))


@pytest.mark.parametrize("model", MODELS)
def test_a_module_as_in_eager_execution(model: Callable[[], Imperative]) -> None:
    theirs = model().double()
    ours = copy.deepcopy(theirs)
    compiled = dt.optimize(ours, random="eager")
    streams = Streams(7), Streams(7)
    for x in batches(4):
        losses = []
        for module, stream in ((compiled, streams[0]), (theirs, streams[1])):
            stream.enter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                losses.append(loss_of(module(x), torch.ones_like(x)))
            losses[-1].backward()
            stream.leave()
        assert_alike(losses[0].detach(), losses[1].detach(), "loss")
        assert_alike(kept(ours), kept(theirs))
        streams[0].assert_equal(streams[1])
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_alike(a.grad, b.grad, "gradient")


def test_code_whose_constants_have_no_hash() -> None:
    """As TorchDynamo generates it, where a hook of a module is added in the forward pass."""
    code = OutsideTheTable.forward.__code__
    generated = code.replace(co_consts=(*code.co_consts, {}))
    offsets = range(0, len(code.co_code), 2)
    assert any(catches_at(generated, at) for at in offsets)
    assert [catches_at(generated, at) for at in offsets] == [catches_at(code, at) for at in offsets]
