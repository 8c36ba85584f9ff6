"""A parameter whose gradient is zero whatever its values: the gradient is zeros, not absent, and weight decay acts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt

pytestmark = pytest.mark.compiled

Body = Callable[[Tensor, Tensor], Tensor]

BODIES: dict[str, Body] = {
    "a slice without elements": lambda w, x: (x @ w)[:, :0].sum(),
    "rows that there are none of": lambda w, x: w[:0].cumsum(0).sum(),
    "a product of no elements": lambda w, x: w[:, :0].prod(1).sum(),
    "a matmul over no elements": lambda w, x: (x[:, :0] @ w[:0]).sum(),
    "the power of zero": lambda w, x: (w**0).sum(),
    "concatenated nothing": lambda w, x: torch.cat([w[:0], x]).sum(),
    "only concatenated nothing": lambda w, x: torch.cat([w[:0], x[:0]]).sum(),
    "gathered nothing": lambda w, x: w.gather(1, torch.zeros(6, 0, dtype=torch.long)).sum(),
    "repeated not once": lambda w, x: w.repeat(0, 2).sum(),
    "a diagonal without elements": lambda w, x: w.diagonal(6).sum(),
    "windows of nothing": lambda w, x: w[:0].unfold(1, 3, 2).sum(),
    "a factor of zero in a matmul": lambda w, x: torch.addmm(w[:4], x, x.new_ones(6, 6), beta=0).sum(),
    "overwritten": lambda w, x: (w * 1).fill_(2.0).sum(),
    "filled": lambda w, x: torch.fill(w, 2.0).sum(),
    "a matrix to the power of zero": lambda w, x: torch.linalg.matrix_power(w, 0).sum(),
    "signs": lambda w, x: w.sign().sum(),
    "scattered nothing": lambda w, x: x.scatter_add(1, torch.zeros(4, 0, dtype=torch.long), w[:4, :0]).sum(),
    "nothing between rows": lambda w, x: x.slice_scatter(w[:0], 0, 2, 2).sum(),
}


class Added(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.w = nn.Parameter(torch.linspace(-1, 2, 36).view(6, 6))
        self.v = nn.Parameter(torch.linspace(0, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.w, x) + (x * self.v).sum()


@pytest.mark.parametrize("name", BODIES)
def test_a_gradient_of_zeros_is_not_absent(name: str) -> None:
    x = torch.linspace(-2, 1, 24).view(4, 6)
    eager, ours, stepped = (Added(BODIES[name]) for _ in range(3))
    for model, called in ((eager, eager), (ours, dt.optimize(ours))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        called(x).backward()
        optimizer.step()
    step = dt.training_step(
        stepped, lambda y: y, torch.optim.SGD(stepped.parameters(), lr=0.1, weight_decay=0.5), keep_gradients=True
    )
    step(x)
    assert not step.breaks
    for model in (ours, stepped):
        assert eager.w.grad is not None and model.w.grad is not None
        torch.testing.assert_close(model.w.grad, eager.w.grad)
        torch.testing.assert_close(model.state_dict(), eager.state_dict())
