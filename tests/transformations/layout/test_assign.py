"""Layouts are assigned to the whole graph at once; reorders lie where they are cheapest."""

import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.ops.movement import Reorder
from daceml_train.transformations.fusion.producer_consumer import FuseElementwise
from daceml_train.transformations.layout.assign import AssignLayouts, is_last
from tests.transformations.checking import assert_text, check_pass, check_same, program

CONV = "stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0)"
LARGE = "f32[2, 3, 40, 40]"


def conv(y: str, x: str, w: str) -> str:
    return f"%{y} = convolution(%{x}, %{w}, {CONV})\n"


def reorders(graph: Graph) -> int:
    return sum(isinstance(node.op, Reorder) for node in graph.nodes)


def assigned(graph: Graph) -> Graph:
    """The graph with layouts, of equal values, of no more bytes, and left alone by a second run."""
    after = AssignLayouts().run(graph)
    check_same(graph, after)
    assert traffic(after).bytes <= traffic(graph).bytes
    assert str(AssignLayouts().run(after)) == str(after)
    return after


def lasts(graph: Graph) -> dict[str, bool]:
    """Operator -> whether its result lies with the channels last, reorders aside."""
    found = ((n.op.label, is_last(graph.tensors[n.outputs[0]])) for n in graph.nodes)
    return {label: last for label, last in found if label != "reorder"}


def test_a_chain_reorders_at_its_borders() -> None:
    body = conv("a", "x", "u") + "%b = relu(%a)\n" + conv("c", "b", "v") + "%d = exp(%c)"
    graph = program(f"x: {LARGE}, u: f32[4, 3, 3, 3], v: f32[4, 4, 3, 3]", body, "%d")
    after = check_pass(FuseElementwise().run(graph), AssignLayouts())
    assert_text(
        after,
        """\
        %reorder: f32[2, 3, 40, 40]@0231 = reorder(%x, order=(0, 2, 3, 1))
        %reorder_1: f32[4, 3, 3, 3]@0231 = reorder(%u, order=(0, 2, 3, 1))
        %a: f32[2, 4, 40, 40]@0231 = convolution(%reorder, %reorder_1, stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0))
        %b: f32[2, 4, 40, 40]@0231 = relu(%a)
        %reorder_2: f32[4, 4, 3, 3]@0231 = reorder(%v, order=(0, 2, 3, 1))
        %c: f32[2, 4, 40, 40]@0231 = convolution(%b, %reorder_2, stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0))
        %d: f32[2, 4, 40, 40] = kernel(x0=%c) {
          %v0 = exp(%x0)
          %v1 = reorder(%v0, order=(0, 1, 2, 3))
          yield %v1
        }
        return %d
        """,
    )
    assert reorders(after) == 3  # the image and two weights; the last kernel writes row-major


def test_an_operator_that_reads_an_image_twice_writes_it_in_another_layout() -> None:
    after = assigned(program(f"x: {LARGE}, u: f32[4, 3, 3, 3]", conv("a", "x", "u") + "%b = mul(%a, %a)", "%b"))
    assert lasts(after)["convolution"]
    assert after.tensors[after.outputs[0]].order is None


def test_heavy_weights_on_small_images_stay() -> None:
    graph = program("x: f32[1, 64, 4, 4], w: f32[64, 64, 3, 3]", conv("y", "x", "w"), "%y")
    assert AssignLayouts().run(graph) is graph


def test_what_lies_with_its_channels_last_stays() -> None:
    graph = program(f"x: {LARGE}@0231, w: f32[4, 3, 3, 3]@0231", conv("y", "x", "w"), "%y")
    assert AssignLayouts().run(graph) is graph


def test_a_weight_is_reordered_once_for_all_its_readers() -> None:
    body = conv("a", "x", "w") + conv("b", "a", "w") + "%c = relu(%b)"
    after = assigned(program("x: f32[2, 4, 30, 30], w: f32[4, 4, 3, 3]", body, "%c"))
    assert reorders(after) == 2


def test_a_flattened_image_is_read_in_row_major_order() -> None:
    body = conv("a", "x", "u") + "%b = relu(%a)\n%c = view(%b, shape=(2, 6400))\n%d = matmul(%c, %m)"
    after = assigned(program(f"x: {LARGE}, u: f32[4, 3, 3, 3], m: f32[6400, 5]", body, "%d"))
    assert lasts(after)["convolution"]
    relu = next(node for node in after.nodes if node.op.label == "kernel")
    assert after.tensors[relu.outputs[0]].order is None


@pytest.mark.parametrize(
    "op",
    [
        "%b, %i = max_pool2d(%a, kernel=(2, 2), stride=(2, 2))",
        "%b = avg_pool2d(%a, kernel=(2, 2), stride=(2, 2))",
        "%b = pad(%a, pads=((0, 0), (0, 0), (1, 1), (0, 2)))",
        "%b = concat(%a, %a, dim=1)",
        "%b = flip(%a, dims=(2,))",
        "%b = slice(%a, dim=1, start=1, stop=3)",
        "%b = relu(%a)",
        "%b = cast(%a, dtype=f64)",
        '%b = reduce(%a, kind="max", dims=(2,), keepdim=True)',
    ],
)
def test_follows_the_convolution(op: str) -> None:
    body = conv("a", "x", "u") + op + '\n%s = reduce(%b, kind="sum", dims=(0, 2, 3))'
    after = assigned(program(f"x: {LARGE}, u: f32[4, 3, 3, 3]", body, "%s"))
    result = next(node for node in after.nodes if node.outputs[0] == "b")
    assert lasts(after)["convolution"]
    assert is_last(after.tensors[result.outputs[0]])


def test_gradients_of_a_convolution_follow() -> None:
    body = conv("y", "x", "w") + "%g = relu(%y)\n"
    body += f"%gx = convolution_input_grad(%g, %w, input_shape=(2, 4, 30, 30), {CONV})\n"
    body += f"%gw = convolution_weight_grad(%g, %x, weight_shape=(4, 4, 3, 3), {CONV})\n"
    body += '%sx = reduce(%gx, kind="sum", dims=(0, 1, 2, 3))\n%n = sub(%w, %gw)'
    graph = program("x: f32[2, 4, 30, 30], w: f32[4, 4, 3, 3]", body, "%sx")
    graph.write("w", graph.value("n"))
    after = assigned(graph)
    assert lasts(after)["convolution_input_grad"]
    assert lasts(after)["convolution_weight_grad"]
    assert after.tensors[after.writes["w"]].order is None, "the parameter keeps its layout"


def test_a_broadcast_image_costs_nothing_to_kernels() -> None:
    body = conv("a", "x", "u") + "%e = expand(%m, shape=(2, 4, 40, 40))\n%b = mul(%a, %e)\n" + conv("c", "b", "v")
    body += '%s = reduce(%c, kind="sum", dims=(0, 2, 3))'
    graph = program(f"x: {LARGE}, u: f32[4, 3, 3, 3], v: f32[4, 4, 3, 3], m: f32[2, 4, 1, 1]", body, "%s")
    after = assigned(graph)
    assert all(lasts(after)[label] for label in ("convolution", "kernel"))
    assert reorders(after) == 3


def test_libraries_of_one_layout_get_it() -> None:
    body = conv("a", "x", "u") + "%b = relu(%a)\n"
    body += '%c = aten(%b, target="aten.lgamma.default", arguments=(operand(0),), types=(f32[2, 4, 40, 40],))'
    after = assigned(program(f"x: {LARGE}, u: f32[4, 3, 3, 3]", body, "%c"))
    (call,) = [node for node in after.nodes if node.op.name == "aten"]
    assert after.tensors[call.inputs[0]].order is None


def test_double_precision_runs_in_loops_of_atens_own() -> None:
    graph = program("x: f64[2, 3, 40, 40], w: f64[4, 3, 3, 3]", conv("y", "x", "w"), "%y")
    assert AssignLayouts().run(graph) is graph


def test_arrays_kept_for_a_backward_graph_lie_as_they_are_made() -> None:
    graph = program(f"x: {LARGE}, u: f32[4, 3, 3, 3]", conv("a", "x", "u") + "%b = relu(%a)", "%b, %a")
    graph.kept = 1
    after = assigned(graph)
    b, a = (after.tensors[name] for name in after.outputs)
    assert b.order is None
    assert is_last(a)


def test_symbolic_batches() -> None:
    body = conv("a", "x", "u") + "%b = relu(%a)\n" + conv("c", "b", "v")
    graph = program("x: f32[s0, 8, 40, 40], u: f32[8, 8, 3, 3], v: f32[8, 8, 3, 3]", body, "%c")
    after = AssignLayouts().run(graph)
    check_same(graph, after, s0=2)
    assert lasts(after)["convolution"]


def test_three_spatial_dimensions() -> None:
    three = CONV.replace("(1, 1)", "(1, 1, 1)").replace("(0, 0)", "(0, 0, 0)")
    body = f"%y = convolution(%x, %w, {three})\n%z = relu(%y)"
    after = assigned(program("x: f32[2, 4, 12, 12, 12], w: f32[4, 4, 3, 3, 3]", body, "%z"))
    assert lasts(after)["convolution"]


def test_sequences_have_a_layout_where_convolutions_read_them() -> None:
    one = CONV.replace("(1, 1)", "(1,)").replace("(0, 0)", "(0,)")
    body = f"%p = pad(%x, pads=((0, 0), (0, 0), (2, 0)))\n%y = convolution(%p, %w, {one})\n%z = relu(%y)"
    after = assigned(program("x: f32[2, 16, 400], w: f32[16, 16, 3]", body, "%z"))
    assert lasts(after)["convolution"] and lasts(after)["pad"]
    graph = program("x: f32[2, 16, 400]@021", "%y = concat(%x, %x, dim=1)\n%z = relu(%y)", "%z")
    assert AssignLayouts().run(graph) is graph, "there is no convolution"


def test_arrays_without_a_choice_lie_as_before() -> None:
    body = conv("a", "x", "u") + '%b = reduce(%a, kind="max", dims=(3,))\n%c = relu(%a)\n%d = exp(%b)'
    after = assigned(program(f"x: {LARGE}, u: f32[4, 3, 3, 3]", body, "%b, %c, %d"))
    assert lasts(after)["convolution"]
    assert all(after.tensors[name].order is None for name in after.outputs)
