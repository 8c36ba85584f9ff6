"""Means over ranks in the graph of a step: what is reduced, in which messages, before what."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.verify import verify
from daceml_train.driver.goals import StepGoal
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse, show
from daceml_train.ops.collective import AllReduce
from daceml_train.ops.operator import Value
from daceml_train.sdfg.convert import from_sdfg, to_sdfg
from daceml_train.tensor import DType, Tensor
from daceml_train.training.distribution import means
from daceml_train.training.gradients import Clipping, GradientOptions, Scaling
from daceml_train.training.joint import Joint, joint_graph


def joint(options: GradientOptions, keep: bool = False) -> Joint:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen, trained, _ = step.look(torch.zeros(5, 3), torch.zeros(5, 2))
    return joint_graph(seen.captured.graph, trained, [t.parameter for t in trained] if keep else [], options)


def values_of(result: Joint) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = {}
    for name, entry in result.graph.inputs.items():
        inputs[name] = rng.uniform(0.5, 1.5, entry.tensor.shape)
        if not entry.tensor.dtype.is_float:
            inputs[name] = np.ones(entry.tensor.shape, entry.tensor.dtype.numpy)
    found = interpret(result.graph, inputs)
    return {**{target: found.values[name] for target, name in result.graph.writes.items()}, "loss": found.outputs[0]}


@pytest.mark.parametrize("clipping", [Clipping(), Clipping(norm=0.1), Clipping(value=0.01)])
@pytest.mark.parametrize("scaling", [None, Scaling(2.0, 0.5, 10)])
def test_equal_ranks_do_as_one(clipping: Clipping, scaling: Scaling | None) -> None:
    alone, together = (joint(GradientOptions(clipping, scaling, ranks)) for ranks in (1, 4))
    verify(together.graph)
    expected, found = values_of(alone), values_of(together)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, err_msg=name)
    assert together.mean and not alone.mean and together.norm == (clipping.norm is not None)


def collectives(graph: Graph) -> list[AllReduce]:
    return [node.op for node in graph.nodes if isinstance(node.op, AllReduce)]


def test_gradients_and_the_loss_are_one_message() -> None:
    result = joint(GradientOptions(ranks=4), keep=True)
    (only,) = [node for node in result.graph.nodes if isinstance(node.op, AllReduce)]
    (elements,) = result.graph.tensors[only.inputs[0]].shape
    assert elements == 3 * 4 + 4 + 4 * 2 + 2 + 1
    assert not collectives(joint(GradientOptions()).graph)


def test_collectives_are_nodes_of_the_sdfg_and_of_the_text() -> None:
    graph = joint(GradientOptions(ranks=4)).graph
    assert "all_reduce" in show(graph)
    assert show(from_sdfg(to_sdfg(graph))) == show(graph) == show(parse(show(graph)))


def test_programs_for_other_numbers_of_ranks_have_other_keys() -> None:
    goals = [StepGoal([], [], GradientOptions(ranks=ranks)) for ranks in (1, 2, 4)]
    assert len({goal.description for goal in goals}) == 3


def test_buckets_have_one_type_and_at_most_so_many_bytes() -> None:
    graph = Graph("step")
    sizes = [(10, DType.float32), (20, DType.float32), (5, DType.bfloat16), (300, DType.float32), (7, DType.float32)]
    inputs = [graph.input(f"x{i}", Tensor((n,), dtype)) for i, (n, dtype) in enumerate(sizes)]
    values: list[Value] = [x.unary("neg") for x in inputs]
    found = means(graph, [*reversed(values), values[0]], 2, limit=120)
    graph.outputs = [value.name for value in found]
    verify(graph)
    reduced = [graph.tensors[node.inputs[0]] for node in graph.nodes if isinstance(node.op, AllReduce)]
    assert [(t.size, t.dtype) for t in reduced] == [
        (30, DType.float32), (300, DType.float32), (7, DType.float32), (5, DType.bfloat16)]  # fmt: skip
    assert [op.position for op in collectives(graph)] == [0, 1, 2, 3]
    given = {f"x{i}": np.arange(n) + 1.0 for i, (n, _) in enumerate(sizes)}
    wanted = [*reversed(given.values()), given["x0"]]
    for value, x in zip(interpret(graph, given).outputs, wanted, strict=True):
        np.testing.assert_array_equal(value, -x)
