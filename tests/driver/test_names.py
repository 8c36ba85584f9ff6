"""Parameters and buffers with names that programs have for arrays of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import daceml_train as dt

NAMES = ("seed", "w", "grad_w", "w_exp_avg", "w_exp_avg_sq", "lr_0", "loss", "draw0", "step", "grad", "inputs", "total")


class Named(nn.Module):
    """Each parameter counts in the result, once with a piece of Python within the step; `seed_1` is a buffer."""

    def __init__(self, in_pieces: bool, dropout: bool) -> None:
        super().__init__()
        self.in_pieces, self.dropout = in_pieces, dropout
        for number, name in enumerate(NAMES):
            self.register_parameter(name, nn.Parameter(torch.linspace(-1, 1, 4) * (number + 1)))
        self.register_buffer("seed_1", torch.ones(()))
        self.notes: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES[:6]:
            x = torch.tanh(x * getattr(self, name)) + self.seed_1
        if self.dropout:
            x = nn.functional.dropout(x, 0.5, self.training)
        if self.in_pieces:
            self.notes.append(round(float(x.detach().max()), 2))
        for name in NAMES[6:]:
            x = torch.tanh(x + getattr(self, name))
        with torch.no_grad():
            self.seed_1 += 0.1  # which a piece has read that recomputes results in its backward pass
        return x


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("whole", "dropout", "in_pieces"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
def test_parameters_named_as_arrays_of_programs(whole: bool, dropout: bool, in_pieces: bool) -> None:
    ours = Named(in_pieces, dropout)
    theirs = copy.deepcopy(ours)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs)]
    step: Any = None
    if whole:
        step = dt.training_step(ours, nn.functional.mse_loss, optimizers[0], random="eager")
    call = None if whole else dt.optimize(ours, random="eager")
    for number in range(4):
        g = torch.Generator().manual_seed(number)
        x, y = torch.randn(8, 4, generator=g), torch.randn(8, 4, generator=g)
        torch.manual_seed(number)
        if step is not None:
            found = step(x, y)
        else:
            optimizers[0].zero_grad()
            found = nn.functional.mse_loss(call(x), y)
            found.backward()
            optimizers[0].step()
        ours_draw = torch.rand(())
        torch.manual_seed(number)
        optimizers[1].zero_grad()
        expected = nn.functional.mse_loss(theirs(x), y)
        expected.backward()
        optimizers[1].step()
        assert torch.equal(ours_draw, torch.rand(()))
        torch.testing.assert_close(found.detach(), expected.detach())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert ours.notes == theirs.notes
    breaks = step.breaks if step is not None else []
    assert not any("internal error" in b for b in breaks)
