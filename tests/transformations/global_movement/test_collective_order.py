"""Collectives keep their order: ranks whose batches have other sizes schedule other memory, and the same messages."""

import pytest

from daceml_train.graph.graph import Graph
from daceml_train.ops.collective import AllReduce, Collective
from daceml_train.tensor import Tensor
from daceml_train.transformations.global_movement.schedule import Schedule


@pytest.mark.parametrize("large", [0, 1, 2])
def test_a_schedule_leaves_collectives_in_order(large: int) -> None:
    graph = Graph("step")
    sizes = [100_000 if number == large else 10 for number in range(3)]
    inputs = [graph.input(f"x{number}", Tensor((size,))) for number, size in enumerate(sizes)]
    sums = [x.unary("exp").apply(AllReduce(2, number)) for number, x in enumerate(inputs)]
    for total in reversed(sums):
        graph.output(total.reduce("sum", (0,)))
    found = Schedule().run(graph)
    assert [node.op.position for node in found.nodes if isinstance(node.op, Collective)] == [0, 1, 2]
