import numpy as np
import pytest
import torch

from daceml_train.analysis.interpret import interpret_ranks
from daceml_train.analysis.verify import verify
from daceml_train.errors import Invalid
from daceml_train.graph.graph import Graph
from daceml_train.graph.text import parse, show
from daceml_train.ops.collective import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Collective,
    OwnShards,
    ReduceScatter,
    ReduceTo,
    SumRows,
)
from daceml_train.sdfg.convert import from_sdfg, to_sdfg
from daceml_train.tensor import DType, Tensor, symbol
from tests.ops.checking import check_op, numbers


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()])
def test_all_reduce_sums_what_equal_ranks_have(shape: tuple[int, ...]) -> None:
    check_op(AllReduce(3), numbers(*shape), reference=lambda x: torch.stack([x] * 3).sum(0))


def test_all_reduce_counts_the_bytes_of_a_ring() -> None:
    assert AllReduce(4).network_bytes(Tensor((1000,))) == 6000
    assert AllReduce(1).network_bytes(Tensor((1000,))) == 0
    n = symbol("n")
    assert AllReduce(2).network_bytes(Tensor((n,), DType.float64)) == 8 * n


def test_integers_and_no_ranks_are_refused() -> None:
    for op, x in ((AllReduce(2), Tensor((3,), DType.int64)), (AllReduce(0), Tensor((3,)))):
        with pytest.raises(Invalid, match="all_reduce expects floating-point arrays on at least 1 rank"):
            op.infer(x)


OPERATORS = {
    "all_reduce": (AllReduce(3), (4, 2)),
    "reduce_scatter": (ReduceScatter(3), (6, 2)),
    "all_gather": (AllGather(3), (2, 2)),
    "all_to_all": (AllToAll(3), (6, 2)),
    "broadcast": (Broadcast(3, 0, 1), (4,)),
    "reduce_to": (ReduceTo(3, 0, 2), (4,)),
}


def one(op: Collective, shape: tuple[int, ...]) -> Graph:
    graph = Graph("one")
    graph.output(graph.input("x", Tensor(shape)).apply(op))
    verify(graph)
    return graph


@pytest.mark.parametrize("name", list(OPERATORS))
def test_the_derivative_is_the_adjoint_over_all_ranks(name: str) -> None:
    """The sum over ranks of <g, op(x)> is that of <vjp(g), x>: what a rank's array adds to the losses of all ranks."""
    op, shape = OPERATORS[name]
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(shape) for _ in range(3)]
    graph = one(op, shape)
    ys = [r.outputs[0] for r in interpret_ranks([graph] * 3, [{"x": x} for x in xs])]
    gs = [rng.standard_normal(y.shape) for y in ys]
    back = Graph("back")
    g = back.input("g", Tensor(ys[0].shape))
    back.output(op.vjp(back, g))
    verify(back)
    grads = [r.outputs[0] for r in interpret_ranks([back] * 3, [{"g": g} for g in gs])]
    assert sum((g * y).sum() for g, y in zip(gs, ys, strict=True)) == pytest.approx(
        sum((d * x).sum() for d, x in zip(grads, xs, strict=True))
    )


@pytest.mark.parametrize("name", list(OPERATORS))
def test_collectives_have_texts_and_library_nodes(name: str) -> None:
    graph = one(*OPERATORS[name])
    assert show(parse(show(graph))) == show(from_sdfg(to_sdfg(graph))) == show(graph)


def test_each_collective_counts_what_a_rank_sends() -> None:
    x = Tensor((1200,))
    sent = {name: OPERATORS[name][0].network_bytes(x) for name in OPERATORS}
    assert sent == {
        "all_reduce": 6400, "reduce_scatter": 3200, "all_gather": 9600, "all_to_all": 3200, "broadcast": 3200,
        "reduce_to": 3200}  # fmt: skip
    rows, indices = Tensor((10, 64)), Tensor((10,), DType.int64)
    assert SumRows(8, 0, (10**7,), (-1,)).network_bytes(rows, indices) == 7 * 10 * (4 * 64 + 8)
    assert OwnShards(4).network_bytes(x) == 0


def test_blocks_must_be_equal_and_roots_exist() -> None:
    for op in (ReduceScatter(3), AllToAll(3)):
        with pytest.raises(Invalid, match=f"{op.label} cuts its operand into 3 equal blocks"):
            op.infer(Tensor((4,)))
    with pytest.raises(Invalid, match="broadcast has no rank 3 among 3"):
        Broadcast(3, 0, 3).infer(Tensor((4,)))
    with pytest.raises(Invalid, match="all_reduce of 3 ranks on 2"):
        interpret_ranks([one(AllReduce(3), (2,))] * 2, [{"x": np.ones(2)}] * 2)
    with pytest.raises(Invalid, match="sum_rows expects a cotangent"):
        SumRows(2, 0, (5,), (-1,)).infer(Tensor((3, 2)), Tensor((4,), DType.int64))


def test_shards_are_padded_with_zeros_and_rows_are_added_up() -> None:
    a, b = np.arange(5.0), np.arange(4.0).reshape(2, 2) + 10
    shards = OwnShards(3).exchange([(a, b)] * 3)
    assert [s.tolist() for s in shards] == [[0, 1, 10, 11], [2, 3, 12, 13], [4, 0, 0, 0]]
    found = SumRows(2, 0, (4, 2), (0, -1)).exchange(
        [
            (np.ones((3, 1)), np.array([1, 1, 0]), np.ones((1, 1)), np.array([0])),
            (np.ones((1, 1)), np.array([3]), np.ones((1, 1)), np.array([1])),
        ]
    )
    assert [tables.tolist() for tables in found] == [[0, 2, 0, 1, 1, 1]] * 2
