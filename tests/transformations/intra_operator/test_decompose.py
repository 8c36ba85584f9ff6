from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.ops.operator import Origin, make
from daceml_train.tensor import Tensor
from daceml_train.transformations.intra_operator.decompose import Decompose
from tests.transformations.checking import assert_text, check_pass, program


def test_nested_composites() -> None:
    graph = program("x: f32[s0, 4]", "%v = variance(%x, dims=(1,))\n%y = sqrt(%v)", "%y")
    after = check_pass(graph, Decompose(), s0=3)
    assert_text(
        after,
        """\
        %v.sum: f32[s0, 1] = reduce(%x, kind="sum", dims=(1,), keepdim=True)
        %v.full: f32[] = full(value=4.0)
        %v.div: f32[s0, 1] = div(%v.sum, %v.full)
        %v.sub: f32[s0, 4] = sub(%x, %v.div)
        %v.square: f32[s0, 4] = square(%v.sub)
        %v.sum_1: f32[s0] = reduce(%v.square, kind="sum", dims=(1,))
        %v.full_1: f32[] = full(value=3.0)
        %v.div_1: f32[s0] = div(%v.sum_1, %v.full_1)
        %y: f32[s0] = sqrt(%v.div_1)
        return %y
        """,
    )
    assert traffic(after).bytes == traffic(graph).bytes


def test_kept_composites() -> None:
    body = "%s = softmax(%x, dim=1)\n%y = variance(%s, dims=(1,))"
    after = check_pass(program("x: f32[3, 4]", body, "%y"), Decompose(keep=("softmax", "mean")))
    assert_text(
        after,
        """\
        %s: f32[3, 4] = softmax(%x, dim=1)
        %y.mean: f32[3, 1] = mean(%s, dims=(1,), keepdim=True)
        %y.sub: f32[3, 4] = sub(%s, %y.mean)
        %y.square: f32[3, 4] = square(%y.sub)
        %y.sum: f32[3] = reduce(%y.square, kind="sum", dims=(1,))
        %y.full: f32[] = full(value=3.0)
        %y.div: f32[3] = div(%y.sum, %y.full)
        return %y.div
        """,
    )


def test_origins_stay() -> None:
    graph = Graph()
    x = graph.input("x", Tensor((3, 4)))
    with graph.at(Origin("head", "model.py:7")):
        graph.output(x.apply(make("softmax", dim=1)))
    after = Decompose().run(graph)
    assert len(after.nodes) == 5
    assert {str(node.origin) for node in after.nodes} == {"head model.py:7"}


def test_written_results() -> None:
    graph = program("p: f32[4, 4]", "%m = mean(%p, dims=(1,))\n%q = sub(%p, %m)\nwrite p <- %q")
    assert Decompose().run(graph).writes == {"p": "q"}
