"""Orders with fewer live bytes: the example, never worse, what must stay in order, near-linear time."""

from hypothesis import HealthCheck, given, settings

from daceml_train.analysis.memory import memory
from daceml_train.analysis.verify import verify
from daceml_train.graph.graph import Graph
from daceml_train.ops.fallback import Aten, Operand
from daceml_train.tensor import Tensor
from daceml_train.transformations.global_movement.schedule import Schedule
from daceml_train.transformations.global_movement.update_in_place import UpdateInPlace
from daceml_train.transformations.pipelines import TRAINING
from tests.timing import thread_seconds
from tests.transformations.checking import check_same, program
from tests.transformations.random_graphs import training_graphs

LATE = program(
    "x: f32[64]",
    "%a = exp(%x)\n%b = sin(%x)\n%c = cos(%x)\n"
    + "".join(f'%s{k} = reduce(%{k}, kind="sum", dims=(0,))\n' for k in "abc"),
    "%sa, %sb, %sc",
)


def test_an_array_is_reduced_before_the_next_is_made() -> None:
    after = Schedule().run(LATE)
    check_same(LATE, after)
    assert memory(LATE).peak == 3 * 256 + 4
    assert memory(after).peak == 256 + 3 * 4
    assert [n.outputs[0] for n in after.nodes] == ["a", "sa", "b", "sb", "c", "sc"]


def test_an_order_that_cannot_be_better_stays() -> None:
    graph = program("x: f32[64]", "%a = exp(%x)\n%b = sin(%a)", "%b")
    assert Schedule().run(graph) is graph
    assert Schedule().run(Schedule().run(LATE)) is not LATE


def layers(count: int, size: int = 16) -> Graph:
    """Matmuls whose updates stand at the end, the learning rate's cast before them."""
    inputs = ", ".join(f"w{i}: f32[{size}, {size}]" for i in range(count))
    body = [f"%h{i + 1} = matmul(%h{i}, %w{i})" for i in range(count)]
    body += [f"%g{i} = matmul(%h{i}, %h{count})" for i in range(count)] + ["%rate = cast(%lr, dtype=f32)"]
    body += [f"%d{i} = mul(%g{i}, %rate)\n%n{i} = sub(%w{i}, %d{i})" for i in range(count)]
    body += [f"write w{i} <- %n{i}" for i in range(count)]
    return program(f"h0: f32[{size}, {size}], lr: f64[], {inputs}", "\n".join(body), f"%h{count}")


def test_an_update_stands_after_the_gradient() -> None:
    """The activations live, and one gradient at a time, in the memory of an activation that its matmul frees."""
    before = TRAINING.only("fuse_elementwise", "update_in_place").run(layers(8))
    after = Schedule().run(before)
    array = 16 * 16 * 4
    assert memory(after).peak <= 9 * array + 4 < memory(before).peak
    gradients = [a for a in memory(after).arrays if a.name.startswith("g")]
    assert len(gradients) == 8 and all(a.last - a.first <= 2 for a in gradients)
    check_same(layers(8), after, exact=False)


def test_updates_stay_after_the_readers_of_the_old_value() -> None:
    body = "%q = exp(%p)\n%n = add(%p, %g)\n%z = mul(%q, %g)\nwrite p <- %n"
    after = Schedule().run(UpdateInPlace().run(program("p: f32[64], g: f32[64]", body, "%z")))
    verify(after)
    assert [n.outputs[0] for n in after.nodes].index("q") < [n.outputs[0] for n in after.nodes].index("n")


def test_rows_are_added_after_the_readers_of_the_table() -> None:
    """In place, the table takes no memory of its own, and who reads the old table stays in front."""
    body = "%e = exp(%t)\n%s = neg(%e)\n%n = add_rows(%t, %i, %r)\nwrite t <- %n"
    before = UpdateInPlace().run(program("t: f32[64, 8], i: i64[4], r: f32[4, 8]", body, "%s"))
    after = Schedule().run(before)
    verify(after)
    assert memory(after).peak == 2 * 64 * 8 * 4
    assert [n.outputs[0] for n in after.nodes].index("e") < [n.outputs[0] for n in after.nodes].index("n")


def test_random_numbers_of_pytorch_are_drawn_in_order() -> None:
    graph = Graph("random")
    x = graph.input("x", Tensor((64,)))
    draw = Aten("aten.rand_like.default", (Operand(0),), (Tensor((64,)),), random=True)
    drawn = [graph.emit(draw, x)[0] for _ in range(3)]
    graph.output(*(v.sum((0,)) for v in reversed(drawn)))
    after = Schedule().run(graph)
    names = [n.outputs[0] for n in after.nodes if isinstance(n.op, Aten)]
    assert names == [v.name for v in drawn]
    assert memory(after).peak < memory(graph).peak


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=training_graphs())
def test_never_worse(graph: Graph) -> None:
    graph = TRAINING.without("schedule").run(graph, ("intra_operator", "fusion", "layout"))
    after = Schedule().run(graph)
    assert memory(after).peak <= memory(graph).peak
    check_same(graph, after, s0=2)


def test_time_is_near_linear() -> None:
    def seconds(count: int) -> float:
        graph = layers(count)
        return thread_seconds(lambda: Schedule().run(graph))

    seconds(20)
    assert seconds(400) < 16 * seconds(50)
