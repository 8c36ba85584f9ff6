"""Steps keep less for a little time: peaks shrink as estimated, values stay, matmuls never run twice."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daceml_train.analysis.device_model import DEVICES
from daceml_train.analysis.memory import memory
from daceml_train.analysis.traffic import traffic
from daceml_train.analysis.verify import verify
from daceml_train.autodiff.reverse import differentiate
from daceml_train.codegen.kernel.analysis import analyze
from daceml_train.graph.graph import Graph, Role
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.operator import Value, make
from daceml_train.tensor import DType, Tensor
from daceml_train.transformations.global_movement.live_ranges import LiveRanges
from daceml_train.transformations.global_movement.remat_costs import finished, remat_costs_of
from daceml_train.transformations.global_movement.rematerialize import rematerialized
from daceml_train.transformations.global_movement.rematerialize_cheap import RematerializeCheap
from daceml_train.transformations.pipelines import TRAINING
from tests.transformations.checking import check_same
from tests.transformations.random_graphs import training_graphs

WIDTH, ROWS = 32, 256
ARRAY = WIDTH * ROWS * 4
CHEAP = RematerializeCheap(time=1.0, min_bytes=1024)
BEFORE = ("intra_operator", "fusion", "layout")


def normalized(x: Value) -> Value:
    """Each row over its root mean square, which the derivative reads, too."""
    return x * (x.unary("square").mean((1,), keepdim=True) + 1.0).unary("rsqrt")


def network(depth: int = 6, dropout: bool = False, normalize: bool = False, width: int = WIDTH) -> Graph:
    """Layers of matmul, GELU and more with their gradients and updates, in front of this level."""
    graph = Graph("network")
    seed = graph.input("seed", Tensor((), DType.int64), Role.state)
    x = graph.input("x", Tensor((ROWS, width)))
    for layer in range(depth):
        w = graph.input(f"w{layer}", Tensor((width, width)), Role.parameter)
        x = (x @ w).unary("gelu_erf")
        if dropout:
            x = x.apply(make("dropout", p=0.25, stream=layer), seed)
        if normalize:
            x = normalized(x)
    loss = x.unary("square").sum((0, 1))
    names = [f"w{layer}" for layer in range(depth)]
    gradients = differentiate(graph, {loss.name: loss.constant(1.0)}, names)
    graph.output(loss)
    for name in names:
        gradient = gradients[name]
        assert gradient is not None
        graph.write(name, graph.value(name) - gradient * 0.01)
    return TRAINING.run(graph, BEFORE)


def peak(graph: Graph) -> int:
    return memory(finished(graph)).peak


@pytest.mark.parametrize("options", [{}, {"dropout": True}, {"normalize": True}])
def test_the_peak_shrinks_and_values_stay(options: dict[str, bool]) -> None:
    graph = network(**options)
    after = CHEAP.run(graph)
    verify(after)
    assert peak(after) < 0.8 * peak(graph)
    check_same(graph, after, exact=True, seed=5)
    check_same(graph, finished(after), exact=True, seed=5)


def test_the_estimate_is_what_is_planned() -> None:
    runs = remat_costs_of(network(), 16.0)
    spans = LiveRanges(runs)
    assert spans.live.max() == runs.peak
    spans.lower(float("inf"), 1024)
    after = RematerializeCheap(time=1.0, min_bytes=1024).run(network())
    assert peak(after) <= spans.live.max()


def test_products_that_arithmetic_bounds_do_not_run_again() -> None:
    graph = network(width=256)
    assert rematerialized(CHEAP.run(graph))
    count = [sum(n.op.label in ("matmul", "matmul_add") for n in g.nodes) for g in (graph, CHEAP.run(graph))]
    assert count[0] == count[1]


def test_what_another_kernel_reads_is_made_again_in_it() -> None:
    """A GELU's derivative reads its operand anyway: the copy costs one array written, none read."""
    graph = network()
    after = CHEAP.run(graph)
    joined = [n for n in rematerialized(after) if len(n.outputs) > 1]
    assert joined
    copies = sum(name.endswith("_again") for n in after.nodes for name in n.outputs)
    more = traffic(finished(after)).bytes - traffic(finished(graph)).bytes
    assert more <= copies * 2 * ARRAY


def test_moments_are_kept() -> None:
    """A normalization is rematerialized from its root mean square: no reduction runs twice."""
    after = CHEAP.run(network(normalize=True))

    def reductions(graph: Graph) -> int:
        kernels = [n.op for n in graph.nodes if isinstance(n.op, Kernel)]
        return sum(s.op.label.startswith("reduce") for op in kernels for s in op.statements)

    assert rematerialized(after)
    assert reductions(after) == reductions(network(normalize=True))
    for node in after.nodes:
        if isinstance(node.op, Kernel):
            analyze(node.op, [Tensor(after.tensors[i].shape, after.tensors[i].dtype) for i in node.inputs])


@pytest.mark.parametrize("cheap", [RematerializeCheap(time=0.0), RematerializeCheap(min_bytes=2 * ARRAY)])
def test_nothing_to_do(cheap: RematerializeCheap) -> None:
    graph = network()
    assert cheap.run(graph) is graph


def test_nothing_is_rematerialized_where_memory_is_spare() -> None:
    graph, least = network(), remat_costs_of(network(), 16.0).peak
    assert replace(CHEAP, spare=least).run(graph) is graph
    assert rematerialized(replace(CHEAP, spare=least - 1).run(graph))
    assert CHEAP.on(DEVICES["h100"]).run(graph) is graph


def test_the_time_is_kept() -> None:
    graph = network()
    total = sum(remat_costs_of(graph, 16.0).costs)
    peaks = []
    for time in (0.02, 0.05, 0.2):
        spans = LiveRanges(remat_costs_of(graph, 16.0))
        spans.lower(time * total, 1024)
        assert spans.spent <= time * total
        peaks.append(int(spans.live.max()))
    assert peaks == sorted(peaks, reverse=True)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=training_graphs(), time=st.floats(0.01, 1.0))
def test_random_graphs(graph: Graph, time: float) -> None:
    graph = TRAINING.run(graph, BEFORE)
    if not graph.nodes:
        return
    after = RematerializeCheap(time=time, min_bytes=1).run(graph)
    verify(after)
    assert peak(after) <= peak(graph)
    check_same(graph, after, s0=2)
