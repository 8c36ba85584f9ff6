import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret
from daceml_train.graph.graph import Graph
from daceml_train.transformations.intra_operator.fold_batch_norm import FoldBatchNorm
from tests.transformations.checking import arrays, assert_text, check_refused, program

STATISTICS = "mean: f32[4] buffer, var: f32[4] buffer, g: f32[4] parameter, b: f32[4] parameter"
WINDOW = "stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0)"
NORM = "%z = batch_norm_inference(%y, %mean, %var, %g, %b, eps=1e-05)"
IMAGE = f"x: f32[2, 3, 5, 5], w: f32[4, 3, 3, 3] parameter, {STATISTICS}"
CONVOLUTION = f"%y = convolution(%x, %w, {WINDOW})\n{NORM}"


def folded(graph: Graph) -> Graph:
    """The graph after the pass, which has the same values in float64."""
    given = arrays(graph)
    given["var"] = np.abs(given["var"]) + 0.1
    after = FoldBatchNorm().run(graph)
    assert not any(node.op.label == "batch_norm_inference" for node in after.nodes)
    (want,), (got,) = interpret(graph, given).outputs, interpret(after, given).outputs
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)
    return after


def test_convolution() -> None:
    assert_text(
        folded(program(IMAGE, CONVOLUTION, "%z")),
        """\
        %full: f32[] = full(value=1e-05)
        %add: f32[4] = add(%var, %full)
        %rsqrt: f32[4] = rsqrt(%add)
        %mul: f32[4] = mul(%rsqrt, %g)
        %neg: f32[4] = neg(%mean)
        %mul_1: f32[4] = mul(%neg, %mul)
        %add_1: f32[4] = add(%mul_1, %b)
        %view: f32[4, 1, 1, 1] = view(%mul, shape=(4, 1, 1, 1))
        %mul_2: f32[4, 3, 3, 3] = mul(%w, %view)
        %convolution: f32[2, 4, 5, 5] = convolution(%x, %mul_2, %add_1, stride=(1, 1), padding=(1, 1), dilation=(1, 1), output_padding=(0, 0))
        return %convolution
        """,
    )


def test_convolution_with_bias() -> None:
    body = f"%y = convolution(%x, %w, %c, {WINDOW})\n{NORM}"
    folded(program(f"{IMAGE}, c: f32[4] parameter", body, "%z"))


@pytest.mark.parametrize("operands", ["%y, %mean, %var", "%y, %mean, %var, %g"])
def test_without_weight_or_bias(operands: str) -> None:
    body = f"%y = convolution(%x, %w, {WINDOW})\n%z = batch_norm_inference({operands}, eps=0.001)"
    folded(program(IMAGE, body, "%z"))


def test_depthwise() -> None:
    body = f"%y = convolution(%x, %w, groups=4, {WINDOW})\n{NORM}"
    folded(program(f"x: f32[2, 4, 5, 5], w: f32[4, 1, 3, 3] parameter, {STATISTICS}", body, "%z"))


def test_transposed() -> None:
    body = f"%y = convolution(%x, %w, transposed=True, {WINDOW})\n{NORM}"
    folded(program(f"x: f32[2, 3, 5, 5], w: f32[3, 4, 3, 3] parameter, {STATISTICS}", body, "%z"))


LINEAR = f"x: f32[s0, 6], w: f32[4, 6] parameter, c: f32[4] parameter, {STATISTICS}"


def test_product_with_bias() -> None:
    body = f"%t = permute(%w, dims=(1, 0))\n%p = matmul(%x, %t)\n%y = add(%p, %c)\n{NORM}"
    folded(program(LINEAR.replace("s0", "7"), body, "%z"))


def test_product_alone() -> None:
    body = f"%t = permute(%w, dims=(1, 0))\n%y = matmul(%x, %t)\n{NORM}"
    folded(program(LINEAR.replace("s0", "7"), body, "%z"))


@pytest.mark.parametrize(
    "signature, body, result, why",
    [
        (IMAGE, CONVOLUTION, "%z, %y", "%y has another reader"),
        (
            IMAGE.replace("var: f32[4] buffer", "var: f32[4] input"),
            CONVOLUTION,
            "%z",
            "%var does not depend on parameters alone",
        ),
        (IMAGE.replace("parameter", "input", 1), CONVOLUTION, "%z", "%w does not depend on parameters alone"),
        (
            IMAGE.replace("f32", "bf16"),
            CONVOLUTION,
            "%z",
            "%y has 16-bit elements, so the weights would be rounded once more",
        ),
        (
            f"x: f32[2, 4, 5, 5], w: f32[4, 2, 3, 3] parameter, {STATISTICS}",
            f"%y = convolution(%x, %w, transposed=True, groups=2, {WINDOW})\n{NORM}",
            "%z",
            "%y is produced by a grouped transposed convolution",
        ),
    ],
)
def test_refused(signature: str, body: str, result: str, why: str) -> None:
    check_refused(program(signature, body, result), FoldBatchNorm(), why)


def test_statistics_that_the_graph_writes_stay() -> None:
    graph = program(IMAGE, f"%next = mul(%mean, %mean)\n{CONVOLUTION}", "%z")
    graph.write("mean", graph.value("next"))
    check_refused(graph, FoldBatchNorm(), "%mean does not depend on parameters alone")
