import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret_ranks
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid, Unsupported
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse, show
from daceml_train.ops.group_collective import GroupCollective
from daceml_train.sdfg.convert import from_sdfg, to_sdfg
from daceml_train.tensor import DType, Tensor

SHAPES = {
    "all_reduce": (4, 2),
    "all_gather": (2, 2),
    "reduce_scatter": (6, 2),
    "all_to_all": (6, 2),
    "broadcast": (4, 2),
}


def one(op: GroupCollective, shape: tuple[int, ...]) -> Graph:
    graph = Graph("one")
    graph.output(graph.input("x", Tensor(shape)).apply(op))
    verify(graph)
    return graph


@pytest.mark.parametrize("kind", SHAPES)
def test_text_and_sdfg_keep_it(kind: str) -> None:
    graph = one(GroupCollective(2, 1, kind, "0", root=1, differentiable=True), SHAPES[kind])
    assert show(parse(show(graph))) == show(graph)
    assert show(from_sdfg(to_sdfg(graph))) == show(graph)


@pytest.mark.parametrize(("reduction", "expected"), [("sum", 5.0), ("avg", 2.5), ("max", 4.0), ("min", 1.0)])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
def test_ranks_reduce(kind: str, reduction: str, expected: float) -> None:
    graph = one(GroupCollective(2, 0, kind, "0", reduction), (2, 3))
    results = interpret_ranks([graph] * 2, [{"x": np.full((2, 3), value)} for value in (1.0, 4.0)])
    for result in results:
        found = result.outputs[0]
        assert found.shape == ((1, 3) if kind == "reduce_scatter" else (2, 3)) and (found == expected).all()


def test_the_root_is_broadcast() -> None:
    graph = one(GroupCollective(2, 0, "broadcast", "0", root=1), (2,))
    results = interpret_ranks([graph] * 2, [{"x": np.full(2, v)} for v in (1.0, 4.0)])
    assert all((result.outputs[0] == 4.0).all() for result in results)


@pytest.mark.parametrize("kind", SHAPES)
def test_network_bytes(kind: str) -> None:
    rows, width = SHAPES[kind]
    size = 4 * rows * width
    expected = {"all_reduce": size, "all_gather": size}.get(kind, size // 2)
    assert GroupCollective(2, 0, kind).network_bytes(Tensor((rows, width))) == expected


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(Invalid, match="no kind gossip"):
        GroupCollective(2, 0, "gossip").infer(Tensor((2,)))
    with pytest.raises(Invalid, match="reduces by one of sum"):
        GroupCollective(2, 0, "all_reduce", reduction="median").infer(Tensor((2,)))
    with pytest.raises(Invalid, match="floating-point"):
        GroupCollective(2).infer(Tensor((2,), DType.int64))
    graph = Graph("g")
    x = graph.input("x", Tensor((2,)))
    with pytest.raises(Unsupported, match=r"the derivative of the collective all_reduce \(avg\)"):
        GroupCollective(2, 0, "all_reduce", "0", "avg", differentiable=True).vjp(graph, x)
