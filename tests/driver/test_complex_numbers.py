"""Complex numbers among the arguments of operators that PyTorch computes within a compiled graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt
from daceml_train.driver.module import state_of


class Polar(nn.Module):
    def forward(self, length: Tensor, angle: Tensor) -> Tensor:
        return torch.view_as_real(torch.polar(length, angle) * 2)


@pytest.mark.compiled
def test_an_imaginary_factor_in_a_gradient(tmp_path: Path) -> None:
    """The derivative of `polar` multiplies by the imaginary unit; the second module runs the stored program."""
    expected = None
    for model in (Polar(), dt.optimize(Polar(), cache=tmp_path), dt.optimize(Polar(), cache=tmp_path)):
        torch._dynamo.reset()
        leaves = [torch.linspace(0.5, 2, 6, requires_grad=True), torch.linspace(-3, 3, 6, requires_grad=True)]
        result = model(*leaves)
        found = [result, *torch.autograd.grad((result * torch.arange(12.0).view(6, 2)).sum(), leaves)]
        expected = expected or found
        torch.testing.assert_close(found, expected)
        state = state_of(model)
        assert state is None or not state.backend.breaks
