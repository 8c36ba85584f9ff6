"""Convolutions and their gradients as matmuls: the same numbers, the bytes promised, and why not."""

import numpy as np
import pytest
import torch

from daceml_train.analysis.interpret import interpret
from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.transformations.layout.convolution_as_matmul import ConvolutionAsMatmul
from tests.transformations.checking import Golden, arrays, check_refused, check_rewrite, program

THREE = "stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0)"
POINT = "stride=(1, 1), padding=(0, 0), dilation=(1, 1), output_padding=(0, 0)"
APART = "stride=(2, 1), padding=(0, 2), dilation=(1, 2), output_padding=(0, 0)"
CASES = {  # x, g, kernel, geometry
    "windows": ((2, 16, 4, 3), (2, 24, 4, 3), (3, 3), THREE),
    "points": ((2, 16, 4, 3), (2, 24, 4, 3), (1, 1), POINT),
    "apart": ((2, 16, 5, 4), (2, 24, 2, 6), (2, 2), APART),
    "sequence": ((2, 16, 9), (2, 24, 9), (3,), "stride=(1,), padding=(1,), dilation=(1,), output_padding=(0,)"),
    "tokens": ((2, 16, 9), (2, 24, 9), (1,), "stride=(1,), padding=(0,), dilation=(1,), output_padding=(0,)"),
    "samples": ((2, 16, 9), (2, 24, 5), (3,), "stride=(2,), padding=(2,), dilation=(2,), output_padding=(0,)"),
}
LAST = "@0231"


def text(shape: tuple[int, ...], order: str = "") -> str:
    return f"f32[{', '.join(map(str, shape))}]{order}"


def graphs(case: str, order: str, visible: bool = True) -> dict[str, Graph]:
    """A convolution with bias and its two gradients, each as a graph of its own."""
    x, g, kernel, geometry = CASES[case]
    w, order = (g[1], x[1], *kernel), "@021" if order and len(x) == 3 else order
    image, gradient, weight = text(x, order), text(g, order), text(w)
    result = "%y" if visible else "%r"
    following = "" if visible else "\n%r = exp(%y)"
    return {
        "convolution": program(
            f"x: {image}, w: {weight}, b: f32[{g[1]}]", f"%y = convolution(%x, %w, %b, {geometry}){following}", result
        ),
        "input_grad": program(
            f"g: {gradient}, w: {weight}",
            f"%y = convolution_input_grad(%g, %w, input_shape={x}, {geometry}){following}",
            result,
        ),
        "weight_grad": program(
            f"g: {gradient}, x: {image}",
            f"%y = convolution_weight_grad(%g, %x, weight_shape={w}, {geometry}){following}",
            result,
        ),
    }


@pytest.mark.parametrize("order", [LAST, ""])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["convolution", "input_grad", "weight_grad"])
def test_equals_the_convolution(kind: str, case: str, order: str, golden: Golden) -> None:
    before = graphs(case, order)[kind]
    if saves(before):
        after = check_rewrite(before, ConvolutionAsMatmul(share=-10.0), exact=False)
        golden(str(after))
    else:
        after = forced(before)
    assert not any(node.op.label.startswith("convolution") for node in after.nodes)
    (y,), (z,) = before.outputs, after.outputs
    assert before.tensors[y] == after.tensors[z], "who reads the result finds it as it was"


def saves(graph: Graph) -> bool:
    (match,) = ConvolutionAsMatmul().matches(graph)
    return int(match.traffic) <= 0


def forced(graph: Graph) -> Graph:
    """The graph with its convolution as a matmul even where that moves more; the promise is still kept."""
    (match,) = ConvolutionAsMatmul().matches(graph)
    after = ConvolutionAsMatmul().sweep(graph, {id(match.root): match})
    assert traffic(after).bytes - traffic(graph).bytes == match.traffic
    inputs = arrays(graph)
    expected, given = interpret(graph, inputs).outputs[0], interpret(after, inputs).outputs[0]
    np.testing.assert_allclose(given, expected, rtol=1e-9, atol=1e-12)
    return after


def test_a_gradient_is_written_as_the_update_wants_it() -> None:
    """The weight's gradient that somebody within the graph reads comes in row-major order, without a reorder."""
    x, g, kernel, geometry = CASES["windows"]
    w = (g[1], x[1], *kernel)
    body = f"%y = convolution_weight_grad(%g, %x, weight_shape={w}, {geometry})\n%r = reorder(%y, order=(0, 1, 2, 3))"
    before = program(f"g: {text(g, LAST)}, x: {text(x, LAST)}", body, "%r")
    (match,) = ConvolutionAsMatmul().matches(before)
    assert match.root.outputs == ("r",)
    after = match.apply()
    assert [n.op.label for n in after.nodes if n.op.label in ("reorder", "matmul", "im2col")] == ["im2col", "matmul"]
    assert traffic(after).bytes - traffic(before).bytes == match.traffic
    inputs = arrays(before)
    np.testing.assert_allclose(interpret(after, inputs).outputs[0], interpret(before, inputs).outputs[0], rtol=1e-9)


def test_a_batch_of_any_size() -> None:
    body = f"%y = convolution(%x, %w, {THREE})"
    graph = program("x: f32[s0, 64, 2, 2]@0231, w: f32[512, 64, 3, 3]", body, "%y")
    (match,) = ConvolutionAsMatmul(share=0.01).matches(graph)
    assert match.refusal is None
    assert traffic(match.apply(), {"s0": 3}).bytes < traffic(graph, {"s0": 3}).bytes


@pytest.mark.parametrize(
    ("signature", "convolution", "sentence"),
    [
        (
            "x: f32[1, 64, 4, 4, 4]@02341, w: f32[64, 64, 3, 3, 3]",
            "stride=(1, 1, 1), padding=(1, 1, 1), dilation=(1, 1, 1), output_padding=(0, 0, 0)",
            "convolution of 3 dimensions: im2col supports images and sequences",
        ),
        ("x: f32[1, 64, 4, 4]@0231, w: f32[64, 32, 3, 3]", f"{THREE}, groups=2", "2 groups would be as many matmuls"),
        (
            "x: f32[1, 64, 4, 4]@0231, w: f32[64, 64, 3, 3]",
            f"{THREE}, transposed=True",
            "a transposed convolution adds up windows in its forward pass",
        ),
        (
            "x: f64[1, 64, 4, 4]@0231, w: f64[64, 64, 3, 3]",
            THREE,
            "the library runs f64 in loops of its own",
        ),
        (
            "x: f32[1, 4, 40, 40]@0231, w: f32[4, 4, 20, 20]",
            THREE,
            "windows of f32[4, 4, 20, 20] have no kernel",
        ),
        (
            "x: f32[1, 64, 4, 4]@0231, w: f32[64, 64, 3, 3]@0231",
            THREE,
            "the weight %w is not row-major, as the matmul requires",
        ),
        (
            "x: f32[8, 4, 20, 20]@0231, w: f32[4, 4, 3, 3]",
            THREE,
            "it would save 0 of the 105280 bytes moved",
        ),
    ],
)
def test_refused(signature: str, convolution: str, sentence: str) -> None:
    graph = program(signature, f"%y = convolution(%x, %w, {convolution})", "%y")
    check_refused(graph, ConvolutionAsMatmul(), sentence)


def test_pytorch_is_the_judge() -> None:
    """The gradients of the matmul against autograd's of the convolution, in float64."""
    x, g, kernel, _ = CASES["apart"]
    tensors = {
        "x": torch.randn(x, dtype=torch.float64, requires_grad=True),
        "w": torch.randn((g[1], x[1], *kernel), dtype=torch.float64, requires_grad=True),
        "b": torch.randn(g[1], dtype=torch.float64),
    }
    y = torch.nn.functional.conv2d(*tensors.values(), stride=(2, 1), padding=(0, 2), dilation=(1, 2))
    tensors["g"] = torch.randn(g, dtype=torch.float64)
    gx, gw = torch.autograd.grad(y, [tensors["x"], tensors["w"]], tensors["g"])
    for (kind, graph), want in zip(graphs("apart", LAST).items(), (y, gx, gw), strict=True):
        inputs = {name: tensors[name].detach().numpy() for name in graph.inputs}
        given = interpret(forced(graph), inputs).outputs[0]
        np.testing.assert_allclose(given, want.detach().numpy(), rtol=1e-9, atol=1e-12, err_msg=kind)


@pytest.mark.parametrize(
    ("stride", "length", "wide", "taken"), [(1, 9, 1 << 9, True), (1, 9, 2 << 20, False), (2, 17, 2 << 20, True)]
)
def test_weight_gradients_of_sequences_that_the_library_is_slow_at(
    stride: int, length: int, wide: int, taken: bool
) -> None:
    """Rows beyond the cache, or pixels skipped, make a matmul of one though windows are written and read."""
    geometry = f"stride=({stride},), padding=(1,), dilation=(1,), output_padding=(0,)"
    body = f"%y = convolution_weight_grad(%g, %x, weight_shape=(24, 16, 3), {geometry})"
    graph = program(f"g: f32[2, 24, 9]@021, x: f32[2, 16, {length}]@021", body, "%y")
    (match,) = ConvolutionAsMatmul(row=wide).matches(graph)
    assert (match.refusal is None) is taken
