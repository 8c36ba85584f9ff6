"""Collectives keep their order: ranks whose batches have other sizes schedule other memory, and the same messages."""

from daceml_train.graph.graph import Graph
from daceml_train.ops.collective import AllReduce, Collective
from daceml_train.tensor import Tensor
from daceml_train.transformations.global_movement.schedule import Schedule


def test_a_schedule_leaves_collectives_in_order() -> None:
    """It would take less memory to run the first one after the second one, of which only a number is kept."""
    graph = Graph("step")
    x, y = graph.input("x", Tensor((1000,))), graph.input("y", Tensor((5000,)))
    kept = x.apply(AllReduce(2, 0))
    largest = y.apply(AllReduce(2, 1)).reduce("max", (0,))
    graph.output(kept + largest)
    found = Schedule().run(graph)
    assert [node.op.position for node in found.nodes if isinstance(node.op, Collective)] == [0, 1]
