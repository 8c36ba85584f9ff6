"""What is attached to leaves of autograd is seen without Python."""

import pytest
import torch

from daceml_train.runtime.native_library import Leaves

pytestmark = pytest.mark.compiled


def test_gradients_and_hooks_are_seen() -> None:
    tensors = [torch.zeros(2), torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(4))]
    leaves = Leaves(tensors)
    assert leaves.attached() == (False, False)
    tensors[2].sum().backward()
    assert leaves.attached() == (True, False)
    tensors[2].grad = None
    assert leaves.attached() == (False, False)
    tensors[1].register_hook(lambda g: g)
    assert leaves.attached() == (False, True)


def test_hooks_after_accumulation_are_seen() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    leaves = Leaves([parameter])
    parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert leaves.attached() == (False, True)
