"""Fusion passes: values, promised bytes, refusals with their sentences, and the fused text."""

import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.ops.kernel import Kernel
from daceml_train.ops.movement import Slice
from daceml_train.tensor import simplify
from daceml_train.transformations.fusion.duplicate import DuplicateCheapProducers
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise, FuseEpilogue, FuseIntoReduction
from daceml_train.transformations.fusion.siblings import FuseSiblings
from daceml_train.transformations.fusion.slice_first import SliceFirst
from tests.transformations.checking import Golden, assert_text, check_pass, check_same, program

CHAIN = program("x: f32[4, 6], b: f32[6]", "%a = add(%x, %b)\n%t = tanh(%a)\n%y = mul(%t, %x)", "%y")
FAN_OUT = program("x: f32[4, 6]", "%a = exp(%x)\n%b = tanh(%a)\n%c = sin(%a)", "%b, %c")
ACROSS_LIBRARY = program("x: f32[4, 4], w: f32[4, 4]", "%a = exp(%x)\n%m = matmul(%a, %w)\n%y = add(%a, %m)", "%y")
SOFTMAX = program(
    "x: f32[4, 6]",
    """
    %m = reduce(%x, kind="max", dims=(1,), keepdim=True)
    %d = sub(%x, %m)
    %e = exp(%d)
    %s = reduce(%e, kind="sum", dims=(1,), keepdim=True)
    %y = div(%e, %s)
    """,
    "%y",
)
THROUGH_VIEW = program("x: f32[8, 6]", "%a = exp(%x)\n%v = view(%a, shape=(2, 4, 6))\n%y = tanh(%v)", "%y")


def kernels(graph: Graph) -> int:
    return sum(isinstance(node.op, Kernel) for node in graph.nodes)


@pytest.mark.parametrize(
    "graph", [CHAIN, FAN_OUT, ACROSS_LIBRARY, THROUGH_VIEW], ids=["chain", "fan_out", "library", "view"]
)
def test_elementwise(graph: Graph, golden: Golden) -> None:
    after = check_pass(graph, FuseElementwise())
    golden(str(after))


def test_what_is_between_never_reaches_memory() -> None:
    after = FuseElementwise().run(CHAIN)
    assert kernels(after) == 1 == len(after.nodes)
    assert traffic(after).bytes == 4 * (24 + 6 + 24)


def test_every_match_promises_its_bytes() -> None:
    for graph in (CHAIN, FAN_OUT, THROUGH_VIEW):
        for match in FuseElementwise().matches(graph):
            if match.refusal is None:
                promised = match.traffic
                after = match.apply()
                assert simplify(traffic(after).bytes - traffic(graph).bytes) == promised
                check_same(graph, after)
                break


def test_a_library_call_between_two_operators_keeps_them_apart() -> None:
    after = FuseElementwise().run(ACROSS_LIBRARY)
    assert [n.op.label for n in after.nodes] == ["exp", "matmul", "add"]
    (match,) = FuseElementwise().matches(ACROSS_LIBRARY)
    assert match.refusal == "y also depends on a through other operators"


def test_limit_refuses_by_its_sentence() -> None:
    refusals = {m.refusal for m in FuseElementwise(limit=1).matches(CHAIN)}
    assert refusals == {"the kernel would have more than 1 operators"}


def test_softmax_becomes_one_kernel() -> None:
    graph = SOFTMAX
    for transformation in (FuseElementwise(), FuseIntoReduction(), FuseEpilogue()):
        graph = transformation.run(graph)
    check_same(SOFTMAX, graph)
    assert_text(
        graph,
        """\
        %y: f32[4, 6] = kernel(x0=%x) {
          %v0 = reduce(%x0, kind="max", dims=(1,), keepdim=True)
          %v1 = sub(%x0, %v0)
          %v2 = exp(%v1)
          %v3 = reduce(%v2, kind="sum", dims=(1,), keepdim=True)
          %v4 = div(%v2, %v3)
          yield %v4
        }
        return %y
        """,
    )
    assert len(graph.nodes) == 1
    assert traffic(graph).bytes == 4 * 2 * 24


def test_reductions_over_different_axes_that_form_no_loop_nest_stay_apart() -> None:
    graph = program(
        "x: f32[4, 6, 5]",
        """
        %a = reduce(%x, kind="sum", dims=(1,), keepdim=True)
        %b = div(%x, %a)
        %y = reduce(%b, kind="sum", dims=(2,), keepdim=True)
        """,
        "%y",
    )
    fused = FuseEpilogue().run(FuseIntoReduction().run(graph))
    check_same(graph, fused, exact=False)
    assert len(fused.nodes) > 1


def test_siblings_read_once() -> None:
    graph = program("x: f32[4, 6], z: f32[4, 6]", "%a = exp(%x)\n%b = mul(%x, %z)", "%a, %b")
    after = check_pass(graph, FuseSiblings())
    assert_text(
        after,
        """\
        %a, %b: f32[4, 6], f32[4, 6] = kernel(x0=%x, x1=%z) {
          %v0 = exp(%x0)
          %v1 = mul(%x0, %x1)
          yield %v0, %v1
        }
        return %a, %b
        """,
    )
    assert traffic(graph).bytes - traffic(after).bytes == 4 * 24


def test_siblings_outside_the_window_stay_apart() -> None:
    graph = program("x: f32[4, 6]", "%a = exp(%x)\n%n = neg(%a)\n%m = sin(%n)\n%b = tanh(%x)", "%m, %b")
    assert len(FuseSiblings(window=1).run(graph).nodes) == 4


def test_sums_join_siblings_outside_the_window() -> None:
    """A weight's gradient and update far after the kernel that reads the same array, if no other input comes late."""
    between = "%n = matmul(%a, %w)\n%m = sin(%n)"
    body = '%a = exp(%x)\n{}\n%s = reduce(%x, kind="sum", dims=(0,))\n%q = sub(%p, {})'
    inputs = "x: f32[64, 8], w: f32[8, 8], p: f32[8]"
    alone = program(inputs, body.format(between, "%s"), "%m, %q")
    joined = FuseSiblings(window=1).run(FuseEpilogue().run(alone))
    assert [node.outputs for node in joined.nodes] == [("a", "q"), ("n",), ("m",)]
    check_same(alone, joined)
    late = program(inputs, body.format(between + '\n%l = reduce(%m, kind="sum", dims=(0,))', "%l"), "%s, %q")
    large = program(inputs, body.format(between, "%p") + "\n%b = tanh(%x)", "%m, %q, %s, %b")
    for graph in (late, large):
        apart = FuseSiblings(window=1).run(FuseEpilogue().run(graph))
        assert all(len({"a", "q", "b"} & set(node.outputs)) < 2 for node in apart.nodes)


DUPLICATE = program(
    "x: f32[4, 6], m: f32[4, 1], w: f32[6, 6]",
    """
    %d, %y = kernel(x0=%x, x1=%m) {
      %v0 = sub(%x0, %x1)
      %v1 = exp(%v0)
      yield %v0, %v1
    }
    %p = matmul(%y, %w)
    %r = kernel(x0=%p, x1=%d) {
      %v0 = mul(%x0, %x1)
      yield %v0
    }
    """,
    "%r",
)


def test_a_cheap_value_is_computed_again() -> None:
    after = check_pass(DUPLICATE, DuplicateCheapProducers())
    assert_text(
        after,
        """\
        %y: f32[4, 6] = kernel(x0=%x, x1=%m) {
          %v0 = sub(%x0, %x1)
          %v1 = exp(%v0)
          yield %v1
        }
        %p: f32[4, 6] = matmul(%y, %w)
        %r: f32[4, 6] = kernel(x0=%x, x1=%m, x2=%p) {
          %v0 = sub(%x0, %x1)
          %v1 = mul(%x2, %v0)
          yield %v1
        }
        return %r
        """,
    )
    assert traffic(after).bytes < traffic(DUPLICATE).bytes


def test_an_expensive_value_is_stored() -> None:
    after = DuplicateCheapProducers(flops=0).run(DUPLICATE)
    assert traffic(after).bytes == traffic(DUPLICATE).bytes


ROTATION = """
    %a = cos(%t)
    %v = view(%a, shape={inner})
    %e = expand(%v, shape={shape})
    %y = mul(%e, %x)
    """
PASSES = FuseElementwise(), FuseIntoReduction(), DuplicateCheapProducers()


@pytest.mark.parametrize(
    ("inner", "shape", "apart"),
    [
        ((1, 1, 128, 64), (4, 12, 128, 64), True),
        ((128, 1, 64), (128, 48, 64), True),
        ((128, 64, 1), (128, 64, 48), False),  # a loop over the others computes it once
        ((1, 128, 64), (4, 128, 64), False),  # four times
        ((128, 1, 64), (128, 4, 64), False),
        ((128, 64, 1, 1), (128, 64, 8, 7), True),  # pixels: channels may become the innermost loop
    ],
)
@pytest.mark.parametrize("end", ["", '%s = reduce(%y, kind="sum", dims=(0,), keepdim=True)'], ids=["", "sum"])
def test_what_many_elements_share_is_computed_once(
    inner: tuple[int, ...], shape: tuple[int, ...], apart: bool, end: str
) -> None:
    """The cosines of positions are stored rather than computed for every head."""
    sizes = ", ".join(map(str, shape))
    body = f"{ROTATION.format(inner=inner, shape=shape)}\n{end}"
    graph = program(f"t: f32[128, 64], x: f32[{sizes}]", body, "%s" if end else "%y")
    after = graph
    for transformation in PASSES:
        after = transformation.run(after)
    check_same(graph, after, exact=False)
    assert (len([n for n in after.nodes if n.op.label not in ("view", "expand")]) > 1) is apart
    cheap = program(f"t: f32[128, 64], x: f32[{sizes}]", body.replace("cos", "neg"), "%s" if end else "%y")
    for transformation in PASSES:
        cheap = transformation.run(cheap)
    assert len(cheap.nodes) == 1


def test_costs_of_what_is_shared_add_up() -> None:
    """Each of these is cheap; twelve of them for every head are not."""
    steps = [f"%p{k + 1} = add(%p{k}, %t)" for k in range(12)]
    ends = [f"%e{k} = expand(%p{k}, shape=(48, 128, 64))\n%y{k} = mul(%y{k - 1}, %e{k})" for k in range(1, 13)]
    body = "\n".join(["%p0 = neg(%t)", *steps, "%y0 = neg(%x)", *ends])
    graph = program("t: f32[128, 64], x: f32[48, 128, 64]", body, "%y12")
    after = DuplicateCheapProducers().run(FuseElementwise().run(graph))
    check_same(graph, after, exact=False)
    largest = max((n for n in after.nodes if isinstance(n.op, Kernel)), key=lambda n: len(n.op.statements))
    assert sum(s.op.label == "add" for s in largest.op.statements) < 12


def test_random_numbers_are_made_again_rather_than_stored() -> None:
    graph = program(
        "x: f32[8, 8], seed: i64[], w: f32[8, 8]",
        """
        %u = uniform(%seed, shape=(8, 8))
        %h = full(value=0.5)
        %keep = ge(%u, %h)
        %z = full(value=0.0)
        %y = where(%keep, %x, %z)
        %p = matmul(%y, %w)
        %g = where(%keep, %p, %z)
        """,
        "%g",
    )
    fused = DuplicateCheapProducers().run(FuseElementwise().run(graph))
    check_same(graph, fused)
    assert all(not name.startswith(("u", "keep")) for node in fused.nodes for name in node.outputs)
    assert traffic(fused).bytes == 4 * 64 * (2 + 3 + 2) + 2 * 8


GATES = program(
    "x: f32[4, 6], b: f32[6]",
    """
    %s = add(%x, %b)
    %i = slice(%s, dim=1, start=0, stop=3)
    %f = slice(%s, dim=1, start=3, stop=6)
    %p = sigmoid(%i)
    %q = tanh(%f)
    %y = mul(%p, %q)
    """,
    "%y",
)


def test_slices_move_in_front_of_elementwise_operators() -> None:
    after = SliceFirst().run(GATES)
    check_same(GATES, after)
    assert_text(
        after,
        """\
        %slice: f32[4, 3] = slice(%x, dim=1, start=0, stop=3)
        %slice_1: f32[3] = slice(%b, dim=0, start=0, stop=3)
        %add: f32[4, 3] = add(%slice, %slice_1)
        %slice_2: f32[4, 3] = slice(%x, dim=1, start=3, stop=6)
        %slice_3: f32[3] = slice(%b, dim=0, start=3, stop=6)
        %add_1: f32[4, 3] = add(%slice_2, %slice_3)
        %p: f32[4, 3] = sigmoid(%add)
        %q: f32[4, 3] = tanh(%add_1)
        %y: f32[4, 3] = mul(%p, %q)
        return %y
        """,
    )
    fused = FuseElementwise().run(after)
    assert len([n for n in fused.nodes if not isinstance(n.op, Slice)]) == 1
    assert traffic(fused).bytes == 4 * (24 + 6 + 12)


def test_equal_slices_of_a_recurrence_are_one() -> None:
    """Each state is read twice by the next one: slices of slices would double at every step."""
    steps = [f"%k{k} = mul(%a, %h{k})\n%t{k} = tanh(%k{k})\n%h{k + 1} = add(%h{k}, %t{k})" for k in range(12)]
    body = "\n".join(["%h0 = exp(%x)", *steps, "%y = slice(%h12, dim=1, start=0, stop=2)"])
    before = program("x: f32[4, 8], a: f32[8]", body, "%y")
    after = SliceFirst().run(before)
    check_same(before, after)
    assert sum(not isinstance(n.op, Slice) for n in after.nodes) == 3 * 12 + 1


def test_overlapping_slices_stay() -> None:
    graph = program(
        "x: f32[6]",
        "%s = exp(%x)\n%a = slice(%s, dim=0, start=0, stop=4)\n%b = slice(%s, dim=0, start=2, stop=6)",
        "%a, %b",
    )
    refusals = {m.refusal for m in SliceFirst().matches(graph)}
    assert refusals == {"the slices of s overlap, so elements would be computed twice"}


@pytest.mark.parametrize("size", [1, 3])
def test_slices_of_nothing(size: int) -> None:
    """A dimension of size 1 is not broadcast where it is sliced itself."""
    body = "%s = add(%x, %b)\n%a = slice(%s, dim=1, start=0, stop=0)\n%c = concat(%a, %y, dim=1)"
    before = program(f"x: f32[4, {size}], b: f32[1], y: f32[4, 2]", body, "%c")
    after = SliceFirst().run(before)
    check_same(before, after)
    assert after.applied == 1


def test_a_whole_reader_keeps_the_slice_before_it() -> None:
    graph = program("x: f32[6]", "%s = exp(%x)\n%a = slice(%s, dim=0, start=0, stop=4)\n%b = neg(%s)", "%a, %b")
    assert [m.refusal for m in SliceFirst().matches(graph)] == ["s is also read by neg as a whole"]
