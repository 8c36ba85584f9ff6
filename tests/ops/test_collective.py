import pytest
import torch

from daceml_train.errors import Invalid
from daceml_train.ops.collective import AllReduce
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
        with pytest.raises(Invalid, match="all_reduce sums floating-point arrays over at least 1 process"):
            op.infer(x)
