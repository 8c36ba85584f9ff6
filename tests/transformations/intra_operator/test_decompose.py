from daceml_train.analysis.traffic import traffic
from daceml_train.graph.graph import Graph
from daceml_train.ops.operator import Origin, make
from daceml_train.tensor import Tensor
from daceml_train.transformations.intra_operator.decompose import Decompose
from tests.transformations.checking import Golden, check_pass, program


def test_nested_composites(golden: Golden) -> None:
    graph = program("x: f32[s0, 4]", "%v = variance(%x, dims=(1,))\n%y = sqrt(%v)", "%y")
    after = check_pass(graph, Decompose(), golden, s0=3)
    assert traffic(after).bytes == traffic(graph).bytes


def test_kept_composites(golden: Golden) -> None:
    body = "%s = softmax(%x, dim=1)\n%y = variance(%s, dims=(1,))"
    check_pass(program("x: f32[3, 4]", body, "%y"), Decompose(keep=("softmax", "mean")), golden)


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
