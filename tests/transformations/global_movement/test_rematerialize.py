"""Budgets are met or refused with the minimum, values stay, choices per array are followed, nothing is written twice."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.memory import memory
from daceml_train.analysis.verify import verify
from daceml_train.autodiff.reverse import differentiate
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph, Role
from daceml_train.ops.fallback import Aten, Operand
from daceml_train.ops.operator import make
from daceml_train.passes.pipeline import Pipeline
from daceml_train.tensor import DType, Tensor
from daceml_train.transformations.global_movement.remat_costs import finished
from daceml_train.transformations.global_movement.rematerialize import Rematerialize, budget_bytes, rematerialized
from daceml_train.transformations.pipelines import TRAINING
from tests.transformations.checking import arrays, check_same
from tests.transformations.random_graphs import training_graphs

WIDTH, ROWS = 32, 256
ARRAY = WIDTH * ROWS * 4


def network(depth: int = 6, dropout: bool = False) -> Graph:
    """Layers of matmul, GELU and dropout with their gradients and updates, after all passes before this level."""
    graph = Graph("network")
    seed = graph.input("seed", Tensor((), DType.int64), Role.state)
    x = graph.input("x", Tensor((ROWS, WIDTH)))
    for layer in range(depth):
        w = graph.input(f"w{layer}", Tensor((WIDTH, WIDTH)), Role.parameter)
        x = (x @ w).unary("gelu_erf")
        if dropout:
            x = x.apply(make("dropout", p=0.25, stream=layer), seed)
    mean = graph.input("mean", Tensor((WIDTH,)), Role.buffer)
    graph.write("mean", mean * 0.9 + x.sum((0,)) * 0.1)
    loss = x.unary("square").sum((0, 1))
    names = [f"w{layer}" for layer in range(depth)]
    gradients = differentiate(graph, {loss.name: loss.constant(1.0)}, names)
    graph.output(loss)
    for name in names:
        gradient = gradients[name]
        assert gradient is not None
        graph.write(name, graph.value(name) - gradient * 0.01)
    return TRAINING.run(graph, ("intra_operator", "fusion", "layout")[:3])


def peak(graph: Graph) -> int:
    return memory(finished(graph)).peak


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_share_of_the_default(share: float) -> None:
    graph = network()
    after = Rematerialize(budget=share).run(graph)
    verify(after)
    assert peak(after) <= share * peak(graph)
    assert rematerialized(after)
    check_same(graph, after, exact=True)
    check_same(graph, finished(after), exact=True)


def test_a_budget_that_is_met_already_changes_nothing() -> None:
    graph = network()
    assert Rematerialize(budget=peak(graph)).run(graph) is graph
    assert Rematerialize().run(graph) is graph


def test_a_budget_below_the_minimum_names_it() -> None:
    graph = network()
    with pytest.raises(Invalid, match=r"a budget of 4 KiB is below the minimum of ([\d.]+) KiB for network") as caught:
        Rematerialize(budget="4 KiB").run(graph)
    assert "without recomputation" in str(caught.value)


def test_dropout_comes_out_the_same() -> None:
    graph = network(dropout=True)
    after = Rematerialize(budget=0.6).run(graph)
    assert peak(after) <= 0.6 * peak(graph)
    check_same(graph, after, exact=True, seed=3)


def test_what_a_step_writes_is_written_once() -> None:
    graph = network()
    after = finished(Rematerialize(recompute=("*",)).run(graph))
    assert set(after.writes) == set(graph.writes)
    inputs = arrays(graph)
    np.testing.assert_allclose(interpret(after, inputs).writes["mean"], interpret(graph, inputs).writes["mean"])


def late(graph: Graph) -> set[str]:
    """Arrays of the forward pass that live across the position where the loss is made."""
    middle = next(i for i, n in enumerate(graph.nodes) if graph.outputs[0] in n.outputs)
    return {a.name for a in memory(graph).at(middle) if a.bytes >= ARRAY and a.last > middle + 2}


def test_choices_per_array() -> None:
    graph = network()
    names = sorted(late(graph))
    one = names[0]
    after = Rematerialize(recompute=(one,)).run(graph)
    assert {n.outputs[0].split("_again")[0] for n in rematerialized(after)} >= {one}
    assert one not in late(after)
    check_same(graph, after, exact=True)
    kept = Rematerialize(budget=0.8, keep=(one,)).run(graph)
    assert one not in {n.split("_again")[0] for node in rematerialized(kept) for n in node.outputs}


def test_refusals() -> None:
    graph = network()
    name = sorted(late(graph))[0]
    with pytest.raises(Invalid, match="names 'nothing', which is no array and no module's path"):
        Rematerialize(recompute=("nothing",)).run(graph)
    with pytest.raises(Invalid, match="is named in keep and in recompute"):
        Rematerialize(keep=(name,), recompute=(name,)).run(graph)
    with pytest.raises(Invalid, match="cannot be rematerialized: it is a result of the step"):
        Rematerialize(recompute=(graph.outputs[0],)).run(graph)


def test_numbers_of_pytorchs_generator_are_not_drawn_again() -> None:
    graph = Graph("random")
    x = graph.input("x", Tensor((64,)), Role.parameter)
    draw = Aten("aten.rand_like.default", (Operand(0),), (Tensor((64,)),), random=True)
    (mask,) = graph.emit(draw, x)
    y = (x * mask).unary("exp")
    graph.output(y.sum((0,)))
    graph.write("x", x - y * mask)
    with pytest.raises(Invalid, match="draws from PyTorch's generator"):
        Rematerialize(recompute=(mask.name,)).run(graph)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("2 GiB", 2 << 30), ("1.5 MB", 1_500_000), ("100", 100), (0.5, 500), (4096, 4096), ("3kib", 3072)],
)
def test_budgets(given: str | int | float, expected: int) -> None:
    assert budget_bytes(given, 1000) == expected


@pytest.mark.parametrize("given", ["much", "2 parsec", "-1 GiB", 0, -5, 1.5, 0.0])
def test_no_budgets(given: str | int | float) -> None:
    with pytest.raises(Invalid, match="a budget is"):
        budget_bytes(given, 1000)


def test_in_a_pipeline() -> None:
    pipeline = TRAINING.before("update_in_place", Rematerialize(budget="2 GiB", keep=("model.norm",)))
    assert Pipeline.parse(str(pipeline)) == pipeline


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=training_graphs(), everything=st.booleans(), share=st.floats(0.3, 1.0))
def test_random_graphs(graph: Graph, everything: bool, share: float) -> None:
    graph = TRAINING.run(graph, ("intra_operator", "fusion", "layout"))
    if not graph.nodes:
        return
    options = Rematerialize(recompute=("*",)) if everything else Rematerialize(budget=share)
    try:
        after = options.run(graph)
    except Invalid as error:
        assert "minimum" in str(error) or "cannot be rematerialized" in str(error) or "no array" in str(error)
        return
    verify(after)
    if not everything:
        assert memory(finished(after)).peak <= share * memory(finished(graph)).peak + 1
    check_same(graph, after, s0=2)
