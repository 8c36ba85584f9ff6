"""The bytes that live: by hand on small graphs, and equal to what lowering plans on random ones."""

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from daceml_train.analysis.memory import memory
from daceml_train.analysis.sizes import bind
from daceml_train.graph.graph import Graph, Role
from daceml_train.lowering.footprint import Footprint, footprint
from daceml_train.lowering.lower import lower
from daceml_train.tensor import Dim
from daceml_train.transformations.pipelines import TRAINING
from tests.lowering.test_lower import GRAPHS, WRITES
from tests.transformations.checking import program
from tests.transformations.random_graphs import training_graphs

JOINED = program(
    "x: f32[4]",
    "%s = sin(%x)\n%a = exp(%s)\n%k = full(value=2.0, shape=(4,))\n%y = concat(%s, %k, %a, dim=0, placed=(2,))\n",
    "%y",
)


def planned(graph: Graph, **sizes: int) -> Footprint:
    def value(size: Dim) -> int:
        return bind(size, sizes | {"blocks": 1}) if not isinstance(size, int) else size

    return footprint(lower(graph), value)


def check_model(graph: Graph, **sizes: int) -> None:
    """The model's peaks are the plan's, of arena, pool, and both at one time."""
    model, plan = memory(graph, sizes), planned(graph, **sizes)
    assert (max(model.arena), max(model.pool), model.peak) == (max(plan.arena, default=0), plan.pool_peak, plan.peak)


def test_a_chain() -> None:
    """%a dies when %b is made, %b is handed out; %v is %a's memory; the input is the user's."""
    graph = program("x: f32[8]", "%a = exp(%x)\n%v = view(%a, shape=(2, 4))\n%b = neg(%v)\n%c = sin(%b)", "%c")
    model = memory(graph)
    assert model.arena == (32, 32, 64, 32, 0)
    assert model.pool == (0, 0, 0, 32, 32)
    assert model.live == (32, 32, 64, 64, 32)
    assert (model.peak, model.peak_position) == (64, 2)
    assert [a.name for a in model.at(2)] == ["a", "b"]
    assert model.inputs == {Role.input: 32}


def test_constants_take_memory_where_a_library_call_reads_them() -> None:
    body = "%k = full(value=2.0, shape=(4, 4))\n%y = mul(%x, %k)\n"
    assert memory(program("x: f32[4, 4]", body, "%y")).peak == 64
    assert memory(program("x: f32[4, 4]", body + "%z = matmul(%y, %k)", "%z")).peak == 3 * 64


def test_a_product_is_added_where_its_summand_dies() -> None:
    body = "%c = exp(%x)\n%y = matmul_add(%c, %x, %x)\n%z = neg(%y)\n"
    last, seen = program("x: f32[4, 4]", body, "%z"), program("x: f32[4, 4]", body + "%u = sin(%c)", "%z, %u")
    assert memory(last).live == (64, 64, 128, 64)
    assert memory(seen).live == (64, 128, 192, 192, 128)
    check_model(last)
    check_model(seen)


def test_constants_are_computed_where_a_concatenation_has_them() -> None:
    """The constant takes no memory of its own: only the concatenation lives, and %s until it is copied."""
    assert memory(JOINED).live == (16, 64, 64, 64, 48)
    check_model(JOINED)


def test_symbols_count_as_32_or_as_given() -> None:
    graph = program("x: f32[n, 2]", "%y = exp(%x)", "%y")
    assert memory(graph).peak == 32 * 8 and memory(graph, {"n": 3}).peak == 24


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_lowering(name: str) -> None:
    check_model(GRAPHS[name])


def test_writes() -> None:
    check_model(WRITES)
    check_model(program("a: f32[4], b: f32[4]", "write a <- %b\nwrite b <- %a", ""))


@example(graph=JOINED, levels=0)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=training_graphs(), levels=st.integers(0, 4))
def test_the_model_is_the_plan(graph: Graph, levels: int) -> None:
    run = TRAINING.run(graph, ("intra_operator", "fusion", "layout", "global_movement")[:levels])
    run = run if levels else TRAINING.only("decompose").run(graph)
    check_model(run, s0=3)
