"""Types of what operators outside of a recursion return, for other numbers of rows than those that they were learned for."""

import copy
import gc
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.frontends.torch.recursion.cells import Fakes
from daceml_train.frontends.torch.recursion.lazy import Lazy, lazy_of, meta_of
from daceml_train.frontends.torch.recursion.outside import Results
from daceml_train.frontends.torch.recursion.runs import Run, Solo
from tests.driver.test_recursion import TreeLSTM, forest

WEIGHT = torch.randn(5, 3, requires_grad=True)
CALLS: dict[str, Any] = {
    "linear": (F.linear, lambda x: (x, WEIGHT), {}),
    "cross entropy": (F.cross_entropy, lambda x: (x, torch.zeros(len(x), dtype=torch.int64)), {}),
    "each": (F.cross_entropy, lambda x: (x, torch.zeros(len(x), dtype=torch.int64)), {"reduction": "none"}),
    "weighted": (F.cross_entropy, lambda x: (x, torch.zeros(len(x), dtype=torch.int64), torch.ones(3)), {}),
    "softmax": (F.softmax, lambda x: (x, 0), {}),
    "tanh": (torch.tanh, lambda x: (x,), {}),
    "rows and columns": (torch.mm, lambda x: (x, x.detach().T), {}),
    "the first rows": (torch.narrow, lambda x: (x, 0, 0, min(len(x), 4)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_types_are_those_of_pytorch(name: str) -> None:
    function, arguments, keywords = CALLS[name]
    results = Results(Fakes())
    for rows in (7, 1, 3, 5, 9, 12, 7):
        x = torch.randn(rows, 3, requires_grad=True)
        args = arguments(x)
        found, why = results.of(function, (lazy_of(None, 0, meta_of(x)), *args[1:]), keywords)
        assert found is meta_of(function(*args, **keywords)) and not why


def test_other_numbers_of_rows_are_not_asked_for() -> None:
    fakes = Fakes()
    results = Results(fakes)
    for rows in range(6, 30):
        results.of(F.linear, (lazy_of(None, 0, meta_of(torch.randn(rows, 3))), WEIGHT), {})
    assert len(results.known) == 1


def test_attributes_of_a_lazy_value_are_those_of_its_tensor() -> None:
    x = torch.randn(2, 3)
    value = lazy_of(None, 0, meta_of(x))
    value.value = x
    computed: Any = value
    assert computed.is_leaf and computed.grad_fn is None and computed.layout is torch.strided
    assert computed.itemsize == 4 and torch.equal(computed.data, x) and torch.equal(computed.T, x.T)
    assert not hasattr(value, "no such attribute")


class Joined(TreeLSTM):
    """The states of all roots in one tensor, as one operand."""

    def forward(self, trees: list[Any]) -> torch.Tensor:
        """The results for the roots."""
        return self.out(torch.cat([self.visit(tree)[0] for tree in trees])).sum()


def test_a_batch_is_released_without_garbage_collection() -> None:
    compiled = dt.optimize(Joined())
    compiled(forest(0, 3)).backward()
    gc.collect()
    gc.disable()

    def alive() -> int:
        return sum(type(o) in (Run, Solo, Lazy) for o in gc.get_objects())

    before = alive()  # what other tests of this process left is not of this batch
    try:
        compiled(forest(1, 3)).backward()
        assert alive() <= before
    finally:
        gc.enable()


class Extended(TreeLSTM):
    """A forward pass that calls a method which user code has added to tensors."""

    def forward(self, trees: list[Any]) -> torch.Tensor:
        """The results for the roots."""
        states = torch.cat([self.visit(tree)[0] for tree in trees])
        return states.doubled().sum()  # type: ignore[attr-defined, no-any-return]


def test_a_method_that_was_added_to_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Extended()
    twin, compiled = copy.deepcopy(model), dt.optimize(model)
    monkeypatch.setattr(torch.Tensor, "doubled", lambda self: self + self, raising=False)
    torch.testing.assert_close(compiled(forest(0, 3)), twin(forest(0, 3)))
