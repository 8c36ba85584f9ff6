"""PyTorch's flash kernel reads rows as dense whatever their stride: what is not dense is copied before it, and a result
in another memory order than is declared is converted after it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt

pytestmark = pytest.mark.compiled


class Transposed(nn.Module):
    """Written attention whose keys lie in memory as the product reads them: [batch, heads, width, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(4, 2, 16, 17))

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (2, 16)).transpose(1, 2)
        return (torch.softmax(q @ self.keys, -1) @ q).transpose(1, 2).flatten(2)


class Library(nn.Module):
    """The operator itself, on heads whose width is not the innermost dimension in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 16)).permute(0, 2, 3, 1)  # [batch, heads, width, length]
        q, k, v = (torch.tanh(heads * self.scale * factor).transpose(-1, -2) for factor in (1.0, 2.0, 3.0))
        return nn.functional.scaled_dot_product_attention(q, k, v).flatten(1)


class Apart(nn.Module):
    """Heads that lie apart in memory: PyTorch's result is row-major as they are, and is converted."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(-1, 2, 17, 16)
        q, k, v = (torch.tanh(heads * self.scale * factor) for factor in (1.0, 2.0, 3.0))
        return nn.functional.scaled_dot_product_attention(q, k, v).flatten(1)


@pytest.mark.parametrize("make", [Transposed, Library, Apart])
def test_numbers_are_those_of_eager_execution(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(4, 17, 32, dtype=torch.float64)
    results = []
    for run in (model, dt.optimize(model)):
        y = run(given := x.clone().requires_grad_())
        y.square().sum().backward()
        results.append([y.detach(), given.grad, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)
