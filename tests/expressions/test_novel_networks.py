"""Networks whose layers are expressions: losses and gradients of PyTorch's own layers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks.novel.networks import NETWORKS, pair


@pytest.mark.parametrize("name", NETWORKS)
def test_losses_and_gradients(name: str) -> None:
    ours, theirs, inputs, targets = pair(name)
    ours, theirs, inputs = ours.double(), theirs.double(), inputs.double()
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    losses = [F.cross_entropy(model(inputs), targets) for model in (ours, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-10)
    found, expected = (
        torch.autograd.grad(loss, [*m.parameters()]) for loss, m in zip(losses, (ours, theirs), strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
