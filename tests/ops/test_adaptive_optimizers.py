"""Updates with a step size per element against torch.optim, several steps, in float64 by the interpreter."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.leaves import leaves
from daceml_train.ops.adaptive_optimizers import NAdamUpdate, RAdamUpdate, RpropUpdate
from daceml_train.ops.optimizer import ASGDUpdate
from daceml_train.tensor import DType, Tensor
from daceml_train.training.optimizers import SCALARS, initial_state, option_value, update_of
from tests.ops.checking import numbers
from tests.ops.test_optimizer import SHAPE, gradients, run

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}, {"rho": 0.5, "eps": 1e-2, "weight_decay": 0.1}, {"maximize": True}],
    "Adamax": [{}, {"betas": (0.3, 0.8), "eps": 1e-2, "weight_decay": 0.1}, {"maximize": True}],
    "NAdam": [
        {},
        {"betas": (0.3, 0.8), "eps": 1e-3, "momentum_decay": 0.3, "weight_decay": 0.1},
        {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True},
    ],
    "RAdam": [
        {},
        {"betas": (0.3, 0.99), "eps": 1e-3, "weight_decay": 0.1},
        {"betas": (0.9, 0.5), "maximize": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True},
    ],
    "Rprop": [{}, {"etas": (0.2, 3.0), "step_sizes": (0.01, 0.15)}, {"maximize": True}],
    "ASGD": [{}, {"lambd": 0.1, "alpha": 0.5, "t0": 2, "weight_decay": 0.1}, {"t0": 1, "maximize": True}],
}


@pytest.fixture
def numbers_in_float64() -> Iterator[None]:
    """PyTorch holds the numbers of its state in float32, unless float64 is the default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("numbers_in_float64")
@pytest.mark.parametrize(("kind", "options"), [(k, o) for k, found in OPTIONS.items() for o in found])
def test_against_torch(kind: str, options: dict[str, Any]) -> None:
    p = numbers(*SHAPE)
    parameter = torch.nn.Parameter(torch.as_tensor(p.copy()))
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.125, foreach=False, **options)
    update = update_of(optimizer, optimizer.param_groups[0])
    state = [initial_state(name, parameter, optimizer).numpy() for name in update.state]
    for step in range(8):
        rate = optimizer.param_groups[0]["lr"] = 0.125 / (step + 1)
        parameter.grad = torch.as_tensor(gradients(step))
        optimizer.step()
        given = [option_value(optimizer.param_groups[0], name) for name in update.op.given]
        p, *state = run(update.op, p, gradients(step), rate, *state, *given)[: 1 + len(state)]
        np.testing.assert_allclose(p, parameter.detach(), rtol=1e-12, atol=1e-13)
        for name, value in zip(update.state, state, strict=True):
            np.testing.assert_allclose(value, optimizer.state[parameter][name], rtol=1e-12, atol=1e-14, err_msg=name)


def test_a_gradient_that_is_no_number_keeps_its_step_size() -> None:
    gradient = np.array([1.0, np.nan, -1.0, 0.0])
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.Rprop([parameter], lr=0.1)
    p, *state = np.zeros(4), np.zeros(()), np.zeros(4), np.full(4, 0.1)
    for sign in (1, 1, -1):
        parameter.grad = torch.as_tensor(sign * gradient)
        optimizer.step()
        p, *state = run(RpropUpdate(), p, sign * gradient, 0.1, *state)
    np.testing.assert_allclose(state[2], optimizer.state[parameter]["step_size"])
    np.testing.assert_array_equal(p, parameter.detach())


@pytest.mark.parametrize("kind", OPTIONS)
def test_what_all_elements_share_is_computed_once(kind: str) -> None:
    """Elementwise work on the parameter's shape has neither powers nor casts, and is float32."""
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = getattr(torch.optim, kind)([parameter])
    update = update_of(optimizer, optimizer.param_groups[0])
    graph = Graph()
    p, grad = (graph.input(name, Tensor(SHAPE)) for name in ("p", "g"))
    rate = graph.input("lr", Tensor((), DType.float64))
    state = [graph.input(f"s_{n}", Tensor(() if n in SCALARS else SHAPE)) for n in update.state]
    options = [graph.input(name, Tensor((), DType.float64)) for name in update.op.given]
    update.emit(p, grad, rate, state, options)
    lowered = leaves(graph).graph
    full = [n for n in lowered.nodes if lowered.tensors[n.outputs[0]].shape == SHAPE]
    assert not {n.op.label for n in full} & {"pow", "cast", "log", "exp"}
    assert {lowered.tensors[n.outputs[0]].dtype for n in full} <= {DType.float32, DType.bool}
    assert update.op.flops(*(v.tensor for v in (p, grad, rate, *state, *options))) > 0


def test_the_rectification_begins_where_its_variance_is_tractable() -> None:
    """With beta2 = 0.999 that is the sixth step; the ones before it are steps of momentum."""
    p, grad = np.ones(SHAPE), gradients(0)
    state = [np.zeros(()), np.zeros(SHAPE), np.zeros(SHAPE)]
    moved = []
    for _ in range(6):
        following, *state = run(RAdamUpdate(), p, grad, 0.1, *state)
        moved.append(np.abs(following - p).max())
        p = following
    assert all(abs(x - 0.1 * np.abs(grad).max()) < 1e-9 for x in moved[:5])
    assert moved[5] < 0.5 * moved[4]


def test_errors() -> None:
    p, lr = Tensor(SHAPE), Tensor(())
    with pytest.raises(Invalid, match="0-d floats for the learning rate and the step"):
        NAdamUpdate().infer(p, p, lr, lr, p, p, p)
    with pytest.raises(Invalid, match="a gradient and a state like"):
        ASGDUpdate().infer(p, p, lr, lr, lr, lr, lr)
    with pytest.raises(Invalid, match="a gradient and a state like"):
        RpropUpdate().infer(p, p, lr, lr, p, Tensor((4,)))
