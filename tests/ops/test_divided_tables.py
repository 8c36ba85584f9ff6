import numpy as np
import pytest

from daceml_train.analysis.interpret import interpret_ranks
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse, show
from daceml_train.ops.divided_tables import LookupRows, ReturnRows, rows_on_rank
from daceml_train.tensor import DType, Tensor

ROWS, WIDTH, RANKS = 10, 3, 4


def lookup(count: int) -> Graph:
    graph = Graph("lookup")
    table = graph.input("table", Tensor((rows_on_rank(ROWS, RANKS), WIDTH), DType.float64))
    indices = graph.input("indices", Tensor((count, 2), DType.int64))
    graph.output(table.apply(LookupRows(RANKS, 0, ROWS), indices))
    verify(graph)
    return graph


def test_a_divided_table_is_read_as_the_whole_one_and_its_derivative_is_the_adjoint() -> None:
    rng = np.random.default_rng(0)
    whole = np.zeros((12, WIDTH))
    whole[:ROWS] = rng.standard_normal((ROWS, WIDTH))
    indices = [rng.integers(0, ROWS, (count, 2)) for count in (3, 1, 4, 2)]
    graphs = [lookup(len(each)) for each in indices]
    scopes = [{"table": part, "indices": i} for part, i in zip(np.split(whole, RANKS), indices, strict=True)]
    found = [r.outputs[0] for r in interpret_ranks(graphs, scopes)]
    for rows, each in zip(found, indices, strict=True):
        np.testing.assert_array_equal(rows, whole[each])

    cotangents = [rng.standard_normal(rows.shape) for rows in found]
    backs = []
    for each in indices:
        back = Graph("back")
        grad = back.input("grad", Tensor((len(each), 2, WIDTH), DType.float64))
        i = back.input("indices", Tensor((len(each), 2), DType.int64))
        table = back.input("table", Tensor((3, WIDTH), DType.float64))
        value, nothing = LookupRows(RANKS, 0, ROWS).vjp(back, table, i, grad)
        assert nothing is None
        back.output(value)
        verify(back)
        backs.append(back)
    scopes = [
        {"grad": g, "indices": i, "table": np.zeros((3, WIDTH))} for g, i in zip(cotangents, indices, strict=True)
    ]
    sums = np.concatenate([r.outputs[0] for r in interpret_ranks(backs, scopes)])
    expected = np.zeros_like(whole)
    for g, i in zip(cotangents, indices, strict=True):
        np.add.at(expected, i, g)
    np.testing.assert_allclose(sums, expected)


def test_bytes_are_those_of_the_formula() -> None:
    """A table of 10,000,000 x 64 on 8 ranks, each of which reads 2,048 distinct rows: less than a megabyte."""
    table, indices = Tensor((1_250_000, 64)), Tensor((2048,), DType.int64)
    op = LookupRows(8, 0, 10_000_000)
    asked = op.network_bytes(table, indices)
    returned = ReturnRows(8, 0, 10_000_000).network_bytes(Tensor((2048, 64)), indices)
    assert asked + returned == 7 * 2048 // 8 * (8 + 2 * 4 * 64) == 931_840


def test_text() -> None:
    graph = lookup(3)
    assert show(parse(show(graph))) == show(graph)


@pytest.mark.parametrize(
    ("table", "indices"),
    [
        (Tensor((4, WIDTH)), Tensor((2,), DType.int64)),
        (Tensor((3, WIDTH)), Tensor((2,), DType.int32)),
        (Tensor((3,)), Tensor((2,), DType.int64)),
    ],
)
def test_wrong_operands_are_refused(table: Tensor, indices: Tensor) -> None:
    with pytest.raises(Invalid, match="lookup_rows expects 3 of 10 rows"):
        LookupRows(RANKS, 0, ROWS).infer(table, indices)
    with pytest.raises(Invalid, match="return_rows expects a cotangent"):
        ReturnRows(RANKS, 0, ROWS).infer(Tensor((3, WIDTH)), Tensor((2,), DType.int64))
