"""Means over ranks in the graph of a step: what is reduced, in which messages, before what."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import daceml_train as dt
from daceml_train.analysis.interpret import interpret, interpret_ranks
from daceml_train.analysis.verify import verify
from daceml_train.driver.goals import StepGoal
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse, show
from daceml_train.ops.collective import AllReduce
from daceml_train.ops.operator import Value
from daceml_train.sdfg.convert import from_sdfg, to_sdfg
from daceml_train.tensor import DType, Tensor
from daceml_train.training.distribution import Exchange
from daceml_train.training.gradients import Clipping, GradientOptions, Scaling
from daceml_train.training.joint import Joint, joint_graph
from daceml_train.transformations.distribution.bucket import Bucket
from daceml_train.transformations.distribution.choose_rows import ChooseRows
from daceml_train.transformations.distribution.shard_optimizer import ShardOptimizer
from daceml_train.transformations.pipelines import TRAINING


def joint(options: GradientOptions, keep: bool = False) -> Joint:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    step = dt.training_step(model, F.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    seen, trained, _ = step.look(torch.zeros(5, 3), torch.zeros(5, 2))
    result = joint_graph(seen.captured.graph, trained, [t.parameter for t in trained] if keep else [], options)
    return distributed(result, False)


def distributed(result: Joint, shard: bool, how: str = "auto") -> Joint:
    """The joint graph after the level `distribution`."""
    pipeline = TRAINING.with_options(ChooseRows, how=how)
    pipeline = pipeline.before(Bucket, ShardOptimizer()) if shard else pipeline
    return replace(result, graph=pipeline.run(result.graph, ("distribution",)))


def values_of(result: Joint) -> dict[str, np.ndarray]:
    inputs = {}
    for name, entry in result.graph.inputs.items():
        rng = np.random.default_rng(sum(name.encode()))
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
    assert elements == 3 * 4 + 4 + 4 * 2 + 2 + 2  # the loss, and the weight of the batch
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
    named = {str(i): value for i, value in enumerate([*reversed(values), values[0]])}
    graph.outputs = [value.name for value in Exchange(graph, 2).means(named).values()]
    graph = Bucket(120).run(graph)
    verify(graph)
    reduced = [graph.tensors[node.inputs[0]] for node in graph.nodes if isinstance(node.op, AllReduce)]
    assert [(t.size, t.dtype) for t in reduced] == [
        (30, DType.float32), (5, DType.bfloat16), (300, DType.float32), (7, DType.float32)]  # fmt: skip
    assert [op.position for op in collectives(graph)] == [0, 2, 3, 4]
    given = {f"x{i}": np.arange(n) + 1.0 for i, (n, _) in enumerate(sizes)}
    wanted = [*reversed(given.values()), given["x0"]]
    for value, x in zip(interpret(graph, given).outputs, wanted, strict=True):
        np.testing.assert_array_equal(value, -x)


# ---- ranks with other data --------------------------------------------------------------------------------------------
class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 3), nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words).mean(1))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
}


def graph_of(optimizer: str, options: GradientOptions, rows: int) -> Joint:
    torch.manual_seed(0)
    model = Words()
    step = dt.training_step(model, F.mse_loss, OPTIMIZERS[optimizer](model.parameters()))
    seen, trained, _ = step.look(torch.zeros(rows, 4, dtype=torch.int64), torch.zeros(rows, 2))
    table = next(name for name, entry in seen.captured.graph.inputs.items() if entry.path.endswith("table.weight"))
    chosen = replace(options, rows=((table, 4 * rows),)) if options.rows else options
    return distributed(joint_graph(seen.captured.graph, trained, [], chosen), options.shard, "gather")


KINDS = (2.0, 1.0, math.inf, 3.0, 0.0)
CASES = [
    *((o, shard, rows, None) for o in OPTIMIZERS for shard in (False, True) for rows in ((), ("table",))),
    *(("sgd", shard, (), kind) for shard in (False, True) for kind in KINDS),
]


@pytest.mark.parametrize(("optimizer", "shard", "rows", "kind"), CASES)
@pytest.mark.parametrize("scaling", [None, Scaling(2.0, 0.5, 10)])
def test_ranks_with_other_rows_do_as_one_with_all_of_them(
    optimizer: str, shard: bool, rows: tuple[str, ...], scaling: Scaling | None, kind: float | None
) -> None:
    clipping = Clipping() if kind is None else Clipping(norm=0.02, kind=kind)
    sizes = (5, 2, 3)
    whole = graph_of(optimizer, GradientOptions(clipping, scaling), sum(sizes))
    rng = np.random.default_rng(0)
    given: dict[str, np.ndarray] = {}
    for name, entry in whole.graph.inputs.items():
        given[name] = rng.uniform(0.5, 1.5, entry.tensor.shape)
        if not entry.tensor.dtype.is_float:
            given[name] = rng.integers(0, 50, entry.tensor.shape).astype(entry.tensor.dtype.numpy)
    expected = interpret(whole.graph, given)
    data = {name for name, entry in whole.graph.inputs.items() if entry.tensor.rank and entry.tensor.shape[0] == 10}
    options = GradientOptions(clipping, scaling, 3, shard, rows)
    parts = [graph_of(optimizer, options, size) for size in sizes]
    bounds = np.cumsum((0, *sizes))
    # the graphs differ in the number of rows alone, so all ranks run the collectives of each
    values = []
    for rank, joint_of_rank in enumerate(parts):
        inputs = {}
        for name, entry in joint_of_rank.graph.inputs.items():
            value = given.get(name, np.asarray(sizes[rank] / 4))
            if name in data:
                value = value[bounds[rank] : bounds[rank + 1]]
            elif value.shape != entry.tensor.shape:
                size = entry.tensor.shape[0]
                value = np.pad(value.reshape(-1), (0, 3 * size - value.size))[rank * size : (rank + 1) * size]
            inputs[name] = value
        values.append(inputs)
    found = interpret_ranks([joint_of_rank.graph for joint_of_rank in parts], values)
    for target, value in expected.writes.items():
        for rank, results in enumerate(found):
            other = results.writes[target]
            if other.shape != value.shape:  # a shard of a state
                size = other.size
                value_of_rank = np.pad(value.reshape(-1), (0, 3 * size - value.size))[rank * size : (rank + 1) * size]
                kept = max(0, min(size, value.size - rank * size))
                np.testing.assert_allclose(other[:kept], value_of_rank[:kept], rtol=1e-10, err_msg=target)
            else:
                np.testing.assert_allclose(other, value, rtol=1e-10, err_msg=target)
    sums = [results.outputs[1] for results in found]
    assert all(np.allclose(mean, expected.outputs[0], rtol=1e-12) for mean in sums)
    if kind is not None:
        assert np.allclose(found[0].outputs[2], expected.outputs[1], rtol=1e-10)
    if shard:
        state = [
            e.tensor for n, e in parts[0].graph.inputs.items() if n not in given or e.tensor.shape != given[n].shape
        ]
        assert {t.shape for t in state if t.rank == 1} <= {(50,), (2,), (1,)}
