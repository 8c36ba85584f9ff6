"""Control flow through the GPU's launch path, on an emulated one: as on the CPU, and captured where nothing decides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import daceml_train as dt
from tests.driver import test_control_flow
from tests.driver.test_control_flow import CASES, Two, both_signs, branch_in_a_loop, each_row, shared_parameters
from tests.runtime.emulation import emulated

pytestmark = pytest.mark.compiled

FEW = ("nested_branches", "backward_recurrence", "branch_in_a_loop", "a_loop_on_data")


@pytest.mark.parametrize(
    "function",
    [f if f.__name__ in FEW else pytest.param(f, marks=pytest.mark.wide) for f in CASES],
    ids=lambda f: f.__name__,
)
def test_values_and_gradients(function: Callable[[Any, Tensor], Tensor]) -> None:
    with emulated() as device:
        test_control_flow.test_values_and_gradients_in_one_graph(function)
    assert device.launches


def two_loops(m: Any, x: Tensor) -> Tensor:
    """Loops that do not depend on each other: their bodies have one arena."""
    return each_row(m, x) + each_row(m, x.flip(0)) * each_row(m, x.sin())


@pytest.mark.parametrize(
    "function", [each_row, two_loops, shared_parameters, branch_in_a_loop], ids=lambda f: f.__name__
)
def test_training_steps(function: Callable[[Any, Tensor], Tensor]) -> None:
    """A loop of known length is captured; where data decides, the step runs launch by launch, and says so."""
    own = Two(function)
    other = copy.deepcopy(own)
    theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (own, other))
    with emulated() as device:
        step = dt.training_step(other, F.mse_loss, ours)
        for x in both_signs() * 3:
            theirs.zero_grad()
            loss = F.mse_loss(own(x), x.cos())
            loss.backward()
            theirs.step()
            torch.testing.assert_close(step(x, x.cos()), loss.detach(), rtol=1e-4, atol=1e-5)
        for p, q in zip(own.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=1e-3, atol=1e-4)
    assert not step.breaks
    (graphs,) = step.cuda_graphs.values()
    if function in (each_row, two_loops):
        assert device.replays == 5 and not graphs.reasons
    else:
        assert device.replays == 0 and len(graphs.reasons) == 1
        assert "depends on data, which the CPU waits for" in graphs.reasons[0]


def test_a_failure_inside_names_the_line() -> None:
    from daceml_train.errors import ExecutionError

    model = Two(
        lambda m, x: torch.cond(
            x.sum() > 0, lambda x: F.embedding(x.long(), m.a.weight), lambda x: F.embedding(x.long(), m.b.weight), (x,)
        )
    )
    with emulated():
        optimized = dt.optimize(model)
        with pytest.raises((ExecutionError, IndexError), match=r"test_gpu_control\.py|out of range"):
            optimized(torch.full((2, 3), 7.0))
        assert optimized(torch.zeros(2, 3)).shape == (2, 3, 4)
