"""Updates against torch.optim, several steps, in float64 by the interpreter."""

from typing import Any

import numpy as np
import pytest
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.leaves import leaves
from daceml_train.ops.operator import Operator
from daceml_train.ops.optimizer import AdagradUpdate, AdamUpdate, RMSpropUpdate, SGDUpdate
from daceml_train.tensor import DType, Tensor
from tests.ops.checking import numbers

SHAPE = (5, 4)


def run(op: Operator, *arrays: Any) -> list[np.ndarray]:
    graph = Graph()
    given = {f"x{i}": np.asarray(a, dtype=np.float64) for i, a in enumerate(arrays)}
    values = [graph.input(name, Tensor(a.shape, DType.float64)) for name, a in given.items()]
    graph.output(*graph.emit(op, *values))
    return list(interpret(graph, given).outputs)


def gradients(step: int) -> np.ndarray:
    return numbers(*SHAPE, seed=step)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
        {"weight_decay": 0.1, "maximize": True},
    ],
)
def test_sgd(options: dict[str, Any]) -> None:
    p = numbers(*SHAPE)
    parameter = torch.nn.Parameter(torch.as_tensor(p.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False, **options)
    state: list[np.ndarray] = []
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        parameter.grad = torch.as_tensor(gradients(step))
        optimizer.step()
        p, *state = run(SGDUpdate(**options), p, gradients(step), 0.1 / (step + 1), *state)
        np.testing.assert_allclose(p, parameter.detach(), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"amsgrad": True},
        {"betas": (0.3, 0.8), "eps": 1e-3},
        {"maximize": True, "weight_decay": 0.01},
    ],
)
def test_adam(kind: str, options: dict[str, Any]) -> None:
    p = numbers(*SHAPE)
    parameter = torch.nn.Parameter(torch.as_tensor(p.copy()))
    optimizer = getattr(torch.optim, kind)([parameter], lr=0.01, foreach=False, **options)
    group = optimizer.param_groups[0]
    op = AdamUpdate(
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=kind == "AdamW",
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )
    count = np.zeros(())
    state = [np.zeros(SHAPE) for _ in range(2 + op.amsgrad)]
    for step in range(4):
        parameter.grad = torch.as_tensor(gradients(step))
        optimizer.step()
        p, count, *state = run(op, p, gradients(step), 0.01, count, *state)
        np.testing.assert_allclose(p, parameter.detach(), rtol=1e-13, atol=1e-14)
    assert count == optimizer.state[parameter]["step"]
    for name, value in zip(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), state, strict=False):
        np.testing.assert_allclose(value, optimizer.state[parameter][name], rtol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9, "weight_decay": 0.1},
        {"centered": True, "alpha": 0.4},
        {"centered": True, "momentum": 0.5, "maximize": True, "eps": 1e-3},
    ],
)
def test_rmsprop(options: dict[str, Any]) -> None:
    p = numbers(*SHAPE)
    parameter = torch.nn.Parameter(torch.as_tensor(p.copy()))
    optimizer = torch.optim.RMSprop([parameter], lr=0.01, foreach=False, **options)
    op, count = RMSpropUpdate(**options), np.zeros(())
    state = [np.zeros(SHAPE) for _ in range(1 + (op.momentum > 0) + op.centered)]
    for step in range(4):
        parameter.grad = torch.as_tensor(gradients(step))
        optimizer.step()
        p, count, *state = run(op, p, gradients(step), 0.01, count, *state)
        np.testing.assert_allclose(p, parameter.detach(), rtol=1e-13, atol=1e-14)
    held = optimizer.state[parameter]
    for name, value in zip([n for n in held if n != "step"], state, strict=True):
        np.testing.assert_allclose(value, held[name], rtol=1e-13)


@pytest.mark.parametrize("options", [{}, {"lr_decay": 0.3, "weight_decay": 0.1}, {"maximize": True, "eps": 1e-3}])
def test_adagrad(options: dict[str, Any]) -> None:
    p = numbers(*SHAPE)
    parameter = torch.nn.Parameter(torch.as_tensor(p.copy()))
    optimizer = torch.optim.Adagrad([parameter], lr=0.1, initial_accumulator_value=0.2, foreach=False, **options)
    count, total = np.zeros(()), np.full(SHAPE, 0.2)
    for step in range(4):
        parameter.grad = torch.as_tensor(gradients(step))
        optimizer.step()
        p, count, total = run(AdagradUpdate(**options), p, gradients(step), 0.1, count, total)
        np.testing.assert_allclose(p, parameter.detach(), rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(total, optimizer.state[parameter]["sum"], rtol=1e-13)


@pytest.mark.parametrize("op", [AdamUpdate(weight_decay=0.1, decoupled=True), SGDUpdate(momentum=0.9)])
def test_what_all_elements_share_is_computed_once(op: Operator) -> None:
    """Elementwise work on the parameter's shape is arithmetic and roots; powers and casts are 0-d."""
    graph = Graph()
    like = [graph.input(name, Tensor(SHAPE)) for name in ("p", "g", "m", "v")]
    lr, step = graph.input("lr", Tensor((), DType.float64)), graph.input("step", Tensor(()))
    operands = (*like[:2], lr, step, *like[2:]) if isinstance(op, AdamUpdate) else (*like[:2], lr, like[2])
    graph.emit(op, *operands)
    lowered = leaves(graph).graph
    full = [n for n in lowered.nodes if lowered.tensors[n.outputs[0]].shape == SHAPE]
    assert {n.op.label for n in full} <= {"add", "sub", "mul", "div", "sqrt"}
    assert {lowered.tensors[n.outputs[0]].dtype for n in full} == {DType.float32}
    assert op.flops(*(v.tensor for v in operands)) > 0


def test_errors() -> None:
    p, lr = Tensor(SHAPE), Tensor(())
    with pytest.raises(Invalid, match=r"a gradient and a state like f32\[5, 4\], given f32\[4\]"):
        SGDUpdate().infer(p, Tensor((4,)), lr)
    with pytest.raises(Invalid, match=r"0-d floats for the learning rate and the step, given f32\[1\]"):
        SGDUpdate().infer(p, p, Tensor((1,)))
    with pytest.raises(Invalid, match=r"momentum 0.0 given 1 buffers"):
        SGDUpdate().infer(p, p, lr, p)
    with pytest.raises(Invalid, match="expects 3 state arrays, given 2"):
        AdamUpdate(amsgrad=True).infer(p, p, lr, lr, p, p)
    with pytest.raises(Invalid, match="expects 2 state arrays, given 1"):
        RMSpropUpdate(centered=True).infer(p, p, lr, lr, p)
