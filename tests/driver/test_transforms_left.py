"""`torch.func` in a model: nested transforms are compiled, and a trace that fails inside of one leaves none active."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, hessian, vmap

import daceml_train as dt
from daceml_train.frontends.torch.capture.capture import functorch_levels


class Hessian(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return hessian(lambda row: (row @ self.weight).pow(3).sum())(x[0])


@pytest.mark.compiled
def test_a_hessian_in_a_model() -> None:
    torch.manual_seed(0)
    theirs = Hessian()
    ours, stepped = copy.deepcopy(theirs), copy.deepcopy(theirs)
    x = torch.randn(3, 4, dtype=torch.float64)
    compiled = dt.optimize(ours)
    for model, call in ((theirs, theirs), (ours, compiled)):
        result = call(x)
        result.pow(2).sum().backward()
        torch.testing.assert_close(result, theirs(x))
        torch.testing.assert_close(model.weight.grad, theirs.weight.grad)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (theirs, stepped)]
    step = dt.training_step(stepped, lambda result: result.pow(2).mean(), optimizers[1])
    for _ in range(3):
        optimizers[0].zero_grad()
        theirs(x).pow(2).mean().backward()
        optimizers[0].step()
        step(x)
        torch.testing.assert_close(stepped.weight, theirs.weight)


def test_what_fails_inside_transforms_leaves_none_active() -> None:
    def fails(x: Tensor) -> Tensor:
        raise LookupError

    with pytest.raises(LookupError), functorch_levels():
        torch._C._functorch._grad_increment_nesting()
        torch._C._functorch._vmap_increment_nesting(3, "error")
        torch._C._enter_dual_level()
        fails(torch.ones(2))
    assert torch._C._functorch.peek_interpreter_stack() is None
    with forward_ad.dual_level():  # of which there is one
        pass
    torch.testing.assert_close(vmap(grad(torch.sin))(torch.zeros(3)), torch.ones(3))
