"""Sizes that PyTorch's derivative of an operator takes to be equal, although two inputs tell them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt

pytestmark = pytest.mark.compiled


class Pooled(nn.Module):
    """Rows of `x` in groups: `scatter_reduce` has a derivative where each row has an index."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(8, 8)

    def forward(self, x: Tensor, group: Tensor) -> Tensor:
        zeros = torch.zeros(4, 8)
        return zeros.scatter_reduce(0, group[:, None].expand(-1, 8), self.layer(x), self.how, include_self=False)


@pytest.mark.parametrize("how", ["mean", "amax", "prod"])
def test_rows_and_indices_are_as_many(how: str) -> None:
    ours = Pooled(how)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    step = dt.training_step(ours, lambda y: y.square().mean(), optimizers[0])
    for rows in (5, 6, 9, 7, 5):
        batch = torch.randn(rows, 8), torch.randint(0, 4, (rows,))
        found = step(batch)
        optimizers[1].zero_grad()
        expected = theirs(*batch).square().mean()
        expected.backward()
        optimizers[1].step()
        torch.testing.assert_close(found, expected.detach())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert step.breaks == []
    assert len(step.records) == 2  # for the first sizes, and for all
    few = torch.randn(6, 8), torch.randint(0, 4, (4,))
    with pytest.raises(RuntimeError) as theirs_error:
        theirs(*few).sum().backward()
    with pytest.raises(RuntimeError) as ours_error:
        step(few)
    assert str(ours_error.value).splitlines()[0] == str(theirs_error.value).splitlines()[0]
