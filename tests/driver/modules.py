"""A network with some of everything, and the comparison of an optimized module with the original."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import daceml_train as dt
from tests.driver.conformity import assert_compiled, assert_tensors_conform, gradients


class Net(nn.Module):
    """A module of the tests' own, at module level so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.norm(self.fc1(x))))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def assert_same_behavior(module: nn.Module, *arguments: Any, compiled: bool = True, **keywords: Any) -> None:
    """Results and gradients of a compiled copy equal those of the module itself, leaf by leaf."""
    own, other = copy.deepcopy(module), copy.deepcopy(module)
    optimized = dt.optimize(other)
    results = []
    for called, owner in ((own, own), (optimized, other)):
        result = called(*arguments, **keywords)
        leaves = [r for r in torch.utils._pytree.tree_leaves(result) if isinstance(r, Tensor)]
        differentiable = [r for r in leaves if r.requires_grad]
        if differentiable:
            sum((r * torch.arange(1, r.numel() + 1).view(r.shape)).sum() for r in differentiable).backward()
        results.append((result, leaves, gradients(owner)))
    (a, a_leaves, a_grads), (b, b_leaves, b_grads) = results
    assert torch.utils._pytree.tree_structure(a) == torch.utils._pytree.tree_structure(b)
    for x, y in zip(a_leaves, b_leaves, strict=True):
        assert x.requires_grad == y.requires_grad
        torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert_tensors_conform(b_grads, a_grads, a_grads)
    if compiled:
        assert_compiled(optimized)
