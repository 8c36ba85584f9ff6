import pytest

from daceml_train.analysis.traffic import traffic
from daceml_train.autodiff.reverse import differentiate
from daceml_train.graph.graph import Graph
from daceml_train.ops.operator import make
from daceml_train.tensor import DType, Tensor
from daceml_train.transformations.forward.cross_entropy import FuseSoftmaxCrossEntropy
from tests.transformations.checking import Golden, assert_text, check_refused, check_rewrite, check_same, program

LOGITS = "x: f32[s0, 20], t: i64[s0]"


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss(golden: Golden, reduction: str) -> None:
    body = f'%p = log_softmax(%x, dim=1)\n%loss, %total = nll_loss(%p, %t, reduction="{reduction}", ignore_index=2)'
    after = check_rewrite(program(LOGITS, body, "%loss"), FuseSoftmaxCrossEntropy(), exact=False, s0=7)
    golden(str(after))


def test_total_and_further_dimensions() -> None:
    body = "%p = log_softmax(%x, dim=1)\n%loss, %total = nll_loss(%p, %t)"
    graph = program("x: f32[2, 20, 4], t: i64[2, 4]", body, "%loss, %total")
    after = check_rewrite(graph, FuseSoftmaxCrossEntropy(), exact=False)
    assert_text(
        after,
        """\
        %cross_entropy, %cross_entropy_1, %cross_entropy_2, %cross_entropy_3: f32[], f32[2, 4], f32[2, 4], f32[] = cross_entropy(%x, %t)
        return %cross_entropy, %cross_entropy_3
        """,
    )


def test_one_sample() -> None:
    body = "%p = log_softmax(%x, dim=0)\n%loss, %total = nll_loss(%p, %t)"
    after = check_rewrite(program("x: f32[20], t: i64[]", body, "%loss"), FuseSoftmaxCrossEntropy(), exact=False)
    assert_text(
        after,
        """\
        %cross_entropy, %cross_entropy_1, %cross_entropy_2, %cross_entropy_3: f32[], f32[], f32[], f32[] = cross_entropy(%x, %t)
        return %cross_entropy
        """,
    )


def test_the_backward_pass_gets_cheaper() -> None:
    def train(fuse: bool) -> Graph:
        graph = Graph("loss")
        x, t = graph.input("x", Tensor((64, 1000))), graph.input("t", Tensor((64,), DType.int64))
        loss, _ = graph.emit(make("nll_loss"), x.apply(make("log_softmax", dim=1)), t)
        graph.output(loss)
        if fuse:
            graph = FuseSoftmaxCrossEntropy().run(graph)
        loss = graph.value(graph.outputs[0])
        gradient = differentiate(graph, {loss.name: loss.constant(1.0)}, ["x"])["x"]
        assert gradient is not None
        graph.output(gradient)
        return graph

    before, after = train(fuse=False), train(fuse=True)
    check_same(before, after, exact=False)
    assert traffic(after).bytes < traffic(before).bytes


def test_refused_for_another_dimension() -> None:
    graph = program("x: f32[3, 3], t: i64[3]", "%p = log_softmax(%x, dim=0)\n%loss, %total = nll_loss(%p, %t)", "%loss")
    check_refused(graph, FuseSoftmaxCrossEntropy(), "%p is normalized along 0, the classes lie along 1")


def test_refused_for_class_weights() -> None:
    body = "%p = log_softmax(%x, dim=1)\n%loss, %total = nll_loss(%p, %t, %w)"
    graph = program(f"{LOGITS}, w: f32[20]", body, "%loss")
    check_refused(graph, FuseSoftmaxCrossEntropy(), "nll_loss has class weights, which cross_entropy does not take")


def test_refused_for_another_reader() -> None:
    graph = program(LOGITS, "%p = log_softmax(%x, dim=1)\n%loss, %total = nll_loss(%p, %t)", "%loss, %p")
    check_refused(graph, FuseSoftmaxCrossEntropy(), "the log-probabilities %p have another reader")
