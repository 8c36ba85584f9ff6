"""Sparse gradients of tables of embeddings, which compiled graphs give as PyTorch does: rows and their indices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of

pytestmark = pytest.mark.compiled
TOKENS, OTHERS = torch.tensor([[1, 2, 2], [0, 9, 1]]), torch.tensor([[2, 2], [5, 1]])


class Table(nn.Module):
    """A table alone: its gradient's rows are the cotangent itself."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True, padding_idx=padding_idx)

    def forward(self, i: Tensor) -> Tensor:
        return self.table(i)


class Twice(Table):
    """A table read twice, whose sparse gradients are added."""

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        h = self.table(i).sum(1)
        return (h + self.table(j).tanh().mean(1)).square()


class Tied(Table):
    """A table that is a dense weight as well: in PyTorch, too, its gradient is dense."""

    def forward(self, i: Tensor) -> Tensor:
        return F.linear(self.table(i), self.table.weight)


class Bags(nn.Module):
    """Sums or means of rows."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.table, self.linear = nn.EmbeddingBag(10, 4, sparse=True, mode=mode), nn.Linear(4, 3)

    def forward(self, i: Tensor) -> Tensor:
        return self.linear(self.table(i)).relu()


class Derived(Table):
    """A table computed from a parameter: the sparse gradient is an operand of the reverse pass."""

    def forward(self, i: Tensor) -> Tensor:
        return F.embedding(i, self.table.weight * 2, sparse=True).sin()


CASES: dict[str, tuple[Callable[[], nn.Module], Sequence[Tensor]]] = {
    "alone": (Table, (TOKENS,)),
    "alone, padded": (lambda: Table(1), (TOKENS,)),
    "only padding": (lambda: Table(1), (torch.ones(2, 3, dtype=torch.int64),)),
    "nothing read": (Table, (TOKENS[:, :0],)),
    "twice": (Twice, (TOKENS, OTHERS)),
    "twice, padded": (lambda: Twice(2), (TOKENS, OTHERS)),
    "indices of 32 bits": (Table, (TOKENS.int(),)),
    "indices transposed": (Table, (TOKENS.t(),)),
    "tied": (Tied, (TOKENS,)),
    "sums": (lambda: Bags("sum"), (TOKENS,)),
    "means": (lambda: Bags("mean"), (TOKENS,)),
    "from a sequence": (lambda: nn.Sequential(Table(), nn.Flatten(), nn.Linear(12, 2)), (TOKENS,)),
}


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    theirs = make()
    return dt.optimize(copy.deepcopy(theirs)), theirs


def same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for own, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert own.grad is not None and their.grad is not None
        assert own.grad.layout == their.grad.layout
        torch.testing.assert_close(own.grad.to_dense(), their.grad.to_dense())


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    """Of two calls, whose gradients autograd adds up."""
    make, arguments = CASES[name]
    ours, theirs = both(make)
    for _ in range(2):
        y, expected = ours(*arguments), theirs(*arguments)
        torch.testing.assert_close(y, expected)
        seed = torch.randn_like(expected)
        y.backward(seed)
        expected.backward(seed)
        same_gradients(ours, theirs)
    state = state_of(ours)
    assert state is not None and not state.backend.breaks


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.SparseAdam(p, 0.1)],
    ids=["momentum", "SparseAdam"],
)
def test_optimizers_of_pytorch(optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    ours, theirs = both(Twice)
    pairs = [(model, optimizer(model.parameters())) for model in (ours, theirs)]
    for _ in range(3):
        for model, result in pairs:
            result.zero_grad()
            model(TOKENS, OTHERS).sum().backward()
            result.step()
    for own, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, their)


@pytest.mark.parametrize(
    "optimizer",
    [lambda p: torch.optim.SGD(p, 0.01), lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.1)],
    ids=["SGD", "Adagrad"],
)
def test_a_step_whose_update_leaves_other_rows_alone_is_one_program(
    optimizer: Callable[[Any], torch.optim.Optimizer],
) -> None:
    _, theirs = both(Twice)
    model = copy.deepcopy(theirs)
    ours, eager = optimizer(model.parameters()), optimizer(theirs.parameters())
    step = dt.training_step(model, lambda y: y.square().mean(), ours)
    for _ in range(3):
        step((TOKENS, OTHERS))
        eager.zero_grad()
        theirs(TOKENS, OTHERS).square().mean().backward()
        eager.step()
        torch.testing.assert_close(model.table.weight, theirs.table.weight)
    assert step.breaks == []
    for own, their in zip(ours.state.values(), eager.state.values(), strict=True):
        torch.testing.assert_close(own, their)


def test_a_step_with_momentum_runs_the_compiled_model() -> None:
    _, theirs = both(Twice)
    model = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, theirs)]
    step = dt.training_step(model, lambda y: y.square().mean(), optimizers[0])
    with pytest.warns(
        UserWarning, match="sparse=True is a sparse tensor, which inside a program only SGD and Adagrad "
    ):
        step((TOKENS, OTHERS))
    for _ in range(2):
        step((TOKENS, OTHERS))
    for _ in range(3):
        optimizers[1].zero_grad()
        theirs(TOKENS, OTHERS).square().mean().backward()
        optimizers[1].step()
    torch.testing.assert_close(model.table.weight, theirs.table.weight)
    state = state_of(step.pieces)
    assert state is not None and not state.backend.breaks


def test_a_table_that_is_computed() -> None:
    """What PyTorch makes of a sparse cotangent stays PyTorch's."""
    ours, theirs = both(Derived)
    with pytest.warns(UserWarning, match="sparse=True is a sparse tensor"):
        y = ours(TOKENS)
    expected = theirs(TOKENS)
    y.sum().backward()
    expected.sum().backward()
    same_gradients(ours, theirs)
